"""The loaders that the library can work with."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from thresher.loading.shuffle import Shuffle


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
                "epoch can be planned. Epoch methods need a map-style dataset (__getitem__ and __len__). A share alone, as in "
                "attach(0.5, ...), and methods that choose in each batch also take streams."
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
    check_iteration(loader)
    sampler = loader.batch_sampler.sampler
    if isinstance(sampler, DistributedSampler | Shuffle) and sampler.num_replicas not in (1, None):
        raise ValueError(
            f"`loader` has a {type(sampler).__name__} for {sampler.num_replicas} processes: training in several processes is "
            "not supported in this version. Use num_replicas=1, or shuffle=True."
        )


OF_ITERATION = ("__iter__", "__len__", "_get_iterator")
"""Methods of a DataLoader that make its batches."""


def check_iteration(loader: DataLoader[Any]) -> None:
    """Refuses a subclass of DataLoader that makes its batches itself, because only settings of a loader can be kept.

    The loaders of accelerate have the class of the loader that they wrap; what they do themselves, which is to move batches
    to the device, a run does as well.

    Args:
        loader: Loader of a map-style dataset.

    Raises:
        ValueError: The class of the loader has its own `__iter__`, `__len__` or `_get_iterator`.
    """
    for name in OF_ITERATION:
        kind = next(kind for kind in loader.__class__.__mro__ if name in vars(kind))
        if kind is not DataLoader:
            raise ValueError(
                f"`loader` is of the class {loader.__class__.__name__}, whose own `{name}` (defined in {kind.__name__}) would "
                "be left out: batches are made by a torch.utils.data.DataLoader with the same settings. "
                "Pass a plain DataLoader, and move what the class does to the dataset, the sampler or the collate_fn. (To keep "
                "workers alive, use persistent_workers=True; to save the position in an epoch, run.state_dict().)"
            )
