"""Values by id on their way into a saved state, where each rank has an equal part, and back to the blocks of the records."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from thresher.distributed.homecoming import from_bits, on_host_as_bits
from thresher.distributed.layout import ShardLayout
from thresher.shards import World


@dataclass(frozen=True)
class Spread:
    """The two places of values by id: the block of a rank, and the part that a DTensor gives it, as `torch.chunk` cuts it.

    Args:
        layout: Blocks of the ranks.
        world: The ranks.
        ids_per_value: Number of ids that one value is for: 1, or 8 for marks that are packed as bits. Default: 1.

    Example:
        >>> from thresher.distributed.threads import on_ranks
        >>> def there_and_back(world):
        ...     spread = Spread(ShardLayout(n=20, size=2, unit=8), world)
        ...     block = torch.arange(20)[spread.layout.block(world.rank)]
        ...     return [len(part) for part in spread.parts], torch.equal(spread.home(spread.out(block)), block)
        >>> import torch
        >>> on_ranks(2, there_and_back)
        [([10, 10], True), ([10, 10], True)]
    """

    layout: ShardLayout
    world: World
    ids_per_value: int = 1

    @property
    def total(self) -> int:
        """Number of values of all ranks."""
        return -(-self.layout.n // self.ids_per_value)

    @property
    def blocks(self) -> list[range]:
        """Places of the values that belong to the records of each rank."""
        blocks = map(self.layout.block, range(self.world.size))
        return [range(-(-block.start // self.ids_per_value), -(-block.stop // self.ids_per_value)) for block in blocks]

    @property
    def parts(self) -> list[range]:
        """Places of the values that each rank has of a DTensor."""
        most = -(-self.total // self.world.size)
        ends = [min(self.total, rank * most) for rank in range(self.world.size + 1)]
        return [range(*part) for part in itertools.pairwise(ends)]

    def out(self, values: Tensor) -> Tensor:
        """Returns what is saved: a DTensor or, in one process, the values; all ranks call it.

        Args:
            values: Values of the block of this rank.
        """
        if self.world.size == 1:
            return values
        return self.world.sharded(self._moved(values, self.blocks, self.parts), self.total)

    def home(self, saved: Any) -> Any:
        """Returns the values of the block of this rank; all ranks call it.

        Args:
            saved: Result of `out` of this number of ranks, or a plain tensor with the values of all ids. Anything else is
                given back for others to refuse.

        Raises:
            ValueError: The tensor has the part of another rank, or that of a rank among another number of ranks.
        """
        if not isinstance(saved, Tensor) or saved.shape != (self.total,):
            return saved
        mesh: Any = getattr(saved, "device_mesh", None)
        if mesh is None:
            block = self.blocks[self.world.rank]
            return saved[block.start : block.stop]
        (rank,) = mesh.get_coordinate()
        if (rank, mesh.size()) != (self.world.rank, self.world.size):
            raise ValueError(
                f"load_state_dict: the state has the part of process {rank} of {mesh.size()}, and this is process "
                f"{self.world.rank} of {self.world.size}. What a process saves with torch.save is for itself alone: save and "
                "load with torch.distributed.checkpoint, which gives each process its part."
            )
        part: Any = saved
        return self._moved(part.to_local(), self.parts, self.blocks)

    def _moved(self, values: Tensor, have: Sequence[range], want: Sequence[range]) -> Tensor:
        """Returns the values that this rank wants, of those that all ranks have."""
        own, bits = have[self.world.rank], on_host_as_bits(values)
        parts = [bits[max(0, to.start - own.start) : max(0, to.stop - own.start)] for to in want]
        return from_bits(np.concatenate(self.world.exchange(parts)), values.dtype).to(values.device)
