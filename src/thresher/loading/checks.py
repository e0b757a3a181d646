"""The loaders that the library can work with."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


def check_loader(loader: Any, *, plans_epochs: bool = True) -> None:
    """Refuses a loader whose rows could not be credited to samples.

    Args:
        loader: The user's loader.
        plans_epochs: Whether a method decides before each epoch, which takes samples with ids.

    Raises:
        TypeError: `loader` is no DataLoader, or iterates over an IterableDataset where samples need ids.
        ValueError: `loader` has a setting that cannot be kept.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"`loader` must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        if plans_epochs:
            raise TypeError(
                f"`loader` iterates over {type(loader.dataset).__name__}, an IterableDataset: its samples have no ids, so no "
                "epoch can be planned. Epoch methods need a map-style dataset (__getitem__ and __len__)."
            )
        if loader.batch_size is None:
            raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
        return
    if loader.batch_sampler is None:
        raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"`loader` has a batch_sampler of its own, {type(loader.batch_sampler).__name__}: leaving samples out would break "
            "what it arranges. Use sampler= and batch_size=."
        )
    if not loader.in_order:
        raise ValueError(
            "`loader` has in_order=False: batches may come back in another order than their ids were drawn. Use in_order=True."
        )
    if isinstance(loader.batch_sampler.sampler, DistributedSampler):
        raise ValueError("`loader` has a DistributedSampler: training in several processes is not supported in this version")
