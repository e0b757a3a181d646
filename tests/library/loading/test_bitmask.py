"""Marks of samples, one bit each: made of ids and back, counted, and looked up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thresher.loading import bitmask as module
from thresher.loading.bitmask import Bitmask, number, packed, unpacked
from thresher.selection import CHUNK


@given(st.data(), st.integers(1, 300))
def test_ids_are_packed_and_looked_up(data, n):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    bits = packed(np.flatnonzero(mask), n)
    assert bits.tolist() == np.packbits(mask, bitorder="little").tolist()
    assert number(bits) == mask.sum() and unpacked(bits).tolist() == [*mask, *[False] * (-n % 8)]
    marks, ids = Bitmask(bits, n), np.random.default_rng(n).integers(0, n, 40)
    assert marks.of(ids).tolist() == mask[ids].tolist()
    assert marks.before(ids).tolist() == [int(mask[:i].sum()) for i in ids.tolist()]
    assert marks.before(ids.astype(np.uint32)).tolist() == marks.before(ids).tolist()


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, 2 * CHUNK + 13])
def test_many_ids_are_packed_in_pieces(n):
    ids = np.flatnonzero(np.random.default_rng(n).random(n) < 0.3)
    bits = packed(ids, n)
    assert np.flatnonzero(unpacked(bits)).tolist() == ids.tolist()
    marks = Bitmask(bits, n)
    assert marks.before(ids).tolist() == list(range(len(ids)))
    assert marks.ids(len(ids) // 3, n).tolist() == ids[len(ids) // 3 :].tolist()


@pytest.mark.parametrize("part", [1, 3, 16])
def test_ids_of_any_places(monkeypatch, part):
    monkeypatch.setattr(module, "BYTES", part)
    ids = np.flatnonzero(np.random.default_rng(part).random(203) < 0.4)
    marks = Bitmask(packed(ids, 203), 203)
    assert marks.count == len(ids)
    for begin in range(0, len(ids) + 2, 5):
        for end in range(begin, len(ids) + 3, 7):
            assert marks.ids(begin, end).tolist() == ids[begin:end].tolist()


def test_marks_of_nothing():
    marks = Bitmask(np.zeros(2, np.uint8), 12)
    assert marks.count == 0 and marks.ids(0, 5).tolist() == []
