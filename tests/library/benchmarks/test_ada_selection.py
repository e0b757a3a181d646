import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import ada_selection
from benchmarks.ada_selection import (
    ARMS,
    BEGIN,
    CLOSE,
    END,
    EPOCHS,
    EQUAL,
    LOWEST,
    MOST_SEEDS,
    OURS,
    RANDOM,
    RATES,
    READINGS,
)
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Job, load

from thresher_lab.training.specs import parse_methods

ROOT = Path(__file__).parents[3]


ALL, NONE, OPEN = (dict.fromkeys(("0.1", "0.3", "0.5"), found) for found in (True, False, None))


def planted(gain: float = 0.5, share: float = 0.4, same: bool = False) -> dict[Job, dict[str, Any]]:
    """Returns results in which AdaSelection gains something, more or less by seed."""
    done = {}
    for job in ada_selection.jobs({}):
        random = job.arm == RANDOM
        weights = {
            "big_loss": 0.1 if same else 0.1 * list(EPOCHS).index(job.task),
            "small_loss": 0.0,
            "uniform": 0.5,
        }
        metric = 90.0 + (0.0 if random else gain + 0.1 * (job.seed % 3 - 1))
        own = {"weights": {} if random else weights, "random_share": None if random else share}
        done[job] = {"metric": metric, "steps": round(1000 * job.share), "cpu_s": 1.0, **own}
    return done


def test_what_decides_the_goals_comes_first_and_nothing_twice() -> None:
    jobs = list(ada_selection.jobs({}))
    assert len(jobs) == len(set(jobs))
    first = jobs[: 2 * len(CLOSE) * MOST_SEEDS]
    assert {(job.task, job.arm, job.share) for job in first} == {
        (task, arm, LOWEST) for task in CLOSE for arm in (OURS, RANDOM)
    }
    assert {job.task for job in jobs} == set(EPOCHS) and {job.arm for job in jobs} == set(ARMS)


def test_arms_differ_in_the_choice_alone() -> None:
    specs = {arm: parse_methods(text.format(0.1))[0] for arm, text in ARMS.items()}
    assert {spec.batch["forward_passes"] for spec in specs.values()} == {"twice"}
    assert len({spec.label for spec in specs.values()}) == len(ARMS)
    assert all(specs[f"{name}{EQUAL}"].given["beta"] == 0 for name in READINGS)


def test_labels_of_wrong_digits_are_wrong() -> None:
    (_, clean), (_, noisy) = map(ada_selection.task_of, ("digits", "digits-noisy"))
    wrong = (clean.train.tensors[1] != noisy.train.tensors[1]).float().mean()
    assert float(wrong) == pytest.approx(0.2, abs=0.001)


def test_goals_that_are_met() -> None:
    found = ada_selection.results(planted())
    assert found["goals"] == {"random share": True, "close": True, "weights differ": ALL}
    assert len(found["pairs"]) == len(EPOCHS) * len(RATES) and len(found["readings"]) == 2 * (
        len(READINGS) + 1
    )
    bike = found["pairs"][0]
    assert (bike["task"], bike["rate"], bike["seeds"], bike["steps"]) == (
        "bike",
        0.1,
        MOST_SEEDS,
        100,
    )
    assert (bike["method"], bike["other"]) == (
        "ada_selection:keep=0.1 twice",
        "random_backprop:keep=0.1 twice",
    )
    assert bike["difference"] == pytest.approx(0.49) and bike["ci95"][0] > 0
    text = ada_selection.markdown(found)
    assert (
        "at most 1.5 points below random selection: yes." in text
        and "at most half of the rows are random draws: yes." in text
    )


@pytest.mark.parametrize(
    ("changed", "goals"),
    [
        ({"gain": -1.6}, {"random share": True, "close": False, "weights differ": ALL}),
        ({"gain": -1.4}, {"random share": True, "close": True, "weights differ": ALL}),
        ({"share": 0.51}, {"random share": False, "close": True, "weights differ": ALL}),
        ({"same": True}, {"random share": True, "close": True, "weights differ": NONE}),
    ],
)
def test_goals_that_are_missed(changed: dict[str, Any], goals: dict[str, Any]) -> None:
    assert ada_selection.results(planted(**changed))["goals"] == goals


def test_weights_are_compared_at_each_rate() -> None:
    done = planted(same=True)
    for job in [job for job in done if job.task == "line" and job.share == 0.3 and job.arm == OURS]:
        done[job] = done[job] | {"weights": {"big_loss": 0.3, "small_loss": 0.0, "uniform": 0.5}}
    found = ada_selection.results(done)
    assert found["goals"]["weights differ"] == NONE | {"0.3": True}
    assert (
        "at a rate of 0.1, no; at a rate of 0.3, yes; at a rate of 0.5, no."
        in ada_selection.markdown(found)
    )


def test_a_goal_without_its_runs_is_open() -> None:
    done = {job: result for job, result in planted().items() if job.task != "mnist-5k"}
    found = ada_selection.results(done)
    assert found["goals"] == {"random share": None, "close": None, "weights differ": OPEN}
    assert "not all runs are there" in ada_selection.markdown(found)
    assert ada_selection.results({})["goals"] == {
        "random share": None,
        "close": None,
        "weights differ": OPEN,
    }


def test_arms_with_other_numbers_of_steps_are_refused() -> None:
    done = planted()
    job = next(job for job in done if job.arm == RANDOM)
    done[job] = done[job] | {"steps": 690}
    with pytest.raises(
        ValueError,
        match=r"bike at 0.1: the arms must have equal numbers of optimizer steps, got \[100, 690\]",
    ):
        ada_selection.results(done)


RESULTS = [
    path for path in (ROOT / "benchmarks" / "results" / "ada_selection.json",) if path.exists()
]


@pytest.mark.parametrize("path", RESULTS)
def test_results_and_page_are_those_of_the_runs(path: Path) -> None:
    found = ada_selection.results(load(path.with_name("ada_selection-runs.jsonl.gz")))
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    page = (ROOT / "docs" / "evidence" / "results.md").read_text()
    assert page == between_marks(page, BEGIN, END, ada_selection.markdown(found))
