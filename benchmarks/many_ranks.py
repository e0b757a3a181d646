"""What the processes of a training with Kakurenbo hold, send and compute in an epoch, without the training itself.

Each of eight processes records its part of the samples, as the steps of an epoch would, sends it to process 0, and receives the
plan. `benchmarks.scale` measures this beside a training in one process.
"""

import datetime
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from benchmarks.overhead import BATCH, fill, resident
from thresher import Kakurenbo
from thresher.attribution.accumulator import COUNT_OF_TRAINED, TRAINED
from thresher.distributed.gathered_records import GatheredRecords
from thresher.distributed.world import ProcessWorld
from thresher.loading.epoch import ComposedEpoch, choose, pad
from thresher.loading.packed_plan import PackedPlan
from thresher.permutation import Permutation

RANKS = 8
"""Number of processes."""
AT_ONCE = 2**14
"""Number of samples of a call that records."""
CPU = torch.device("cpu")


@contextmanager
def largest(found: dict[str, int]) -> Iterator[None]:
    """Writes the largest number of bytes that the process held, at any of many moments, to `found["resident"]`."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            found["resident"] = max(found["resident"], resident()[0])

    found["resident"] = resident()[0]
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def epoch(rank: int, n: int, folder: str, ranks: int) -> None:
    """Runs an epoch of one process, and writes the numbers of bytes and seconds of its parts.

    Args:
        rank: Number of the process.
        n: Number of samples of all processes.
        folder: Where the processes meet and write.
        ranks: Number of processes.
    """
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=30),
    )
    world = ProcessWorld()
    rehearse(world)
    held, seconds = {}, {}
    before = resident()[0]

    def measured(part: str, call: Any) -> Any:
        world.total(0)
        found: dict[str, int] = {}
        begin = time.perf_counter()
        with largest(found):
            result = call()
        seconds[part] = time.perf_counter() - begin
        held[part] = max(found["resident"], resident()[0]) - before
        return result

    records = GatheredRecords(Kakurenbo().columns(), n, world, CPU)
    counts = GatheredRecords(COUNT_OF_TRAINED, n, world, CPU, sent={TRAINED: torch.bool})
    if world.is_first:
        fill(records)
    order = Permutation(n, seed=0, epoch=0)
    measured("recording", lambda: record(records, counts, order, world))
    measured("gathering", lambda: (records.sync(), counts.sync()))
    plan = measured("planning", lambda: planned(records, n, world))
    kept = measured("order", lambda: own_rows(order, plan, world))
    held["rest"] = resident()[0] - before
    assert len(kept) == -(-plan.rows // ranks) < n
    Path(folder, f"{rank}.json").write_text(json.dumps({"held": held, "seconds": seconds}))
    world.total(0)
    distributed.destroy_process_group()


def own_rows(order: Permutation, plan: PackedPlan, world: ProcessWorld) -> Any:
    """Returns the rows of this process in an epoch."""
    pieces = choose(order.piece, order.n, plan)
    ends = np.array([0, pad(plan.rows, world.size, drop_last=False)])
    whole = ComposedEpoch(pieces, plan.rows, ends, by_rows=True)
    return whole.deal(world.rank, world.size, dtype=np.int32)


def rehearse(world: ProcessWorld) -> None:
    """Loads what an epoch needs, so that it does not count."""
    n = BATCH * world.size
    records = GatheredRecords(Kakurenbo().columns(), n, world, CPU)
    fill(records)
    record(records, GatheredRecords(COUNT_OF_TRAINED, n, world, CPU), Permutation(n, 0, 0), world)
    records.sync()
    planned(records, n, world)


def record(
    records: GatheredRecords, counts: GatheredRecords, order: Permutation, world: ProcessWorld
) -> None:
    """Records what the steps of an epoch give for the samples of this process."""
    n, generator = order.n, torch.Generator().manual_seed(world.rank)
    begin, end = n * world.rank // world.size, n * (world.rank + 1) // world.size
    for first in range(begin, end, AT_ONCE):
        ids = torch.from_numpy(order.piece(first, min(end, first + AT_ONCE)))
        loss = torch.rand(len(ids), generator=generator)
        records.write(ids, {"loss": loss, "correct": loss < 0.5, "confidence": 1 - loss})
        counts.write(ids, {TRAINED: torch.ones_like(ids, dtype=torch.bool)})


def planned(records: GatheredRecords, n: int, world: ProcessWorld) -> PackedPlan:
    """Returns the plan that process 0 makes, in each process."""
    generator = torch.Generator().manual_seed(0)

    def plan() -> dict[str, Any]:
        made = Kakurenbo().plan_epoch(records, epoch=1, epochs=1000, generator=generator)
        made.check(n)
        return PackedPlan.of(made, n).state_dict()

    return PackedPlan(**world.from_first(plan))


def measure(n: int, ranks: int = RANKS) -> dict[str, Any]:
    """Returns the bytes per sample and the seconds of the parts of an epoch, of process 0 and the largest of the others.

    Args:
        n: Number of samples.
        ranks: Number of processes. Default: 8.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(epoch, (n, folder, ranks), nprocs=ranks)
        first, *others = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)
        ]
    return {
        "n": n,
        "ranks": ranks,
        "seconds": first["seconds"],
        "first": {part: size / n for part, size in first["held"].items()},
        "others": {part: max(one["held"][part] for one in others) / n for part in first["held"]},
    }
