"""Checks which loaders and samplers Thresher can work with, including loaders that accelerate prepared."""

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from thresher.distributed.world import World
from thresher.samplers.epochs import EpochSampler
from thresher.samplers.shuffle import Shuffle


class ShardedSampler(Sampler[int]):
    """Sampler that yields every W-th id of another sampler, as DistributedSampler does with its own order.

    All W processes get the same number of ids: the first ids are repeated at the end, or the last ids are left out.

    Args:
        whole: Sampler whose order is divided; it must have the same order in all processes.
        num_replicas: Number of processes.
        rank: Number of this process, within [0, num_replicas).
        drop_last: Whether the last ids are left out if the number of ids is not a multiple of W; else the first are repeated.

    Example:
        >>> list(ShardedSampler(range(5), 2, 0, drop_last=False)), list(ShardedSampler(range(5), 2, 1, drop_last=False))
        ([0, 2, 4], [1, 3, 0])
    """

    def __init__(self, whole: Any, num_replicas: int, rank: int, *, drop_last: bool) -> None:
        self.whole = whole
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last

    def __len__(self) -> int:
        if self.drop_last:
            return len(self.whole) // self.num_replicas
        return -(-len(self.whole) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # Iterated once, because a shuffle has another order each time.
        ids = list(self.whole)
        return islice(chain(ids, ids), self.rank, len(self) * self.num_replicas, self.num_replicas)


class EpochFlags:
    """Stands in for a loader that accelerate prepared: has the attributes that accelerate reads during an epoch.

    Args:
        gradient_state: The `GradientState` of accelerate, which lists the loaders in use.
    """

    def __init__(self, gradient_state: Any) -> None:
        self.gradient_state = gradient_state
        self.end_of_dataloader = False
        self.remainder = 0
        self.iteration = 0

    def begin(self) -> None:
        """Adds the loader to accelerate's list of loaders in use."""
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Removes the loader from accelerate's list of loaders in use."""
        self.gradient_state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the user's loader was not prepared by accelerate, so it does not count epochs."""


class PreparedLoader:
    """Shows accelerate where an epoch begins and ends, as a loader that accelerate prepared does when it is iterated.

    `Accelerator.accumulate` makes a step at the last batch of an epoch, even if fewer batches than usual were accumulated. It
    asks the loader in use whether a batch is the last. If accelerate is not in use, this class does nothing.

    Args:
        loader: The user's loader.

    Example:
        >>> import torch
        >>> loader = PreparedLoader(torch.utils.data.DataLoader([1, 2]))
        >>> loader.begin(remainder=0), loader.yielded(last=True), loader.end(whole=True)
        (None, None, None)
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader if is_prepared(loader) else None
        self.in_use = self._loader is not None
        """Whether accelerate is in use, and so must learn where this epoch ends."""
        self._begun = False

    def begin(self, *, remainder: int) -> None:
        """Begins an epoch. Ends the previous one if the loop left it early.

        Args:
            remainder: Number of rows of the last step, in all processes, that are not repeated ones; 0 if none is repeated.
                `gather_for_metrics` returns only these.
        """
        # Not imported here: a loop that uses accelerate has imported it already.
        accelerate = sys.modules.get("accelerate.state")
        # The loop uses accelerate, but did not prepare its loader.
        if self._loader is None and accelerate is not None:
            # A shared state: it is the right one even if the loop creates its Accelerator after `attach`.
            self._loader = EpochFlags(accelerate.GradientState())
            self.in_use = True
        # accelerate keeps a list of loaders in use: a loader that was left early must leave it before it enters again.
        if self._loader is not None:
            self.end(whole=False)
            self._loader.begin()
            self._loader.remainder = remainder
            # A prepared loader does the same when it is iterated, to pass the epoch to its sampler and dataset.
            self._loader.set_epoch(self._loader.iteration)
            self._begun = True

    def yielded(self, *, last: bool) -> None:
        """Tells accelerate about a batch before the training loop gets it.

        Args:
            last: Whether it is the last batch of the epoch.
        """
        if self._loader is not None:
            self._loader.end_of_dataloader = last

    def end(self, *, whole: bool) -> None:
        """Ends the epoch.

        Args:
            whole: Whether the loop asked for every batch. If not, the epoch counts only if its last batch was yielded.
        """
        if self._loader is not None and self._begun:
            # An epoch counts even if the loop breaks at its last batch, as in a loader that Accelerate prepared.
            self._loader.iteration += whole or self._loader.end_of_dataloader
            self._loader.end()
            self._begun = False


def is_prepared(loader: Any) -> bool:
    """Whether a loader was prepared by accelerate; such a loader reports to accelerate where an epoch begins and ends."""
    # By the attributes that `PreparedLoader` uses, because accelerate has several classes of loaders.
    names = (
        "begin",
        "end",
        "end_of_dataloader",
        "remainder",
        "gradient_state",
        "iteration",
        "set_epoch",
    )
    return all(hasattr(loader, name) for name in names)


def is_dealt_by_accelerate(batches: Any) -> bool:
    """Whether a batch sampler is the one with which accelerate divides the batches of another one among processes."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and isinstance(batches, loaders.BatchSamplerShard)


def foreign_batches(batches: Any) -> str | None:
    """Returns the class of a batch sampler that a run cannot replace, such as one that groups by length; None for others."""
    inner = inner_batches(batches)
    known = (
        type(inner) is BatchSampler or composes(batches) or is_of_torchdata(inner, "BatchSampler")
    )
    return None if known else type(inner).__name__


def inner_batches(batches: Any) -> Any:
    """Returns a batch sampler without the wrapper of accelerate."""
    if is_dealt_by_accelerate(batches):
        return batches.batch_sampler
    return batches


def composes(batches: Any) -> bool:
    """Whether a batch sampler composes the batches of any samples, as `thresher.samplers.BatchComposer` describes it."""
    classes = type(inner_batches(batches)).__mro__
    composer = next((i for i, kind in enumerate(classes) if "compose" in vars(kind)), None)
    # A subclass with an iteration of its own yields other batches than the `compose` that it inherits.
    return composer is not None and not any("__iter__" in vars(kind) for kind in classes[:composer])


def inner_sampler(batches: Any) -> Any:
    """Returns the sampler of a batch sampler, without the wrappers of accelerate and `ShardedSampler`.

    A batch sampler that composes its batches is its own sampler if it has no other.
    """
    inner = inner_batches(batches)
    sampler = getattr(inner, "sampler", inner) if composes(batches) else inner.sampler
    return sampler.whole if isinstance(sampler, ShardedSampler) else sampler


def is_seeded_by_epoch(sampler: Any) -> bool:
    """Whether a sampler is the SeedableRandomSampler of accelerate, which seeds its generator anew for each epoch."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and type(sampler) is loaders.SeedableRandomSampler


def is_of_torchdata(thing: Any, name: str) -> bool:
    """Whether the class of an object is exactly the class `name` of torchdata.stateful_dataloader."""
    # Compared by name, because torchdata need not be installed.
    return type(thing).__name__ == name and type(thing).__module__.startswith(
        "torchdata.stateful_dataloader"
    )


def share_states(loader: Any) -> None:
    """Copies the random states of the first process to all others, as a loader of accelerate does before each epoch."""
    if getattr(loader, "rng_types", None) is not None:
        sys.modules["accelerate.data_loader"].synchronize_rng_states(
            loader.rng_types, loader.synchronized_generator
        )


WRAPPED = "run = thresher.attach(..., loader=wrapper.loader); wrapper.loader = run.loader"
"""Code to write for an object that wraps a DataLoader, such as the PrefetchLoader of timm."""


def without_wrapper(loader: Any) -> Any:
    """Returns the loader inside a wrapper of Ray Train; other loaders are returned unchanged.

    The wrapper moves batches to the device, which a run does as well.

    Args:
        loader: The user's loader.
    """
    if type(loader).__module__.startswith("ray.train."):
        return loader._dataloader
    return loader


def check_loader(loader: Any, *, plans_epochs: bool = True, several: bool = False) -> None:
    """Checks that Thresher can choose samples of a loader and assign the loss of each row to its sample.

    Args:
        loader: The user's loader.
        plans_epochs: Whether a method chooses samples before each epoch, for which samples need ids.
        several: Whether several processes train together.

    Raises:
        TypeError: `loader` is not a DataLoader, or iterates over an IterableDataset although samples need ids.
        ValueError: `loader` has a setting that a rebuilt loader cannot have, such as a batch sampler of the user.
    """
    if not isinstance(loader, DataLoader):
        name = type(loader).__name__
        inside = isinstance(getattr(loader, "loader", None), DataLoader)
        of_tensors = ". For tensors that lie entirely on the device, use thresher.TensorLoader(x, y, batch_size=...)"
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
            raise ValueError(
                "`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size."
            )
        return
    if loader.batch_sampler is None:
        raise ValueError(
            "`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size."
        )
    foreign = foreign_batches(loader.batch_sampler)
    if foreign or (is_dealt_by_accelerate(loader.batch_sampler) and not several):
        name = foreign or type(loader.batch_sampler).__name__
        raise ValueError(
            f"`loader` has a batch_sampler, {name}: leaving out samples would break its batches. Use a batch sampler of "
            "thresher.samplers, give it a function compose, or use sampler= and batch_size=."
        )
    if not loader.in_order:
        raise ValueError(
            "`loader` has in_order=False: batches may come back in another order than their ids were drawn. Use in_order=True."
        )
    if isinstance(loader.sampler, ShardedSampler):
        sampler = loader.sampler
    else:
        sampler = inner_sampler(loader.batch_sampler)
    if isinstance(sampler, EpochSampler):
        sampler.check_size(len(loader.dataset))  # pyright: ignore[reportArgumentType]
    replicas = getattr(
        loader.batch_sampler, "num_processes", getattr(sampler, "num_replicas", None)
    )
    if (
        not several
        and isinstance(sampler, DistributedSampler | EpochSampler | ShardedSampler)
        and replicas not in (1, None)
    ):
        raise ValueError(
            f"`loader` has a {type(sampler).__name__} for {replicas} processes, but there is no process group of several "
            "processes: call torch.distributed.init_process_group before attach. In one process, create it with "
            "num_replicas=1, or create the DataLoader with shuffle=True and no sampler."
        )


def check_unchanged(dataset: Any, n: int) -> None:
    """Checks that a dataset still has as many samples as when the run was attached.

    Args:
        dataset: Dataset of the loader.
        n: Number of samples when the run was attached.

    Raises:
        ValueError: The dataset has another number of samples now.
    """
    if len(dataset) != n:
        raise ValueError(
            f"The dataset of the loader had {n} samples when `attach` was called, but now has {len(dataset)}. A run needs a "
            "fixed number of samples. Call run.detach() and attach again after the dataset has changed."
        )


ITERATION_METHODS = ("__iter__", "__len__", "_get_iterator")
"""Methods of a DataLoader that make its batches."""


def check_iteration(loader: DataLoader[Any]) -> None:
    """Checks that a loader does not make its batches itself, as a subclass of DataLoader may do.

    For a map-style dataset, a run builds a DataLoader with the same settings, which would not have the code of the subclass.
    For an IterableDataset, a run reads the batches of the user's loader. But a subclass may begin in the middle of the stream,
    whereas a resumed run expects its beginning.

    The loaders of accelerate are accepted: they show the class of the loader that they wrap, and only move batches to the
    device, which a run does as well.

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
        return  # accepted: the run saves the position itself
    for name in ITERATION_METHODS:
        # `__class__` rather than type(), because loaders of accelerate show the class of the wrapped loader there.
        defining_class = next(kind for kind in loader.__class__.__mro__ if name in vars(kind))
        if defining_class is not DataLoader and not (streams and name == "__len__"):
            if streams:
                why = "may begin in the middle of a stream, and a resumed run would skip its beginning once more"
            else:
                why = "would be left out: batches are made by a torch.utils.data.DataLoader with the same settings"
            raise ValueError(
                f"`loader` is of the class {loader.__class__.__name__}, whose own `{name}` (defined in {defining_class.__name__}) {why}. "
                "Pass a plain DataLoader, and move what the class does to the dataset, the sampler or the collate_fn. (To keep "
                "workers alive, use persistent_workers=True; to save the position in an epoch, run.state_dict().)"
            )


# Compared by name, because the library need not be installed.
YIELD_ONCE = ("LengthGroupedSampler",)
"""Names of sampler classes of other libraries that yield each id once: the one of `group_by_length` of Transformers."""

SHARED = (
    "a torch.utils.data.DistributedSampler, a thresher.Shuffle with num_replicas= and rank=, or accelerator.prepare(loader) with "
    "dispatch_batches=False"
)
"""Ways to divide samples among several processes, for error messages."""


def check_shared(loader: DataLoader[Any], world: World) -> None:
    """Checks that a loader gives each of several processes an equal part of one order.

    Args:
        loader: The user's loader of a map-style dataset.
        world: The processes.

    Raises:
        ValueError: The loader does not divide its samples among processes, divides them among other processes, or unequally.
    """
    batches: Any = loader.batch_sampler
    by_batches = is_dealt_by_accelerate(batches)
    outer: Any = None if by_batches else getattr(batches, "sampler", None)
    sampler: Any = inner_sampler(batches)
    dataset: Any = loader.dataset
    name = type(sampler).__name__
    size = len(dataset)
    # (number of processes, rank) of whatever divides the samples: a composer itself, a wrapper, or the sampler.
    if composes(batches) and not by_batches:
        dealt: Any = sampler.dealing() if isinstance(sampler, EpochSampler) else (1, 0)
    elif by_batches or isinstance(outer, ShardedSampler):
        if by_batches:
            dealt = (batches.num_processes, batches.process_index)
        else:
            dealt = (outer.num_replicas, outer.rank)
        if by_batches and not batches.even_batches and not batches.drop_last:
            raise ValueError(
                "`loader` was prepared with even_batches=False: processes could have different numbers of batches. Use "
                "even_batches=True, or drop_last=True."
            )
        if not composes(batches):
            _check_dealt_order(sampler, size)
        elif getattr(batches, "split_batches", False):
            raise ValueError(
                f"`loader` was prepared with split_batches=True, which cuts the batches of {name}. Use split_batches=False."
            )
    else:
        # Exactly these classes: a subclass may divide its samples in another way.
        if type(sampler) is not DistributedSampler and type(sampler) is not Shuffle:
            raise ValueError(
                f"`loader` has a {name}, by which each of the {world.size} processes would train on all samples. Use {SHARED}."
            )
        if isinstance(sampler, Shuffle):
            dealt = sampler.dealing()
            source: Any = sampler.data_source
        else:
            dealt = (sampler.num_replicas, sampler.rank)
            source = sampler.dataset
        if len(source) != size:
            raise ValueError(
                f"`loader` has a {name} over {len(source)} samples, but its dataset has {size}: give it that dataset"
            )
    if dealt != (world.size, world.rank):
        raise ValueError(
            f"`loader` loads the samples for process {dealt[1]} of {dealt[0]}, but this is process {world.rank} of "
            f"{world.size} of `process_group`. Both must use the data-parallel group."
        )
    if not composes(batches):
        _check_size(batches, size, world)


def _check_dealt_order(sampler: Any, size: int) -> None:
    """Checks that an order that accelerate or `ShardedSampler` divides among processes has every sample once."""
    known: tuple[type, ...] = (RandomSampler, SequentialSampler, Shuffle)
    repeats = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != size
    )
    # A Shuffle for several processes would be divided twice.
    yields_once = type(sampler).__name__ in YIELD_ONCE or (
        isinstance(sampler, known)
        and not repeats
        and getattr(sampler, "num_replicas", None) in (None, 1)
    )
    if not yields_once or len(sampler) != size:
        raise ValueError(
            f"`loader` has a {type(sampler).__name__}, whose order is divided among several processes: the method needs an "
            "order with every sample once. Use shuffle=True, or a thresher.Shuffle with num_replicas=1."
        )


def _check_size(batches: Any, size: int, world: World) -> None:
    if getattr(batches, "split_batches", False) and batches.batch_size % world.size:
        raise ValueError(
            f"`loader` splits batches of {batches.batch_size} rows among {world.size} processes: the batch size must be a "
            f"multiple of {world.size}"
        )
    if size < world.size:
        raise ValueError(
            f"the dataset has {size} samples, but there are {world.size} processes: each needs one or more"
        )
