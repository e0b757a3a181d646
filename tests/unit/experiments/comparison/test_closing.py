"""What to do after a comparison."""

from statistics import mean

import pytest

from thresher.experiments.comparison.summary import closing, summarise


def run_of(method, seed, value, ratio, control_of=None):
    found = {"method": method, "control_of": control_of, "seed": seed, "metric": {"name": "accuracy", "value": value}}
    return found | {"wall_s": 1.0, "cpu_s": 1.0, "cost": {"ratio": ratio}, "history": []}


def results_of(losses, controls=None, *, cost=0.5, margin=0.5, scale=1.0, spread=0.0002):
    """Results of one method, and of its controls, by their losses to full training."""
    seeds = len(losses)
    runs = [run_of("full", seed, 0.9 * scale, 1.0) for seed in range(seeds)]
    runs += [run_of("m", seed, scale * (0.9 - loss), cost) for seed, loss in enumerate(losses)]
    for kind, less in (controls or {}).items():
        wobble = [spread * (seed - (seeds - 1) / 2) for seed in range(seeds)]
        runs += [run_of(f"{kind}@{cost:.3f}", seed, scale * (0.9 - less - wobble[seed]), cost, "m") for seed in range(seeds)]
    return {"runs": runs, "margin": margin, "summary": summarise(runs, margin)}


SMALL = (0.0002, 0.0001, 0.0003)


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        (
            {},
            [
                "Our pick: m. It loses no more than 0.5 points at 0.500 of the cost of full training.",
                "No controls were trained",
            ],
        ),
        (
            {"uniform": 0.05, "smaller": 0.04},
            ["at 0.500 of the cost of full training, and is better than all of its controls."],
        ),
        (
            {"uniform": 0.05, "smaller": 0.0002},
            ["Our pick: smaller@0.500, smaller batches. m loses no more than", "is simpler"],
        ),
        ({"uniform": 0.0002, "smaller": 0.05}, ["Our pick: uniform@0.500, random. m loses"]),
        ({"smaller": 0.05, "placebo": 0.0002}, ["Our pick: m.", "it is not told from permuted signals"]),
        ({"placebo": 0.0002}, ["Our pick: m.", "It is not shown to be better than permuted signals of the same cost."]),
    ],
)
def test_a_method_without_loss(controls, expected):
    text = " ".join(closing(results_of(SMALL, controls)))
    assert all(part in text for part in expected), text


def test_of_several_methods_the_one_that_beats_its_controls():
    results = results_of(SMALL, {"smaller": 0.04})
    cheaper = [one | {"method": "n", "cost": {"ratio": 0.3}} for one in results["runs"] if one["method"] == "m"]
    runs = results["runs"] + [one | {"metric": one["metric"] | {"value": one["metric"]["value"] - 0.0001}} for one in cheaper]
    assert "Our pick: m." in closing(results | {"runs": runs, "summary": summarise(runs, 0.5)})[0]


def test_a_method_that_is_worse_than_a_control_is_no_pick():
    [said] = closing(results_of((0.0042, 0.0041, 0.0043), {"smaller": 0.0}))
    assert said == "Nothing to pick. No loss is shown for m, but nothing is saved, or a control of the same cost is better."
    assert "Nothing to pick" in closing(results_of(SMALL, cost=1.0))[0]


def test_what_would_decide():
    [said] = closing(results_of((0.0, 0.01, 0.005)))
    assert said.startswith("Cannot tell yet: from seed to seed, the difference of m to full training ranges over 1 point. ")
    needed = results_of((0.0, 0.01, 0.005))["summary"][1]["seeds_needed"]
    assert needed is None or f"About {needed} seeds" in said
    assert "It is shown already that m loses no more than 2 points: use --margin 2 if such a loss does not matter." in said
    of_two = results_of((0.0, 0.01, 0.005), margin=2.0)["summary"]
    assert of_two[1]["finding"] == "no loss"


def test_seeds_are_listed_as_the_option_takes_them():
    found = closing(results_of((0.004, 0.0001, 0.0035)))[0]
    assert "(--seeds 0,1,2,3" in found


def test_one_seed_cannot_tell():
    assert closing(results_of((0.001,))) == [
        "Cannot tell yet with 1 seed. Repeat the command with more of them, such as --seeds 0,1,2,3,4."
    ]


def test_everything_loses():
    [said] = closing(results_of((0.03, 0.031, 0.032)))
    assert said.startswith(
        "Nothing to pick: every method with a verdict loses. The smallest loss is that of m, 3.1 points at 0.500 of the cost."
    )


def test_a_metric_that_is_no_share_has_no_points():
    results = results_of((0.0, 0.01, 0.005), scale=40, margin=0.01)
    [said] = closing(results)
    assert "point" not in said and "use --margin 0." in said
    assert mean(run["metric"]["value"] for run in results["runs"]) > 1


def test_full_training_alone():
    runs = [run_of("full", seed, 0.9, 1.0) for seed in range(3)]
    assert closing({"runs": runs, "margin": 0.5, "summary": summarise(runs, 0.5)}) == [
        "There is nothing to pick from: no method has a verdict."
    ]
