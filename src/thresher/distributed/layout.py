"""The blocks of ids whose records the ranks hold, and values that are asked for at their owners."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.shards import Shard, World

UNIT = 1024
"""Number of ids in the units that blocks consist of; also of the places of an order that are counted together."""


@dataclass(frozen=True)
class ShardLayout:
    """Blocks of contiguous ids, one per rank, all but the last ones of the same size.

    Args:
        n: Number of samples, 1 or more.
        size: Number of ranks, 1 or more; ranks for which no unit is left have empty blocks.
        unit: Number that divides the sizes of the blocks, a multiple of 8, so that marks are packed in whole bytes.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> layout = ShardLayout(n=20, size=3, unit=8)
        >>> [layout.block(rank) for rank in range(3)], layout.owner(np.array([7, 8, 19]))
        ([range(0, 8), range(8, 16), range(16, 20)], array([0, 1, 2]))
    """

    n: int
    size: int
    unit: int = UNIT

    def __post_init__(self) -> None:
        if self.n < 1 or self.size < 1:
            raise ValueError(f"ShardLayout: `n` and `size` must be 1 or more, got {self.n} and {self.size}")
        if self.unit < 8 or self.unit % 8:
            raise ValueError(f"ShardLayout: `unit` must be a multiple of 8, got {self.unit}")

    @property
    def per(self) -> int:
        """Number of ids in each block but the last ones."""
        units = -(-self.n // self.unit)
        return -(-units // self.size) * self.unit

    def block(self, rank: int) -> range:
        """Returns the ids of a rank.

        Args:
            rank: Number of the rank.
        """
        return range(min(self.n, rank * self.per), min(self.n, (rank + 1) * self.per))

    def owner(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranks that hold the records of samples.

        Args:
            ids: Ids, shape (k,), within [0, n).
        """
        return ids // self.per

    def shard(self, world: World) -> Shard:
        """Returns the block of this rank.

        Args:
            world: The ranks, as many as there are blocks.
        """
        block = self.block(world.rank)
        return Shard(block.start, block.stop, self.n, world)


def equal_part(total: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the places, from one to another, of a rank among which places are dealt in equal parts.

    Args:
        total: Number of places; the parts of the ranks differ by one at most.
        rank: Number of the rank.
        size: Number of ranks.

    Example:
        >>> [equal_part(7, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    return total * rank // size, total * (rank + 1) // size


def to_owners(ids: NDArray[np.int64], layout: ShardLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorts samples by the rank that holds their records, and leaves the order of those of one rank as it is.

    Args:
        ids: Ids, shape (k,).
        layout: Blocks of the ranks.

    Returns:
        Places in `ids`, shape (k,), those of rank 0 first, and the places between the ranks, shape (size - 1,).
    """
    owners = layout.owner(ids)
    order = np.argsort(owners, kind="stable")
    return order, np.cumsum(np.bincount(owners, minlength=layout.size))[:-1]


def fetch(
    ids: NDArray[np.int64], values: Callable[[NDArray[Any]], NDArray[Any]], layout: ShardLayout, world: World
) -> NDArray[Any]:
    """Returns the values of samples of any rank; all ranks ask at the same time.

    It costs 4 bytes per sample to ask, and the size of a value to answer.

    Args:
        ids: Ids, shape (k,), int64, in any order; ranks may ask for different numbers of samples.
        values: Function of the places of samples in this rank's block, shape (k,), that returns their values, shape (k,).
        layout: Blocks of the ranks.
        world: The ranks.

    Returns:
        Values in the order of the ids, shape (k,).
    """
    if world.size == 1:
        return values(ids)
    order, ends = to_owners(ids, layout)
    places = (ids[order] % layout.per).astype(np.uint32)
    asked = world.exchange(np.split(places, ends))
    answers = np.concatenate(world.exchange([values(part) for part in asked]))
    found = np.empty_like(answers)
    found[order] = answers
    return found
