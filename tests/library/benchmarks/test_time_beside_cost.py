"""What the pages say of time that the counted cost does not explain."""

import pytest
from benchmarks.pages import NOT_COUNTED, time_beside_cost

from lab.report.cases import comparison


def with_scores(results, row, ratio):
    for run in results["runs"]:
        run["cost"]["scores_ratio"] = ratio if run["method"] == row["method"] else 0.0


def test_time_that_the_cost_does_not_explain_is_said():
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    with_scores(results, row, 0.0)
    row["cpu_ratio"] = row["cost_ratio"] + 0.1
    assert time_beside_cost(results) == []
    for apart in (0.11, -0.11):
        row["cpu_ratio"] = row["cost_ratio"] + apart
        numbers = (
            f"{row['cost_ratio']:.2f} of full training, and the CPU time {row['cpu_ratio']:.2f}"
        )
        expected = f"{row['method']}: the counted cost is {numbers}. {NOT_COUNTED}"
        assert time_beside_cost(results) == [expected]
    for run in results["runs"]:
        run["tracing_s"] = 2.25 if run["method"] == row["method"] else None
    assert "of which tracing the model took 2.2 s of each run" in time_beside_cost(results)[0]


def test_the_cost_of_scores_is_told_from_that_of_the_run():
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    row["cost_ratio"], row["cpu_ratio"] = 1.5, 0.5
    with_scores(results, row, 1.0)
    parts = "1.00 for scores that were made before the run, and 0.50 for the run itself"
    said = f"{row['method']}: the counted cost is 1.50 of full training: {parts}. Its CPU time is "
    assert time_beside_cost(results) == [f"{said}0.50."]
    row["cpu_ratio"] = 0.75
    assert time_beside_cost(results) == [f"{said}0.75. {NOT_COUNTED}"]


def test_a_run_of_an_earlier_version_gives_no_reason():
    """Whether scores are part of its cost is not known."""
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    with_scores(results, row, 1.0)
    next(run for run in results["runs"] if run["method"] == row["method"])["cost"].pop(
        "scores_ratio"
    )
    row["cost_ratio"], row["cpu_ratio"] = 1.5, 0.5
    assert time_beside_cost(results) == [
        f"{row['method']}: the counted cost is 1.50 of full training, and the CPU time 0.50."
    ]


@pytest.mark.parametrize(
    ("busy", "tail"), [(False, "here."), (True, "here as measured on a busy machine.")]
)
def test_a_saving_that_the_clock_does_not_show_is_said(busy, tail):
    counted = {
        "forward": 50,
        "backward": 50,
        "full_forward": 100,
        "full_backward": 100,
        "ratio": 0.5,
        "scores_ratio": 0.0,
    }
    run = {
        "method": "winnow",
        "control_of": None,
        "cost": counted,
        "busy": busy,
        "history": [{"steps": 600}] * 4,
    }
    results = {
        "runs": [run],
        "summary": [{"method": "winnow", "control_of": None, "cost_ratio": 0.5, "cpu_ratio": 1.04}],
    }
    [said] = time_beside_cost(results)
    assert said.startswith(
        "winnow: the counted cost is 0.50 of full training, and the CPU time 1.04."
    )
    assert f"So it saved no time {tail}" in said
    assert "--methods winnow:spend=steps. In our trainings of 160 to 1,500 steps that lost" in said
    steps = {
        "method": "winnow:share=0.5 in steps",
        "control_of": None,
        "cost_ratio": 0.5,
        "cpu_ratio": 0.52,
    }
    both = {
        "runs": [run, run | {"method": steps["method"]}],
        "summary": [*results["summary"], steps],
    }
    assert "spend=steps. In" not in time_beside_cost(both)[0]
