"""The plan of an epoch as all ranks know it: one bit per sample, or none where lots tell who is kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.layout import ShardLayout, equal_part, fetch
from thresher.distributed.marks import Marks, number, unpacked
from thresher.distributed.packed import PackedPlan
from thresher.exact import chunks
from thresher.plans import EpochPlan
from thresher.selection import Mask
from thresher.shards import Shard, World


def part_of_plan(plan: EpochPlan, shard: Shard) -> EpochPlan:
    """Returns the part of a plan of all samples that is of one shard, for a method that does not plan over shards.

    Args:
        plan: Plan of all samples, the same on all ranks, with `drawn` False.
        shard: The shard.
    """
    inside = (plan.ids >= shard.first) & (plan.ids < shard.last)
    refresh = plan.refresh
    return replace(
        plan,
        ids=plan.ids[inside],
        weights=None if plan.weights is None else plan.weights[inside],
        keys=None if plan.keys is None else plan.keys[inside],
        scores=None if plan.scores is None else plan.scores[inside],
        refresh=None if refresh is None else refresh[(refresh >= shard.first) & (refresh < shard.last)],
        remember={name: values[shard.first : shard.last] for name, values in plan.remember.items()},
        lots=None,
    )


class HeldPlan:
    """A plan as a run holds it through an epoch, in one process or in parts in shards; all ranks make it together.

    Where everything is kept, or where lots without marks tell who is, no bits travel; otherwise one bit per sample does.

    Args:
        own: Part of the plan that is of this rank's block. A plan that was drawn is that of one process.
        layout: Blocks of the ranks.
        world: The ranks.

    Attributes:
        own: Part of the plan that is of this rank's block.
        rows: Number of samples that are kept, of all ranks; of a plan that was drawn, those that come twice count twice.
        refreshed: Number of samples that are refreshed, of all ranks.
        everything: Whether every sample is kept, and comes once.

    Raises:
        ValueError: The part of a rank is not what its `lots` say; all ranks raise it.

    Example:
        >>> from thresher.distributed.threads import on_ranks
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
        again = np.zeros_like(bits) if own.refresh is None else own.refresh.numpy()
        both_or_none = 0 if own.drawn else len(self._block) - number(np.bitwise_xor(bits, again))
        numbers = world.sum(np.array([self._kept, number(again), both_or_none], dtype=np.int64))
        self.rows, self.refreshed, both_or_none = numbers.tolist()
        self.everything = not own.drawn and self.rows == layout.n
        self._lots = own.lots if world.size > 1 else None  # they spare the bits that travel
        self._marks: Marks | None = None
        if not own.drawn and not self.everything:
            among = bits if self._lots is None else self._lots.among
            self._marks = None if among is None else Marks.gathered(among, layout, world)
        self._weights = self._weights_by_lots(bits)
        others = self._marks is not None and self._lots is None and not both_or_none
        self._refreshes_others = bool(self.refreshed) and others
        self._refresh: Marks | None = None
        if self.refreshed and not self._refreshes_others:
            self._refresh = Marks.gathered(again, layout, world)

    @staticmethod
    def of(plan: EpochPlan, layout: ShardLayout, world: World) -> "HeldPlan":
        """Returns the plan that a method made, as a run holds it; all ranks call it.

        Args:
            plan: Part of the plan that is of this rank's block.
            layout: Blocks of the ranks.
            world: The ranks.
        """
        return HeldPlan(PackedPlan.of(plan, layout.shard(world)), layout, world)

    def plan(self) -> EpochPlan:
        """Returns the part of the plan that is of this rank's block, with its ids, which are made now."""
        return self.own.unpacked(self._layout.shard(self._world))

    def _weights_by_lots(self, bits: NDArray[np.uint8]) -> tuple[float, float] | None:
        """Returns the weights of samples that took no part and of winners; None without lots. Checks what lots say."""
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
        """Marks the samples, of some that are kept, that took part in the lots."""
        return np.ones(len(kept), dtype=np.bool_) if self._marks is None else self._marks.of(kept)

    def keeps(self, ids: NDArray[np.int64]) -> Mask:
        """Returns which of some samples are kept; it needs no other rank.

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
        """Whether weights have to be asked for at other ranks."""
        return self._world.size > 1 and self.own.weights is not None and self._weights is None

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of samples that are kept; None where the plan has none. All ranks call it.

        Args:
            ids: Ids, shape (k,), int64; ranks may ask for different numbers of samples.

        Returns:
            Weights, shape (k,), float32.
        """
        if self.own.weights is None:
            return None
        if self._weights is None:
            return self._fetched(ids, self.own.weights)
        other, winner = self._weights
        return torch.from_numpy(np.where(self._won(ids), np.float32(winner), np.float32(other)))

    def keys(self, ids: NDArray[np.int64]) -> Tensor:
        """Returns the keys by which rows are drawn, of samples that are kept; all ranks call it.

        Args:
            ids: Ids, shape (k,), int64; ranks may ask for different numbers of samples.

        Returns:
            Keys, shape (k,), float32.
        """
        assert self.own.keys is not None
        return self._fetched(ids, self.own.keys)

    def scores(self, ids: NDArray[np.int64]) -> Tensor:
        """Returns the scores that the keys were drawn by; all ranks call it.

        Args:
            ids: Ids, shape (k,), int64, of samples that are kept.

        Returns:
            Scores, shape (k,), float32.
        """
        assert self.own.scores is not None
        return self._fetched(ids, self.own.scores)

    def _fetched(self, ids: NDArray[np.int64], values: Tensor) -> Tensor:
        own = values.numpy()
        look_up = lambda places: own[self._place(places)]  # noqa: E731
        return torch.from_numpy(fetch(ids, look_up, self._layout, self._world))

    @cached_property
    def _place(self) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Function of the places of kept samples in the block that returns their places among the kept ones."""
        if self.own.drawn:
            place = torch.empty(self._layout.n, dtype=torch.int32 if self._kept < 2**31 else torch.int64)
            place[self.own.ids] = torch.arange(self._kept, dtype=place.dtype)  # a sample that was drawn twice has one weight
            return place.numpy().take
        if self._kept == len(self._block):
            return lambda places: places
        return Marks(self.own.ids.numpy(), len(self._block)).before

    def refreshing(self) -> Callable[[int, int], NDArray[np.int64]]:
        """Returns the ids that this rank refreshes, ascending, as a function of two places, from one to another.

        The ranks have equal parts, which differ by one at most; the function returns fewer ids where the part ends.
        """
        begin, end = equal_part(self.refreshed, self._world.rank, self._world.size)
        marks = self._marks.inverse() if self._refreshes_others and self._marks is not None else self._refresh
        if not self.refreshed or marks is None:
            return lambda first, last: np.empty(0, dtype=np.int64)
        return lambda first, last: marks.ids(min(begin + first, end), min(begin + last, end))
