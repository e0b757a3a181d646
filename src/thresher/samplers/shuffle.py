"""`Shuffle`: a sampler that computes its order piece by piece: no permutation in memory, and a pass can begin anywhere."""

from collections.abc import Sized

from thresher.permutation import Permutation
from thresher.samplers.epochs import EpochSampler


class Shuffle(EpochSampler):
    """Sampler that yields every sample once an epoch, in random order, without a permutation in memory.

    Use it as `DataLoader(dataset, batch_size, sampler=Shuffle(dataset))`, with a run or without. The order depends on the seed,
    the epoch and the number of samples alone (`thresher.permutation`). No global random state is used.

    The first pass over the sampler is epoch 0, the next epoch 1, and so on, so each pass has a new order.
    `set_epoch(e)` gives the next pass epoch `e`. A pass begins with its first id. Call `set_epoch` after a restart.

    To go on in the middle of an epoch, load `run.state_dict()` where a run is attached. Without a run, call
    `set_epoch(epoch, consumed=steps * batch_size)`, or use torchdata's StatefulDataLoader, which saves the position by itself.

    In W processes, process r gets the ids at the places r, r + W, r + 2W, ... of the order, as from a DistributedSampler.
    Batches of B ids in each of W processes are therefore together the same samples for all W and B with the same product.

    Args:
        dataset: Dataset, or anything with a length; or a number of samples, 0 or more.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the ids. Default: the world size of torch.distributed if it is initialized,
            else 1. Pass num_replicas=1, rank=0 if something else deals them out, such as `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.
        drop_last: Whether the last ids are left out where the processes would not all get equally many. Default: False, which
            repeats the first ids of the order instead.

    Attributes:
        epoch: Epoch of the next pass.

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
                f"Shuffle: `dataset` must have a length, or be a number of samples, got {type(dataset).__name__}: a stream "
                "cannot be shuffled"
            )
        super().__init__(seed, num_replicas, rank, drop_last)
        self.data_source: Sized = dataset

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self.data_source)

    def order(self, epoch: int) -> Permutation:
        """Returns the order of an epoch.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        return Permutation(self.total, self.seed, epoch)
