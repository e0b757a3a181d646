"""The processes that torchrun or accelerate launch has started to train together.

In a training in one process, every function works without communication.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from thresher import ShardedSampler, Shuffle, loader_settings
from thresher.samplers import Grouped

BATCH_PREFIX = "batch_"
"""Prefix of the entries of a batch method that is combined with a method of another stage."""
SCORE_COUNTS = ("scores_forward", "scores_backward")
ROW_COUNTS = (
    "forward",
    "backward",
    "refresh",
    "scoring",
    "comparing",
    "full_forward",
    "full_backward",
    "candidates",
    "selected",
    *SCORE_COUNTS,
)
"""Entries of the costs and of the history that each process counts for its own rows."""


def number_of_processes() -> int:
    """Returns the number of processes that train together, 1 or more."""
    together = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if together else 1


def check_joined() -> None:
    """Refuses processes that were started together but have no process group, because each would train by itself.

    Raises:
        ValueError: There are several processes, and no process group.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1" and number_of_processes() == 1:
        raise ValueError(
            f"torchrun or accelerate launch has started {started} processes (WORLD_SIZE), which have no process group: call "
            "torch.distributed.init_process_group first, or use the command `thresher`."
        )


def own_rank() -> int:
    """Returns the number of this process; the first process, 0, prints and writes for all."""
    return distributed.get_rank() if number_of_processes() > 1 else 0


def of_first(value: Any) -> Any:
    """Returns the value of the first process; all processes must call it.

    Args:
        value: Value that can be pickled. The values of other processes are ignored.
    """
    values = [value]
    if number_of_processes() > 1:
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def of_each_process(value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of their ranks; all processes must call it.

    Args:
        value: Value that can be pickled.
    """
    values = [value] * number_of_processes()
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


def combine_counts(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the counts of all processes: adds counts of rows, averages other floats, and takes the rest from the first process.

    Args:
        counts: Costs, or entries of the history, with the same names, one per process.

    Example:
        >>> combine_counts([{"forward": 3, "steps": 1, "loss": 0.5}, {"forward": 2, "steps": 1, "loss": 1.0}])
        {'forward': 5, 'steps': 1, 'loss': 0.75}
    """
    total = dict(counts[0])
    for name, first in total.items():
        values = [each[name] for each in counts]
        if name.removeprefix(BATCH_PREFIX) in ROW_COUNTS:
            total[name] = sum(values)
        # The mean of equal floats may differ from them in the last digit.
        elif isinstance(first, float) and name != "backward_to_forward" and len({*values}) > 1:
            total[name] = sum(values) / len(values)
    for prefix in ("", BATCH_PREFIX):
        if total.get(f"{prefix}candidates") and f"{prefix}actual_fraction" in total:
            total[f"{prefix}actual_fraction"] = (
                1 - total[f"{prefix}selected"] / total[f"{prefix}candidates"]
            )
    return total


def once_per_machine(write: Callable[[], Any]) -> None:
    """Lets one process of each machine write files that all of them read later; all processes must call it.

    Args:
        write: Function that writes the files.
    """
    if number_of_processes() == 1:
        write()
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write()
    distributed.barrier()


def shard_loader(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Returns a loader with the part of each batch that this process trains on.

    A loader that is already sharded, by a DistributedSampler or a Shuffle of several processes, is returned unchanged.

    Args:
        loader: Training loader of a task.
        seed: Random seed of the order, used if the loader shuffles by the global random state, which differs between processes.

    Raises:
        ValueError: The processes cannot have equal parts of a batch.
    """
    size = number_of_processes()
    rank = own_rank()
    sampler = loader.sampler
    if (
        size == 1
        or isinstance(sampler, DistributedSampler)
        or getattr(sampler, "num_replicas", None) not in (None, 1)
    ):
        return loader
    batch = loader.batch_size
    if batch is None or batch % size:
        if batch is None:
            many = "a batch sampler of its own"
        else:
            many = f"batches of {batch} samples"
        raise ValueError(
            f"the training loader has {many}, of which {size} processes cannot have equal parts. Start a number of processes "
            "that divides the batch size, change the batch size, or train in one process."
        )
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    drop_last = loader.drop_last
    settings = loader_settings(loader)
    if isinstance(sampler, Shuffle):
        part: Any = Shuffle(
            sampler.data_source, sampler.seed, num_replicas=size, rank=rank, drop_last=drop_last
        )
    else:
        part = ShardedSampler(sampler, size, rank, drop_last=drop_last)
    return DataLoader(
        loader.dataset,
        batch // size,
        sampler=part,
        drop_last=drop_last,
        in_order=loader.in_order,
        **settings,
    )


def group_by_length(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Returns a loader of the same samples whose batches have samples of similar lengths.

    Args:
        loader: Training loader of this process, with batches of one size.
        seed: Random seed of the batches.

    Raises:
        ValueError: The dataset has no `lengths`, or the loader has batches of its own, or drops the last.
    """
    lengths = getattr(loader.dataset, "lengths", None)
    if lengths is None:
        raise ValueError(
            f"batches by length: {type(loader.dataset).__name__} has no attribute `lengths`, the number of tokens of each sample"
        )
    if loader.batch_size is None or loader.drop_last:
        raise ValueError(
            "batches by length: give the training loader a batch_size, and leave out batch_sampler and drop_last"
        )
    batches = Grouped(lengths, loader.batch_size, seed=seed)
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        in_order=loader.in_order,
        **loader_settings(loader),
    )


def fresh_accelerator(**settings: Any) -> Accelerator:
    """Returns an Accelerator whose optimizers step, even if an earlier trainer stopped in the middle of a step.

    Args:
        **settings: Arguments of Accelerator.
    """
    accelerator = Accelerator(**settings)
    accelerator.sync_gradients = True
    return accelerator
