"""What to do after a comparison."""

import pytest

from thresher_lab.comparison.summary import NOTHING_JUDGED, closing, conclude, summarize

CPU_TIMES = {
    "full": 1.0,
    "m": 0.59,
    "smaller": 0.55,
    "shorter": 0.49,
    "uniform": 0.52,
    "placebo": 0.6,
}


def run_of(method, seed, value, ratio, control_of=None, times=CPU_TIMES):
    found = {
        "method": method,
        "control_of": control_of,
        "seed": seed,
        "metric": {"name": "accuracy", "value": value},
    }
    seconds = times.get(method.partition("@")[0], 1.0)
    return found | {"wall_s": seconds, "cpu_s": seconds, "cost": {"ratio": ratio}, "history": []}


def results_of(
    losses, controls=None, *, cost=0.5, margin=0.5, scale=1.0, spread=0.0002, times=None
):
    """Results of one method, and of its controls, by their losses to full training; `times` replace those of `CPU_TIMES`."""
    seeds, took = len(losses), CPU_TIMES | (times or {})
    runs = [run_of("full", seed, 0.9 * scale, 1.0, times=took) for seed in range(seeds)]
    runs += [
        run_of("m", seed, scale * (0.9 - loss), cost, times=took)
        for seed, loss in enumerate(losses)
    ]
    for kind, less in (controls or {}).items():
        wobble = [spread * (seed - (seeds - 1) / 2) for seed in range(seeds)]
        values = [scale * (0.9 - less - one) for one in wobble]
        runs += [
            run_of(f"{kind}@{cost:.3f}", seed, value, cost, "m", took)
            for seed, value in enumerate(values)
        ]
    return {"runs": runs, "margin": margin, "summary": summarize(runs, margin)}


SMALL = (0.0002, 0.0001, 0.0003)


NO_LOSS = "no loss within the margin of 0.5 points"
NUMBERS = (
    "It took 0.59 of the CPU time of full training. "
    "Difference from full training: -0.02 points [-0.04, +0.00]."
)


@pytest.mark.parametrize(
    ("controls", "pick", "sentence"),
    [
        ({}, "m", f"m is the pick: {NO_LOSS}. {NUMBERS} It has no control with a verdict."),
        (
            {"uniform": 0.05, "smaller": 0.04},
            "m",
            f"m is the pick: {NO_LOSS}; better than random and smaller batches. {NUMBERS}",
        ),
        (
            {"smaller": 0.05, "placebo": 0.0002},
            "m",
            f"m is the pick: {NO_LOSS}; better than smaller batches; no better than permuted signals. {NUMBERS}",
        ),
        (
            {"uniform": 0.05, "smaller": 0.0002},
            "smaller@0.500",
            f"m is not picked: {NO_LOSS}; better than random; no better than smaller batches. {NUMBERS} The pick is "
            "smaller@0.500 (smaller batches), which loses no more than 0.5 points.",
        ),
        (
            dict.fromkeys(("uniform", "smaller", "shorter"), 0.0002),
            "shorter@0.500",
            f"m is not picked: {NO_LOSS}; no better than random, smaller batches and fewer epochs. {NUMBERS} The pick is "
            "shorter@0.500 (fewer epochs), which loses no more than 0.5 points.",
        ),
        (
            {"smaller": -0.02},
            "smaller@0.500",
            f"m is not picked: {NO_LOSS}; worse than smaller batches. {NUMBERS} The pick is smaller@0.500 (smaller batches), "
            "which loses no more than 0.5 points.",
        ),
    ],
)
def test_a_method_without_loss(controls, pick, sentence):
    found = conclude(results_of(SMALL, controls))
    assert found.sentences == [sentence]
    assert found.pick["method"] == pick


def test_a_method_that_loses():
    found = conclude(results_of((0.03, 0.031, 0.032), {"uniform": 0.05}))
    assert found.pick is None
    assert found.sentences == [
        "m is not picked: loses; better than random. It took 0.59 of the CPU time of full training. "
        "Difference from full training: -3.10 points [-3.35, -2.85]."
    ]


@pytest.mark.parametrize(
    ("losses", "verdict", "sentence"),
    [
        (
            (0.0, 0.01, 0.005),
            "not enough seeds to tell (about 10 would do)",
            "About 10 seeds (--seeds 0-9) would decide, by a rough estimate from 3.",
        ),
        (
            (0.001,),
            "not enough seeds to tell: 1 of at least 3",
            "Too few seeds to tell (1). Repeat the command with more.",
        ),
        (
            (0.0, 0.01),
            "not enough seeds to tell: 2 of at least 3",
            "About 18 seeds (--seeds 0-17) would decide, by a rough estimate from 2.",
        ),
    ],
)
def test_what_would_decide(losses, verdict, sentence):
    found = conclude(results_of(losses))
    assert found.pick is None and found.sentences[1:] == [sentence]
    assert found.sentences[0].startswith(f"m is not picked: {verdict}. It took 0.59 of")


def several(*losses):
    """Results of several methods, by their losses."""
    first, *others = [results_of(of)["runs"] for of in losses]
    for number, runs in enumerate(others):
        first += [run | {"method": f"m{number + 2}"} for run in runs if run["method"] == "m"]
    return {"runs": first, "margin": 0.5, "summary": summarize(first, 0.5)}


def test_of_several_methods_the_quickest_without_loss_is_picked():
    results = several(SMALL, SMALL, (0.03, 0.031, 0.032))
    results["summary"][2]["cpu_ratio"] = 0.4
    assert conclude(results).pick["method"] == "m2"


def test_of_several_methods_none_of_which_is_shown_to_be_better():
    assert closing(several((0.03, 0.031, 0.032), (0.02, 0.021, 0.022))) == [
        "No method is shown to lose no more than 0.5 points and to be better than its controls. The closest is m2: loses. "
        "It took 0.59 of the CPU time of full training. Difference from full training: -2.10 points [-2.35, -1.85]. "
        "It has no control with a verdict."
    ]


def test_another_device_has_the_time_on_the_clock_and_an_unknown_time_is_said():
    assert "took 0.59 of the wall time" in closing(results_of(SMALL) | {"device": "cuda"})[0]
    results = results_of(SMALL)
    results["summary"][1]["cpu_ratio"] = None
    assert "took an unknown share of the CPU time" in closing(results)[0]


def test_without_verdicts_there_is_nothing_to_pick():
    runs = [run_of("full", seed, 0.9, 1.0) for seed in range(3)]
    assert closing({"runs": runs, "margin": 0.5, "summary": summarize(runs, 0.5)}) == [
        NOTHING_JUDGED
    ]


def test_a_metric_that_is_no_share_is_in_its_own_unit():
    sentence = closing(results_of(SMALL, scale=40, margin=1.0))[0]
    assert "no loss within the margin of 1. " in sentence and ": -0.008 [" in sentence
