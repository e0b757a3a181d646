"""The plan of an epoch as a run holds and saves it: one bit per sample, or none if the draw is reproducible."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.bitmask import Bitmask, number, packed, unpacked
from thresher.distributed.layout import ShardLayout, equal_part, fetch
from thresher.exact import chunks
from thresher.plans import EpochPlan
from thresher.selection import Lots, Mask, ids_of
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
        lots: Reproducible draw that the plan consists of; not saved.

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
    lots: Lots | None = None

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
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "lots"}
        for name in ("refresh",) if self.drawn else ("ids", "refresh"):
            bits = values[name]
            if bits is None:
                continue
            if bits.dtype != torch.uint8 or bits.shape != (-(-len(shard) // 8),):
                raise ValueError(
                    f"`{name}` must be one bit for each of {len(shard)} samples, a torch.uint8 tensor of shape "
                    f"({-(-len(shard) // 8)},), got a {bits.dtype} tensor of shape {tuple(bits.shape)}"
                )
            values[name] = ids_of(unpacked(bits.numpy()), shard.first)
        return EpochPlan(**values)

    @property
    def kept(self) -> int:
        """Number of ids."""
        return len(self.ids) if self.drawn else number(self.ids.numpy())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values; `PackedPlan(**state)` restores the plan."""
        return {name: value for name, value in vars(self).items() if name != "lots"} | {"facts": dict(self.facts)}


def part_of_plan(plan: EpochPlan, shard: Shard) -> EpochPlan:
    """Returns the part of one shard in a plan of all samples, for a method that does not plan over shards.

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
        lots=None,
    )


class HeldPlan:
    """A plan as a run holds it through an epoch, whole or in shards; all ranks make it together.

    No bitmask is sent if everything is kept, or if a draw among all samples is reproducible. Otherwise the ranks exchange one
    bit per sample.

    Args:
        own: Part of the plan for the block of this rank; drawn ids are those of all ranks.
        layout: Blocks of the ranks.
        world: The ranks.

    Attributes:
        own: Part of the plan for the block of this rank.
        rows: Number of kept samples of all ranks; in a drawn plan, a sample counts as often as it was drawn.
        refreshed: Number of refreshed samples of all ranks.
        everything: Whether every sample is kept, and comes once.

    Raises:
        ValueError: The part of a rank contradicts its `lots`; all ranks raise it.

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
        self._lots = own.lots if world.size > 1 else None  # they spare the bitmask, which one process does not send
        self._marks: Bitmask | None = None
        if not own.drawn and not self.everything:
            among = bits if self._lots is None else self._lots.among
            self._marks = None if among is None else Bitmask.gathered(among, layout, world)
        self._weights = self._weights_by_lots(bits)
        others = self._marks is not None and self._lots is None and not both_or_none
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

    def _weights_by_lots(self, bits: NDArray[np.uint8]) -> tuple[float, float] | None:
        """Returns the weights of samples that took no part and of winners, after a check of the lots; None without lots."""
        # Other ranks would train on what the lots say, not on what this rank chose: all check their blocks, and raise together.
        if self.everything or self._lots is None:
            return None
        weights, first, wrong = self.own.weights, 0, False
        ends = np.array([np.inf, -np.inf, np.inf, -np.inf])
        for part in chunks(len(self._block)):
            ids = np.arange(self._block.start + part.start, self._block.start + part.stop)
            own = unpacked(bits[part.start // 8 : -(-part.stop // 8)])[: len(ids)]
            wrong = wrong or bool((self.keeps(ids) != own).any())
            if weights is None:
                continue
            found = weights[first : first + np.count_nonzero(own)].numpy()
            first, won = first + len(found), self._won(ids[own])
            for place, some in ((0, found[~won]), (2, found[won])):
                ends[place] = some.min(initial=ends[place])
                ends[place + 1] = some.max(initial=ends[place + 1])
        every = self._world.gather(np.append(ends, wrong))
        low, high = every[:, 0:4:2].min(axis=0), every[:, 1:4:2].max(axis=0)
        if every[:, 4].any() or (low < high).any():
            raise ValueError(
                "EpochPlan: `lots` must be the random choice that the plan consists of: every sample is kept but those that "
                "lost, and weights are one number for the winners and one for the other samples. Leave `lots` out otherwise."
            )
        return float(low[0]), float(low[1])

    def _won(self, kept: NDArray[np.int64]) -> Mask:
        """Returns the mask of kept samples that took part in the lots."""
        return np.ones(len(kept), dtype=np.bool_) if self._marks is None else self._marks.of(kept)

    def keeps(self, ids: NDArray[np.int64]) -> Mask:
        """Returns the mask of kept samples, without a message to other ranks.

        Args:
            ids: Ids, shape (k,), int64.
        """
        if self.everything:
            return np.ones(len(ids), dtype=np.bool_)
        if self._lots is None:
            assert self._marks is not None
            return self._marks.of(ids)
        if self._marks is None:
            return self._lots.wins(ids)
        among = self._marks.of(ids)
        kept = ~among
        kept[among] = self._lots.wins(ids[among])
        return kept

    @property
    def asks_for_weights(self) -> bool:
        """Whether `weights` sends requests to other ranks."""
        return self._world.size > 1 and self.own.weights is not None and self._weights is None and not self.own.drawn

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of kept samples, or None if the plan has none; all ranks call it.

        Args:
            ids: Ids, shape (k,), int64; the number may differ from rank to rank.

        Returns:
            Weights, shape (k,), float32.
        """
        if self.own.weights is None:
            return None
        if self.own.drawn:
            return self.own.weights[torch.from_numpy(self._place(ids))]
        if self._weights is None:
            own = self.own.weights.numpy()
            look_up = lambda places: own[self._place(places)]  # noqa: E731
            return torch.from_numpy(fetch(ids, look_up, self._layout, self._world))
        other, winner = self._weights
        return torch.from_numpy(np.where(self._won(ids), np.float32(winner), np.float32(other)))

    @cached_property
    def _place(self) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Function from places in the block, or from drawn ids, to places among the kept samples."""
        if self.own.drawn:
            place = torch.empty(self._layout.n, dtype=torch.int32 if self._kept < 2**31 else torch.int64)
            place[self.own.ids] = torch.arange(self._kept, dtype=place.dtype)  # a sample that was drawn twice has one weight
            return place.numpy().take
        if self._kept == len(self._block):
            return lambda places: places
        return Bitmask(self.own.ids.numpy(), len(self._block)).before

    def refreshing(self) -> Callable[[int, int], NDArray[np.int64]]:
        """Returns a function from a first and an end place to the ids that this rank refreshes, ascending.

        The function returns fewer ids at the end of the part of this rank.
        """
        begin, end = equal_part(self.refreshed, self._world.rank, self._world.size)
        marks = self._marks.inverse() if self._refreshes_others and self._marks is not None else self._refresh
        if not self.refreshed or marks is None:
            return lambda first, last: np.empty(0, dtype=np.int64)
        return lambda first, last: marks.ids(min(begin + first, end), min(begin + last, end))
