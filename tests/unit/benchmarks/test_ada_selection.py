import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import ada_selection
from benchmarks.ada_selection import ARMS, BEGIN, CLOSE, END, EPOCHS, MOST_SEEDS, RATES, SEEDS
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Job, load

from thresher.experiments.training.specs import parse_methods

ROOT = Path(__file__).parents[3]


ALL, NONE, OPEN = (dict.fromkeys(("0.1", "0.3", "0.5"), found) for found in (True, False, None))


def planted(gain: float = 0.5, spread: float = 0.1, same: bool = False) -> dict[Job, dict[str, Any]]:
    """Returns results in which AdaSelection gains something, more or less by seed."""
    done = {}
    for job in ada_selection.jobs({}):
        ours = job.arm == "AdaSelection"
        weights = {"big_loss": 0.1 if same else 0.2 * list(EPOCHS).index(job.task), "small_loss": 0.0, "uniform": 0.5}
        metric = 90.0 + (gain + spread * (job.seed % 3 - 1) if ours else 0.0)
        done[job] = {"metric": metric, "steps": round(1000 * job.share), "cpu_s": 1.0, "weights": weights if ours else {}}
    return done


def test_every_row_has_both_arms_and_those_to_be_won_have_more_seeds() -> None:
    jobs = list(ada_selection.jobs({}))
    extra = len(CLOSE) * (MOST_SEEDS - SEEDS)
    assert len(jobs) == len(set(jobs)) == len(ARMS) * (len(EPOCHS) * len(RATES) * SEEDS + extra)
    assert all(job.seed < SEEDS for job in jobs[: -len(ARMS) * extra]), "what decides the most comes first"


def test_arms_differ_in_the_choice_alone() -> None:
    specs = [parse_methods(text.format(0.1))[0] for text in ARMS.values()]
    assert {spec.batch["forward_passes"] for spec in specs} == {"twice"}


def test_goals_that_are_met() -> None:
    found = ada_selection.results(planted())
    assert found["goals"] == {"close": True, "above": True, "weights differ": ALL}
    assert len(found["pairs"]) == len(EPOCHS) * len(RATES) and len(found["means"]) == len(EPOCHS)
    bike = found["pairs"][0]
    assert (bike["task"], bike["rate"], bike["seeds"], bike["steps"]) == ("bike", 0.1, MOST_SEEDS, 100)
    assert (bike["method"], bike["other"]) == ("ada_selection:keep=0.1 twice", "random_backprop:keep=0.1 twice")
    assert bike["difference_of_three"] == pytest.approx(0.5) and bike["ci95"][0] > 0
    assert "Above it at a rate of 0.1 on `bike` and `mnist-5k`, 10 seeds: yes." in ada_selection.markdown(found)


@pytest.mark.parametrize(
    ("changed", "goals"),
    [
        ({"gain": -1.6}, {"close": False, "above": False, "weights differ": ALL}),
        ({"gain": -1.4}, {"close": True, "above": False, "weights differ": ALL}),
        ({"gain": 0.01}, {"close": True, "above": False, "weights differ": ALL}),
        ({"same": True}, {"close": True, "above": True, "weights differ": NONE}),
    ],
)
def test_goals_that_are_missed(changed: dict[str, Any], goals: dict[str, Any]) -> None:
    assert ada_selection.results(planted(**changed))["goals"] == goals


def test_weights_are_compared_at_each_rate() -> None:
    done = planted(same=True)
    for job in [job for job in done if job.task == "line" and job.share == 0.3 and job.arm == "AdaSelection"]:
        done[job] = done[job] | {"weights": {"big_loss": 0.3, "small_loss": 0.0, "uniform": 0.5}}
    found = ada_selection.results(done)
    assert found["goals"]["weights differ"] == NONE | {"0.3": True}
    assert "at a rate of 0.1, no; at a rate of 0.3, yes; at a rate of 0.5, no." in ada_selection.markdown(found)


def test_one_rate_far_below_is_a_miss() -> None:
    done = planted()
    for job in [job for job in done if job.task == "line" and job.share == 0.5 and job.arm == "AdaSelection"]:
        done[job] = done[job] | {"metric": 86.9}
    assert ada_selection.results(done)["goals"]["close"] is False


def test_a_goal_without_its_runs_is_open() -> None:
    done = {job: result for job, result in planted().items() if job.seed < SEEDS and job.task != "mnist-5k"}
    found = ada_selection.results(done)
    assert found["goals"] == {"close": None, "above": None, "weights differ": OPEN}
    assert "not all runs are there" in ada_selection.markdown(found)
    assert ada_selection.results({})["goals"] == {"close": None, "above": None, "weights differ": OPEN}


def test_arms_with_other_numbers_of_steps_are_refused() -> None:
    done = planted()
    job = next(job for job in done if job.arm == "random")
    done[job] = done[job] | {"steps": 690}
    with pytest.raises(ValueError, match=r"bike at 0.1: the arms must have equal numbers of optimizer steps, got \[100, 690\]"):
        ada_selection.results(done)


RESULTS = [path for path in (ROOT / "benchmarks" / "results" / "ada_selection.json",) if path.exists()]


@pytest.mark.parametrize("path", RESULTS)
def test_results_and_page_are_those_of_the_runs(path: Path) -> None:
    found = ada_selection.results(load(path.with_name("ada_selection-runs.jsonl")))
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    page = (ROOT / "docs" / "results.md").read_text()
    assert page == between_marks(page, BEGIN, END, ada_selection.markdown(found))
