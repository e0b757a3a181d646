"""Shards: which ids of the dataset a process holds records of, and what the processes of a training tell each other.

In a training in one process the shard is the whole dataset and the world is `ALONE`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class World(ABC):
    """The processes of a training, its ranks, which all call the same functions in the same order."""

    rank: int = 0
    """Number of this process, [0, size)."""
    size: int = 1
    """Number of processes, 1 or more."""

    @abstractmethod
    def sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sum over all ranks of arrays of one shape."""

    @abstractmethod
    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, which have one shape and dtype: shape (size, *shape)."""

    @abstractmethod
    def exchange(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Sends one array to each rank, and returns those that were sent to this one; shape (any,), all of one dtype."""

    def meet(self, what: str, *, patient: bool = False) -> None:
        """Waits for all ranks, up to a time.

        Args:
            what: Name of what all ranks must call, for the message.
            patient: Whether a rank that does not come in that time is told by a warning, and waited for. Default: False.

        Raises:
            RuntimeError: A rank does not come.
        """
        self.total(len(what))

    def share_of_mean(self, count: int, device: torch.device) -> Tensor:
        """Returns the factor with which a mean over rows of this rank enters the mean of the ranks' means, shape (), float64.

        With it, the mean over the ranks is that over the rows of all ranks: size * count / rows of all ranks.

        Args:
            count: Number of rows of this rank.
            device: Device of the result.
        """
        return torch.full((), self.size * count / max(1, self.total(count)), dtype=torch.float64, device=device)

    def sharded(self, part: Tensor, total: int) -> Tensor:
        """Returns a tensor of the values of all ranks: each has the whole here, and its part of a DTensor between processes.

        Args:
            part: Values of this rank, shape (n,): its part as `torch.chunk` cuts the whole.
            total: Number of values of all ranks.
        """
        return torch.from_numpy(self.join(part.numpy()))

    def total(self, number: int) -> int:
        """Returns the sum of one number over all ranks.

        Args:
            number: Number of this rank.
        """
        return int(self.sum(np.array([number], dtype=np.int64))[0])

    def join(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, one after the other along their last dimension.

        Args:
            values: Array of this rank, shape (..., n); n may differ from rank to rank.
        """
        if self.size == 1:
            return values
        sizes = self.gather(np.array([values.shape[-1]]))[:, 0].tolist()
        padded = np.zeros((*values.shape[:-1], max(sizes)), dtype=values.dtype)
        padded[..., : values.shape[-1]] = values
        return np.concatenate([part[..., :size] for part, size in zip(self.gather(padded), sizes, strict=True)], axis=-1)


class Alone(World):
    """The world of a training in one process.

    Example:
        >>> ALONE.total(3), ALONE.gather(np.array([1, 2]))
        (3, array([[1, 2]]))
    """

    def sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers."""
        return numbers

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the values as those of one rank, shape (1, *shape)."""
        return values[None]

    def exchange(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the only part."""
        return list(parts)


ALONE = Alone()
"""World of a training in one process."""


@dataclass(frozen=True)
class Shard:
    """The block of contiguous ids whose records one rank holds; the blocks ascend with the rank.

    Args:
        first: First id of the block.
        last: Id after the last one of the block; equal to `first` where the rank holds no records.
        n: Number of samples of all ranks together.
        world: The ranks that hold the other blocks. Default: there is one process, and the block is the whole.

    Example:
        >>> shard = Shard.whole(5)
        >>> len(shard), shard.ids
        (5, tensor([0, 1, 2, 3, 4]))
    """

    first: int
    last: int
    n: int
    world: World = ALONE

    @staticmethod
    def whole(n: int) -> "Shard":
        """Returns the shard of a training in one process.

        Args:
            n: Number of samples.
        """
        return Shard(0, n, n)

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def ids(self) -> Tensor:
        """Ids of the block, shape (len,), int64."""
        return torch.arange(self.first, self.last)
