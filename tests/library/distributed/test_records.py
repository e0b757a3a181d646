"""Records in shards: what ranks write arrives at its owner, as one process would have written it, and is saved and loaded."""

import math

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import Forgetting
from thresher.distributed.layout import ShardLayout
from thresher.distributed.sharded_records import ShardedRecords
from thresher.records import NEVER_SEEN, Column, Records
from thresher.testing.threaded_world import on_ranks

CPU = torch.device("cpu")


def keep_both(old, new):
    """A merge whose order is seen."""
    return old * 10 + new.to(old.dtype)


COLUMNS = {
    "loss": Column(torch.float32, fill=NEVER_SEEN),
    "half": Column(torch.bfloat16, signal="loss"),
    "correct": Column(torch.bool),
    "total": Column(torch.float32, signal="loss", merge="sum"),
    "seen": Column(torch.uint8, signal="correct", merge="sum"),
    "when": Column(torch.int16, fill=-1, signal="epoch"),
    "history": Column(torch.int64, signal="digit", merge=keep_both),
    "weight": Column(torch.float32, fill=1.0, merge="plan"),
}


def signals(r, n):
    return {
        "loss": torch.from_numpy(r.choice(np.float32([0.0, 0.5, 1.5, np.nan, np.inf]), n)),
        "correct": torch.from_numpy(r.random(n) < 0.5),
        "digit": torch.from_numpy(r.integers(1, 10, n)),
    }


def batches_of(number, n, size):
    """What each rank writes, in several batches; padding makes samples come twice, on one rank or on several."""
    r = np.random.default_rng(number)
    every = []
    for rank in range(size):
        own = r.permutation(n)[: int(r.integers(0, n + 1))] if rank != number % size else np.empty(0, np.int64)
        parts = [*np.array_split(own, int(r.integers(1, 4))), own[: int(r.integers(0, 3))]]
        every.append([(torch.from_numpy(part), signals(r, len(part))) for part in parts])
    return every


@over_instances(range(depth(30, 300)))
def test_what_arrives_is_what_one_process_would_have_written(number):
    """Ranks one after the other; columns that are replaced keep the value of the lowest rank."""
    n, size = [1, 9, 40][number % 3], 2 + number % 3
    batches = batches_of(number, n, size)
    whole, backwards = Records(COLUMNS, n, CPU), Records(COLUMNS, n, CPU)
    whole.epoch = backwards.epoch = 7
    for rank in range(size):
        for ids, values in batches[rank]:
            whole.write(ids, values)
    for rank in reversed(range(size)):
        for ids, values in batches[rank]:
            backwards.write(ids, values)

    def train(world):
        records = ShardedRecords(COLUMNS, ShardLayout(n, size, 8), world, CPU)
        records.epoch = 7
        for ids, values in batches[world.rank]:
            records.write(ids, values)
        records.sync()
        records.sync()
        return records

    parts = on_ranks(size, train)
    for name, column in COLUMNS.items():
        expected = backwards[name] if column.merge == "last" else whole[name]
        found = torch.cat([part[name] for part in parts])
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


def in_two(function, n=16, columns=None):
    """What a function of the records of each of two ranks returns, of eight samples each."""
    columns = COLUMNS if columns is None else columns
    return on_ranks(2, lambda world: function(ShardedRecords(columns, ShardLayout(n, 2, 8), world, CPU), world.rank))


def values(*losses):
    n = len(losses)
    return {"loss": torch.tensor(losses), "correct": torch.ones(n, dtype=torch.bool), "digit": torch.ones(n, dtype=torch.int32)}


def test_nothing_is_seen_before_it_comes_home():
    def train(records, rank):
        records.write(torch.tensor([0, 9]), values(1.0, 2.0))
        before = records["loss"].tolist()
        records.sync()
        return before, records["loss"][:2].tolist()

    assert in_two(train) == [([-math.inf] * 8, [1.0, -math.inf]), ([-math.inf] * 8, [-math.inf, 2.0])]


def test_where_nothing_was_written_only_a_number_travels():
    def train(records, rank):
        records.sync()
        return records.shard.world.bytes

    assert in_two(train) == [8, 8]


def test_writing_again_adds_the_difference_and_replaces_the_value():
    def train(records, rank):
        if rank == 0:
            ids = torch.tensor([9])
            records.write(ids, values(1.0))
            records.write(ids, values(3.5), before=values(1.0), first=False)
        records.sync()
        return {name: records[name][1].item() for name in ("loss", "total", "seen", "history")}

    assert in_two(train)[1] == {"loss": 3.5, "total": 3.5, "seen": 1, "history": 1}


def test_rows_that_turn_out_to_be_of_other_samples_do_not_travel():
    def train(records, rank):
        records.write(torch.tensor([3, 12]), values(1.0, 2.0), certain=torch.tensor(rank == 1))
        records.write(torch.tensor([4, 13]), values(3.0, 4.0), certain=torch.tensor([False, True]))
        records.sync()
        return records["loss"].isfinite().nonzero().flatten().tolist(), records["total"].sum().item()

    assert in_two(train) == [([3], 1.0), ([4, 5], 10.0)]


def test_functions_are_given_the_rows_that_are_written_for_the_first_time():
    def train(records, rank):
        records.write(torch.tensor([8, 9]), values(1.0, 1.0), first=torch.tensor([rank == 0, True]))
        records.sync()
        return records["history"][:2].tolist()

    assert in_two(train)[1] == [1, 11]


def test_functions_are_given_the_data_type_that_was_written():
    given = []

    def look(old, new):
        given.append(new.dtype)
        return old

    def train(records, rank, dtypes):
        if rank < len(dtypes):
            records.write(torch.tensor([9]), {"loss": torch.tensor([0.5], dtype=dtypes[rank])})
        records.sync()

    columns = {"worst": Column(torch.float32, signal="loss", merge=look)}
    for dtypes, expected in (([torch.bfloat16], [torch.bfloat16]), ([torch.bfloat16, torch.float32], [torch.float32] * 2)):
        given.clear()
        in_two(lambda records, rank, dtypes=dtypes: train(records, rank, dtypes), columns=columns)
        assert given == expected


def test_forgetting_counts_the_same_in_shards():
    method, r = Forgetting(), np.random.default_rng(0)
    right = torch.from_numpy(r.random((12, 40)) < 0.6)
    whole = Records(method.columns(), 40, CPU)
    for correct in right:
        whole.write(torch.arange(40), {"correct": correct})

    def train(world):
        records = ShardedRecords(method.columns(), ShardLayout(40, 3, 8), world, CPU)
        for epoch, correct in enumerate(right):
            own = torch.from_numpy(np.random.default_rng(epoch).permutation(40)[world.rank :: 3])
            records.write(own, {"correct": correct[own]})
            records.sync()
        return records["forgetting"]

    assert torch.equal(torch.cat(on_ranks(3, train)), whole["forgetting"])


def test_a_plan_remembers_its_block():
    def train(records, rank):
        records.remember({"weight": torch.full((8,), float(rank))})
        with pytest.raises(ValueError, match=r"must be torch.float32 of shape \(8,\), got torch.float32 of shape \(16,\)"):
            records.remember({"weight": torch.zeros(16)})
        return records["weight"].tolist()

    assert in_two(train) == [[0.0] * 8, [1.0] * 8]


def test_columns_are_gathered():
    def train(records, rank):
        records["loss"].copy_(torch.arange(8) + 8.0 * rank)
        records["half"].copy_(torch.arange(8) + 8.0 * rank)
        found = records.gathered()
        return (
            found["loss"].tolist(),
            found["half"].tolist(),
            found["half"].dtype,
            found["correct"].shape,
            found["loss"].add_(1),
        )

    for loss, half, dtype, shape, _ in in_two(train):
        assert loss == half == [float(i) for i in range(16)] and dtype is torch.bfloat16 and shape == (16,)
