"""An epoch as arrays: the ids of one process in the order of training, and where each batch ends.

Everything else is an index: the position in an epoch is a number of rows, a resumed run makes the same arrays and continues at
this position, several processes share one order, and smaller batches have other ends.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.loading.packed_plan import PackedPlan
from thresher.selection import chunks

IdArray = NDArray[np.int32 | np.int64]

Piece = Callable[[int, int], IdArray]
"""Function `(begin, end)` that returns the ids at positions begin to end - 1 of an order."""


def do_nothing() -> None:
    """Does nothing: most samplers draw nothing at the end of their ids."""


class Epoch:
    """The batches of one epoch of one process.

    Args:
        ids: Ids of the rows in the order of training, shape (rows or more,); those after the last batch are left out.
        ends: Number of rows up to the end of each batch, after a leading 0, shape (batches + 1,).
        weights: Weights of the samples, shape (N,), float32, set for those with rows; None if all are 1.
        finish: Function that draws what the sampler draws when its ids run out. Default: nothing.

    Example:
        >>> epoch = Epoch(np.array([4, 2, 0, 1]), np.array([0, 2, 4]))
        >>> len(epoch), epoch.batch(1)
        (2, tensor([0, 1]))
    """

    def __init__(
        self,
        ids: IdArray,
        ends: NDArray[np.int64],
        weights: Tensor | None = None,
        finish: Callable[[], object] = do_nothing,
    ) -> None:
        self.ids = ids
        self.ends = ends
        self.weights = weights
        self._finish = finish
        self.rows: int | None = int(ends[-1])
        """Number of rows."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def batch(self, number: int) -> Tensor:
        """Returns the ids of a batch, int64.

        Args:
            number: Number of the batch, within [0, number of batches).
        """
        return torch.from_numpy(
            self.ids[self.ends[number] : self.ends[number + 1]].astype(np.int64)
        )

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yields the ids of each batch when it is asked for.

        Args:
            size: Number of rows of a full batch.
        """
        last = len(self) - 1
        for number in range(len(self)):
            ids = self.batch(number)
            # The batch sampler of torch meets the end of the ids while it fills an incomplete last batch, so it draws before
            # that batch; after a full last batch, it draws when it is asked for another one.
            if number == last and len(ids) < size:
                self.finish()
            yield ids
        self.finish()

    def finish(self) -> None:
        """Draws, once, what the sampler draws at the end of its ids."""
        finish = self._finish
        self._finish = do_nothing
        finish()


class LazyEpoch:
    """The batches of a sampler that is read as the plain loader reads it, batch by batch; see `Epoch`.

    Args:
        ids: Ids in batches.
        rows: Number of rows, as far as the sampler knows; None if it has no length.
        weights: Weights of the samples, shape (N,), float32; None if all are 1.
        drop_last: Whether a last batch that is not full is left out.
    """

    def __init__(
        self, ids: Iterator[Tensor], rows: int | None, weights: Tensor | None, *, drop_last: bool
    ) -> None:
        self._ids = ids
        self._drop_last = drop_last
        self.rows = rows
        self.weights = weights

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yields the ids of each batch when it is asked for."""
        for ids in self._ids:
            if self._drop_last and len(ids) < size:
                return
            yield ids

    def finish(self) -> None:
        """Does nothing: the sampler itself meets the end of its ids."""


BETWEEN_BATCHES = (
    "The epoch in progress has trained on {} rows in each process, after which no batch of this run ends. Choose the batch size "
    "so that all processes together have batches of the same size as before, or save between epochs."
)


def choose(piece: Piece, n: int, plan: PackedPlan) -> Iterator[IdArray]:
    """Yields the ids of an order that a plan keeps, in pieces.

    Args:
        piece: The order.
        n: Number of ids of the order.
        plan: The plan, which is not drawn.

    Example:
        >>> from thresher.plans import EpochPlan
        >>> plan = PackedPlan.of(EpochPlan(torch.tensor([0, 3])), 4)
        >>> [ids.tolist() for ids in choose(lambda begin, end: np.array([2, 3, 1, 0])[begin:end], 4, plan)]
        [[3, 0]]
    """
    # In pieces that fit in the cache: each lookup of an id in the plan is a random access.
    for part in chunks(n):
        ids = piece(part.start, part.stop)
        yield ids[plan.keeps(ids)]


@dataclass(frozen=True, eq=False)
class ComposedEpoch:
    """The batches of an epoch of all processes together, before they are dealt to the processes.

    Args:
        pieces: Ids in the order of training, in pieces.
        rows: Number of these ids. If the batches have more rows, the order is repeated from its start.
        ends: Number of rows up to the end of each batch, after a leading 0, shape (batches + 1,).
        by_rows: Whether W processes get every W-th row of each batch, rather than every W-th batch.
        finish: Function that draws what the sampler draws when its ids run out. Default: nothing.
    """

    pieces: Iterable[IdArray]
    rows: int
    ends: NDArray[np.int64]
    by_rows: bool
    finish: Callable[[], object] = do_nothing

    def deal(self, rank: int, size: int, *, dtype: type[Any] = np.int64) -> IdArray:
        """Returns the rows of one process.

        Args:
            rank: Number of the process.
            size: Number of processes W.
            dtype: Integer dtype of the result. Default: int64.

        Example:
            >>> ends = np.array([0, 4, 6])
            >>> [ComposedEpoch([np.arange(10, 15)], 5, ends, True).deal(rank, 2).tolist() for rank in range(2)]
            [[10, 12, 14], [11, 13, 10]]
            >>> [ComposedEpoch([np.arange(10, 15)], 5, ends, False).deal(rank, 2).tolist() for rank in range(2)]
            [[10, 11, 12, 13], [14, 10]]
        """
        total = int(self.ends[-1])
        rows = int(ends_of_rank(self.ends, rank, size, by_rows=self.by_rows)[-1])
        dealt = np.empty(rows, dtype)
        seen = 0
        taken = 0
        for ids in self._padded(total - self.rows):
            if self.by_rows or size == 1:
                # A slice, because an array of row numbers would take more memory than the ids.
                of_rank = ids[(rank - seen) % size :: size]
            else:
                places = np.arange(seen, seen + len(ids))
                batch_numbers = np.searchsorted(self.ends, places, side="right") - 1
                of_rank = ids[batch_numbers % size == rank]
            # Rows after the last batch are left out.
            of_rank = of_rank[: len(dealt) - taken]
            dealt[taken : taken + len(of_rank)] = of_rank
            seen += len(ids)
            taken += len(of_rank)
        return dealt

    def _padded(self, missing: int) -> Iterator[IdArray]:
        """Yields the pieces, and then `missing` padding rows, repeated from the start."""
        start = np.empty(0, dtype=np.int64)
        for ids in self.pieces:
            # Kept now, because the pieces are computed while they are read, once.
            if len(start) < missing:
                start = np.concatenate([start, ids[:missing]])
            yield ids
        if missing > 0:
            yield np.resize(start[: self.rows], missing)


def ends_of_rank(
    ends: NDArray[np.int64], rank: int, size: int, *, by_rows: bool
) -> NDArray[np.int64]:
    """Returns where each batch of one process ends, after a leading 0.

    Args:
        ends: Where each batch of all processes together ends.
        rank: Number of the process.
        size: Number of processes W.
        by_rows: Whether W processes get every W-th row of each batch, rather than every W-th batch.

    Example:
        >>> ends_of_rank(np.array([0, 4, 6]), 1, 2, by_rows=True), ends_of_rank(np.array([0, 4, 6]), 1, 2, by_rows=False)
        (array([0, 2, 3]), array([0, 2]))
    """
    if by_rows or size == 1:
        return ends // size
    return np.append(0, np.diff(ends)[rank::size].cumsum())


def pad(number: int, unit: int, *, drop_last: bool) -> int:
    """Returns a number of rows or batches that can be divided equally: the next multiple of `unit`, or the one before.

    Args:
        number: Number of rows or batches.
        unit: Number of those that are dealt at once.
        drop_last: Whether to leave out what remains, instead of repeating the first.

    Example:
        >>> pad(5, 2, drop_last=False), pad(5, 2, drop_last=True)
        (6, 4)
    """
    return number // unit * unit if drop_last else -(-number // unit) * unit


def small_dtype(n: int) -> type[np.int32] | type[np.int64]:
    """Returns the smallest dtype of this module for ids below n."""
    return np.int32 if n < 2**31 else np.int64
