"""Properties of plans and records over ranks: whatever the blocks are, the answer is that of one process."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher.distributed.bitmask import Bitmask
from thresher.distributed.order import KeptOrder, RankOrder
from thresher.distributed.sharded_records import Arrivals
from thresher.testing.threaded_world import on_ranks

hard = settings(max_examples=depth(40, 300))

sizes = st.integers(2, 5)


@hard
@given(st.data(), st.integers(1, 200))
def test_marks_are_those_that_were_given(data, n):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    marks = Bitmask(np.packbits(mask, bitorder="little"), n)
    begin, end = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 5))
    assert np.array_equal(marks.of(np.arange(n)), mask) and marks.count == mask.sum()
    assert np.array_equal(marks.ids(begin, end), np.flatnonzero(mask)[begin : max(begin, end)])
    assert np.array_equal(marks.inverse().of(np.arange(n)), ~mask) and marks.inverse().count == n - marks.count


@hard
@given(st.data(), st.integers(1, 200), sizes, st.sampled_from([8, 16, 64]))
def test_the_kept_part_of_an_order_is_read_at_any_place(data, n, size, unit):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    order = np.random.default_rng(n).permutation(n)
    expected = order[mask[order]]
    begin, end = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 3))

    def look(world):
        kept = KeptOrder(lambda a, b: order[a:b], n, lambda ids: mask[ids], world, unit)
        return len(kept), kept.take(begin, end).tolist()

    for rank in on_ranks(size, look):
        assert rank == (len(expected), expected[begin : max(begin, end)].tolist())


@hard
@given(st.data(), st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_rows_of_ranks_are_those_of_a_distributed_sampler(data, n, size, drop_last):
    order = np.random.default_rng(n).permutation(100)[:n]
    begin, length = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    found = on_ranks(size, lambda world: RankOrder(lambda a, b: order[a:b], n, world, drop_last=drop_last))
    for rank, own in enumerate(found):
        sampler = torch.utils.data.DistributedSampler(order, size, rank, shuffle=False, drop_last=drop_last)
        expected = order[list(sampler)].tolist() if not drop_last or n >= size else []
        assert len(own) == len(expected) and own.take(0, len(own)).tolist() == expected
        assert own.take(begin, begin + length).tolist() == expected[begin : begin + length]


@hard
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=30))
def test_rows_that_arrive_are_told_apart(rows):
    table = np.array(sorted(rows, key=lambda row: row[0]), np.int64).reshape(-1, 2)
    ranks, places = table[:, 0], table[:, 1]
    arrivals = Arrivals(places, ranks, {})
    lowest = {place: min(ranks[places == place]) for place in places.tolist()}
    winners = {place: max(np.flatnonzero((places == place) & (ranks == rank))) for place, rank in lowest.items()}
    assert sorted(arrivals.last.tolist()) == sorted(winners.values())
    order = []
    for turn in arrivals.turns:
        assert len(set(places[turn].tolist())) == len(turn) > 0
        order += [(int(places[row]), row) for row in turn.tolist()]
    assert sorted(row for _, row in order) == list(range(len(rows)))
    for place in lowest:
        of_place = [row for one, row in order if one == place]
        assert of_place == sorted(of_place)
