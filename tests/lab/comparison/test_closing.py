"""What to do after a comparison."""

import pytest

from thresher_lab.comparison.summary import NOTHING_JUDGED, conclude, summarize

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
NO_PICK = "No method is shown to lose at most 0.5 points and to beat its controls."


NO_LOSS = "no loss within the margin of 0.5 points"
NUMBERS = (
    "It took 0.59 of the CPU time of full training. "
    "Difference from full training: -0.02 points [-0.04, +0.00]."
)


@pytest.mark.parametrize(
    ("controls", "verdict"),
    [
        ({}, NO_LOSS),
        ({"uniform": 0.05, "smaller": 0.04}, f"{NO_LOSS}; better than random and smaller batches"),
        (
            {"smaller": 0.05, "placebo": 0.0002},
            f"{NO_LOSS}; better than smaller batches; no better than permuted signals",
        ),
    ],
)
def test_a_method_without_loss_that_beats_its_controls(controls, verdict):
    found = conclude(results_of(SMALL, controls))
    uncontrolled = "" if controls else " It has no control with a verdict."
    assert found.sentences == [f"Use m: {verdict}.", f"{NUMBERS}{uncontrolled}"]
    assert found.pick["method"] == "m"


@pytest.mark.parametrize(
    ("controls", "pick", "verdict"),
    [
        (
            {"uniform": 0.05, "smaller": 0.0002},
            "smaller@0.500 (smaller batches)",
            f"{NO_LOSS}; better than random; no better than smaller batches",
        ),
        (
            dict.fromkeys(("uniform", "smaller", "shorter"), 0.0002),
            "shorter@0.500 (fewer epochs)",
            f"{NO_LOSS}; no better than random, smaller batches and fewer epochs",
        ),
        (
            {"smaller": -0.02},
            "smaller@0.500 (smaller batches)",
            f"{NO_LOSS}; worse than smaller batches",
        ),
    ],
)
def test_a_control_that_does_as_well(controls, pick, verdict):
    found = conclude(results_of(SMALL, controls))
    assert found.sentences == [
        f"Use {pick}: it loses at most 0.5 points.",
        f"The closest method is m: {verdict}. {NUMBERS}",
    ]
    assert found.pick["method"] == pick.partition(" ")[0]


def test_a_method_that_loses():
    found = conclude(results_of((0.03, 0.031, 0.032), {"uniform": 0.05}))
    assert found.pick is None
    assert found.sentences == [
        NO_PICK,
        "The closest method is m: loses; better than random. It took 0.59 of the CPU time of full training. "
        "Difference from full training: -3.10 points [-3.35, -2.85].",
    ]


@pytest.mark.parametrize(
    ("losses", "verdict", "sentence"),
    [
        (
            (0.0, 0.01, 0.005),
            "not enough seeds to tell (about 10 would do)",
            "About 10 seeds (--seeds 0-9) would decide, a rough estimate from 3.",
        ),
        (
            (0.001,),
            "not enough seeds to tell: 1 of at least 3",
            "Too few seeds to tell: 1. Repeat the command with more.",
        ),
        (
            (0.0, 0.01),
            "not enough seeds to tell: 2 of at least 3",
            "About 18 seeds (--seeds 0-17) would decide, a rough estimate from 2.",
        ),
    ],
)
def test_what_would_decide(losses, verdict, sentence):
    found = conclude(results_of(losses))
    assert found.pick is None and found.sentences[2:] == [sentence]
    assert found.sentences[1].startswith(f"The closest method is m: {verdict}. It took 0.59 of")


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
    assert conclude(several((0.03, 0.031, 0.032), (0.02, 0.021, 0.022))).sentences == [
        NO_PICK,
        "The closest method is m2: loses. It took 0.59 of the CPU time of full training. "
        "Difference from full training: -2.10 points [-2.35, -1.85]. "
        "It has no control with a verdict.",
    ]


def test_another_device_has_the_time_on_the_clock_and_an_unknown_time_is_said():
    on_cuda = conclude(results_of(SMALL) | {"device": "cuda"})
    assert "took 0.59 of the wall time" in on_cuda.sentences[1]
    results = results_of(SMALL)
    results["summary"][1]["cpu_ratio"] = None
    assert conclude(results).sentences[1].startswith("Its CPU time is unknown. Difference from ")


def test_without_verdicts_there_is_nothing_to_pick():
    runs = [run_of("full", seed, 0.9, 1.0) for seed in range(3)]
    nothing = conclude({"runs": runs, "margin": 0.5, "summary": summarize(runs, 0.5)})
    assert nothing.sentences == [NOTHING_JUDGED]


def test_a_metric_that_is_no_share_is_in_its_own_unit():
    advice, measured = conclude(results_of(SMALL, scale=40, margin=1.0)).sentences
    assert advice == "Use m: no loss within the margin of 1." and ": -0.008 [" in measured
