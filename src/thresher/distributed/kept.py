"""What every rank knows of a plan whose parts are in shards: one bit per sample, or none where lots tell it."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.layout import ShardLayout, equal_part, fetch
from thresher.plans import EpochPlan
from thresher.selection import Mask
from thresher.shards import Shard, World

BYTES = 2**12
"""Number of bytes of marks that are counted together."""


class Marks:
    """Marks of all samples, one bit each.

    Args:
        bits: Marks, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0.
        n: Number of samples.

    Example:
        >>> marks = Marks(np.packbits([0, 1, 0, 0, 1, 1], bitorder="little"), 6)
        >>> marks.of(np.array([4, 0])), marks.count, marks.ids(1, 3), marks.inverse().ids(0, 9)
        (array([ True, False]), 3, array([4, 5]), array([0, 2, 3]))
    """

    def __init__(self, bits: NDArray[np.uint8], n: int) -> None:
        self.bits, self.n = bits, n

    @staticmethod
    def gathered(packed: NDArray[np.uint8], layout: ShardLayout, world: World) -> "Marks":
        """Returns the marks of all samples; all ranks call it.

        Args:
            packed: Marks of the samples of this rank's block, packed in bits, lowest id first.
            layout: Blocks of the ranks.
            world: The ranks.
        """
        own = np.zeros(layout.per // 8, dtype=np.uint8)
        own[: len(packed)] = packed
        return Marks(world.gather(own).reshape(-1)[: -(-layout.n // 8)], layout.n)

    def of(self, ids: NDArray[np.int64]) -> Mask:
        """Returns the marks of some samples.

        Args:
            ids: Ids, shape (k,), within [0, n).
        """
        return (self.bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 != 0

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Number of marks up to the end of each `BYTES` bytes."""
        return np.cumsum([np.bitwise_count(self.bits[i : i + BYTES]).sum() for i in range(0, len(self.bits), BYTES)])

    @property
    def count(self) -> int:
        """Number of marked samples."""
        return int(self._ends[-1])

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the ids of the marked samples in ascending order, from one place to another.

        Args:
            begin: First place, 0 or more.
            end: Place after the last one; no more ids than there are marks.
        """
        end = min(end, self.count)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left")) + 1
        found = np.flatnonzero(np.unpackbits(self.bits[first * BYTES : last * BYTES], bitorder="little"))
        before = int(self._ends[first - 1]) if first else 0
        return found[begin - before : end - before] + first * BYTES * 8

    def inverse(self) -> "Marks":
        """Returns the marks of the other samples."""
        bits = ~self.bits
        if self.n % 8:
            bits[-1] &= (1 << self.n % 8) - 1
        return Marks(bits, self.n)


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


class SharedPlan:
    """A plan whose parts are in shards, as far as all ranks must know it; all ranks make it together.

    Where everything is kept, or where lots without marks tell who is, no bits travel; otherwise one bit per sample does.

    Args:
        plan: Part of the plan that is of this rank's block.
        layout: Blocks of the ranks.
        world: The ranks.

    Attributes:
        plan: Part of the plan that is of this rank's block.
        rows: Number of samples that are kept, of all ranks.
        refreshed: Number of samples that are refreshed, of all ranks.

    Raises:
        ValueError: The part of a rank is not what its `lots` say; all ranks raise it.

    Example:
        >>> from thresher.distributed.threads import on_ranks
        >>> def kept_by_even_ids(world):
        ...     layout = ShardLayout(n=12, size=2, unit=8)
        ...     own = torch.arange(12)[layout.block(world.rank)]
        ...     shared = SharedPlan(EpochPlan(own[own % 2 == 0], refresh=own[own % 2 == 1]), layout, world)
        ...     return shared.rows, shared.keeps(np.arange(4)).tolist(), shared.refresh_ids().tolist()
        >>> on_ranks(2, kept_by_even_ids)[1]
        (6, [True, False, True, False], [7, 9, 11])
    """

    def __init__(self, plan: EpochPlan, layout: ShardLayout, world: World) -> None:
        self.plan, self._layout, self._world = plan, layout, world
        block = layout.block(world.rank)
        self._first, self._size = block.start, len(block)
        refresh = torch.empty(0, dtype=torch.int64) if plan.refresh is None else plan.refresh
        own, again = self._mask(plan.ids), self._mask(refresh)
        numbers = [len(plan.ids), len(refresh), np.count_nonzero(own == again)]
        self.rows, self.refreshed, both_or_none = world.sum(np.array(numbers, dtype=np.int64)).tolist()
        self.everything = self.rows == layout.n
        """Whether every sample is kept."""
        self._marks: Marks | None = None
        if not self.everything:
            among = plan.lots.among if plan.lots is not None else np.packbits(own, bitorder="little")
            self._marks = None if among is None else Marks.gathered(among, layout, world)
        self._weights = self._weights_by_lots(own)
        self._refresh: Marks | None = None
        if self.refreshed and self._marks is not None and plan.lots is None and not both_or_none:
            self._refresh = self._marks.inverse()
        elif self.refreshed:
            self._refresh = Marks.gathered(np.packbits(again, bitorder="little"), layout, world)

    def _mask(self, ids: Tensor) -> Mask:
        mask = np.zeros(self._size, dtype=np.bool_)
        mask[ids.numpy() - self._first] = True
        return mask

    def _weights_by_lots(self, own: Mask) -> tuple[float, float] | None:
        """Returns the weights of samples that took no part and of winners; None without lots. Checks what lots say."""
        plan = self.plan
        if self.everything or plan.lots is None:
            return None
        ids = np.arange(self._first, self._first + self._size)
        wrong = bool((self.keeps(ids) != own).any())
        ends = np.array([np.inf, -np.inf, np.inf, -np.inf])
        if plan.weights is not None:
            weights, ids = plan.weights.numpy(), plan.ids.numpy()
            won = np.ones(len(ids), dtype=np.bool_) if self._marks is None else self._marks.of(ids)
            for place, some in ((0, weights[~won]), (2, weights[won])):
                ends[place : place + 2] = some.min(initial=np.inf), some.max(initial=-np.inf)
        every = self._world.gather(np.append(ends, wrong))
        low, high = every[:, 0:4:2].min(axis=0), every[:, 1:4:2].max(axis=0)
        if every[:, 4].any() or (low < high).any():
            raise ValueError(
                "EpochPlan: `lots` must be the random choice that the plan consists of: every sample is kept but those that "
                "lost, and weights are one number for the winners and one for the other samples. Leave `lots` out otherwise."
            )
        return float(low[0]), float(low[1])

    def keeps(self, ids: NDArray[np.int64]) -> Mask:
        """Returns which of some samples are kept; it needs no other rank.

        Args:
            ids: Ids, shape (k,), int64.
        """
        lots = self.plan.lots
        if self.everything:
            return np.ones(len(ids), dtype=np.bool_)
        if lots is None:
            assert self._marks is not None
            return self._marks.of(ids)
        if self._marks is None:
            return lots.wins(ids)
        among = self._marks.of(ids)
        kept = ~among
        kept[among] = lots.wins(ids[among])
        return kept

    @property
    def asks_for_weights(self) -> bool:
        """Whether weights have to be asked for at other ranks."""
        return self.plan.weights is not None and self._weights is None

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of samples that are kept; None where the plan has none. All ranks call it.

        Args:
            ids: Ids, shape (k,), int64; ranks may ask for different numbers of samples.

        Returns:
            Weights, shape (k,), float32.
        """
        if self.plan.weights is None:
            return None
        if self._weights is None:
            return self._fetched(ids, self.plan.weights)
        other, winner = self._weights
        won = np.ones(len(ids), dtype=np.bool_) if self._marks is None else self._marks.of(ids)
        return torch.from_numpy(np.where(won, np.float32(winner), np.float32(other)))

    def keys(self, ids: NDArray[np.int64]) -> Tensor:
        """Returns the keys by which rows are drawn, of samples that are kept; all ranks call it.

        Args:
            ids: Ids, shape (k,), int64; ranks may ask for different numbers of samples.

        Returns:
            Keys, shape (k,), float32.
        """
        assert self.plan.keys is not None
        return self._fetched(ids, self.plan.keys)

    def scores(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the scores that the keys were drawn by; None where the plan has none. All ranks call it.

        Args:
            ids: Ids, shape (k,), int64, of samples that are kept.

        Returns:
            Scores, shape (k,), float32.
        """
        return None if self.plan.scores is None else self._fetched(ids, self.plan.scores)

    def _fetched(self, ids: NDArray[np.int64], values: Tensor) -> Tensor:
        dense = np.full(self._size, np.nan, dtype=np.float32)
        dense[self.plan.ids.numpy() - self._first] = values.numpy()
        return torch.from_numpy(fetch(ids, dense, self._layout, self._world))

    def refresh_ids(self) -> Tensor:
        """Returns the ids that this rank refreshes, ascending, int64: equal parts, which differ by one at most."""
        if self._refresh is None:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(self._refresh.ids(*equal_part(self.refreshed, self._world.rank, self._world.size)))
