"""The loaders and samplers that the library can work with, those that accelerate prepared among them."""

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from thresher.distributed.world import World
from thresher.samplers.shuffle import Shuffle
from thresher.samplers.stratified import StratifiedBatchSampler


class ShardedSampler(Sampler[int]):
    """Sampler that yields every W-th id of another sampler, as a DistributedSampler deals out its own order.

    All processes get equally many ids: the order is continued with its beginning, or its end is left out.

    Args:
        whole: Sampler whose order is dealt out; it must have the same order in all processes.
        num_replicas: Number of processes.
        rank: Number of this process, within [0, num_replicas).
        drop_last: Whether the last ids are left out if the processes would not all get equally many.

    Example:
        >>> list(ShardedSampler(range(5), 2, 0, drop_last=False)), list(ShardedSampler(range(5), 2, 1, drop_last=False))
        ([0, 2, 4], [1, 3, 0])
    """

    def __init__(self, whole: Any, num_replicas: int, rank: int, *, drop_last: bool) -> None:
        self.whole, self.num_replicas, self.rank, self.drop_last = whole, num_replicas, rank, drop_last

    def __len__(self) -> int:
        return len(self.whole) // self.num_replicas if self.drop_last else -(-len(self.whole) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # Iterated once, because each iteration of a shuffle is another order.
        ids = list(self.whole)
        return islice(chain(ids, ids), self.rank, len(self) * self.num_replicas, self.num_replicas)


class EpochFlags:
    """What accelerate reads of the loader that a loop iterates.

    Args:
        gradient_state: State of accelerate, in which loaders in use are noted.
    """

    def __init__(self, gradient_state: Any) -> None:
        self.gradient_state = gradient_state
        self.end_of_dataloader, self.remainder, self.iteration = False, -1, 0

    def begin(self) -> None:
        """Notes that the loader is in use."""
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Notes that the loader is not in use any more."""
        self.gradient_state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the user's loader was not prepared, and counts no epochs."""


class PreparedLoader:
    """Shows accelerate where an epoch begins and ends, as the iteration of a loader that it prepared would have done.

    `Accelerator.accumulate` steps at the last batch of an epoch, whatever the number of accumulated batches. It reads from the
    loader that was iterated last which batch that is. If accelerate is not in use, nothing is done.

    Args:
        loader: The user's loader.

    Example:
        >>> import torch
        >>> loader = PreparedLoader(torch.utils.data.DataLoader([1, 2]))
        >>> loader.begin(), loader.yielded(1, last=True), loader.end(whole=True)
        (None, None, None)
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader if is_prepared(loader) else None
        self.in_use = self._loader is not None
        """Whether accelerate reads where this epoch ends."""
        self._begun = False

    def begin(self) -> None:
        """Begins an epoch; one that was left early ends."""
        # Looked up and not imported: a loop that uses accelerate has imported it.
        accelerate = sys.modules.get("accelerate.state")
        if self._loader is None and accelerate is not None:
            self._loader = EpochFlags(accelerate.GradientState())  # one for all; a loop may prepare its parts after `attach`
            self.in_use = True
        # accelerate keeps a list of loaders in use: one that was left early must leave it before it enters again.
        if self._loader is not None:
            self.end(whole=False)
            self._loader.begin()
            # As the iteration of a prepared loader does, so that its sampler and dataset get the next epoch.
            self._loader.set_epoch(self._loader.iteration)
            self._begun = True

    def yielded(self, rows: int, *, last: bool) -> None:
        """Notes a batch before the loop sees it.

        Args:
            rows: Number of its rows.
            last: Whether it is the last one of the epoch.
        """
        if self._loader is None:
            return
        self._loader.end_of_dataloader = last
        if last and self._loader.remainder != rows:
            self._loader.remainder = 0  # `gather_for_metrics` cuts the last batch to this many rows, if it is not 0

    def end(self, *, whole: bool) -> None:
        """Ends the epoch.

        Args:
            whole: Whether every batch was asked for; else it is over where the last one was yielded.
        """
        if self._loader is not None and self._begun:
            # An epoch that was left at its last batch counts, as with a prepared loader.
            self._loader.iteration += whole or self._loader.end_of_dataloader
            self._loader.end()
            self._begun = False


def is_prepared(loader: Any) -> bool:
    """Whether accelerate prepared a loader, whose own iteration tells accelerate where an epoch begins and ends."""
    names = ("begin", "end", "end_of_dataloader", "remainder", "gradient_state", "iteration", "set_epoch")
    return all(hasattr(loader, name) for name in names)


def is_dealt_by_accelerate(batches: Any) -> bool:
    """Whether a batch sampler is one by which accelerate deals out the batches of another one."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and isinstance(batches, loaders.BatchSamplerShard)


def inner_sampler(batches: Any) -> Any:
    """Returns the sampler of a batch sampler, inside of one of accelerate and of `ShardedSampler`."""
    sampler = (batches.batch_sampler if is_dealt_by_accelerate(batches) else batches).sampler
    return sampler.whole if isinstance(sampler, ShardedSampler) else sampler


def is_seeded_by_epoch(sampler: Any) -> bool:
    """Whether a sampler is the shuffle of accelerate that seeds its generator by the epoch, before each of its orders."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and type(sampler) is loaders.SeedableRandomSampler


def is_of_torchdata(thing: Any, name: str) -> bool:
    """Whether an object is of a class of StatefulDataLoader's package, and of no class derived from it."""
    # By name, because torchdata need not be installed.
    return type(thing).__name__ == name and type(thing).__module__.startswith("torchdata.stateful_dataloader")


def share_states(loader: Any) -> None:
    """Gives all processes the random states of the first one, as a loader that accelerate prepared does before each epoch."""
    if getattr(loader, "rng_types", None) is not None:
        sys.modules["accelerate.data_loader"].synchronize_rng_states(loader.rng_types, loader.synchronized_generator)


WRAPPED = "run = thresher.attach(..., loader=wrapper.loader); wrapper.loader = run.loader"
"""Lines for an object that iterates a DataLoader, such as the PrefetchLoader of timm."""


def without_wrapper(loader: Any) -> Any:
    """Returns the loader inside of a wrapper of Ray Train, which moves batches to the device as a run does.

    Args:
        loader: The user's loader.
    """
    return loader._dataloader if type(loader).__module__.startswith("ray.train.") else loader


def check_loader(loader: Any, *, plans_epochs: bool = True, several: bool = False) -> None:
    """Refuses a loader whose rows could not be credited to samples.

    Args:
        loader: The user's loader.
        plans_epochs: Whether a method decides before each epoch, which takes samples with ids.
        several: Whether several processes train together.

    Raises:
        TypeError: `loader` is not a DataLoader, or iterates over an IterableDataset although samples need ids.
        ValueError: `loader` has a setting that cannot be kept.
    """
    if not isinstance(loader, DataLoader):
        name = type(loader).__name__
        inside = isinstance(getattr(loader, "loader", None), DataLoader)
        of_tensors = ". For tensors that lie on the device whole, use thresher.TensorLoader(x, y, batch_size=...)"
        wraps = f", which wraps one. Pass its `loader`, and let it yield what the run chooses: {WRAPPED}"
        advice = wraps if inside else of_tensors
        raise TypeError(f"`loader` must be a torch.utils.data.DataLoader, got {name}{advice}")
    check_iteration(loader)
    if isinstance(loader.dataset, IterableDataset):
        if plans_epochs:
            raise TypeError(
                f"`loader` iterates over {type(loader.dataset).__name__}, an IterableDataset, whose samples have no index. If "
                "it also reads samples by number, pass a Dataset with __getitem__ and __len__ that does so. A share, as in "
                "attach(0.5, ...), and methods that choose in each batch, such as UniformRows(0.5), also take an "
                "IterableDataset."
            )
        if loader.batch_size is None:
            raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
        return
    if loader.batch_sampler is None:
        raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
    # A batch sampler that buckets by length, say, would have batches of mixed lengths after a plan.
    batches = loader.batch_sampler
    known = type(batches) in (BatchSampler, StratifiedBatchSampler) or is_of_torchdata(batches, "BatchSampler")
    if not known and not (several and is_dealt_by_accelerate(loader.batch_sampler)):
        raise ValueError(
            f"`loader` has a batch_sampler, {type(loader.batch_sampler).__name__}: leaving out samples would break its "
            "batches. Use sampler= and batch_size=."
        )
    if not loader.in_order:
        raise ValueError(
            "`loader` has in_order=False: batches may come back in another order than their ids were drawn. Use in_order=True."
        )
    sampler = loader.sampler if isinstance(loader.sampler, ShardedSampler) else inner_sampler(loader.batch_sampler)
    replicas = getattr(loader.batch_sampler, "num_processes", getattr(sampler, "num_replicas", None))
    if not several and isinstance(sampler, DistributedSampler | Shuffle | ShardedSampler) and replicas not in (1, None):
        raise ValueError(
            f"`loader` has a {type(sampler).__name__} for {replicas} processes, but there is no process group of several "
            "processes: call torch.distributed.init_process_group before attach. In one process use num_replicas=1, or "
            "shuffle=True."
        )


def check_unchanged(dataset: Any, n: int) -> None:
    """Refuses a dataset that has another number of samples than when the run was attached.

    Args:
        dataset: Dataset of the loader.
        n: Number of samples that it had.

    Raises:
        ValueError: It has another number now.
    """
    if len(dataset) != n:
        raise ValueError(
            f"The dataset of the loader had {n} samples when `attach` was called, but now has {len(dataset)}. A run needs a "
            "fixed number of samples. Call run.detach() and attach again after the dataset has changed."
        )


OF_ITERATION = ("__iter__", "__len__", "_get_iterator")
"""Methods of a DataLoader that make its batches."""


def check_iteration(loader: DataLoader[Any]) -> None:
    """Refuses a subclass of DataLoader that makes its batches itself, because only settings of a loader can be kept.

    A stream yields the batches of the user's loader. But a class that begins in the middle of the stream, by a state of
    its own or with one iterator for all epochs, does not begin where a resumed run expects it.

    The loaders of accelerate have the class of the loader that they wrap; what they do themselves, which is to move batches
    to the device, a run does as well.

    Args:
        loader: The user's loader.

    Raises:
        ValueError: The class of the loader has its own `__iter__`, `__len__` or `_get_iterator`.
    """
    streams = isinstance(loader.dataset, IterableDataset)
    if is_of_torchdata(loader, "StatefulDataLoader") and not streams:
        if getattr(loader, "next_iter_state", None) is not None:
            raise ValueError(
                "`loader` is a StatefulDataLoader that was given a state before attach. The run stores the position: call "
                "run.loader.load_state_dict(state) after attach, with a state from run.loader.state_dict()."
            )
        return  # a run keeps the position itself
    for name in OF_ITERATION:
        # The class that defines the method, wherever it is in the line of its parents.
        # `__class__` and not type(): loaders of accelerate show the class that they wrap there.
        kind = next(kind for kind in loader.__class__.__mro__ if name in vars(kind))
        if kind is not DataLoader and not (streams and name == "__len__"):
            why = (
                "may begin in the middle of a stream, and a resumed run would skip its beginning once more"
                if streams
                else "would be left out: batches are made by a torch.utils.data.DataLoader with the same settings"
            )
            raise ValueError(
                f"`loader` is of the class {loader.__class__.__name__}, whose own `{name}` (defined in {kind.__name__}) {why}. "
                "Pass a plain DataLoader, and move what the class does to the dataset, the sampler or the collate_fn. (To keep "
                "workers alive, use persistent_workers=True; to save the position in an epoch, run.state_dict().)"
            )


SHARED = (
    "a torch.utils.data.DistributedSampler, a thresher.Shuffle with num_replicas= and rank=, or accelerator.prepare(loader)"
)
"""Ways to deal out samples to several processes."""


def check_shared(loader: DataLoader[Any], world: World) -> None:
    """Refuses a loader by which several processes would not have equal parts of one order.

    Args:
        loader: The user's loader of a map-style dataset.
        world: The processes.

    Raises:
        ValueError: The loader does not deal out its samples, deals them out to others, or not equally.
    """
    batches: Any = loader.batch_sampler
    by_batches = is_dealt_by_accelerate(batches)
    outer: Any = None if by_batches else batches.sampler
    sampler: Any = inner_sampler(batches)
    dataset: Any = loader.dataset
    name, size = type(sampler).__name__, len(dataset)
    if by_batches or isinstance(outer, ShardedSampler):
        dealt: Any = (batches.num_processes, batches.process_index) if by_batches else (outer.num_replicas, outer.rank)
        if by_batches and not batches.even_batches and not batches.drop_last:
            raise ValueError("`loader` was prepared with even_batches=False: processes could have different numbers of batches")
        _check_dealt_order(sampler, size)
    else:
        # Exactly these classes: a subclass may deal out its samples in another way.
        if type(sampler) is not DistributedSampler and type(sampler) is not Shuffle:
            raise ValueError(
                f"`loader` has a {name}, by which each of the {world.size} processes would train on all samples. Use {SHARED}."
            )
        dealt = sampler.dealing() if isinstance(sampler, Shuffle) else (sampler.num_replicas, sampler.rank)
        source: Any = sampler.data_source if isinstance(sampler, Shuffle) else sampler.dataset
        read = len(source)
        if read != size:
            raise ValueError(f"`loader` has a {name} over {read} samples, but its dataset has {size}: give it that dataset")
    if dealt != (world.size, world.rank):
        raise ValueError(
            f"`loader` loads the samples for process {dealt[1]} of {dealt[0]}, but this is process {world.rank} of "
            f"{world.size} of `process_group`. Both must use the data-parallel group."
        )
    _check_size(batches, size, world)


def _check_dealt_order(sampler: Any, size: int) -> None:
    """Refuses an order that something else than its sampler deals out, and that has not every sample once."""
    known: tuple[type, ...] = (RandomSampler, SequentialSampler, Shuffle)
    repeats = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != size)
    fits = isinstance(sampler, known) and not repeats and getattr(sampler, "num_replicas", None) in (None, 1)
    if not fits or len(sampler) != size:
        raise ValueError(
            f"`loader` has a {type(sampler).__name__}, whose order is divided among several processes: the method needs an "
            "order with every sample once. Use shuffle=True, or a thresher.Shuffle with num_replicas=1."
        )


def _check_size(batches: Any, size: int, world: World) -> None:
    if getattr(batches, "split_batches", False) and batches.batch_size % world.size:
        raise ValueError(f"`loader` has batches of {batches.batch_size} rows, not a multiple of {world.size} processes")
    if size < world.size:
        raise ValueError(f"the dataset has {size} samples, but there are {world.size} processes: each needs one or more")
