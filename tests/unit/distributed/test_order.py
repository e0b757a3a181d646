"""Orders by hand; against one process in tests/property/test_shards.py."""

import numpy as np

from thresher.distributed.order import AT_ONCE, KeptOrder, RankOrder, drawn_rows
from thresher.distributed.threads import on_ranks
from thresher.shards import ALONE


def test_an_order_of_many_units():
    n = 3 * AT_ONCE * 8 + 5
    order = KeptOrder(np.arange, n, lambda ids: ids % 7 == 0, ALONE, 8)
    assert len(order) == -(-n // 7) and order.take(100, 103).tolist() == [700, 707, 714]
    assert order.take(0, n).tolist() == list(range(0, n, 7)) and order.take(len(order), n).tolist() == []


def test_two_bytes_per_unit_travel():
    def look(world):
        KeptOrder(np.arange, 10_000, lambda ids: ids >= 0, world)
        return world.bytes

    assert on_ranks(2, look) == [2 * 10] * 2


def test_a_whole_unit_is_counted():
    assert len(KeptOrder(np.arange, 2**16 - 1, lambda ids: ids >= 0, ALONE, 2**16 - 1)) == 2**16 - 1


def test_ids_are_int64_also_where_there_are_none():
    for order in (KeptOrder(np.arange, 10, lambda ids: ids < 0, ALONE), RankOrder(np.arange, 3, ALONE)):
        assert order.take(5, 9).dtype == np.int64 and len(order.take(5, 9)) == 0


def test_steps_without_rows():
    assert drawn_rows(np.array([2.0, 1.0, 0.0]), np.array([2, 0, 1]), np.array([1, 0, 0])).tolist() == [False, True, False]
    assert len(drawn_rows(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))) == 0
