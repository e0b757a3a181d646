"""Draws with replacement by hand: chances, draws, weights, plans."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from thresher.methods._base import Chances, drawn_ids, drawn_plan, full_plan, unbiased_weights
from thresher.rng import seeded
from thresher.selection import CHUNK

NAN = math.nan


@pytest.mark.parametrize(
    ("importance", "chances"),
    [
        ([1, 1, 2, 4], [0.125, 0.125, 0.25, 0.5]),
        ([0, 3, 1], [0, 0.75, 0.25]),
        ([0, 0, 0, 0], [0.25] * 4),
        ([-0.0, 0.0], [0.5, 0.5]),
        ([5], [1]),
        ([0], [1]),
        ([NAN, 1, math.inf, 3, -math.inf], [NAN, 0.25, NAN, 0.75, NAN]),
        ([-1, 1, 1], [NAN, 0.5, 0.5]),
        ([NAN, 0, 0], [NAN, 0.5, 0.5]),
        ([NAN, -1], [NAN, NAN]),
        ([], []),
    ],
)
def test_probabilities(importance: list[float], chances: list[float]) -> None:
    for dtype in (np.float32, np.float64):
        given = Chances(np.array(importance, dtype))
        found = given.of(slice(None))
        assert (
            found.dtype == np.float64
            and given.n == len(chances)
            and given.known == np.count_nonzero(~np.isnan(chances))
        )
        assert [*np.concatenate([*given.unknown(), np.empty(0)])] == [
            *np.flatnonzero(np.isnan(chances))
        ]
        np.testing.assert_array_equal(found, chances)


@pytest.mark.parametrize("scale", [1e308, 1e-300, 5e-324])
def test_neither_huge_nor_tiny_importances_lose_their_ratio(scale: float) -> None:
    np.testing.assert_allclose(
        Chances(np.array([1.0, 1.0, 0.0, -1.0]) * scale).of(np.arange(3)), [0.5, 0.5, 0]
    )


def test_chances_of_float32_losses_are_summed_in_double_precision() -> None:
    """In float32 a sum of 2^24 ones stops growing."""
    importance = np.ones(2**17, np.float32)
    importance[0] = 2**24
    found = Chances(importance).of(slice(None))
    assert found[1:].sum() == pytest.approx((2**17 - 1) / (2**24 + 2**17 - 1), rel=1e-12)


def test_draws_follow_the_chances() -> None:
    chances, k = np.array([0.0, 0.1, 0.0, 0.6, 0.3, 0.0]), 40_000
    drawn, distinct = drawn_ids(Chances(chances), k, seeded(1))
    assert distinct == 3 and drawn.dtype == np.int64 and drawn.shape == (k,)
    share = np.bincount(drawn, minlength=6) / k
    assert (share[[0, 2, 5]] == 0).all()
    assert (np.abs(share - chances) <= 5 * np.sqrt(chances * (1 - chances) / k)).all()


def test_draws_do_not_depend_on_each_other() -> None:
    drawn, _ = drawn_ids(Chances(np.array([0.5, 0.5])), 40_000, seeded(2))
    assert np.mean(drawn[1:] == drawn[:-1]) == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / 40_000))


def at(importance: list[float] | np.ndarray, points: list[float]) -> list[int]:
    return [
        int(i)
        for some in Chances(np.asarray(importance, np.float64)).at(np.array(points))
        for i in some
    ]


BELOW_ONE = float(np.nextafter(1.0, 0.0))


def test_the_ends_of_the_distribution() -> None:
    """What is drawn at 0 and just below 1 has a chance, whatever lies before and behind."""
    assert at([0, 0.25, 0, 0.75, 0, 0], [0.0, np.nextafter(0.25, 0), 0.25, BELOW_ONE]) == [
        1,
        1,
        3,
        3,
    ]
    assert at([0, 0, 0], [0.0, 0.5, BELOW_ONE]) == [0, 1, 2]
    for n in range(2, 300):
        assert at(np.append(np.full(n, 1 / n), 0.0), [0.0, BELOW_ONE]) == [0, n - 1]


def test_a_piece_without_a_chance_and_one_with_all_of_them() -> None:
    importance = np.zeros(4 * CHUNK + 5)
    importance[:CHUNK], importance[-5:] = NAN, NAN
    importance[[2 * CHUNK, 3 * CHUNK - 1]] = 1, 3
    points = (np.arange(3 * CHUNK) + 0.5) / (3 * CHUNK)
    drawn = [some.copy() for some in Chances(importance).at(points)]
    assert max(map(len, drawn)) <= CHUNK
    ids, counts = np.unique(np.concatenate(drawn), return_counts=True)
    assert ids.tolist() == [2 * CHUNK, 3 * CHUNK - 1] and counts.tolist() == [
        3 * CHUNK // 4,
        9 * CHUNK // 4,
    ]


def test_more_samples_than_multinomial_takes() -> None:
    importance = np.zeros(2**24 + 3, np.float32)
    importance[[0, 2**24 + 1]] = 0.5
    assert set(drawn_ids(Chances(importance), 50, seeded(0))[0].tolist()) == {0, 2**24 + 1}


@pytest.mark.parametrize(
    ("chances", "n", "weights"),
    [
        ([0.125, 0.125, 0.25, 0.5], 4, [2, 2, 1, 0.5]),
        ([0.25, 0.25], 8, [0.5, 0.5]),
        ([0.5, NAN, 0.5, NAN], 4, [1, 1, 1, 1]),
        ([0.25, NAN], 4, [2, 0.5]),
        ([1.0], 1, [1]),
    ],
)
def test_unbiased_weights(chances: list[float], n: int, weights: list[float]) -> None:
    draws = sum(not math.isnan(chance) for chance in chances)
    found = unbiased_weights(np.array(chances), n, draws=draws, size=len(chances))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(weights))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_expected_mean_of_an_epoch_is_the_mean_of_all(k: int) -> None:
    """Added up over all outcomes of k draws, not estimated; some samples have no chance."""
    loss = np.array([0.5, 2.0, 1.0, 4.0, 8.0, 3.0])
    chances = Chances(np.array([1, 2, NAN, 1, 4, NAN])).of(slice(None))
    mean = 0.0
    for drawn in product((0, 1, 3, 4), repeat=k):
        ids = np.array([2, 5, *drawn])
        mean += np.prod(chances[[*drawn]]) * np.mean(
            unbiased_weights(chances[ids], 6, draws=k, size=k + 2) * loss[ids]
        )
    assert mean == pytest.approx(loss.mean(), rel=1e-6)


def test_samples_without_a_chance_are_there_once_and_anywhere() -> None:
    chances = Chances(np.array([NAN, 1.0, NAN, 1.0, 1.0, 1.0]))
    places = []
    for key in range(300):
        plan = drawn_plan(chances, 1.0, seeded(key), weighted=False)
        ids = plan.ids.tolist()
        assert len(ids) == 6 and ids.count(0) == ids.count(2) == 1
        places.append(ids.index(0))
        assert plan.drawn and plan.weights is None and plan.ids.dtype == torch.int64
        assert plan.facts["distinct"] == len(set(ids)) / 6
    assert np.bincount(places, minlength=6).min() > 25


@pytest.mark.parametrize(
    ("keep", "n", "draws"), [(1.0, 7, 7), (0.5, 7, 3), (0.29, 100, 29), (0.01, 7, 1)]
)
def test_counts(keep: float, n: int, draws: int) -> None:
    plan = drawn_plan(Chances(np.arange(1.0, n + 1)), keep, seeded(3), weighted=True)
    assert len(plan.ids) == draws
    assert plan.facts["scheduled_fraction"] == pytest.approx(1 - keep)
    assert plan.facts["actual_fraction"] == pytest.approx(1 - draws / n)


@pytest.mark.parametrize(("unknown", "draws"), [(10, 40), (20, 30), (50, 12), (80, 5), (99, 1)])
def test_samples_without_a_chance_take_the_place_of_half_of_the_draws_at_most(
    unknown: int, draws: int
) -> None:
    """One draw for half of the samples would weigh as much as all of them."""
    importance = np.ones(100)
    importance[:unknown] = NAN
    plan = drawn_plan(Chances(importance), 0.5, seeded(3), weighted=True)
    assert len(plan.ids) == unknown + draws and plan.weights is not None
    drawn = plan.weights[plan.ids >= unknown]
    assert drawn.max() <= 2 * len(plan.ids) / 100 / 0.4


def test_nothing_to_draw_is_everything() -> None:
    plan = drawn_plan(Chances(np.full(3, NAN)), 0.5, seeded(0), weighted=True)
    assert plan.ids.tolist() == [0, 1, 2] and not plan.drawn and plan.weights is None


def test_everything() -> None:
    plan = full_plan(4)
    assert plan.ids.tolist() == [0, 1, 2, 3] and plan.refresh is None and not plan.drawn
    assert dict(plan.facts) == {"scheduled_fraction": 0, "actual_fraction": 0}
