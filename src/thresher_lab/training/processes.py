"""The processes that torchrun or accelerate launch has started to train together: who they are, and what they tell each other.

In a training in one process every function does the obvious, so that the code around needs no second way.
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

OF_BATCHES = "batch_"
"""Prefix of the entries of a batch method beside a method of another stage."""
OF_SCORES = ("scores_forward", "scores_backward")
OF_ROWS = (
    "forward",
    "backward",
    "refresh",
    "scoring",
    "comparing",
    "full_forward",
    "full_backward",
    "candidates",
    "selected",
    *OF_SCORES,
)
"""Entries of the costs and of the history that each process counts for its own rows."""


def number_of_processes() -> int:
    """Returns the number of processes that train together, 1 or more."""
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def check_joined() -> None:
    """Refuses processes that were started to train together and have no process group, in which each would train for itself.

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
    """Returns the number of this process; the first one, 0, prints and writes for all."""
    return distributed.get_rank() if number_of_processes() > 1 else 0


def of_first(value: Any) -> Any:
    """Returns the value that the first process has given; all processes call it together.

    Args:
        value: Plain value, or one that can be pickled; that of other processes is not looked at.
    """
    if number_of_processes() == 1:
        return value
    held = [value if own_rank() == 0 else None]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def of_each_process(value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of their ranks; all processes call it together.

    Args:
        value: Plain value, or one that can be pickled.
    """
    gathered = [value] * number_of_processes()
    if len(gathered) > 1:
        distributed.all_gather_object(gathered, value)
    return gathered


def of_processes(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the counts of all processes together: sums of rows, means of other numbers that differ, else those of the first.

    Args:
        counted: Costs, or entries of the history, with the same names, one per process.

    Example:
        >>> of_processes([{"forward": 3, "steps": 1, "loss": 0.5}, {"forward": 2, "steps": 1, "loss": 1.0}])
        {'forward': 5, 'steps': 1, 'loss': 0.75}
    """
    total = dict(counted[0])
    for name, first in counted[0].items():
        values = [one[name] for one in counted]
        plain_name = name.removeprefix(OF_BATCHES)
        if plain_name in OF_ROWS:
            total[name] = sum(values)
        elif isinstance(first, float) and name != "backward_to_forward":
            total[name] = (
                sum(values) / len(values) if any(value != first for value in values) else first
            )
    for prefix in ("", OF_BATCHES):
        if total.get(f"{prefix}candidates") and f"{prefix}actual_fraction" in total:
            total[f"{prefix}actual_fraction"] = (
                1 - total[f"{prefix}selected"] / total[f"{prefix}candidates"]
            )
    return total


def once_per_machine(write: Callable[[], Any]) -> None:
    """Has one process of each machine write files that all of them read afterwards; all processes call it together.

    Args:
        write: Function that writes the files.
    """
    if number_of_processes() == 1:
        write()
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write()
    distributed.barrier()


def dealt(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Returns the training loader of this process: batches of all processes together are those of the given loader.

    A loader that deals out its samples by itself, by a DistributedSampler or a Shuffle of several processes, stays as it is.

    Args:
        loader: Training loader of a task.
        seed: Random seed of the order of a loader that shuffles by the global random state, which differs between processes.

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
        many = "a batch sampler of its own" if batch is None else f"batches of {batch} samples"
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


def fresh_accelerator(**settings: Any) -> Accelerator:
    """Returns an Accelerator whose optimizers step, also after a trainer that left this process in the middle of a step.

    Args:
        **settings: Arguments of Accelerator.
    """
    accelerator = Accelerator(**settings)
    accelerator.sync_gradients = True
    return accelerator
