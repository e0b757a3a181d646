"""What `integration/test_worlds_in_processes.py` runs in three processes; one start of them is enough for all cases."""

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed

from thresher import Kakurenbo
from thresher.distributed.gathered_records import GatheredRecords
from thresher.distributed.world import DisagreementError, ProcessWorld, World, agree, sampler_facts
from thresher.records import Column

RANKS, N = 3, 5000
ARRAYS = [
    np.bool_,
    np.uint8,
    np.uint16,
    np.int16,
    np.float16,
    np.float32,
    np.uint32,
    np.int64,
    np.float64,
]


class OnlyHereError(Exception):
    """An exception that cannot be sent."""

    def __init__(self) -> None:
        super().__init__("held", lambda: None)


def calls(world: World) -> Any:
    """Every call, with arrays of every data type."""
    found: list[Any] = [world.total(world.rank), world.every({"rank": world.rank})]
    found += [world.gather(np.full((2, 3), world.rank).astype(dtype)).tolist() for dtype in ARRAYS]
    plan = world.from_first(
        lambda: {
            "rank": world.rank,
            "ids": torch.arange(3),
            "half": torch.ones(2).bfloat16(),
            "none": None,
        }
    )
    found.append(
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in plan.items()
        }
    )
    found.append(
        [
            (rank, rows.tolist())
            for rank, rows in world.to_first((world.rank, torch.arange(k)) for k in range(2))
        ]
    )
    found.append(list(world.to_first([])))
    return found


def errors(world: World) -> list[str]:
    """What all ranks raise where a function fails in rank 0."""

    def fail(error: Exception) -> Any:
        if world.rank == 0:
            raise error
        return None

    found = []
    for error in (ValueError("too few"), OnlyHereError()):
        try:
            world.from_first(lambda error=error: fail(error))
        except Exception as raised:
            found.append(f"{type(raised).__name__}: {raised.args[0]}")
    return found


def home(world: World) -> Any:
    """Rows of two ranks, of which one sample is written by both."""
    columns = {"loss": Column(torch.float32), "half": Column(torch.bfloat16, signal="loss")}
    records = GatheredRecords(columns, 30, world, torch.device("cpu"))
    if world.rank != 1:
        ids = torch.tensor([29 - world.rank, world.rank, 15])
        records.write(ids, {"loss": torch.full((3,), world.rank + 0.5)})
    records.sync()
    return records["loss"].tolist(), records["half"].float().tolist()


def disagreement(world: World) -> Any:
    """A rank with another seed, another method, another number of samples or another sampler."""
    data, odd = range(N), world.rank == 1
    alike = {"seed": 0, "method": Kakurenbo(), "n": N}
    cases = [
        {**alike, "seed": int(odd)},
        {**alike, "method": Kakurenbo(tau=0.6 if odd else 0.7)},
        {**alike, "n": N + odd},
        alike
        | sampler_facts(
            torch.utils.data.DistributedSampler(data, world.size, world.rank, seed=2 * odd)
        ),
        alike,
    ]
    found = []
    for facts in cases:
        try:
            agree(world, facts)
            found.append("")
        except DisagreementError as error:
            found.append(str(error).splitlines()[1].strip())
    return found


CASES: tuple[Callable[[World], Any], ...] = (calls, home, errors, disagreement)


def groups() -> list[Any]:
    """A group of two of the processes, whose first one is not that of all processes."""
    group = distributed.new_group([1, 2])
    try:
        world = ProcessWorld(group)
        rows = [*world.to_first([world.rank])]
        return [world.rank, world.size, world.from_first(lambda: 10 + distributed.get_rank()), rows]
    except RuntimeError as error:
        return [str(error)]


def run_cases(rank: int, folder: str) -> None:
    """Runs every case in this process, and saves what they return."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=180),
    )
    try:
        found = {case.__name__: case(ProcessWorld()) for case in CASES}
        torch.save(found | {"groups": groups()}, f"{folder}/{rank}")
        distributed.barrier()  # a process that leaves first takes the connections along
    finally:
        distributed.destroy_process_group()
