"""Intervals that are valid at every look, by which a comparison stops when every verdict is decided."""

import numpy as np
import pytest
from scipy import integrate, stats

from thresher_lab.comparison.compare import is_decided
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import (
    ALPHA,
    LEAST_SEEDS,
    PRIOR_WIDTH,
    PairedAtAnyLook,
    against_controls,
    chance_at_any_look,
    findings,
    t_at_any_look,
)
from thresher_lab.comparison.summary import conclude, interval_sentences, summarize, unfinished

REPETITIONS = 4000
MOST = 30
MARGIN = 0.5


def t_at_looks(differences, limit=0.0):
    """Returns the t-statistics after 3, 4, ... differences, for a mean of `limit`, and these numbers."""
    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(axis=1) / n
    squares = (differences**2).cumsum(axis=1) - n * mean**2
    later = slice(LEAST_SEEDS - 1, None)
    error = np.sqrt(squares[:, later] / (n - 1)[later] / n[later])
    return (mean[:, later] - limit) / error, n[later]


def shown(differences, limit=0.0):
    """Returns whether each look shows the mean to be above the limit, and to be below it."""
    t, n = t_at_looks(differences, limit)
    is_small = chance_at_any_look(t, n) / 2 <= ALPHA
    return (t > 0) & is_small, (t < 0) & is_small


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_wrong_verdicts_are_rare_although_it_looks_after_every_seed(spread):
    noise = spread * np.random.default_rng(0).standard_normal((REPETITIONS, MOST))
    better, worse = shown(noise)
    _, loses = shown(noise, -MARGIN)
    equal = (better | worse).any(axis=1)
    assert equal.mean() <= 0.05 and loses.any(axis=1).mean() <= 0.05
    no_loss, loses = shown(noise - MARGIN, -MARGIN)
    assert (no_loss | loses).any(axis=1).mean() <= 0.05
    # Student's intervals, looked at as often, would be wrong far more often.
    t, n = t_at_looks(noise)
    assert (np.abs(t) > stats.t.ppf(1 - ALPHA, n - 1)).any(axis=1).mean() > 0.2


def test_findings_are_those_of_the_simulation():
    rng = np.random.default_rng(1)
    differences = 0.5 * rng.standard_normal((100, 8)) + rng.choice([-1.5, 0.0, 1.0], (100, 1))
    above, below = shown(differences, -MARGIN)
    better, worse = shown(differences)
    for row, values in enumerate(differences):
        for n in range(LEAST_SEEDS, 9):
            at = (row, n - LEAST_SEEDS)
            paired = PairedAtAnyLook.of(values[:n])
            finding = findings({"m": paired}, MARGIN)["m"]
            assert (finding == "no loss", finding == "loses") == (above[at], below[at])
            against = against_controls({"m": paired}, 1e-9)["m"]
            assert (against == "better", against == "worse") == (better[at], worse[at])
            assert (paired.low > -MARGIN, paired.high < -MARGIN) == (above[at], below[at])
    assert above.any() and below.any() and better.any() and worse.any()


@pytest.mark.parametrize(("n", "t"), [(3, 20.0), (5, 4.0), (8, -5.0), (30, 4.0)])
def test_the_chance_is_a_ratio_of_likelihoods(n, t):
    """Student's density over the mean of noncentral ones, with effects from the prior."""

    def density(effect):
        noncentral = stats.nct.pdf(t, n - 1, effect * np.sqrt(n))
        return noncentral * stats.norm.pdf(effect, scale=PRIOR_WIDTH)

    mixed, _ = integrate.quad(density, -30, 30, points=[0, t / np.sqrt(n)], limit=500)
    chance = chance_at_any_look(t, n)
    assert chance == pytest.approx(stats.t.pdf(t, n - 1) / mixed, rel=1e-6)
    assert t_at_any_look(n, float(chance)) == pytest.approx(abs(t))


def test_too_few_seeds_have_no_interval():
    assert np.isinf(t_at_any_look([2, 3], 0.05)).tolist() == [True, False]
    assert PairedAtAnyLook.of([0.1]).low is None
    paired = PairedAtAnyLook.of([0.1, 0.2])
    assert paired.low is None and paired.spread and paired.chance(0.0) == 1.0


def test_the_seeds_that_would_decide():
    """With as many the interval has the length that is asked for, and with one fewer it is longer."""
    paired = PairedAtAnyLook.of([0.1, 0.4, 0.2, 0.3])
    seeds = paired.seeds_for(0.1)
    half = (
        paired.spread * t_at_any_look([seeds - 1, seeds], 2 * ALPHA) / np.sqrt([seeds - 1, seeds])
    )
    assert half[1] <= 0.1 < half[0]
    assert paired.seeds_for(0.1, among=3) > seeds and paired.seeds_for(1e-4) is None


def row(finding, control_of=None, **against):
    against = {
        SAME_TIME if kind == "time" else kind: {"finding": of} for kind, of in against.items()
    }
    return {"finding": finding, "control_of": control_of, "against": against}


@pytest.mark.parametrize(
    ("decided", "rows"),
    [
        (True, [row("no loss", time="better", uniform="unclear"), row("loses", time="worse")]),
        (True, [row("loses"), row("unclear", control_of="m"), row(None, time=None)]),
        (False, [row("no loss", time="unclear")]),
        (False, [row("loses", time="worse"), row("unclear", time="worse")]),
    ],
)
def test_what_is_decided(decided, rows):
    assert is_decided([row(None), *rows]) is decided


def test_the_sentences_say_which_intervals_they_are():
    values = {"full": 0.9, "m": 0.88}
    runs = [
        {
            "method": method,
            "control_of": None,
            "seed": seed,
            "metric": {"name": "accuracy", "value": value + seed**2 / 1e5 * (method == "m")},
            "cost": {"ratio": 0.5},
        }
        for method, value in values.items()
        for seed in range(4)
    ]
    rows = summarize(runs, 0.5, any_look=True)
    results = {"runs": runs, "margin": 0.5, "summary": rows, "until": "decided"}
    assert rows[1]["verdict"].startswith("loses more than the margin of 0.5 points")
    assert (
        conclude(results)
        .sentences[1]
        .startswith(
            "The closest method is m: loses more than the margin of 0.5 points. Its CPU time is unknown."
        )
    )
    assert "valid at every look" in interval_sentences(results)[0]
    assert interval_sentences({}) == []
    [said] = unfinished(results | {"running": {"finished": 3, "runs": 9}})
    assert said == "Not finished: 3 of at most 9 runs. It stops when every verdict is decided."
