"""Draws at sorted points: they are those of a search point by point, and have the frequencies of independent draws."""

import math
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import depth
from thresher import selection
from thresher.methods._base import Chances, drawn_ids
from thresher.rng import seeded

numbers = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 1.0, 5e-324, 1e-300, 1e-40, 1e308, -1.0, math.nan, math.inf, -math.inf]
    ),
    st.floats(min_value=0, allow_infinity=False),
    st.floats(min_value=0, max_value=10),
)
importances = st.lists(numbers, min_size=1, max_size=40)


def searched(importance: list[float], k: int, key: int) -> Counter[int]:
    """The samples of one epoch and how often they come, one point after the other."""
    known = [i for i, value in enumerate(importance) if math.isfinite(value) and value >= 0]
    largest = max((importance[i] for i in known), default=0.0)
    edges, reached = [], 0.0
    for i in known:
        reached += importance[i] / largest if largest else 1.0
        edges.append(reached)
    times = Counter(i for i in range(len(importance)) if i not in known)
    for point in (
        torch.rand(k, generator=seeded(key), dtype=torch.float64).tolist() if known else ()
    ):
        place = min(point * reached, math.nextafter(reached, 0))
        times[next(i for i, edge in zip(known, edges, strict=True) if edge > place)] += 1
    return times


@given(importances, st.integers(1, 60), st.integers(0, 2**32), st.integers(1, 9))
def test_a_search_point_by_point_finds_the_same(
    importance: list[float], k: int, key: int, piece: int
) -> None:
    """However long the pieces are; of values of both precisions."""
    for dtype in (np.float64, np.float32):
        with np.errstate(over="ignore"):
            values = np.array(importance).astype(dtype)
        expected = searched(values.tolist(), k, key)
        with patch.object(selection, "CHUNK", piece):
            chances = Chances(values)
            if chances.known:
                ids, distinct = drawn_ids(chances, k, seeded(key))
                assert Counter(ids.tolist()) == expected and distinct == len(expected)
                assert ids.tolist() == drawn_ids(Chances(values), k, seeded(key))[0].tolist()


@given(importances)
def test_chances_add_up_to_one_and_are_nan_where_nothing_is_known(importance: list[float]) -> None:
    chances = Chances(np.array(importance))
    found = chances.of(slice(None))
    known = np.isfinite(importance) & (np.array(importance) >= 0)
    assert (np.isnan(found) == ~known).all() and chances.known == known.sum()
    if known.any():
        assert np.nansum(found) == pytest.approx(1)
        assert (found[known] >= 0).all()


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """Distance from the expected counts, in standard deviations of a chi-square of as many degrees of freedom."""
    freedom = found.size - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("key", depth(range(3), range(40)))
def test_frequencies(key: int) -> None:
    importance = np.random.default_rng(key).gamma(1.0, 1.0, 200) + 0.05
    k = 200_000
    ids, _ = drawn_ids(Chances(importance), k, seeded(key))
    assert chi_square(np.bincount(ids, minlength=200), k * importance / importance.sum()) < 5


@pytest.mark.parametrize("key", depth(range(3), range(40)))
def test_the_order_of_training_tells_nothing_of_the_samples(key: int) -> None:
    """Counts by the place in the epoch and by the sample; and of the samples that follow each other."""
    ids, _ = drawn_ids(Chances(np.ones(16)), 160_000, seeded(key))
    by_place = np.stack([np.bincount(some, minlength=16) for some in np.split(ids, 16)])
    assert abs(chi_square(by_place, np.full((16, 16), 625.0))) < 5
    pairs = np.bincount(16 * ids[:-1] + ids[1:], minlength=256)
    assert abs(chi_square(pairs, np.full(256, (len(ids) - 1) / 256))) < 5


def test_draws_are_independent_and_not_systematic() -> None:
    """The variance of a count is that of a binomial distribution; points at equal distances would make it smaller than 1."""
    times, k = depth(400, 4000), 100
    counts = [
        int((drawn_ids(Chances(np.array([1.0, 3.0])), k, seeded(key))[0] == 0).sum())
        for key in range(times)
    ]
    assert np.var(counts) == pytest.approx(k * 0.25 * 0.75, rel=5 * math.sqrt(2 / times))
    assert np.mean(counts) == pytest.approx(k * 0.25, abs=5 * math.sqrt(k * 0.25 * 0.75 / times))
