"""Properties of orders that ranks share: whatever their number is, the rows are those of one process."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from threaded_world import on_ranks
from thresher.distributed.order import KeptOrder, RankOrder
from thresher.loading.bitmask import Bitmask

hard = settings(max_examples=depth(40, 300))


@hard
@given(st.data(), st.integers(1, 200))
def test_marks_are_those_that_were_given(data, n):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    marks = Bitmask(np.packbits(mask, bitorder="little"), n)
    begin, end = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 5))
    assert np.array_equal(marks.of(np.arange(n)), mask) and marks.count == mask.sum()
    assert np.array_equal(marks.ids(begin, end), np.flatnonzero(mask)[begin : max(begin, end)])


@hard
@given(st.data(), st.integers(1, 200), st.integers(1, 5), st.sampled_from([8, 16, 64]))
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
    for rank in range(size):
        own = RankOrder(lambda a, b: order[a:b], n, rank, size, drop_last=drop_last)
        sampler = torch.utils.data.DistributedSampler(
            order, size, rank, shuffle=False, drop_last=drop_last
        )
        expected = order[list(sampler)].tolist() if not drop_last or n >= size else []
        assert len(own) == len(expected) and own.take(0, len(own)).tolist() == expected
        assert own.take(begin, begin + length).tolist() == expected[begin : begin + length]
