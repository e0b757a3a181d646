"""An epoch as arrays: the ids of one process in the order of training, and where each batch ends.

Everything else is an index: the position in an epoch is a number of rows, a resumed run makes the same arrays and continues at
this position, several processes share one order, and smaller batches have other ends.
"""

import zlib
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


@dataclass(frozen=True, eq=False)
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

    ids: IdArray
    ends: NDArray[np.int64]
    weights: Tensor | None = None
    finish: Callable[[], object] = do_nothing

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

    def checksum(self, rows: int) -> int:
        """Returns a checksum of the ids of the first rows.

        Args:
            rows: Number of rows.
        """
        return zlib.crc32(np.ascontiguousarray(self.ids[:rows]).data)


BETWEEN_BATCHES = (
    "The epoch in progress has trained on {} rows in each process, after which no batch of this run ends. Choose the batch size "
    "so that all processes together have batches of the same size as before, or save between epochs."
)


def batch_at(ends: NDArray[np.int64], rows: int) -> int:
    """Returns the number of the batch that begins after some rows of an epoch.

    Args:
        ends: Number of rows up to the end of each batch, after a leading 0.
        rows: Number of rows.

    Raises:
        ValueError: No batch ends after this number of rows.

    Example:
        >>> batch_at(np.array([0, 3, 7]), 3)
        1
    """
    number = int(np.searchsorted(ends, rows))
    if number == len(ends) or ends[number] != rows:
        raise ValueError(BETWEEN_BATCHES.format(rows))
    return number


def full_batches(
    rows: int, size: int, *, drop_last: bool = False, least: int = 1
) -> NDArray[np.int64]:
    """Returns the ends of full batches, after a leading 0.

    Args:
        rows: Number of rows of the epoch.
        size: Number of rows of a batch.
        drop_last: Whether a last batch that is not full is left out. Default: False.
        least: Least number of rows of a last batch that is not left out. Default: 1.

    Example:
        >>> full_batches(7, 3), full_batches(7, 3, least=2)
        (array([0, 3, 6, 7]), array([0, 3, 6]))
    """
    ends = np.arange(0, rows + 1, size, dtype=np.int64)
    rest = rows % size
    return ends if drop_last or rest < least else np.append(ends, rows)


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


def rows_dealt(total: int, size: int, *, batch: int = 1, drop_last: bool = False) -> int:
    """Returns the number of rows of each of several processes; see `deal`."""
    unit = size * batch
    return (total // unit if drop_last else -(-total // unit)) * batch


def deal(
    pieces: Iterable[IdArray],
    total: int,
    rank: int,
    size: int,
    *,
    batch: int = 1,
    drop_last: bool = False,
    dtype: type[Any] = np.int64,
) -> IdArray:
    """Returns the rows of one rank: with W ranks, every W-th row of an order, or every W-th batch.

    All ranks have the same number of rows, because a rank with one step less would let the others wait: the last rows come from
    the start of the order again, or with `drop_last` the rest of the order is left out. Rows are divided as by
    DistributedSampler, batches as by the loaders of accelerate.

    Args:
        pieces: The order, in pieces.
        total: Number of ids of the order.
        rank: Number of the rank.
        size: Number of ranks W.
        batch: Number of rows of a batch of one rank; 1 divides single rows. Default: 1.
        drop_last: Whether to leave out the rest of the order if it has too few samples for all ranks. Default: False.
        dtype: Integer dtype of the result. Default: int64.

    Example:
        >>> [deal([np.arange(10, 15)], 5, rank, 2).tolist() for rank in range(2)]
        [[10, 12, 14], [11, 13, 10]]
        >>> [deal([np.arange(10, 15)], 5, rank, 2, batch=2).tolist() for rank in range(2)]
        [[10, 11, 14, 10], [12, 13, 11, 12]]
    """
    rows = rows_dealt(total, size, batch=batch, drop_last=drop_last)
    own = np.empty(rows, dtype=dtype)
    seen = taken = 0
    start = own[:0]

    def take(ids: IdArray) -> None:
        nonlocal seen, taken
        if batch == 1:
            # Every W-th row, without a number for each row.
            mine = ids[(rank - seen) % size :: size]
        else:
            turns = np.arange(seen, seen + len(ids)) // batch % size
            mine = ids[turns == rank]
        mine = mine[: rows - taken]
        own[taken : taken + len(mine)] = mine
        seen += len(ids)
        taken += len(mine)

    for ids in pieces:
        if len(start) < batch * size:
            start = np.concatenate([start, ids[: batch * size]])
        take(ids)
    take(np.resize(start[:total], max(0, rows * size - total)))
    return own


def small_dtype(n: int) -> type[np.int32] | type[np.int64]:
    """Returns the smallest dtype of this module for ids below n."""
    return np.int32 if n < 2**31 else np.int64
