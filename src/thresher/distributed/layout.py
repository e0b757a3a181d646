"""The blocks of ids that the ranks own, and requests for values of samples at their owners."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thresher.shards import Shard, World

UNIT = 1024
"""Number of ids in a unit of a block, and of places in a unit of an order."""


@dataclass(frozen=True)
class ShardLayout:
    """Blocks of contiguous ids, one per rank. All blocks but the last ones have the same size.

    Args:
        n: Number of samples, 1 or more.
        size: Number of ranks, 1 or more; the last ranks have empty blocks if there are too few units.
        unit: Number that divides the sizes of the blocks; a multiple of 8, so that bitmasks consist of whole bytes.

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
        """Number of ids in a block that is not one of the last."""
        units = -(-self.n // self.unit)
        return -(-units // self.size) * self.unit

    def block(self, rank: int) -> range:
        """Returns the ids of a rank.

        Args:
            rank: Number of the rank.
        """
        return range(min(self.n, rank * self.per), min(self.n, (rank + 1) * self.per))

    def owner(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranks that own samples.

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
    """Returns the first and the end place of a rank, if places are divided equally.

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
    """Sorts samples by owner, in a stable order.

    Args:
        ids: Ids, shape (k,).
        layout: Blocks of the ranks.

    Returns:
        Places in `ids`, shape (k,), the places of rank 0 first; and the places where the next rank begins, shape (size - 1,).
    """
    # Stable, because a sample may have several rows: of its losses, the owner must get the last one last.
    owners = layout.owner(ids)
    order = np.argsort(owners, kind="stable")
    return order, np.cumsum(np.bincount(owners, minlength=layout.size))[:-1]
