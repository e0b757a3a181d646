import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher_lab.comparison.statistics import ALPHA, LEVEL, Paired, findings, holm

T_2, T_4 = (
    4.302652729911275,
    2.7764451051977987,
)  # 97.5 % quantiles of Student's t with 2 and 4 degrees of freedom
MARGIN = 0.005
COMPARISONS = depth(100, 200)
SLACK = 0.05


def test_the_interval_by_hand():
    paired = Paired.of([0.01, 0.03, 0.02])
    half = T_2 * 0.01 / math.sqrt(3)
    assert (paired.n, paired.mean, paired.spread) == (3, pytest.approx(0.02), pytest.approx(0.01))
    assert (paired.low, paired.high) == (pytest.approx(0.02 - half), pytest.approx(0.02 + half))


def test_one_difference_has_no_interval_and_tells_nothing():
    paired = Paired.of([0.01])
    assert (paired.low, paired.high, paired.spread, paired.decides) == (None, None, None, False)
    assert paired.chance(-1.0) == 1.0 and paired.seeds_for(0.1) is None


@pytest.mark.parametrize("differences", [[0.02, 0.021], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3]])
def test_two_seeds_and_no_spread_tell_nothing(differences):
    assert not Paired.of(differences).decides
    assert findings({"m": Paired.of(differences)}, 10.0) == {"m": "unclear"}


def test_chances_agree_with_the_interval():
    paired = Paired.of([0.1, 0.4, 0.2, 0.3, 0.0])
    assert paired.chance(paired.low) == pytest.approx(ALPHA) and paired.chance_below(
        paired.high
    ) == pytest.approx(ALPHA)
    assert paired.chance(paired.mean) == pytest.approx(0.5)
    t = paired.mean / (paired.spread / math.sqrt(5))
    assert (paired.chance(0.0) < ALPHA) == (t > T_4)


@settings(max_examples=depth(60, 100))
@given(st.dictionaries(st.integers(), st.floats(0, 1), max_size=8))
def test_holm_against_its_definition(chances):
    corrected = holm(chances)
    for level in (0.01, 0.025, 0.05, 0.3):
        rejected = set()
        for position, key in enumerate(sorted(chances, key=chances.__getitem__)):
            if chances[key] * (len(chances) - position) > level:
                break
            rejected.add(key)
        assert {key for key, chance in corrected.items() if chance <= level} == rejected
    assert list(corrected) == list(chances) and all(
        corrected[key] >= chances[key] for key in chances
    )


def drawn(truth, seeds, generator):
    return Paired.of(generator.normal(truth, 0.003, seeds).tolist())


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("truth", [-MARGIN - 1e-6, -MARGIN + 1e-6, 0.0])
def test_simulated_comparisons_err_as_seldom_as_they_say(truth, seeds):
    generator = np.random.default_rng(7)
    simulated = [drawn(truth, seeds, generator) for _ in range(COMPARISONS)]
    said = [findings({"m": paired}, MARGIN)["m"] for paired in simulated]
    covered = np.mean([paired.low <= truth <= paired.high for paired in simulated])
    assert abs(covered - LEVEL) <= SLACK
    if truth < -MARGIN:
        assert said.count("no loss") / COMPARISONS <= ALPHA + SLACK
    if truth == 0.0:
        assert said.count("loses") / COMPARISONS <= ALPHA + SLACK


@pytest.mark.parametrize(("truth", "wrong"), [(-MARGIN, "no loss"), (0.0, "loses")])
def test_eight_methods_at_once_err_no_more_often_together(truth, wrong):
    generator = np.random.default_rng(8)
    erred = 0
    for _ in range(COMPARISONS):
        erred += (
            wrong in findings({m: drawn(truth, 5, generator) for m in range(8)}, MARGIN).values()
        )
    assert erred / COMPARISONS <= ALPHA + SLACK


def test_without_correction_eight_methods_would_err():
    generator = np.random.default_rng(8)
    erred = 0
    for _ in range(COMPARISONS):
        erred += any(
            findings({m: drawn(-MARGIN, 5, generator)}, MARGIN)[m] == "no loss" for m in range(8)
        )
    assert erred / COMPARISONS > ALPHA + SLACK


@pytest.mark.parametrize(("truth", "right"), [(0.0, "no loss"), (-4 * MARGIN, "loses")])
def test_clear_cases_are_found(truth, right):
    generator = np.random.default_rng(9)
    said = [findings({"m": drawn(truth, 10, generator)}, MARGIN)["m"] for _ in range(COMPARISONS)]
    assert said.count(right) / COMPARISONS > 0.9


@pytest.mark.parametrize("distance", [0.002, 0.005, 0.02])
def test_so_many_seeds_would_do(distance):
    generator = np.random.default_rng(10)
    sample = Paired(5, 0.0, None, None, 0.003)
    seeds = sample.seeds_for(distance)
    shown = [
        drawn(0.0, seeds, generator).chance(-distance) <= ALPHA for _ in range(depth(400, 1000))
    ]
    assert np.mean(shown) >= 0.76
    if seeds > 3:
        fewer = [
            drawn(0.0, seeds - 1, generator).chance(-distance) <= ALPHA
            for _ in range(depth(400, 1000))
        ]
        assert np.mean(fewer) <= 0.84


def test_a_correction_takes_more_seeds():
    sample = Paired(5, 0.0, None, None, 0.003)
    assert (
        sample.seeds_for(0.005) < sample.seeds_for(0.005, among=8) < 2 * sample.seeds_for(0.005) + 3
    )


def test_no_number_where_none_would_do():
    assert Paired(5, 0.0, None, None, 1.0).seeds_for(0.001) is None
    assert Paired(5, 0.0, None, None, 1.0).seeds_for(0.0) is None
