import json
import math
from pathlib import Path

import numpy as np
import pytest

from thresher_lab.comparison.summary import (
    WALL_LEFT_BLANK,
    margin_of,
    sentences_on_times,
    summarize,
)

T_2 = 4.302652729911275  # 97.5 % quantile of Student's t with 2 degrees of freedom
T = {3: T_2, 5: 2.7764451051977987}  # by the number of seeds, one more than the degrees of freedom
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def run(method, seed, value, *, cost=1.0, wall=10.0, cpu=10.0, memory=None, control_of=None):
    return {
        "method": method,
        "settings": {"keep": cost},
        "seed": seed,
        "control_of": control_of,
        "metric": {"name": "accuracy", "value": value},
        "cost": {"ratio": cost},
        "wall_s": wall,
        "cpu_s": cpu,
        "step_memory": memory,
    }


def runs(method, values, **others):
    return [run(method, seed, value, **others) for seed, value in enumerate(values)]


FULL = [run("full", 0, 0.90), run("full", 1, 0.92, cpu=20.0), run("full", 2, 0.94)]
METHOD = [
    run("m", 0, 0.91, cost=0.5, cpu=6.0),
    run("m", 1, 0.95, cost=0.6, cpu=8.0),
    run("m", 2, 0.96, cost=0.7, wall=7.0),
]
CONTROL = [run(f"uniform@0.{k}00", k - 5, 0.5, cost=k / 10, control_of="m") for k in (5, 6, 7)]
SHORTER = [
    run(f"shorter@0.{k}00", k - 5, 0.9 + (k == 6) / 10, cost=k / 10 + 0.002, control_of="m")
    for k in (5, 6, 7)
]


def test_rows_against_an_independent_computation():
    mixed = [run for runs in zip(METHOD, CONTROL, SHORTER, strict=True) for run in runs]
    full, method, control, shorter = summarize([*FULL, *mixed])
    assert (full["method"], full["difference"], full["ci95"], full["verdict"]) == (
        "full",
        None,
        None,
        "the baseline",
    )
    differences = [0.01, 0.03, 0.02]
    mean = sum(differences) / 3
    half = T_2 * math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    assert method["method"] == "m" and method["control_of"] is None
    assert method["mean"] == pytest.approx(0.94)
    assert method["std"] == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.02**2) / 2))
    assert method["difference"] == pytest.approx(mean)
    assert method["ci95"] == pytest.approx([mean - half, mean + half])
    assert method["cost_ratio"] == pytest.approx(0.6)
    assert method["wall_ratio"] == 1.0 and method["cpu_ratio"] == 0.6
    assert method["finding"] == "no loss" and method["seeds_needed"] is None
    assert method["verdict"] == (
        "no loss within the margin of 0.5 points; better than random; not told apart from fewer epochs"
    )
    assert method["against"]["uniform"]["difference"] == pytest.approx(0.44)
    assert method["against"]["shorter"]["seeds_needed"] > 3
    assert (control["method"], control["control_of"], control["finding"]) == (
        "uniform@0.600",
        "m",
        "loses",
    )
    assert (shorter["method"], shorter["control_of"], shorter["finding"]) == (
        "shorter@0.602",
        "m",
        "unclear",
    )


def test_the_memory_of_a_step_is_unknown_where_that_of_one_run_is():
    full = [run("full", seed, 0.9, memory=400) for seed in range(3)]
    halves = [run("m", seed, 0.9, memory=memory) for seed, memory in enumerate((100, 200, 240))]
    row = summarize([*full, *halves])[1]
    assert row["memory_ratio"] == 0.5
    for unknown in (
        [*full, *halves[:2], run("m", 2, 0.9)],
        [*full[:2], run("full", 2, 0.9), *halves],
    ):
        assert summarize(unknown)[1]["memory_ratio"] is None


def test_a_metric_that_is_no_share_is_in_its_own_units():
    full, method = runs("full", [10.0, 12.0, 11.0]), runs("m", [10.1, 12.0, 11.2])
    row = summarize([*full, *method], margin=1.0)[1]
    assert row["verdict"] == "no loss within the margin of 1"


def test_the_easiest_tenth_loses():
    full, easiest = (
        runs("full", [0.970, 0.972, 0.968]),
        runs("easiest", [0.612, 0.655, 0.583], cost=0.1),
    )
    control = runs("uniform@0.100", [0.921, 0.915, 0.930], cost=0.1, control_of="easiest")
    row = summarize([*full, *easiest, *control])[1]
    assert row["finding"] == "loses" and row["verdict"] == "loses; worse than random"


@pytest.mark.parametrize("seeds", [1, 2])
def test_so_few_seeds_tell_nothing(seeds):
    row = summarize([*FULL[:seeds], *runs("m", [0.1, 0.2][:seeds])])[1]
    assert row["finding"] == "unclear" and row["verdict"].startswith("not enough seeds to tell")
    assert (row["ci95"] is None) == (seeds == 1)


def test_no_better_than_random():
    full = runs("full", [0.950, 0.951, 0.949, 0.950])
    method = runs("m", [0.950, 0.949, 0.951, 0.950], cost=0.5)
    control = runs("uniform@0.500", [0.9495, 0.950, 0.951, 0.9500], cost=0.5, control_of="m")
    row = summarize([*full, *method, *control])[1]
    assert row["verdict"] == "no loss within the margin of 0.5 points; no better than random"


def test_the_verdict_names_all_controls():
    full, method = (
        runs("full", [0.950, 0.951, 0.949, 0.950]),
        runs("m", [0.950, 0.949, 0.951, 0.950], cost=0.5),
    )
    far, near = [0.900, 0.901, 0.899, 0.902], [0.9495, 0.950, 0.951, 0.9500]

    def verdict(**values):
        controls = [
            runs(f"{kind}@0.500", of, cost=0.5, control_of="m") for kind, of in values.items()
        ]
        return summarize([*full, *method, *(run for of in controls for run in of)])[1][
            "verdict"
        ].partition("; ")[2]

    assert verdict(uniform=far, shorter=far, smaller=far, placebo=far) == (
        "better than random, fewer epochs, smaller batches and permuted signals"
    )
    assert verdict(uniform=far, shorter=far, smaller=near, placebo=far) == (
        "better than random, fewer epochs and permuted signals; no better than smaller batches"
    )


def test_it_says_how_many_seeds_would_do():
    full, method = runs("full", [0.95, 0.95, 0.95]), runs("m", [0.95, 0.945, 0.955])
    row = summarize([*full, *method])[1]
    assert (
        row["finding"] == "unclear" and row["seeds_needed"] == 10
    )  # by any table of t-test power at d = 1, 0.025, 80 %
    assert row["verdict"] == "not enough seeds to tell (about 10 would do)"


def test_more_methods_need_clearer_differences():
    full, method = runs("full", [0.95, 0.95, 0.95, 0.95]), runs("m", [0.950, 0.952, 0.951, 0.9475])
    others = [one for k in range(6) for one in runs(f"other{k}", [0.95, 0.91, 0.99, 0.94])]
    assert summarize([*full, *method])[1]["finding"] == "no loss"
    assert summarize([*full, *method, *others])[1]["finding"] == "unclear"


def test_more_methods_need_more_seeds():
    full, method = runs("full", [0.95, 0.95, 0.95]), runs("m", [0.95, 0.945, 0.955])
    others = [one for k in range(7) for one in runs(f"other{k}", [0.95, 0.91, 0.99])]
    alone, among = (summarize([*full, *method, *more])[1]["seeds_needed"] for more in ([], others))
    assert alone < among < 3 * alone


def test_full_training_need_not_come_first():
    rows = summarize([*METHOD, *FULL])
    assert [row["method"] for row in rows] == ["m", "full"]


def test_pairs_go_by_seed_not_by_order():
    assert summarize([*FULL, *METHOD[::-1]])[1]["difference"] == pytest.approx(0.02)


def test_methods_that_share_a_control_have_it_each():
    others = [other | {"method": "other"} for other in METHOD]
    shared = [control | {"control_of": "other"} for control in CONTROL]
    rows = summarize([*FULL, *METHOD, *CONTROL, *others, *shared])
    assert [row["control_of"] or row["method"] for row in rows] == [
        "full",
        "m",
        "m",
        "other",
        "other",
    ]


@pytest.mark.parametrize(
    ("name", "of"), [("demo-mnist-5k", 3), ("fashion-cnn", 5), ("fashion-resnet8", 5)]
)
def test_committed_results_against_a_second_computation(name, of):
    """By bootstrap-free, loop-free NumPy on a table of seeds by methods, and the t table in plain numbers."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    seeds = sorted({run["seed"] for run in results["runs"]})
    assert len(seeds) == of
    table = {}
    for entry in results["runs"]:
        kind = entry["method"].split("@")[0] if entry["control_of"] else "itself"
        table.setdefault((entry["control_of"] or entry["method"], kind), {})[entry["seed"]] = entry[
            "metric"
        ]["value"]
    matrix = {place: np.array([values[seed] for seed in seeds]) for place, values in table.items()}
    rows = summarize(results["runs"])
    assert len(rows) == len(matrix)
    for row in rows:
        kind = row["method"].split("@")[0] if row["control_of"] else "itself"
        place = (row["control_of"] or row["method"], kind)
        assert row["mean"] == pytest.approx(matrix[place].mean())
        if row["difference"] is None:
            continue
        d = matrix[place] - matrix["full", "itself"]
        half = T[of] * d.std() / math.sqrt(of - 1)
        assert row["difference"] == pytest.approx(d.mean()) and row["ci95"] == pytest.approx(
            [d.mean() - half, d.mean() + half]
        )
        for other, found in row["against"].items():
            beside = matrix[place] - matrix[place[0], other]
            assert found["difference"] == pytest.approx(beside.mean())
        if row["finding"] == "loses":
            assert row["ci95"][1] < 0
        if row["finding"] == "no loss":
            assert row["ci95"][0] > -0.005


def test_one_bad_value_does_not_change_the_margin():
    full, method = runs("full", [0.90, 0.91, 0.92, 0.90]), runs("m", [0.70, 0.71, 0.69, 0.70])
    rows = summarize([*full, *method, *runs("bad", [-0.01, 0.9, 0.9, 0.9])])
    assert rows[1]["finding"] == "loses"


def test_no_spread_has_its_own_words():
    row = summarize([*runs("full", [0.9, 0.8, 0.9]), *runs("m", [0.9, 0.8, 0.9])])[1]
    assert row["verdict"] == "the same difference with every seed, no spread to judge by"


def diverged(method, seed, share, **others):
    history = [{"nonfinite": 0, "backward": 10}, {"nonfinite": share, "backward": 10}]
    return run(method, seed, 0.1, **others) | {"history": history}


def test_a_training_that_diverged_gets_no_verdict():
    broken = [diverged("n", 0, 5), *runs("n", [0.9, 0.91])[1:], run("n", 2, 0.9)]
    rows = {row["method"]: row for row in summarize([*FULL, *METHOD, *broken])}
    assert (
        rows["n"]["finding"] is None
        and rows["n"]["difference"] is None
        and rows["n"]["against"] == {}
    )
    assert (
        rows["n"]["verdict"]
        == "no verdict: diverged, half of the losses or more are not finite (seeds: 0)"
    )
    assert rows["full"]["verdict"] == "the baseline"
    alone = {row["method"]: row for row in summarize([*FULL, *METHOD])}
    assert rows["m"]["finding"] == alone["m"]["finding"]


def test_fewer_than_half_of_the_losses_are_no_divergence():
    rows = summarize([*FULL, *[diverged("n", seed, 4) for seed in range(3)]])
    assert rows[1]["finding"] is not None


def test_nothing_is_judged_where_full_training_diverged():
    full = [diverged("full", 0, 10), *FULL[1:]]
    for row in summarize([*full, *METHOD, *CONTROL]):
        assert row["verdict"] == "no verdict: full training diverged" and row["finding"] is None


def test_a_control_that_diverged_is_no_control():
    broken = [one | {"history": [{"nonfinite": 9, "backward": 10}]} for one in CONTROL]
    rows = {
        row["method"].partition("@")[0]: row
        for row in summarize([*FULL, *METHOD, *broken, *SHORTER])
    }
    assert set(rows["m"]["against"]) == {"shorter"} and rows["uniform"]["verdict"].startswith(
        "no verdict: diverged, half of the losses or more are not finite (seeds: 0, 1, 2)"
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([{}, {"busy": None}], ""),
        ([{}, {"busy": False}], ""),
        (
            [{"busy": False}, {"busy": True}],
            "The machine was busy, so all times, including CPU times, are unreliable: in 1 of 2 runs",
        ),
    ],
)
def test_wall_times_of_a_busy_machine_are_flagged(runs, said):
    sentences = sentences_on_times({"runs": runs, "summary": []})
    assert said in "".join(sentences) and len(sentences) == bool(said)


def test_runs_that_methods_share_are_counted_once():
    runs = [
        {"busy": True, "samples": "a"},
        {"busy": True, "samples": "a"},
        {"busy": False, "samples": "b"},
    ]
    assert "in 1 of 2 runs" in sentences_on_times({"runs": runs, "summary": []})[0]


@pytest.mark.parametrize(
    ("of_full", "of_method", "ratio"),
    [
        ([{}] * 3, [{}] * 3, 1.0),
        ([{"other_runs": 1.0}] * 3, [{"other_runs": 0.9}] * 3, 1.0),
        (
            [{"other_runs": 1.0}] * 3,
            [{"other_runs": 1.0}] * 2 + [{"other_runs": 0.0}],
            1.0,
        ),  # the last run of a comparison
        ([{"other_runs": 1.0}] * 3, [{"other_runs": 1.0}] + [{"other_runs": 0.0}] * 2, None),
        ([{"other_runs": 0.0}] * 3, [{"other_runs": 1.0}] * 3, None),
        ([{"busy": True}] * 3, [{"busy": True}] * 3, None),
        ([{"busy": True}] + [{}] * 2, [{"busy": True}] + [{}] * 2, 1.0),
        ([{"busy": True}] * 3, [{"busy": False}] * 3, None),
        ([{"busy": None}] * 3, [{"busy": True}] * 3, None),
    ],
)
def test_wall_times_in_unlike_company_are_left_blank(of_full, of_method, ratio):
    full, method = (
        [one | more for one, more in zip(*of, strict=True)]
        for of in ((FULL, of_full), (METHOD, of_method))
    )
    _, row = rows = summarize([*full, *method])
    assert row["wall_ratio"] == ratio and row["cpu_ratio"] == 0.6
    said = sentences_on_times({"runs": [], "summary": rows})
    assert said == ([] if ratio is not None else [WALL_LEFT_BLANK])


def test_the_default_margin_is_in_proportion_to_the_metric():
    """Half of a unit is nothing for an accuracy in points, and ten times the error of a small regression."""

    def runs(name, values):
        return [
            {"method": "full", "control_of": None, "seed": i, "metric": {"name": name, "value": v}}
            for i, v in enumerate(values)
        ]

    assert margin_of(runs("accuracy", [0.91, 0.93])) == 0.5
    assert margin_of(runs("-mse", [-0.05, -0.056])) == pytest.approx(0.0027, abs=1e-4)
    assert margin_of(runs("score", [120.0])) == 6.0
    assert margin_of(runs("-mse", [0.0])) == margin_of(runs("-mse", [float("-inf")])) == 0.5
