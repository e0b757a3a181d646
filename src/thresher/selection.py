"""Selection of samples by value: counts, smallest, largest, thresholds, and random choice.

These are pure functions; ties are broken by index, and values that are not finite are never selected. They run on the host,
once per epoch: the result is then the same for every device, and NumPy's vectorized partition is several times as fast as a
sort.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng

Mask = NDArray[np.bool_]
"""Mask of samples: shape (N,), bool."""

Values = NDArray[Any]
"""Numbers of samples, such as losses: shape (N,), floating point."""

CHUNK = 2**16
"""Number of values that are processed at once; they fit in the cache."""


def chunks(n: int) -> Iterator[slice]:
    """Yields slices of at most `CHUNK` numbers that cover the first n.

    Args:
        n: Number of values.

    Example:
        >>> list(chunks(70_000))
        [slice(0, 65536, None), slice(65536, 70000, None)]
    """
    for first in range(0, n, CHUNK):
        yield slice(first, min(first + CHUNK, n))


def share(fraction: float, n: int) -> int:
    """Returns floor(fraction * n), without rounding errors for fractions such as 0.29.

    Args:
        fraction: Fraction of the samples, in [0, 1].
        n: Number of samples.

    Example:
        >>> share(0.29, 100), int(0.29 * 100)
        (29, 28)
    """
    return math.floor(fraction * n + 1e-9)


def on_host(column: Tensor) -> Values:
    """Returns a column of the records as a NumPy array, without a copy if the column is on the CPU.

    Args:
        column: A tensor on any device.

    Example:
        >>> on_host(torch.tensor([0.5, 2.0])).max()
        np.float32(2.0)
    """
    return column.detach().cpu().numpy()


def kth_smallest(values: NDArray[Any], k: int) -> Any:
    """Returns the value at position `k` in ascending order, counted from 0.

    Args:
        values: Values, shape (n,), of any integer or floating dtype, without NaN.
        k: Position in the order, [0, n).

    Returns:
        A NumPy scalar of the dtype of the values.

    Example:
        >>> kth_smallest(np.array([5, 1, 4, 2], dtype=np.int16), 2)
        np.int16(4)
    """
    return np.partition(values, k)[k]


def smallest(values: Values, k: int, *, usable: Mask | None = None) -> Mask:
    """Marks the `k` smallest finite values.

    Args:
        values: Values of the samples, shape (N,), floating point; NaN and infinities are never marked.
        k: Number of values to mark; if fewer are finite, all finite values are marked.
        usable: Result of `np.isfinite(values)`, if the caller has computed it already. Default: computed here.

    Returns:
        Marks, shape (N,), bool; of equal values the one with the lower index is marked first.

    Example:
        >>> np.flatnonzero(smallest(np.array([0.5, np.nan, 0.1, 0.5, 2.0]), 2))
        array([0, 2])
    """
    usable = np.isfinite(values) if usable is None else usable
    return _least(_with_others_last(values, usable), k, usable)


def largest(values: Values, k: int) -> Mask:
    """Marks the `k` largest finite values.

    Args:
        values: Values of the samples, shape (N,), floating point; NaN and infinities are never marked.
        k: Number of values to mark; if fewer are finite, all finite values are marked.

    Returns:
        Marks, shape (N,), bool; of equal values the one with the higher index is marked first. `smallest` and `largest` are
        thus the two ends of one order by (value, index).

    Example:
        >>> np.flatnonzero(largest(np.array([0.5, np.nan, 0.1, 0.5, 2.0]), 2))
        array([3, 4])
    """
    usable = np.isfinite(values)
    negative = -values
    if not usable.all():
        negative[~usable] = np.inf
    return _least(negative, k, usable, highest_first=True)


def _with_others_last(values: Values, usable: Mask) -> Values:
    """Returns the values, with infinity in place of values that are not usable."""
    return values if usable.all() else np.where(usable, values, np.inf)


def _least(values: Values, k: int, usable: Mask | None, *, highest_first: bool = False) -> Mask:
    """Marks the `k` smallest usable values; of equal ones those with the lowest, or with the highest, indices first.

    Args:
        values: Values of the samples, shape (N,); values that are not usable must be the largest of their dtype.
        k: Number of values to mark.
        usable: Marks of the values that may be marked, shape (N,); None for all.
        highest_first: Whether the highest indices come first.

    Returns:
        Marks, shape (N,), bool.
    """
    k = min(k, len(values) if usable is None else int(np.count_nonzero(usable)))
    if k <= 0:
        return np.zeros(len(values), dtype=np.bool_)
    cut = kth_smallest(values, k - 1)
    mask = values <= cut
    if usable is not None:
        mask &= usable
    surplus = np.count_nonzero(mask) - k
    if surplus:
        ties = np.flatnonzero(mask & (values == cut))
        mask[ties[:surplus] if highest_first else ties[-surplus:]] = False
    return mask


def quantile_cut(finite: Values, q: float) -> float:
    """Returns the q-quantile of n values: the value at position floor(q * n) in ascending order, counted from 0.

    Args:
        finite: Finite values, shape (n,); n is 1 or more.
        q: Share of the values, in [0, 1]; 1 gives the largest value.

    Example:
        >>> quantile_cut(np.array([5.0, 1.0, 4.0, 2.0, 3.0]), 0.6)
        4.0
    """
    n = len(finite)
    return float(kth_smallest(finite, min(share(q, n), n - 1)))


def draw_lots(k: int, generator: torch.Generator, n: int, among: Mask | None = None) -> Mask:
    """Chooses `k` samples uniformly at random, without replacement.

    Args:
        k: Number of samples to choose, at most the number of samples to choose from.
        generator: Source of the random numbers, on the CPU.
        n: Number of samples.
        among: Marks of the samples to choose from, shape (n,). Default: all.

    Returns:
        Marks of the chosen samples, shape (n,), bool. Each sample draws a random number that depends only on the draw and its
        id, and the k lowest numbers win.

    Example:
        >>> int(draw_lots(2, torch.Generator().manual_seed(0), 5).sum())
        2
    """
    base = int(torch.randint(2**62, (), generator=generator))
    drawn = rng.lots(base, range(n))
    if among is not None:
        drawn |= (
            (among.view(np.int8) - np.int8(1)).astype(np.int32).view(np.uint32)
        )  # all bits set for other samples
    return _least(drawn, k, among)


def chosen(n: int, k: int, generator: torch.Generator) -> Mask:
    """Marks `k` of `n` samples uniformly at random, without replacement.

    Args:
        n: Number of samples.
        k: Number of samples to mark, at most n.
        generator: Source of the random numbers, on the CPU.

    Returns:
        Marks, shape (n,), bool.

    Example:
        >>> mask = chosen(5, 2, torch.Generator().manual_seed(0))
        >>> int(mask.sum()), len(mask)
        (2, 5)
    """
    small = torch.int32 if n < 2**31 else torch.int64
    mask = np.zeros(n, dtype=np.bool_)
    mask[torch.randperm(n, generator=generator, dtype=small)[:k].numpy()] = True
    return mask


def ids_of(mask: Mask) -> Tensor:
    """Returns the ids of the marked samples, shape (K,), int64, ascending.

    Args:
        mask: Marks, shape (N,), bool.

    Example:
        >>> ids_of(np.array([True, False, True]))
        tensor([0, 2])
    """
    return torch.from_numpy(np.flatnonzero(mask))
