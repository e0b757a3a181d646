"""Ranks that are threads: what they are told, and what happens where one fails, does not come, or is somewhere else."""

import time

import numpy as np
import pytest

from thresher.testing.threaded_world import LeftAloneError, Meeting, ThreadWorld, on_ranks


def test_the_calls_of_a_world():
    def look(world):
        numbers = np.arange(3) * (world.rank + 1)
        parts = [np.full(world.rank, 10 * world.rank + to, np.int16) for to in range(world.size)]
        return world.sum(numbers).tolist(), world.gather(numbers).tolist(), [part.tolist() for part in world.exchange(parts)]

    for rank, (total, every, sent) in enumerate(on_ranks(3, look)):
        assert total == [0, 6, 12] and every == [[0, 1, 2], [0, 2, 4], [0, 3, 6]]
        assert sent == [[], [10 + rank], [20 + rank] * 2]


def test_what_a_world_counts():
    def look(world):
        world.sum(np.zeros(4, np.int64))
        world.gather(np.zeros(5, np.float32))
        world.exchange([np.zeros(3, np.int16)] * 2)
        counted = dict(world.calls), dict(world.traffic), world.bytes
        world.reset()
        return *counted, world.bytes, world.calls.total()

    assert (
        on_ranks(2, look) == [({"sum": 1, "gather": 1, "exchange": 1}, {"sum": 32, "gather": 40, "exchange": 12}, 84, 0, 0)] * 2
    )


def test_an_array_for_each_rank_is_needed():
    with pytest.raises(ValueError, match="`parts` must have one array for each of 2 ranks, got 1"):
        on_ranks(2, lambda world: world.exchange([np.zeros(1)]))


def test_many_ranks_in_many_calls():
    def look(world):
        return [world.total(world.rank * step) for step in range(20)]

    assert on_ranks(64, look) == [[2016 * step for step in range(20)]] * 64


def test_the_error_of_one_rank_ends_the_others():
    seen = []

    def look(world):
        if world.rank == 1:
            raise KeyError("own")
        try:
            world.total(1)
        except LeftAloneError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="own"):
        on_ranks(3, look)
    assert seen == ["another rank has failed, or did not come to this call"] * 2


def test_a_rank_that_does_not_come_is_not_waited_for():
    began = time.monotonic()
    with pytest.raises(LeftAloneError):
        on_ranks(2, lambda world: world.rank or world.total(1), patience=0.05)
    assert time.monotonic() - began < 30


def test_after_a_failure_nobody_waits_again():
    meeting = Meeting(2, patience=30)
    meeting.leave()
    meeting.leave()
    with pytest.raises(LeftAloneError):
        ThreadWorld(0, 2, meeting).total(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda world: world.total(1) if world.rank else world.gather(np.zeros(1)),
            "gather of float64 .*, sum of int64 of shape",
        ),
        (lambda world: world.sum(np.zeros(1 + world.rank, np.int64)), r"sum of int64 of shape \(1,\), .*\(2,\)"),
    ],
)
def test_ranks_in_different_calls_are_told(call, message):
    errors = []

    def look(world):
        try:
            call(world)
        except RuntimeError as error:
            errors.append(str(error))

    on_ranks(2, look)
    assert len(errors) == 2 and errors[0] == errors[1]
    with pytest.raises(RuntimeError, match=f"the ranks are in different calls: {message}"):
        on_ranks(2, call)


def test_what_is_received_cannot_be_changed():
    for array in on_ranks(2, lambda world: world.gather(np.zeros(2))):
        assert not array.flags.writeable
