"""What to do after a comparison."""

from statistics import mean

import pytest

from thresher_lab.comparison.summary import closing, conclude, summarize

CPU_TIMES = {"full": 1.0, "m": 0.59, "smaller": 0.55, "shorter": 0.49, "uniform": 0.52, "placebo": 0.6}


def run_of(method, seed, value, ratio, control_of=None, times=CPU_TIMES):
    found = {"method": method, "control_of": control_of, "seed": seed, "metric": {"name": "accuracy", "value": value}}
    seconds = times.get(method.partition("@")[0], 1.0)
    return found | {"wall_s": seconds, "cpu_s": seconds, "cost": {"ratio": ratio}, "history": []}


def results_of(losses, controls=None, *, cost=0.5, margin=0.5, scale=1.0, spread=0.0002, times=None):
    """Results of one method, and of its controls, by their losses to full training; `times` replace those of `CPU_TIMES`."""
    seeds, took = len(losses), CPU_TIMES | (times or {})
    runs = [run_of("full", seed, 0.9 * scale, 1.0, times=took) for seed in range(seeds)]
    runs += [run_of("m", seed, scale * (0.9 - loss), cost, times=took) for seed, loss in enumerate(losses)]
    for kind, less in (controls or {}).items():
        wobble = [spread * (seed - (seeds - 1) / 2) for seed in range(seeds)]
        values = [scale * (0.9 - less - one) for one in wobble]
        runs += [run_of(f"{kind}@{cost:.3f}", seed, value, cost, "m", took) for seed, value in enumerate(values)]
    return {"runs": runs, "margin": margin, "summary": summarize(runs, margin)}


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
            ["at 0.500 of the cost of full training, and is better than random and smaller batches of the same cost."],
        ),
        (
            {"uniform": 0.05, "smaller": 0.0002},
            ["Any of these will do: m and smaller batches. The cheapest is smaller batches (smaller@0.500)"],
        ),
        ({"uniform": 0.0002, "smaller": 0.05}, ["Any of these will do: m and random. The cheapest is random (uniform@0.500)"]),
        ({"smaller": 0.05, "placebo": 0.0002}, ["Our pick: m.", "it is not told apart from permuted signals"]),
        ({"placebo": 0.0002}, ["Our pick: m.", "It is not shown to be better than permuted signals of the same cost."]),
    ],
)
def test_a_method_without_loss(controls, expected):
    text = " ".join(closing(results_of(SMALL, controls)))
    assert all(part in text for part in expected), text


TIED = {"smaller": 0.0002, "shorter": 0.0002, "uniform": 0.0002, "placebo": 0.0002}


def test_of_everything_that_ties_the_cheapest_by_cpu_time():
    results = results_of(SMALL, TIED)
    assert closing(results) == [
        "Any of these will do: m, smaller batches, fewer epochs and random. The cheapest is fewer epochs (shorter@0.500), "
        "which took 0.49 of the CPU time of full training; m took 0.59, smaller batches 0.55 and random 0.52.",
        "Each of these 4 loses no more than 0.5 points; none of them is shown to be better than another.",
    ]
    assert conclude(results).pick["method"] == "shorter@0.500"


def test_the_method_is_picked_where_it_is_the_cheapest():
    results = results_of(SMALL, TIED, times={"m": 0.4})
    assert "The cheapest is m, which took 0.40 of the CPU time of full training; smaller batches" in closing(results)[0]
    assert conclude(results).pick["method"] == "m"


def test_of_equal_times_the_simplest():
    said = closing(results_of(SMALL, TIED, times={"m": 0.49, "smaller": 0.492}))
    assert "The cheapest and simplest is smaller batches (smaller@0.500), which took 0.49" in said[0]


def test_controls_that_are_not_decided_count_as_far_as_the_seeds_show():
    results = results_of(SMALL, TIED, spread=0.004)
    assert {row["finding"] for row in results["summary"] if row["control_of"]} == {"unclear"}
    first, second = closing(results)
    assert first.startswith(
        "Any of these will do, as far as these 3 seeds show: m, smaller batches, fewer epochs and random. The cheapest is "
        "fewer epochs (shorter@0.500), which took 0.49 of the CPU time of full training; "
    )
    assert second.startswith("It is shown for m only that the loss is no more than 0.5 points. About ")
    assert "would decide on shorter@0.500 if further ones differ as these 3 do." in second


def test_an_undecided_control_that_seems_to_lose_is_not_picked():
    said = closing(results_of(SMALL, {"shorter": 0.02}, spread=0.02))
    assert said == [
        "Our pick: m. It loses no more than 0.5 points at 0.500 of the cost of full training. It is not shown to be better "
        "than fewer epochs of the same cost."
    ]


def test_controls_that_lose_are_not_named():
    [first, _] = closing(results_of(SMALL, TIED | {"uniform": 0.03, "shorter": 0.03}))
    assert first.startswith("Any of these will do: m and smaller batches. The cheapest is smaller batches (smaller@0.500)")


def test_a_control_is_the_only_one_without_a_loss():
    assert closing(results_of((0.03, 0.031, 0.032), {"shorter": 0.0002, "uniform": 0.03})) == [
        "Our pick: fewer epochs (shorter@0.500). It loses no more than 0.5 points at 0.500 of the cost of full training.",
        "m loses against full training.",
    ]


def test_a_control_while_the_method_is_not_decided():
    said = closing(results_of((0.0, 0.01, 0.005), {"shorter": 0.0002}))
    assert said[0].startswith("Our pick: fewer epochs (shorter@0.500).") and said[1] == "Whether m would do is open."
    assert said[2].startswith("Cannot tell yet: from seed to seed, the difference of m")


def test_a_method_that_is_better_but_slower_than_its_controls():
    results = results_of(SMALL, {"uniform": 0.05, "shorter": 0.04})
    assert closing(results) == [
        "Our pick: m. It loses no more than 0.5 points at 0.500 of the cost of full training, and is better than random "
        "and fewer epochs of the same cost.",
        "It is not the cheapest in CPU time: it took 0.59 of that of full training, and fewer epochs took 0.49.",
    ]


def test_what_saves_no_cpu_time_is_said():
    slow = {"m": 1.2, "smaller": 1.1}
    assert closing(results_of(SMALL, times=slow))[1:] == [
        "Yet it saves no CPU time here: it took 1.20 of that of full training."
    ]
    assert "None of them saves CPU time here." in closing(results_of(SMALL, {"smaller": 0.0002}, times=slow))


def test_without_cpu_times_the_counted_cost_decides():
    results = results_of(SMALL, TIED)
    unknown = [run | {"cpu_s": None} for run in results["runs"]]
    said = closing(results | {"runs": unknown, "summary": summarize(unknown, 0.5)})
    assert said[0].endswith(
        "The CPU time of some of them is not known. The cheapest and simplest as counted is smaller batches (smaller@0.500), "
        "at 0.500 of the cost of full training."
    )


def test_on_another_device_the_wall_time_decides():
    said = closing(results_of(SMALL, TIED) | {"device": "cuda"})
    assert "which took 0.49 of the wall time of full training" in said[0]


def test_of_several_methods_the_one_that_beats_its_controls():
    results = results_of(SMALL, {"smaller": 0.04})
    cheaper = [one | {"method": "n", "cost": {"ratio": 0.3}} for one in results["runs"] if one["method"] == "m"]
    runs = results["runs"] + [one | {"metric": one["metric"] | {"value": one["metric"]["value"] - 0.0001}} for one in cheaper]
    assert "Our pick: m." in closing(results | {"runs": runs, "summary": summarize(runs, 0.5)})[0]


def test_a_method_that_is_worse_than_a_control_is_no_pick():
    assert closing(results_of((0.0042, 0.0041, 0.0043), {"smaller": 0.0})) == [
        "Our pick: smaller batches (smaller@0.500). It loses no more than 0.5 points at 0.500 of the cost of full training.",
        "m is worse than a control of the same cost.",
    ]
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
    assert "(--seeds 0,1,2,3" in found and "Yet it" not in found


def test_many_seeds_are_added_by_the_command():
    results = results_of((0.004, 0.0001, 0.0035))
    results["summary"][1]["seeds_needed"] = 20
    assert "About 20 seeds (--until-decided --max-seeds 20) would decide on m" in closing(results)[0]
    results["summary"][1]["seeds_needed"] = 67
    assert "differ too much to decide by more of them: about 67 would do, by a rough estimate from 3." in closing(results)[0]


def test_a_loss_with_every_seed_is_said_before_it_is_shown():
    [said] = closing(results_of((0.116, 0.264, 0.134)))
    assert said.startswith("Cannot tell yet: from seed to seed, the difference of m to full training ranges over 15 points. ")
    assert "Yet it lost about 12 points or more with every seed. " in said


def test_a_loss_with_every_seed_is_said_where_no_number_of_seeds_is_known():
    results = results_of((0.116, 0.264, 0.134))
    results["summary"][1]["seeds_needed"] = None
    assert closing(results)[0].startswith(
        "Cannot tell yet with 3 seeds. Yet it lost about 12 points or more with every seed. Rep"
    )


def test_a_method_that_is_not_decided_may_be_better_than_its_controls():
    [said] = closing(results_of((0.0, 0.0105, 0.005), dict.fromkeys(TIED, 0.2)))
    assert "ranges over 1 point. Yet it is better than all of its controls. About " in said


def test_one_seed_cannot_tell():
    assert closing(results_of((0.001,))) == [
        "Cannot tell yet with 1 seed. Repeat the command with more seeds, such as --seeds 0,1,2,3,4."
    ]


def test_everything_loses():
    [said] = closing(results_of((0.03, 0.031, 0.032)))
    assert said.startswith(
        "Nothing to pick: every method with a verdict loses. The smallest loss is that of m, 3.1 points at 0.500 of the cost."
    )


def test_a_metric_that_is_no_share_has_no_points():
    results = results_of((0.0, 0.01, 0.005), scale=40, margin=0.1)
    [said] = closing(results)
    assert "point" not in said and "use --margin 0." in said
    [said] = closing(results_of((0.0, 0.01, 0.005), scale=40, margin=0.01))
    assert "It is shown already" not in said and "--margin" not in said  # 10 times the margin and more
    assert mean(run["metric"]["value"] for run in results["runs"]) > 1


def test_full_training_alone():
    runs = [run_of("full", seed, 0.9, 1.0) for seed in range(3)]
    assert closing({"runs": runs, "margin": 0.5, "summary": summarize(runs, 0.5)}) == [
        "There is nothing to pick from: no method has a verdict."
    ]
