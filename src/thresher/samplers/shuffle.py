"""`Shuffle`: a sampler that computes its order piece by piece, without a permutation in memory, and can start anywhere."""

from collections.abc import Sized

from thresher.permutation import Permutation
from thresher.samplers.epochs import EpochSampler


class Shuffle(EpochSampler):
    """Sampler that yields every sample once an epoch, in random order, without a permutation in memory.

    Use it as `DataLoader(dataset, batch_size, sampler=Shuffle(dataset))`, with or without a `thresher.Run`. The order depends
    only on the seed, the epoch and the number of samples. Global random states are not used.

    The first loop over the sampler yields epoch 0, and each further loop the next epoch, in a new order. After `set_epoch(e)`,
    the next loop yields epoch `e`; call it after a restart.

    To continue in the middle of an epoch, load `run.state_dict()` if a run is attached. Without a run, call `set_epoch(epoch,
    consumed=steps * batch_size)`, or use torchdata's StatefulDataLoader, which saves the position by itself.

    With W processes, process r gets the ids at positions r, r + W, r + 2W, ... of the order, as from a DistributedSampler. So W
    processes with batches of B ids train on the same samples in each step for all W and B with the same product.

    Args:
        dataset: Dataset, or anything with a length; or a number of samples, 0 or more.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the ids. Default: the world size of torch.distributed if it is initialized,
            else 1. Pass num_replicas=1, rank=0 if other code divides the data among processes, such as `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.
        drop_last: Whether to leave out the last ids if the processes cannot get equally many. Default: False, which repeats the
            first ids instead.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.

    Raises:
        TypeError: `dataset` has no length and is not a number of samples, or `seed` is not an integer.
        ValueError: `num_replicas` and `rank` do not fit together.

    Example:
        >>> shuffle = Shuffle(range(8), seed=1)
        >>> list(shuffle), list(shuffle)
        ([1, 2, 5, 7, 0, 6, 4, 3], [2, 6, 1, 4, 5, 3, 7, 0])
        >>> shuffle.set_epoch(0, consumed=5)
        >>> list(shuffle)
        [6, 4, 3]
    """

    def __init__(
        self,
        dataset: Sized | int,
        seed: int = 0,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if isinstance(dataset, int):
            dataset = range(dataset)
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"Shuffle: `dataset` must have a length, or be a number of samples, got {type(dataset).__name__}; an "
                "IterableDataset cannot be shuffled"
            )
        super().__init__(seed, num_replicas, rank, drop_last)
        self.data_source: Sized = dataset

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self.data_source)

    def order(self, epoch: int) -> Permutation:
        """Returns the order of an epoch: an object that returns the ids at given positions.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        return Permutation(self.total, self.seed, epoch)
