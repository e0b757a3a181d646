"""A shuffle that is computed instead of stored: it returns any part of the order, and the position of any id.

A position is mixed by multiplications with odd numbers and by shifts ("multiply-xorshift"), modulo a power of two. This maps
the numbers below this power one to one. A result that is not an id is mixed again until it is one ("cycle walking"), which
keeps the map one to one (Black & Rogaway, 2002, "Ciphers with Arbitrary Finite Domains").
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.rng import seeds

Words = NDArray[np.unsignedinteger[Any]]

ROUNDS = 6
"""Number of rounds. Three fail the tests of tests/library/test_permutation.py."""

ROUNDS_OF_FEW = 16
"""Number of rounds for `FEW` ids or fewer: small numbers need more rounds to mix well."""

FEW = 2**12

MOST = 2**62
"""Largest number of ids."""

PIECE = 2**16
"""Number of ids that are computed at once; they fit in the cache."""

OWN_KEYS = 0x5E1EC7
"""Number that makes the keys differ from other random numbers with the same seed and epoch."""


class Permutation:
    """The ids 0, 1, ..., n - 1 in random order. The order takes no memory, because ids are computed when they are needed.

    It depends on the arguments alone. An id takes a few nanoseconds. It is made for training, not for cryptography.

    Args:
        n: Number of ids, 0 to 2^62.
        seed: Random seed, a whole number; only its last 64 bits are used.
        epoch: Number of the epoch; each epoch has another order.
        rounds: Number of times that the bits are mixed. Default: 6, or 16 for 4,096 ids or fewer.

    Raises:
        ValueError: `n` is out of its range.

    Example:
        >>> order = Permutation(10, seed=0, epoch=3)
        >>> order.piece(0, 10)
        array([8, 6, 1, 5, 0, 9, 3, 4, 7, 2])
        >>> order.piece(4, 6), order.places_of(np.array([0, 9]))
        (array([0, 9]), array([4, 5]))
    """

    def __init__(self, n: int, seed: int, epoch: int, *, rounds: int | None = None) -> None:
        if not 0 <= n <= MOST:
            raise ValueError(f"Permutation: `n` must be a number of ids from 0 to 2^62, got {n}")
        self.n = n
        bits = max(1, (n - 1).bit_length())
        rounds = rounds or (ROUNDS_OF_FEW if n <= FEW else ROUNDS)
        kind = self._kind = np.uint32 if bits <= 32 else np.uint64
        self._last = kind(max(0, n - 1))
        self._mask = kind(2**bits - 1)
        self._shift = kind((bits + 1) // 2)
        keys = [key % 2**bits for key in seeds(2 * rounds, seed, epoch, n, OWN_KEYS)]
        keys, factors = keys[:rounds], [key | 1 for key in keys[rounds:]]
        self._rounds = [
            (kind(key), kind(factor)) for key, factor in zip(keys, factors, strict=True)
        ]
        inverse = [
            (kind(key), kind(pow(factor, -1, 2**bits)))
            for key, factor in zip(keys, factors, strict=True)
        ]
        self._rounds_back = inverse[::-1]

    def piece(self, begin: int, end: int, step: int = 1) -> NDArray[np.int64]:
        """Returns the ids at positions begin, begin + step, ... below `end` of the order, shape (k,), int64.

        Args:
            begin: First position, 0 or more.
            end: Position after the last one, at most n.
            step: Number of positions from one id to the next, 1 or more. Default: 1.

        Raises:
            ValueError: A position is outside the order, or `step` is below 1.
        """
        if not 0 <= begin <= end <= self.n or step < 1:
            raise ValueError(
                f"Permutation.piece: need 0 <= begin <= end <= {self.n}, step >= 1; got {begin}, {end}, {step}"
            )
        places = range(begin, end, step)
        ids = np.empty(len(places), dtype=np.int64)
        for first in range(0, len(ids), PIECE):
            part = places[first : first + PIECE]
            ids[first : first + PIECE] = self._mix_below_n(
                np.arange(part.start, part.stop, step, dtype=np.int64), self._mix
            )
        return ids

    def places_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of ids in the order, shape (k,), int64.

        Args:
            ids: Ids, shape (k,), int64, each within [0, n).

        Raises:
            ValueError: An id is outside [0, n).
        """
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.n):
            raise ValueError(
                f"Permutation.places_of: ids must be within [0, {self.n}), got {ids.min()} to {ids.max()}"
            )
        places = np.empty(len(ids), dtype=np.int64)
        for first in range(0, len(ids), PIECE):
            places[first : first + PIECE] = self._mix_below_n(
                ids[first : first + PIECE], self._mix_back
            )
        return places

    def _mix_below_n(self, numbers: NDArray[np.int64], mix: Callable[[Words], None]) -> Words:
        """Mixes each number, again and again until it is below n ("cycle walking", see the module).

        This ends: the numbers below a power of two are mixed one to one, so each returns to itself in the end, and at least half
        of them are below n.

        Args:
            numbers: Numbers below n.
            mix: Function that mixes numbers in place, `_mix` or its inverse.
        """
        words = numbers.astype(self._kind)
        mix(words)
        places = np.flatnonzero(words > self._last)
        too_large = words.take(places)
        while len(places):
            mix(too_large)
            words[places] = too_large
            remaining = np.flatnonzero(too_large > self._last)
            places = places.take(remaining)
            too_large = too_large.take(remaining)
        return words

    def _mix(self, words: Words) -> None:
        for key, factor in self._rounds:
            words ^= key
            words *= factor
            words &= self._mask
            words ^= words >> self._shift

    def _mix_back(self, words: Words) -> None:
        for key, factor in self._rounds_back:
            words ^= (
                words >> self._shift
            )  # this shift is its own inverse, because it moves by at least half of the bits
            words *= factor
            words &= self._mask
            words ^= key
