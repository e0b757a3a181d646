"""Records of several ranks: what they write comes to rank 0, as one process would have written it, and is saved and loaded."""

import math

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from threaded_world import on_ranks
from thresher import Forgetting
from thresher.distributed.gathered_records import GatheredRecords
from thresher.records import NEVER_SEEN, Column, Records

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
        own = (
            r.permutation(n)[: int(r.integers(0, n + 1))]
            if rank != number % size
            else np.empty(0, np.int64)
        )
        parts = [*np.array_split(own, int(r.integers(1, 4))), own[: int(r.integers(0, 3))]]
        every.append([(torch.from_numpy(part), signals(r, len(part))) for part in parts])
    return every


@over_instances(range(depth(30, 300)))
def test_what_arrives_is_what_one_process_would_have_written(number):
    """Rank by rank, the lowest at the end."""
    n, size = [1, 9, 40][number % 3], 2 + number % 3
    batches = batches_of(number, n, size)
    whole = Records(COLUMNS, n, CPU)
    whole.epoch = 7
    for rank in reversed(range(size)):
        for ids, values in batches[rank]:
            whole.write(ids, values)

    def train(world):
        records = GatheredRecords(COLUMNS, n, world, CPU)
        records.epoch = 7
        for ids, values in batches[world.rank]:
            records.write(ids, values)
        records.sync()
        records.sync()
        return records

    first, *others = on_ranks(size, train)
    for name in COLUMNS:
        assert torch.equal(first[name].view(torch.uint8), whole[name].view(torch.uint8)), name
        assert all(len(records[name]) == 0 for records in others)


def in_two(function, n=16, columns=None):
    """What a function of the records of each of two ranks returns for rank 0, which has them."""
    columns = COLUMNS if columns is None else columns
    return on_ranks(2, lambda world: function(GatheredRecords(columns, n, world, CPU), world.rank))[
        0
    ]


def values(*losses):
    n = len(losses)
    return {
        "loss": torch.tensor(losses),
        "correct": torch.ones(n, dtype=torch.bool),
        "digit": torch.ones(n, dtype=torch.int32),
    }


def test_nothing_is_seen_before_it_comes_home():
    def train(records, rank):
        records.write(torch.tensor([0, 9]), values(1.0, 2.0))
        before = records["loss"].tolist()
        records.sync()
        return before, records["loss"].tolist()

    before, after = in_two(train)
    assert before == [-math.inf] * 16 and after == [1.0, *[-math.inf] * 8, 2.0, *[-math.inf] * 6]


def test_writing_again_adds_the_difference_and_replaces_the_value():
    def train(records, rank):
        if rank == 1:
            ids = torch.tensor([9])
            records.write(ids, values(1.0))
            records.write(ids, values(3.5), before=values(1.0), first=False)
        records.sync()
        return {
            name: column[9].item()
            for name, column in records.items()
            if len(column) and name in wanted
        }

    wanted = ("loss", "total", "seen", "history")
    assert in_two(train) == {"loss": 3.5, "total": 3.5, "seen": 1, "history": 1}


def test_rows_that_turn_out_to_be_of_other_samples_do_not_travel():
    def train(records, rank):
        records.write(torch.tensor([3, 12]), values(1.0, 2.0), certain=torch.tensor(rank == 1))
        records.write(torch.tensor([4, 13]), values(3.0, 4.0), certain=torch.tensor([False, True]))
        records.sync()
        return records["loss"].isfinite().nonzero().flatten().tolist(), records[
            "total"
        ].sum().item()

    assert in_two(train) == ([3, 12, 13], 11.0)


def test_functions_are_given_the_rows_that_are_written_for_the_first_time():
    def train(records, rank):
        records.write(torch.tensor([8, 9]), values(1.0, 1.0), first=torch.tensor([rank == 0, True]))
        records.sync()
        return records["history"][8:10].tolist()

    assert in_two(train) == [1, 11]


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
    for dtypes, expected in (
        ([torch.bfloat16], [torch.bfloat16]),
        ([torch.bfloat16, torch.float32], [torch.float32, torch.bfloat16]),
    ):
        given.clear()
        in_two(lambda records, rank, dtypes=dtypes: train(records, rank, dtypes), columns=columns)
        assert given == expected


def test_forgetting_counts_the_same_in_several_processes():
    method, r = Forgetting(), np.random.default_rng(0)
    right = torch.from_numpy(r.random((12, 40)) < 0.6)
    whole = Records(method.columns(), 40, CPU)
    for correct in right:
        whole.write(torch.arange(40), {"correct": correct})

    def train(world):
        records = GatheredRecords(method.columns(), 40, world, CPU)
        for epoch, correct in enumerate(right):
            own = torch.from_numpy(np.random.default_rng(epoch).permutation(40)[world.rank :: 3])
            records.write(own, {"correct": correct[own]})
            records.sync()
        return records["forgetting"]

    assert torch.equal(on_ranks(3, train)[0], whole["forgetting"])


def test_values_are_sent_in_a_data_type_of_their_own():
    """A count of 1 takes a byte, and an id four."""

    def train(records, rank):
        records.write(torch.tensor([3, 4]), {"count": torch.tensor([True, rank == 0])})
        records.write(torch.tensor([3]), {"count": torch.ones(1, dtype=torch.int32)})
        bits = {
            values.dtype for piece in records._write_buffer.pieces() for values in piece.values()
        }
        records.sync()
        return bits, records["count"].tolist()

    columns = {"count": Column(torch.int32, merge="sum")}
    make = lambda world: GatheredRecords(columns, 6, world, CPU, sent={"count": torch.bool})  # noqa: E731
    bits, counts = on_ranks(2, lambda world: train(make(world), world.rank))[0]
    assert bits == {torch.int32, torch.bool} and counts == [0, 0, 0, 4, 1, 0]


# Saving


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_state_has_what_has_not_come_home_and_the_run_goes_on_as_without_it(size):
    n = 20

    def train(world):
        records = GatheredRecords(COLUMNS, n, world, CPU)
        own = torch.arange(n)[world.rank :: world.size]
        records.write(own, {"loss": own.float(), "correct": own % 2 == 0, "digit": own % 10})
        records.sync()
        records.epoch = 3
        if world.rank == 0:
            records.write(torch.tensor([n - 1]), values(99.0))
        before, state = (
            {name: column.clone() for name, column in records.items()},
            records.state_dict(),
        )
        unchanged = all(torch.equal(before[name], records[name]) for name in COLUMNS)
        records.sync()
        again = GatheredRecords(COLUMNS, n, world, CPU)
        again.write(torch.tensor([0]), values(5.0))  # forgotten
        again.load_state_dict(state)
        again.sync()
        return unchanged, *(
            {name: column.clone() for name, column in one.items()}
            for one in (records, state, again)
        )

    for unchanged, whole, state, again in on_ranks(size, train):
        assert unchanged and list(state) == [*COLUMNS]
        assert all(
            torch.equal(state[name], whole[name]) and torch.equal(again[name], whole[name])
            for name in COLUMNS
        )


def test_of_a_sample_that_comes_again_after_a_resume_the_later_value_counts():
    def train(records, rank, resumed):
        for turn in (0, 1):
            if rank == turn:
                records.write(torch.tensor([5]), values(float(turn)))
            if resumed and not turn:
                records.load_state_dict(records.state_dict())
        records.sync()
        return None if rank else records["loss"][5].item()

    for resumed in (False, True):
        assert (
            in_two(lambda records, rank, resumed=resumed: train(records, rank, resumed)) == resumed
        )


def test_a_copy_is_saved():
    def train(records, rank):
        state = records.state_dict()
        records["loss"].fill_(3.0)
        return state["loss"].isneginf().all().item()

    assert in_two(train)
