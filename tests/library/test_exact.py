"""The k-th smallest value and the mean, by hand and against exact arithmetic; over ranks in tests/property/test_shards.py."""

from fractions import Fraction

import numpy as np
import pytest

from thresher.exact import CHUNK, chunks, exact_mean, kth_smallest
from thresher.testing.threaded_world import on_ranks

DTYPES = [np.float32, np.float64, np.float16, np.int16, np.int64, np.uint8, np.uint32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_of_every_dtype(dtype):
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    values = np.array([3, 0, 1, info.max, info.min, 7, 1, 2], dtype)
    for size in (1, 2, 3):
        parts = np.array_split(values, size)
        for found in on_ranks(size, lambda w, p=parts: [kth_smallest(p[w.rank], k, w) for k in range(len(values))]):
            assert found == sorted(values.tolist()) and {one.dtype for one in found} == {np.dtype(dtype)}


def test_infinities_have_their_places_and_zeros_are_equal():
    parts = [np.float32([np.inf, -0.0, 1]), np.float32([-np.inf, 0.0])]
    found = [on_ranks(2, lambda world, k=k: float(kth_smallest(parts[world.rank], k, world)))[0] for k in range(5)]
    assert found == [-np.inf, 0, 0, 1, np.inf]


def test_a_rank_sends_at_most_2048_numbers_at_a_time():
    values = np.random.default_rng(0).random(4000).astype(np.float32)

    def look(world):
        kth_smallest(values[world.rank :: 2], 1000, world)
        return dict(world.calls), world.traffic["sum"]

    assert on_ranks(2, look)[0] == ({"gather": 1, "sum": 3}, 8 * (2048 + 2048 + 2 ** (on_bits(values) - 22)))


def on_bits(values):
    """Number of bits that tell the values apart."""
    bits = values.view(np.uint32)
    return int(bits.max() - bits.min()).bit_length()


def test_small_whole_numbers_take_one_round():
    counts = np.arange(2000, dtype=np.int16) % 40 - 1
    calls = on_ranks(2, lambda world: (kth_smallest(counts[world.rank :: 2], 700, world), world.calls["sum"]))
    assert calls == [(int(np.sort(counts)[700]), 1)] * 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_is_the_exact_one_rounded_once(dtype):
    r = np.random.default_rng(0)
    info = np.finfo(dtype)
    for _ in range(200):
        values = (r.standard_normal(int(r.integers(1, 40))) * 2.0 ** r.integers(-150, 100, 1)).astype(dtype)
        values[r.random(len(values)) < 0.2] = r.choice(np.array([0, -0.0, info.max, info.tiny, info.smallest_subnormal], dtype))
        assert exact_mean(values) == float(sum(map(Fraction, values.tolist())) / len(values))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_order_does_not_matter_where_it_matters_for_a_sum(dtype):
    values = np.array([1e8, 1, -1e8, 1e-3] * 30_000, dtype)
    assert exact_mean(values) == exact_mean(np.sort(values)) == (1 + float(dtype(1e-3))) / 4
    assert len(list(chunks(len(values)))) > 1 and np.sort(values).cumsum()[-1] / len(values) != exact_mean(values)


def test_equal_values_have_their_mean():
    for value in (0.1, 1 / 3, 1e-300, -7.5):
        assert all(exact_mean(np.full(n, value)) == value for n in (1, 3, 1000))
    assert exact_mean(np.full(CHUNK + 3, np.float32(0.1))) == np.float32(0.1)


def test_the_mean_of_nothing():
    assert np.isnan(exact_mean(np.empty(0, np.float32)))


def test_a_mean_of_many_large_values_does_not_overflow():
    values = np.full(300_000, np.finfo(np.float64).max)
    assert exact_mean(values) == values[0]


def test_a_strided_view_is_as_good():
    values = np.arange(10, dtype=np.float32)
    assert exact_mean(values[::3]) == 4.5 and kth_smallest(values[::-3], 1) == 3
