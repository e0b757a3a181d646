"""Exact statistics of the values that all ranks hold together: the k-th smallest value, and the mean.

Their bits do not depend on the number of ranks. A rank sends counts, never its values.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.shards import ALONE, World

DIGIT = 11
"""Number of bits that are looked at in one round: an all-reduce of 2,048 counts."""

CHUNK = 2**16
"""Number of values that are looked at at once, so that they stay in the cache."""


def chunks(n: int) -> Iterator[slice]:
    """Yields slices of at most `CHUNK` numbers that cover the first n.

    Args:
        n: Number of values.
    """
    for first in range(0, n, CHUNK):
        yield slice(first, min(first + CHUNK, n))


def kth_smallest(values: NDArray[Any], k: int, world: World = ALONE) -> Any:
    """Returns the value that has k of the values of all ranks before it in ascending order.

    Args:
        values: Values of this rank, shape (n,), of any integer or floating dtype, without NaN; -0.0 equals 0.0.
        k: Place in the order, [0, number of values of all ranks).
        world: Ranks that hold the values.

    Returns:
        A NumPy scalar of the dtype of the values.

    Example:
        >>> kth_smallest(np.array([5, 1, 4, 2], dtype=np.int16), 2)
        np.int16(4)
    """
    if world.size == 1:
        return np.partition(values, k)[k]
    keys = _ordered(values)
    least, most = np.iinfo(keys.dtype).max, 0
    ends = world.gather(np.array([keys.min(initial=least), keys.max(initial=most)], dtype=keys.dtype))
    low, high = int(ends[:, 0].min()), int(ends[:, 1].max())
    keys -= keys.dtype.type(low)
    found, bits = 0, (high - low).bit_length()
    while bits:
        digit = min(bits, DIGIT)
        bits -= digit
        shift = keys.dtype.type(bits)
        counts = np.zeros(1 << digit, dtype=np.int64)
        for part in chunks(len(keys)):
            counts += np.bincount((keys[part] >> shift).astype(np.intp), minlength=1 << digit)
        before = np.cumsum(world.sum(counts))
        place = int(np.searchsorted(before, k, side="right"))
        k -= int(before[place - 1]) if place else 0
        keys = keys[(keys >> shift) == keys.dtype.type(place)] & keys.dtype.type((1 << bits) - 1)
        found = found << digit | place
    return _value_of(low + found, values.dtype)


def _ordered(values: NDArray[Any]) -> NDArray[Any]:
    """Returns unsigned integers that have the order of the values; equal values have equal ones."""
    if values.dtype.kind == "u":
        return values.copy()
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    top = unsigned.type(1 << (8 * unsigned.itemsize - 1))
    if values.dtype.kind == "i":
        return values.view(unsigned) ^ top
    bits = (values + values.dtype.type(0)).view(unsigned)
    return np.where(bits & top, ~bits, bits | top)


def _value_of(key: int, dtype: np.dtype[Any]) -> Any:
    """Returns the value that has this place in the order of `_ordered`."""
    top = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind == "i":
        key ^= top
    elif dtype.kind == "f":
        key ^= top if key & top else 2 * top - 1
    return np.array([key], dtype=f"u{dtype.itemsize}").view(dtype)[0]


def exact_mean(values: NDArray[Any], world: World = ALONE) -> np.float64:
    """Returns the mean of the values of all ranks: the exact sum, divided and rounded once.

    The mantissas are added up as integers, separately for each exponent, so that the order of the values does not matter. The
    mean of equal values is their value.

    Args:
        values: Values of this rank, shape (n,), float32 or float64, finite.
        world: Ranks that hold the values.

    Returns:
        The mean; nan where there is no value on any rank.

    Example:
        >>> np.full(3, 0.1).mean(), exact_mean(np.full(3, 0.1))
        (np.float64(0.10000000000000002), np.float64(0.1))
    """
    wide = values.dtype.itemsize == 8
    mantissa, exponents = (52, 1 << 11) if wide else (23, 1 << 8)
    table = np.zeros((2 if wide else 1, exponents + 1), dtype=np.int64)
    table[0, -1] = len(values)
    for part in chunks(len(values)):
        table[:, :-1] += _by_exponent(values[part], mantissa, exponents)
    table = world.sum(table)
    count, rows = int(table[0, -1]), table[:, :-1].tolist()
    if not count:
        return np.float64(np.nan)
    total = 0
    for row, part in enumerate(rows):
        total += sum(number << max(exponent, 1) for exponent, number in enumerate(part) if number) << (HALF * row)
    # The value of a mantissa of 1 at the exponent 1 is 2 ** -1074 in float64 and 2 ** -149 in float32.
    return np.float64(total / (count << (1075 if wide else 150)))


HALF = 27
"""Number of low bits of a float64 mantissa that are added up apart from the high bits, so that sums fit into int64."""


def _by_exponent(values: NDArray[Any], mantissa: int, exponents: int) -> NDArray[np.int64]:
    """Returns the sums of the signed mantissas by exponent; for float64 those of the low and of the high bits."""
    signed = np.dtype(f"i{values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).view(signed)
    exponent = (bits >> mantissa) & signed.type(exponents - 1)
    whole = bits & signed.type((1 << mantissa) - 1)
    whole |= (exponent > 0).astype(signed) << mantissa
    parts = [whole] if signed.itemsize == 4 else [whole & signed.type((1 << HALF) - 1), whole >> HALF]
    for part in parts:
        np.negative(part, out=part, where=bits < 0)
    return np.stack([np.bincount(exponent, weights=part, minlength=exponents).astype(np.int64) for part in parts])
