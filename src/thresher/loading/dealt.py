"""The order of a sampler for one process, dealt out to several."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import Sampler


class DealtRows(Sampler[int]):
    """Sampler that yields every W-th id of another sampler, as a DistributedSampler deals out its own order.

    All processes get equally many ids: the order is continued with its beginning, or its end is left out.

    Args:
        whole: Sampler whose order is dealt out; it must have the same order in all processes.
        num_replicas: Number of processes.
        rank: Number of this process, within [0, num_replicas).
        drop_last: Whether the last ids are left out where the processes would not all get equally many.

    Example:
        >>> list(DealtRows(range(5), 2, 0, drop_last=False)), list(DealtRows(range(5), 2, 1, drop_last=False))
        ([0, 2, 4], [1, 3, 0])
    """

    def __init__(self, whole: Any, num_replicas: int, rank: int, *, drop_last: bool) -> None:
        self.whole, self.num_replicas, self.rank, self.drop_last = whole, num_replicas, rank, drop_last

    def __len__(self) -> int:
        return len(self.whole) // self.num_replicas if self.drop_last else -(-len(self.whole) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        ids = list(self.whole)
        return islice(chain(ids, ids), self.rank, len(self) * self.num_replicas, self.num_replicas)
