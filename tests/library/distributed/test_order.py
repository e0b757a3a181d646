"""Orders by hand; against one process in tests/property/test_orders_of_ranks.py."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thresher.distributed.order import AT_ONCE, KeptOrder, RankBatches, RankOrder, take_cyclic
from thresher.distributed.world import ALONE


def test_an_order_of_many_units():
    n = 3 * AT_ONCE * 8 + 5
    order = KeptOrder(np.arange, n, lambda ids: ids % 7 == 0, ALONE, 8)
    assert len(order) == -(-n // 7) and order.take(100, 103).tolist() == [700, 707, 714]
    assert (
        order.take(0, n).tolist() == list(range(0, n, 7))
        and order.take(len(order), n).tolist() == []
    )


def test_a_whole_unit_is_counted():
    assert len(KeptOrder(np.arange, 2**16 - 1, lambda ids: ids >= 0, ALONE, 2**16 - 1)) == 2**16 - 1


def test_ids_are_int64_also_where_there_are_none():
    for order in (
        KeptOrder(np.arange, 10, lambda ids: ids < 0, ALONE),
        RankOrder(np.arange, 3, 0, 1),
    ):
        assert order.take(5, 9).dtype == np.int64 and len(order.take(5, 9)) == 0


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 20))
def test_the_place_after_kept_samples(marks, unit):
    kept = np.flatnonzero(marks)
    order = KeptOrder(np.arange, len(marks), lambda ids: np.array(marks)[ids], ALONE, unit)
    assert order.place_after(0) == 0
    assert [order.place_after(k) for k in range(1, len(kept) + 1)] == [
        int(place) + 1 for place in kept
    ]
    assert order.place_after(len(kept) + 1) == len(marks)


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_an_order_that_is_continued(total, begin, more):
    ids = np.arange(100, 100 + total)
    found = take_cyclic(lambda low, high: ids[low:high], total, begin, begin + more)
    assert found.tolist() == [100 + place % total for place in range(begin, begin + more)]


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_every_wth_batch(total, size, batch, drop_last, begin, more):
    """As BatchSamplerShard of accelerate deals them: batch number s * W + r is step s of rank r."""
    steps = total // (size * batch) if drop_last else -(-total // (size * batch))
    whole = [place % total for place in range(steps * size * batch)]

    for rank in range(size):
        rows = RankBatches(np.arange, total, rank, size, batch=batch, drop_last=drop_last)
        own = [
            whole[(step * size + rank) * batch + row]
            for step in range(steps)
            for row in range(batch)
        ]
        assert (
            len(rows) == len(own)
            and rows.take(begin, begin + more).tolist() == own[begin : begin + more]
        )
