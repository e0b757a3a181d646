"""Which samples: counts, smallest, largest, thresholds. Pure functions, stable on ties, safe on non-finite values.

Plans are made on the host, once an epoch: an answer is then the same on every device, and NumPy's vectorised partition
beats a sort several times over.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mask = NDArray[np.bool_]
Values = NDArray[Any]


def share(fraction: float, n: int) -> int:
    """Count that `fraction` of `n` samples makes: floor(fraction * n), with float products such as .29 * 100 repaired."""
    return math.floor(fraction * n + 1e-9)


def on_host(column: Tensor) -> Values:
    """The values of a record column as a NumPy array, without a copy where the column lives on the CPU."""
    return column.detach().cpu().numpy()


def smallest(values: Values, k: int, *, usable: Mask | None = None) -> Mask:
    """Mark the `k` smallest finite values.

    Args:
        values: Shape (N,), floating point; NaN and infinities are never marked.
        k: How many; more than there are finite values marks all of those.
        usable: `np.isfinite(values)` where the caller has it already.

    Returns:
        Bool mask (N,) with min(k, finite) marks; ties go to the lower index.
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
    """Mark the `k` largest finite values; ties go to the higher index, so that the order by (value, index) is one order."""
    return smallest(-values[::-1], k)[::-1]


def quantile_cut(finite: Values, q: float) -> float:
    """The value that floor(q * n) of the n values come before in ascending order."""
    k = min(share(q, len(finite)), len(finite) - 1)
    return float(np.partition(finite, k)[k])


def chosen(n: int, k: int, generator: torch.Generator) -> Mask:
    """Mark `k` of `n` uniformly at random, without replacement.

    Returns:
        Bool mask (n,) with k marks.
    """
    small = torch.int32 if n < 2**31 else torch.int64
    mask = np.zeros(n, dtype=np.bool_)
    mask[torch.randperm(n, generator=generator, dtype=small)[:k].numpy()] = True
    return mask


def ids_of(mask: Mask) -> Tensor:
    """The marked indices, ascending, int64."""
    return torch.from_numpy(np.flatnonzero(mask))
