"""Selection of samples by value: counts, smallest, largest, thresholds, and random choice.

These are pure functions; ties are broken by index, and values that are not finite are never selected. They work on the host,
once per epoch: the answer is then the same for every device, and NumPy's vectorised partition is several times as fast as a
sort.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mask = NDArray[np.bool_]
"""Marks of samples: shape (N,), bool."""

Values = NDArray[Any]
"""Numbers of samples, such as losses: shape (N,), floating point."""


def share(fraction: float, n: int) -> int:
    """Returns how many samples a fraction of `n` samples is: floor(fraction * n), exact for fractions such as 0.29.

    Args:
        fraction: Fraction of the samples, in [0, 1].
        n: Number of samples.

    Example:
        >>> share(0.29, 100), int(0.29 * 100)
        (29, 28)
    """
    return math.floor(fraction * n + 1e-9)


def on_host(column: Tensor) -> Values:
    """Returns a column of the records as a NumPy array, without a copy where the column is on the CPU.

    Args:
        column: A tensor on any device.

    Example:
        >>> on_host(torch.tensor([0.5, 2.0])).max()
        np.float32(2.0)
    """
    return column.detach().cpu().numpy()


def smallest(values: Values, k: int, *, usable: Mask | None = None) -> Mask:
    """Marks the `k` smallest finite values.

    Args:
        values: Values of the samples, shape (N,), floating point; NaN and infinities are never marked.
        k: Number of values to mark; where fewer are finite, all finite values are marked.
        usable: Result of `np.isfinite(values)`, where the caller has it already.

    Returns:
        Marks, shape (N,), bool; of equal values the one with the lower index is marked first.

    Example:
        >>> np.flatnonzero(smallest(np.array([0.5, np.nan, 0.1, 0.5, 2.0]), 2))
        array([0, 2])
    """
    usable = np.isfinite(values) if usable is None else usable
    finite = int(np.count_nonzero(usable))
    k = min(k, finite)
    if k <= 0:
        return np.zeros(len(values), dtype=np.bool_)
    if finite < len(values):
        values = np.where(usable, values, np.inf)
    cut = np.partition(values, k - 1)[k - 1]
    mask = values <= cut
    surplus = np.count_nonzero(mask) - k
    if surplus:
        ties = np.flatnonzero(values == cut)
        mask[ties[len(ties) - surplus :]] = False
    return mask


def largest(values: Values, k: int) -> Mask:
    """Marks the `k` largest finite values.

    Args:
        values: Values of the samples, shape (N,), floating point; NaN and infinities are never marked.
        k: Number of values to mark; where fewer are finite, all finite values are marked.

    Returns:
        Marks, shape (N,), bool; of equal values the one with the higher index is marked first, so that `smallest` and
        `largest` are the two ends of one order by (value, index).

    Example:
        >>> np.flatnonzero(largest(np.array([0.5, np.nan, 0.1, 0.5, 2.0]), 2))
        array([3, 4])
    """
    return smallest(-values[::-1], k)[::-1]


def quantile_cut(finite: Values, q: float) -> float:
    """Returns the value that has floor(q * n) of the n values before it in ascending order.

    Args:
        finite: Finite values, shape (n,), n >= 1.
        q: Share of the values, in [0, 1].

    Example:
        >>> quantile_cut(np.array([5.0, 1.0, 4.0, 2.0, 3.0]), 0.6)
        4.0
    """
    k = min(share(q, len(finite)), len(finite) - 1)
    return float(np.partition(finite, k)[k])


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
