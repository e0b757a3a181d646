"""The samples of an epoch that a plan keeps, in order, which each rank can read at any position; and the rows of each rank."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thresher.distributed.world import World
from thresher.selection import Mask

Piece = Callable[[int, int], NDArray[np.int64]]
"""Function `(begin, end)` that returns the ids at positions begin to end - 1 of an order; the same on all ranks."""

Keeps = Callable[[NDArray[np.int64]], Mask]
"""Function of ids that returns a mask of those that a plan keeps."""

UNIT = 1024
"""Number of positions in a unit of an order: the counts that are sent for 10^9 samples take 2 MB."""
AT_ONCE = 2**8
"""Number of units that are counted in one call."""


class KeptOrder:
    """The samples of an order that a plan keeps. All ranks must create it together; each rank can then read any part of it.

    Each rank counts the kept samples in its share of the units of the order, and sends these counts, 2 bytes per unit.

    Args:
        piece: The order before the plan.
        n: Number of ids of the order before the plan.
        keeps: Function that marks the ids that the plan keeps, such as `HeldPlan.keeps`.
        world: The ranks.
        unit: Number of positions in a unit, at most 65,535. Default: 1024.

    Example:
        >>> from thresher.distributed.world import ALONE
        >>> order = KeptOrder(np.arange, 10, lambda ids: ids % 3 == 0, ALONE)
        >>> len(order), order.take(1, 3)
        (4, array([3, 6]))
    """

    def __init__(self, piece: Piece, n: int, keeps: Keeps, world: World, unit: int = UNIT) -> None:
        self._piece = piece
        self._n = n
        self._keeps = keeps
        self._unit = unit
        units = -(-n // unit)
        # The same number of units for each rank, because `gather` needs arrays of one shape; units after the end are cut off
        # below.
        per = -(-units // world.size)
        # Counts are enough: a rank knows the order and the plan, and computes the ids of a unit again when it needs them.
        first = min(units, world.rank * per)
        last = min(units, (world.rank + 1) * per)
        counts = np.zeros(per, dtype=np.uint16)
        # In pieces, because the ids of all units of a rank at once would take 8 bytes per sample.
        for begin in range(first, last, AT_ONCE):
            end = min(last, begin + AT_ONCE)
            kept = keeps(piece(begin * unit, min(n, end * unit)))
            counts[begin - first : end - first] = np.add.reduceat(
                kept, np.arange(0, len(kept), unit), dtype=np.uint16
            )
        self._ends = np.cumsum(world.gather(counts).reshape(-1)[:units], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the ids of the kept samples at positions `begin` to `end` - 1, int64; fewer at the end of the order.

        Args:
            begin: First position, counting only kept samples, 0 or more.
            end: Position after the last one.
        """
        end = min(end, len(self))
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left")) + 1
        # Whole units, because only their ends are known: the plan marks the kept ids among them again.
        ids = self._piece(first * self._unit, min(self._n, last * self._unit))
        before = int(self._ends[first - 1]) if first else 0
        return ids[self._keeps(ids)][begin - before : end - before]

    def place_after(self, kept: int) -> int:
        """Returns the length of the shortest beginning of the whole order (kept and omitted ids) that has `kept` kept samples.

        Args:
            kept: Number of kept samples, 0 or more.
        """
        if not 0 < kept <= len(self):
            return self._n if kept else 0
        unit = int(np.searchsorted(self._ends, kept, side="left"))
        begin = unit * self._unit
        before = int(self._ends[unit - 1]) if unit else 0
        marks = self._keeps(self._piece(begin, min(self._n, begin + self._unit)))
        return begin + int(np.flatnonzero(marks)[kept - before - 1]) + 1


def take_cyclic(piece: Piece, total: int, begin: int, end: int) -> NDArray[np.int64]:
    """Returns the ids at positions `begin` to `end` - 1 of an order that is repeated without end.

    Args:
        piece: The order.
        total: Number of ids of the order, 1 or more.
        begin: First position, 0 or more.
        end: Position after the last one, `begin` or more.

    Example:
        >>> take_cyclic(lambda begin, end: np.arange(10, 13)[begin:end], 3, 1, 8)
        array([11, 12, 10, 11, 12, 10, 11])
    """
    parts = [np.empty(0, dtype=np.int64)]
    place = begin
    while place < end:
        first = place % total
        parts.append(piece(first, min(total, first + end - place)))
        place += len(parts[-1])
    return np.concatenate(parts)


class RankOrder:
    """The rows of one rank: with W ranks, every W-th sample of an order, as DistributedSampler divides them.

    All ranks have the same number of rows: the last rows come from the start of the order again, or with `drop_last` the rest
    of the order is left out.

    Args:
        piece: The order of the epoch, such as `KeptOrder.take`.
        total: Number of ids of the order, 1 or more.
        rank: Number of this rank.
        size: Number of ranks.
        drop_last: Whether to leave out the rest of the order if it has too few samples for all ranks. Default: False.

    Example:
        >>> order = lambda begin, end: np.arange(10, 15)[begin:end]
        >>> [RankOrder(order, 5, rank, 2).take(0, 9).tolist() for rank in range(2)]
        [[10, 12, 14], [11, 13, 10]]
    """

    def __init__(
        self, piece: Piece, total: int, rank: int, size: int, *, drop_last: bool = False
    ) -> None:
        self._piece = piece
        self._total = total
        self._rank = rank
        self._size = size
        # The same number of rows on all ranks: if a rank had one step less, the others would wait for it in their all-reduce.
        self._rows = total // size if drop_last else -(-total // size)

    def __len__(self) -> int:
        return self._rows

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the ids of the rows `begin` to `end` - 1 of this rank, int64; fewer at the end.

        Args:
            begin: Number of the first row, 0 or more.
            end: Number after the last row.
        """
        # Reads the rows of all ranks and keeps every W-th: ids are small, and `take_cyclic` reads only contiguous positions.
        begin = min(begin, self._rows) * self._size
        end = min(end, self._rows) * self._size
        return take_cyclic(self._piece, self._total, begin, end)[self._rank :: self._size]


class RankBatches:
    """The rows of one rank: with W ranks, every W-th batch of an order, as the loaders of accelerate divide them.

    All ranks have the same number of full batches: the last rows come from the start of the order again, or with `drop_last`
    the rest of the order is left out.

    Args:
        piece: The order of the epoch, such as `KeptOrder.take`.
        total: Number of ids of the order, 1 or more.
        rank: Number of this rank.
        size: Number of ranks.
        batch: Number of rows of a batch of one rank, 1 or more.
        drop_last: Whether to leave out the rest of the order if it has too few samples for one batch on each rank. Default:
            False.

    Example:
        >>> order = lambda begin, end: np.arange(10, 15)[begin:end]
        >>> [RankBatches(order, 5, rank, 2, batch=2).take(0, 9).tolist() for rank in range(2)]
        [[10, 11, 14, 10], [12, 13, 11, 12]]
    """

    def __init__(
        self, piece: Piece, total: int, rank: int, size: int, *, batch: int, drop_last: bool = False
    ) -> None:
        self._piece = piece
        self._total = total
        self._rank = rank
        self._size = size
        self._batch = batch
        # Only full batches on all ranks: if a rank had one step less, the others would wait for it in their all-reduce.
        all_ranks = batch * size
        self._rows = (total // all_ranks if drop_last else -(-total // all_ranks)) * batch

    def __len__(self) -> int:
        return self._rows

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the ids of the rows `begin` to `end` - 1 of this rank, int64; fewer at the end.

        Args:
            begin: Number of the first row, 0 or more.
            end: Number after the last row.
        """
        parts = [np.empty(0, dtype=np.int64)]
        end = min(end, self._rows)
        while begin < end:
            # A batch at a time, because the rows of a rank are contiguous within a batch only.
            step, row = divmod(begin, self._batch)
            first = (step * self._size + self._rank) * self._batch + row
            count = min(self._batch - row, end - begin)
            parts.append(take_cyclic(self._piece, self._total, first, first + count))
            begin += count
        return np.concatenate(parts)
