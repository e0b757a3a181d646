"""What `integration/test_shards_in_processes.py` runs in three processes; one start of them is enough for all cases."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed

from shard_cases import hard_columns, planned_part, records_of
from thresher import EpochSelectiveBackprop, Forgetting, InfoBatch, Kakurenbo, UniformSubset, Winnow
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.plan import HeldPlan
from thresher.distributed.sharded_records import ShardedRecords
from thresher.distributed.world import CountedWorld, DisagreementError, ProcessWorld, agree, sampler_facts
from thresher.records import Column

RANKS, N = 3, 5000
METHODS = [Kakurenbo(), InfoBatch(), Winnow(), UniformSubset(), EpochSelectiveBackprop(), Forgetting(0.3, start=1)]
ARRAYS = [np.bool_, np.uint8, np.uint16, np.int16, np.float16, np.float32, np.uint32, np.int64, np.float64]


def calls(world: CountedWorld) -> Any:
    """Every call, with arrays of every data type, of several shapes, and empty ones."""
    found: list[Any] = [world.sum(np.array([world.rank, 2**40])), world.total(world.rank)]
    for dtype in ARRAYS:
        found.append(world.gather(np.full((2, 3), world.rank).astype(dtype)))
        found.append(world.join(np.arange(world.rank * 2).astype(dtype)))
        found += world.exchange([np.full(world.rank * to, to).astype(dtype) for to in range(world.size)])
    found += world.exchange([np.empty(0, np.float32)] * world.size)
    row = np.array([(world.rank, 0.5)], dtype=[("place", np.uint32), ("loss", np.float32)])
    found += [part["loss"].copy() for part in world.exchange([row] * world.size)]
    return [np.asarray(one).tolist() for one in found], dict(world.calls), dict(world.traffic)


def plans(world: CountedWorld) -> Any:
    """Parts of the plans of all methods, and what each rank knows of them."""
    layout, found = ShardLayout(N, world.size), []
    for method in METHODS:
        records = records_of(method, hard_columns(N, 1))
        part = planned_part(method, records, layout.shard(world))
        shared = HeldPlan.of(part, layout, world)
        order = KeptOrder(np.arange, N, shared.keeps, world)
        refresh, weights = shared.refreshing()(0, N).tolist(), shared.weights(order.take(10, 20))
        weights = None if weights is None else weights.tolist()
        found.append((part.ids.tolist(), dict(part.facts), len(order), refresh, weights))
    return found


def home(world: CountedWorld) -> Any:
    """Rows of one rank for the blocks of the others, one of them written by all."""
    columns = {"loss": Column(torch.float32), "half": Column(torch.bfloat16, signal="loss")}
    records = ShardedRecords(columns, ShardLayout(30, world.size, 8), world, torch.device("cpu"))
    if world.rank != 1:
        ids = torch.tensor([29 - world.rank, world.rank, 15])
        records.write(ids, {"loss": torch.full((3,), world.rank + 0.5)})
    records.sync()
    return records["loss"].tolist(), records["half"].float().tolist(), records.gathered()["loss"].tolist()


def disagreement(world: CountedWorld) -> Any:
    """A rank with another seed, another method, another number of samples or another sampler."""
    data, odd = range(N), world.rank == 1
    alike = {"seed": 0, "method": Kakurenbo(), "n": N}
    cases = [
        {**alike, "seed": int(odd)},
        {**alike, "method": Kakurenbo(tau=0.6 if odd else 0.7)},
        {**alike, "n": N + odd},
        alike | sampler_facts(torch.utils.data.DistributedSampler(data, world.size, world.rank, seed=2 * odd)),
        alike,
    ]
    found, began = [], time.monotonic()
    for facts in cases:
        try:
            agree(world, facts)
            found.append("")
        except DisagreementError as error:
            found.append(str(error).splitlines()[1].strip())
    return found, time.monotonic() - began


CASES: tuple[Callable[[CountedWorld], Any], ...] = (calls, plans, home, disagreement)


def groups() -> list[Any]:
    """A group of two of the processes."""
    group = distributed.new_group([0, 2])
    try:
        world = ProcessWorld(group)
        return [world.rank, world.size, world.total(10 + distributed.get_rank())]
    except RuntimeError as error:
        return [str(error)]


def run_cases(rank: int, folder: str) -> None:
    """Runs every case in this process, and saves what they return."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=180)
    )
    try:
        found = {case.__name__: case(ProcessWorld()) for case in CASES}
        torch.save(found | {"groups": groups()}, f"{folder}/{rank}")
        distributed.barrier()  # a process that leaves first takes the connections along
    finally:
        distributed.destroy_process_group()
