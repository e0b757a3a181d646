"""The plan of an epoch as a run holds and saves it: one bit per sample, and the weights of the kept ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.bitmask import Bitmask, number, packed, unpacked
from thresher.distributed.layout import ShardLayout, equal_part
from thresher.plans import EpochPlan
from thresher.selection import Mask, ids_of
from thresher.shards import Shard, World


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """The plan of one shard with bitmasks in place of ids, and without the columns for the records.

    Args:
        ids: Bitmask of the kept samples, lowest id first, shape (ceil(len(shard) / 8),), uint8; bits beyond the shard are 0.
            If `drawn` is True, the ids in the order of training, shape (K,), int64.
        weights: Factors on the losses of the kept samples, shape (K,), float32; this and the rest are as in `EpochPlan`.
        refresh: Bitmask of the refreshed samples; None if the plan refreshes none.
        lr_scale: Factor on the learning rate.
        drawn: Whether `ids` was drawn.
        facts: Scalars for the history by name.
        smaller_batches: Whether the epoch has as many steps as full training.
        note: Sentence that the user must know.

    Example:
        >>> plan = PackedPlan.of(EpochPlan(torch.tensor([1, 3, 4]), refresh=torch.tensor([0])), Shard.whole(5))
        >>> plan.ids, plan.kept, plan.unpacked(Shard.whole(5)).ids
        (tensor([26], dtype=torch.uint8), 3, tensor([1, 3, 4]))
    """

    ids: Tensor
    weights: Tensor | None
    refresh: Tensor | None
    lr_scale: float
    drawn: bool
    facts: Mapping[str, float]
    smaller_batches: bool
    note: str

    @staticmethod
    def of(plan: EpochPlan, shard: Shard) -> "PackedPlan":
        """Returns a plan with bitmasks in place of ids.

        Args:
            plan: The plan, already checked by `EpochPlan.check`.
            shard: Shard of the plan.
        """
        # Ids that were drawn have an order and come more than once, which a bitmask cannot hold.
        block = range(shard.first, shard.last)
        values: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(PackedPlan)}
        for name in ("refresh",) if plan.drawn else ("ids", "refresh"):
            if values[name] is not None:
                values[name] = torch.from_numpy(packed(values[name].numpy(), block))
        return PackedPlan(**values)

    def unpacked(self, shard: Shard) -> EpochPlan:
        """Returns the plan with ids in place of bitmasks.

        Args:
            shard: Shard of the plan.

        Raises:
            TypeError: A tensor has the wrong dtype.
            ValueError: A bitmask does not have one bit per sample of the shard, or a number is out of range.
        """
        values: dict[str, Any] = dict(vars(self))
        for name in ("refresh",) if self.drawn else ("ids", "refresh"):
            bits = values[name]
            if bits is None:
                continue
            if bits.dtype != torch.uint8 or bits.shape != (-(-len(shard) // 8),):
                raise ValueError(
                    f"`{name}` must be one bit for each of {len(shard)} samples, a torch.uint8 tensor of shape "
                    f"({-(-len(shard) // 8)},), got a {bits.dtype} tensor of shape {tuple(bits.shape)}"
                )
            values[name] = ids_of(unpacked(bits.numpy())).add_(shard.first)
        return EpochPlan(**values)

    @property
    def kept(self) -> int:
        """Number of ids."""
        return len(self.ids) if self.drawn else number(self.ids.numpy())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values; `PackedPlan(**state)` restores the plan."""
        return vars(self) | {"facts": dict(self.facts)}


def part_of_plan(plan: EpochPlan, shard: Shard) -> EpochPlan:
    """Returns the part of one shard in a plan of all samples.

    Args:
        plan: Plan of all samples, the same on all ranks.
        shard: The shard.
    """
    # Ids that were drawn are the order of training of all ranks together, so each rank needs all of them.
    inside = (plan.ids >= shard.first) & (plan.ids < shard.last) | plan.drawn
    refresh = plan.refresh
    return replace(
        plan,
        ids=plan.ids[inside],
        weights=None if plan.weights is None else plan.weights[inside],
        refresh=None if refresh is None else refresh[(refresh >= shard.first) & (refresh < shard.last)],
        remember={name: values[shard.first : shard.last] for name, values in plan.remember.items()},
    )


class HeldPlan:
    """A plan as a run holds it through an epoch, whole or in shards; all ranks make it together.

    Nothing is sent if everything is kept without weights. Otherwise the ranks exchange one bit per sample, and the weights of
    the kept ones.

    Args:
        own: Part of the plan for the block of this rank; drawn ids are those of all ranks.
        layout: Blocks of the ranks.
        world: The ranks.

    Attributes:
        own: Part of the plan for the block of this rank.
        rows: Number of kept samples of all ranks; in a drawn plan, a sample counts as often as it was drawn.
        refreshed: Number of refreshed samples of all ranks.
        everything: Whether every sample is kept, and comes once.

    Example:
        >>> from thresher.testing.threaded_world import on_ranks
        >>> def kept_by_even_ids(world):
        ...     layout = ShardLayout(n=12, size=2, unit=8)
        ...     own = torch.arange(12)[layout.block(world.rank)]
        ...     held = HeldPlan.of(EpochPlan(own[own % 2 == 0], refresh=own[own % 2 == 1]), layout, world)
        ...     return held.rows, held.keeps(np.arange(4)).tolist(), held.refreshing()(0, 9).tolist()
        >>> on_ranks(2, kept_by_even_ids)[1]
        (6, [True, False, True, False], [7, 9, 11])
    """

    def __init__(self, own: PackedPlan, layout: ShardLayout, world: World) -> None:
        self.own, self._layout, self._world = own, layout, world
        self._block, self._kept = layout.block(world.rank), own.kept
        bits = own.ids.numpy()
        again = np.zeros(0 if own.drawn else len(bits), dtype=np.uint8) if own.refresh is None else own.refresh.numpy()
        # Samples that are both kept and refreshed, or neither. If there are none on any rank, the refreshed samples are those
        # that are not kept, and need no bitmask of their own. A rank without refreshed samples counts as well.
        both_or_none = 0 if own.drawn else len(self._block) - number(np.bitwise_xor(bits, again))
        numbers = world.sum(np.array([self._kept, number(again), both_or_none], dtype=np.int64))
        self.rows, self.refreshed, both_or_none = numbers.tolist()
        self.rows = self._kept if own.drawn else self.rows
        self.everything = not own.drawn and self.rows == layout.n
        self._marks: Bitmask | None = None
        if not own.drawn and not self.everything:
            self._marks = Bitmask.gathered(bits, layout, world)
        # In the order of the ids; those of a drawn plan are of all ranks already.
        weights = None if own.weights is None or own.drawn else world.join(own.weights.numpy())
        self._weights = own.weights if weights is None else torch.from_numpy(weights)
        others = self._marks is not None and not both_or_none
        self._refreshes_others = bool(self.refreshed) and others
        self._refresh: Bitmask | None = None
        if self.refreshed and not self._refreshes_others:
            self._refresh = Bitmask.gathered(again, layout, world)

    @staticmethod
    def of(plan: EpochPlan, layout: ShardLayout, world: World) -> "HeldPlan":
        """Returns the plan of a method as a run holds it; all ranks call it.

        Args:
            plan: Part of the plan for the block of this rank.
            layout: Blocks of the ranks.
            world: The ranks.
        """
        return HeldPlan(PackedPlan.of(plan, layout.shard(world)), layout, world)

    def plan(self) -> EpochPlan:
        """Returns the part of the plan for the block of this rank, with ids."""
        return self.own.unpacked(self._layout.shard(self._world))

    def keeps(self, ids: NDArray[np.int64]) -> Mask:
        """Returns the mask of kept samples, without a message to other ranks.

        Args:
            ids: Ids, shape (k,), int64.
        """
        if self.everything:
            return np.ones(len(ids), dtype=np.bool_)
        assert self._marks is not None
        return self._marks.of(ids)

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of kept samples, or None if the plan has none; no message to other ranks.

        Args:
            ids: Ids, shape (k,), int64.

        Returns:
            Weights, shape (k,), float32.
        """
        return None if self._weights is None else self._weights[torch.from_numpy(self._place(ids))]

    @cached_property
    def _place(self) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Function from ids to places among the kept samples."""
        if self.own.drawn:
            place = torch.empty(self._layout.n, dtype=torch.int32 if self._kept < 2**31 else torch.int64)
            place[self.own.ids] = torch.arange(self._kept, dtype=place.dtype)  # a sample that was drawn twice has one weight
            return place.numpy().take
        return (lambda ids: ids) if self._marks is None else self._marks.before

    def refreshing(self) -> Callable[[int, int], NDArray[np.int64]]:
        """Returns a function from a first and an end place to the ids that this rank refreshes, ascending.

        The function returns fewer ids at the end of the part of this rank.
        """
        begin, end = equal_part(self.refreshed, self._world.rank, self._world.size)
        marks = self._marks.inverse() if self._refreshes_others and self._marks is not None else self._refresh
        if not self.refreshed or marks is None:
            return lambda first, last: np.empty(0, dtype=np.int64)
        return lambda first, last: marks.ids(min(begin + first, end), min(begin + last, end))
