"""The question that fresh seeds answer: is a method better over all tasks together?"""

import json

import numpy as np
import pytest
from benchmarks.league import pooled


def runs(*metrics):
    return [{"metric": metric} for metric in metrics]


def test_a_difference_is_in_spreads_of_full_training():
    held = {
        ("text", "full"): runs(80, 82, 84),
        ("text", "winnow"): runs(83, 84, 88),
        ("text", "smaller"): runs(80, 80, 10),
    }
    assert pooled.standardized(held, "text", "winnow", "full") == pytest.approx(3 / 2)
    # A training of the control failed, or there is none.
    assert pooled.standardized(held, "text", "winnow", "smaller") is None
    assert pooled.standardized(held, "text", "winnow", "placebo") is None


def test_the_unit_is_the_task_and_methods_are_corrected():
    found = pooled.answers(
        {"clear": [2, 3, 2, 3], "one task": [9, 0, 0, 0], "worse": [-2, -3, -2, -3]}
    )
    assert {method: word for method, (_, word) in found.items()} == {
        "clear": "better",
        "one task": "not decided",
        "worse": "worse",
    }
    paired = found["clear"][0]
    assert paired.n == 4 and paired.mean == 2.5 and paired.low < 2.5 < paired.high
    # Alone, this method would be decided; among seven, it is not.
    values = [0.6, 3.0, 1.0, 2.5, 0.8]
    others = {str(number): np.sin(np.arange(5) * (number + 2)) for number in range(6)}
    assert pooled.answers({"alone": values})["alone"][1] == "better"
    assert pooled.answers({"alone": values, **others})["alone"][1] == "not decided"


@pytest.mark.parametrize("between", [0.0, 3.0])
def test_answers_are_seldom_wrong(between):
    found = pooled.simulated([0, 0, 0, 0, 0, 2.0, 8.0], 8, 5, between, rounds=120)
    # 0.05, and two standard deviations of the simulation.
    assert found["error"] <= 0.09
    assert found["better"]["0"] <= 0.03 <= found["better"]["2.0"] < found["better"]["8.0"] > 0.7


def test_the_committed_simulations_are_those_of_the_plan():
    rows = json.loads(pooled.POWER_FILE.read_text())["simulations"]
    assert {(row["tasks"], row["seeds"], row["between"]) for row in rows} == {
        (tasks, seeds, between)
        for tasks in (8, 16)
        for seeds in (5, 10, 40)
        for between in (0.0, 1.0, 3.0)
    }
    assert max(row["error"] for row in rows) <= 0.05
