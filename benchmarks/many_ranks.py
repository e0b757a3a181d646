"""What a rank holds, gets and computes in an epoch with Kakurenbo, counted and timed in parts, for trainings of any size.

`benchmarks.scale` measures the parts, and writes the model that `docs/scale.md` shows. What is counted or timed here is that of
one rank: its own block of ids, and the bits and counts of all samples. The network is not measured.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.overhead import fill
from thresher import EpochPlan, Kakurenbo
from thresher.distributed.bitmask import Bitmask
from thresher.distributed.layout import UNIT, ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.plan import HeldPlan, part_of_plan
from thresher.distributed.sharded_records import ShardedRecords
from thresher.permutation import Permutation
from thresher.records import Column
from thresher.testing.threaded_world import ThreadWorld, on_ranks

TRAINED = {"trained": Column(torch.int32, merge="sum")}
"""Column that a run keeps of each sample beside those of the method."""


@dataclass(frozen=True)
class Size:
    """The size of a training.

    Attributes:
        n: Number of samples.
        ranks: Number of processes.
    """

    n: int
    ranks: int

    @property
    def block(self) -> int:
        """Number of samples whose records a rank holds, at most."""
        return ShardLayout(self.n, self.ranks).per

    @property
    def units(self) -> int:
        """Number of units of the order whose kept samples are counted, those that fill up the last rank included."""
        units = -(-self.n // UNIT)
        return -(-units // self.ranks) * self.ranks


def records_of(layout: ShardLayout, world: ThreadWorld) -> ShardedRecords:
    """Returns the records of a rank, filled as in training."""
    records = ShardedRecords(Kakurenbo().columns(), layout, world, torch.device("cpu"))
    fill(records, seed=world.rank)
    return records


def planned(records: ShardedRecords) -> EpochPlan:
    """Returns the part of a rank in the plan of all samples."""
    plan = Kakurenbo().plan_epoch(records.gathered(), epoch=1, epochs=1000, generator=torch.Generator().manual_seed(0))
    return part_of_plan(plan, records.shard)


def traffic(size: Size) -> dict[str, int]:
    """Returns the bytes that a rank gets for a plan: those of counts, of marks, and of the numbers of kept samples by unit.

    Args:
        size: Size of the training, whose ranks are threads here.
    """
    layout = ShardLayout(size.n, size.ranks)

    def count(world: ThreadWorld) -> list[int]:
        records = records_of(layout, world)
        ends = [0]
        plan = planned(records)
        ends.append(world.bytes)
        held = HeldPlan.of(plan, layout, world)
        ends.append(world.bytes)
        KeptOrder(lambda begin, end: np.arange(begin, end), size.n, held.keeps, world)
        return np.diff([*ends, world.bytes]).tolist()

    names = ("counts", "marks", "places")
    return dict(zip(names, np.max(on_ranks(size.ranks, count), axis=0).tolist(), strict=True))


def traffic_of(size: Size, counts: int) -> dict[str, int]:
    """Returns what `traffic` would count at a size.

    Args:
        size: Size of the training.
        counts: Bytes of counts, which depend on the number of ranks alone.
    """
    return {"counts": counts, "marks": size.block // 8 * size.ranks + 24, "places": 2 * size.units}


def home() -> dict[str, float]:
    """Returns the bytes per sample that a rank notes in an epoch, and those that travel to the rank with its records."""
    layout, rows = ShardLayout(2 * 2**16, 2), 2**16

    def count(world: ThreadWorld) -> tuple[float, float]:
        ids = torch.arange(rows) + (1 - world.rank) * rows  # all of the other rank
        held = 0
        for columns in (Kakurenbo().columns(), TRAINED):
            records = ShardedRecords(columns, layout, world, torch.device("cpu"))
            records.write(ids, {name: torch.zeros(rows, dtype=column.dtype) for name, column in columns.items()})
            held += sum(values.nbytes for values in records._write_buffer.rows().values())
            records.sync()
        return held / rows, world.traffic["exchange"] / rows

    (noted, sent), _ = on_ranks(2, count)
    return {"noted": noted, "sent": sent}


def seconds(call: Callable[[], Any]) -> float:
    """Returns the CPU seconds of a call, the smallest of three."""
    found = []
    for _ in range(3):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def plan_seconds(block: int) -> float:
    """Returns the CPU seconds of the plan of one rank.

    Two ranks that are threads of this process plan together, each for a block; the time is half of theirs.

    Args:
        block: Number of samples of a block.
    """
    layout, found = ShardLayout(2 * block, 2), []

    def plan(world: ThreadWorld) -> None:
        records = records_of(layout, world)
        for _ in range(3):
            world.total(0)
            begin = time.process_time()
            HeldPlan.of(planned(records), layout, world)
            world.total(0)
            found.append((time.process_time() - begin) / 2)

    on_ranks(2, plan)
    return min(found)


def order_seconds(size: Size) -> float:
    """Returns the CPU seconds in which a rank counts the kept samples of its part of the order, with the bits of all samples.

    Args:
        size: Size of the training.
    """
    generator = np.random.default_rng(0)
    bits = np.bitwise_or(generator.integers(256, size=-(-size.n // 8), dtype=np.uint8), np.uint8(0x55))
    marks, order = Bitmask(bits, size.n), Permutation(size.n, seed=0, epoch=1)
    part = size.units // size.ranks * UNIT

    def count() -> None:
        for begin in range(0, part, 2**8 * UNIT):
            marks.of(order.piece(begin, min(begin + 2**8 * UNIT, part)))

    return seconds(count)


def memory(size: Size, noted: float) -> dict[str, float]:
    """Returns the bytes that a rank holds: records, marks, numbers of kept samples by unit, and what waits to travel.

    Args:
        size: Size of the training.
        noted: Bytes that wait per sample that the rank has trained on.
    """
    columns = Kakurenbo().columns() | TRAINED
    per_sample = sum(column.dtype.itemsize for column in columns.values())
    return {
        "records": per_sample * size.block,
        "marks": size.block // 8 * size.ranks,
        "places": 8 * -(-size.n // UNIT),
        "noted": noted * -(-size.n // size.ranks),
    }


def model(size: Size, checked: Size) -> dict[str, Any]:
    """Returns the model of a training, and what its parts were measured with.

    Args:
        size: Size of the training.
        checked: Size at which the traffic is counted with as many ranks, which are threads.
    """
    counted, way = traffic(checked), home()
    expected = traffic_of(checked, counted["counts"])
    return {
        "n": size.n,
        "ranks": size.ranks,
        "checked_n": checked.n,
        "checked_ranks": checked.ranks,
        "counted": counted,
        "as_expected": counted == expected,
        "traffic": traffic_of(size, counted["counts"]),
        "memory": memory(size, way["noted"]),
        "home": way["sent"] * -(-size.n // size.ranks),
        "seconds": {"plan": plan_seconds(size.block), "order": order_seconds(size)},
    }
