"""Bitmasks of samples: one bit per sample."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thresher.selection import Mask, chunks

BYTES = 2**9
"""Number of bytes in a block; a bitmask stores one running count of set bits per block."""


def packed(ids: NDArray[np.int64], n: int) -> NDArray[np.uint8]:
    """Returns a bitmask in which the bits of the given ids are 1.

    Args:
        ids: Ids of the samples to mark, shape (K,), ascending, within [0, n).
        n: Number of samples.

    Returns:
        Bits, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0.

    Example:
        >>> packed(np.array([1, 2, 10]), 12)
        array([6, 4], dtype=uint8)
    """
    bits = np.zeros(-(-n // 8), dtype=np.uint8)
    # In parts, because a mask of all samples would take a byte per sample. Each part begins at the first bit of a byte.
    for part in chunks(n):
        low, high = np.searchsorted(ids, (part.start, part.stop))
        mask = np.zeros(part.stop - part.start, dtype=np.bool_)
        mask[ids[low:high] - part.start] = True
        bits[part.start // 8 : -(-part.stop // 8)] = np.packbits(mask, bitorder="little")
    return bits


def unpacked(bits: NDArray[np.uint8]) -> Mask:
    """Converts a bitmask to a boolean mask, shape (8 * len(bits),).

    Args:
        bits: Bits, lowest id first, uint8.
    """
    return np.unpackbits(bits, bitorder="little").view(np.bool_)


def number(bits: NDArray[np.uint8]) -> int:
    """Returns the number of marked samples: the bits that are 1.

    Args:
        bits: Bits, uint8.
    """
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


class Bitmask:
    """Bitmask of a dataset: bit i is 1 if sample i is marked.

    Args:
        bits: Bits, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0.
        n: Number of samples.

    Example:
        >>> marks = Bitmask(np.packbits([0, 1, 0, 0, 1, 1], bitorder="little"), 6)
        >>> marks.of(np.array([4, 0])), marks.count, marks.ids(1, 3)
        (array([ True, False]), 3, array([4, 5]))
        >>> marks.before(np.array([5, 1]))
        array([2, 0])
    """

    def __init__(self, bits: NDArray[np.uint8], n: int) -> None:
        self.bits = bits
        self.n = n

    def of(self, ids: NDArray[np.int64]) -> Mask:
        """Returns whether each of the given samples is marked, shape (k,), bool.

        Args:
            ids: Ids, shape (k,), within [0, n).
        """
        return (self.bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 != 0

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Number of marked samples up to the end of each block of `BYTES` bytes."""
        # One number per block takes 1/64 of the memory of the bits.
        counts = np.bitwise_count(self.bits)
        whole = len(counts) - len(counts) % BYTES
        of_parts = counts[:whole].reshape(-1, BYTES).sum(axis=1, dtype=np.int64)
        return np.cumsum(np.append(of_parts, counts[whole:].sum(dtype=np.int64)))

    @property
    def count(self) -> int:
        """Number of marked samples."""
        return int(self._ends[-1])

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns entries `begin` to `end` - 1 of the ascending list of all marked ids.

        Args:
            begin: First position in that list, 0 or more.
            end: Position after the last one; the result is shorter if fewer samples are marked.
        """
        end = min(end, self.count)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        # Only the blocks that hold these positions are unpacked, because a mask takes a byte per sample.
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left")) + 1
        positions = np.flatnonzero(unpacked(self.bits[first * BYTES : last * BYTES]))
        before = int(self._ends[first - 1]) if first else 0
        return positions[begin - before : end - before] + first * BYTES * 8

    @cached_property
    def _words(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The bits as words of 64 bits, and the number of marked samples before each word."""
        # The bits begin with the lowest id, so words of 8 bytes must be read as little-endian on any machine. The counts take
        # as much memory as the bits, and are computed only when weights are looked up.
        words = np.pad(self.bits, (0, -len(self.bits) % 8)).view(
            np.dtype(np.uint64).newbyteorder("<")
        )
        counts = np.bitwise_count(words)
        return words, np.cumsum(counts, dtype=np.int64) - counts

    def before(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each id, the number of marked samples with a lower id, shape (k,).

        For a marked sample, this number is its position in the ascending list of marked ids.

        Args:
            ids: Ids, shape (k,), within [0, n).
        """
        words, counts = self._words
        word = ids >> 6
        bit = (ids & 63).astype(np.uint64)
        lower = words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return counts[word] + np.bitwise_count(lower)
