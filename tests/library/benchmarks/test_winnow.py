import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.winnow import jobs
from benchmarks.winnow.jobs import (
    ARMS,
    FIRST_LOOK,
    SHORT,
    Design,
    Job,
    arms_of,
    chosen_factor,
    load,
    looks_of,
    ready,
    run_all,
)
from benchmarks.winnow.measures import calibration_error, measures_of
from benchmarks.winnow.table import (
    BEGIN,
    END,
    TITLES,
    goal,
    markdown,
    overview,
    results,
    rows_of,
    shown,
    with_overview,
    with_tables,
)
from benchmarks.winnow.tasks import PROBLEMS, Sets, problem_of
from torch import nn
from torch.utils.data import TensorDataset

from thresher_lab.tasks.networks import perceptron

TASKS = ("fashion-20k", "mnist-5k", "bike", "text", "relief", "fashion-resnet8")
DESIGN = replace(SHORT, tasks=TASKS, shares=(0.5,))

ROOT = Path(__file__).parents[3]
RUNS, RESULTS = (
    ROOT / "benchmarks" / "results" / name for name in ("winnow-runs.jsonl.gz", "winnow.json")
)
PAGE, OVERVIEW_PAGE = (
    ROOT / "docs" / "evidence" / "winnow-measured.md",
    ROOT / "docs" / "evidence" / "results.md",
)

BEST = {"full": 1.0, "winnow": 0.6, "shorter": 1.6}
"""Planted best factors of the grid; of the other arms it is 1."""


def planted(design: Design, means: Mapping[str, float]) -> dict[Job, dict[str, Any]]:
    """Returns results whose means are as given, with noise that depends on the seed and the arm."""
    done: dict[Job, dict[str, Any]] = {}
    while waiting := [job for job in ready(design, done) if job not in done]:
        for job in waiting:
            noise = 0.02 * ((7 * job.seed + 3 * len(job.arm)) % 5 - 2)
            off = 0.0 if job.factor == BEST.get(job.arm, 1.0) else -1.0
            value = means[job.arm] + noise + (off if job.looks else 0.0)
            done[job] = {
                "metric": value,
                "worst_class": None,
                "calibration_error": None,
                "cost": {"ratio": job.share},
            }
    return done


def means(**different: float) -> dict[str, float]:
    return {**{arm.name: 88.0 for arm in ARMS}, "full": 90.0, **different}


def test_every_arm_looks_at_the_same_grid_with_seeds_that_are_not_counted() -> None:
    for arm, share in arms_of(SHORT):
        looks = looks_of(SHORT, "bike", arm.name, share)
        assert [job.factor for job in looks] == [0.6, 0.6, 1.0, 1.0, 1.6, 1.6]
        assert all(job.looks for job in looks)
    assert all(max(SHORT.counted(problem, 0.5)) < FIRST_LOOK for problem in PROBLEMS)
    assert [len(SHORT.counted(problem, 0.35)) for problem in PROBLEMS] == [5] * len(PROBLEMS)


def test_counted_runs_wait_for_their_rate() -> None:
    design = replace(DESIGN, tasks=("bike",))
    first = list(ready(design, {}))
    assert all(job.looks for job in first)
    done = {job: {"metric": job.factor} for job in first}
    counted = [job for job in ready(design, done) if not job.looks]
    assert {job.arm for job in counted} == {arm.name for arm in ARMS}
    assert {job.factor for job in counted} == {1.6}


def test_of_equal_rates_the_smallest_is_chosen_and_the_rule_takes_the_one_of_full_training() -> (
    None
):
    design = replace(DESIGN, tasks=("bike",))
    done = {job: {"metric": 1.0 if job.arm == "full" else -job.factor} for job in ready(design, {})}
    arms = {arm.name: arm for arm in ARMS}
    assert chosen_factor(design, done, "bike", arms["full"], 1.0) == 0.6
    done |= {
        job: {"metric": float(job.factor == 1.6)} for job in looks_of(design, "bike", "full", 1.0)
    }
    assert chosen_factor(design, done, "bike", arms["winnow at its own rate"], 0.5) == 1.6
    assert chosen_factor(design, done, "bike", arms["winnow"], 0.5) == 0.6


def test_planted_differences_are_found() -> None:
    done = planted(DESIGN, means(winnow=89.95, smaller=89.5))
    rows = rows_of(DESIGN, done, "bike", 0.5)
    assert (rows["winnow"].factor, rows["shorter"].factor, rows["full"].factor) == (0.6, 1.6, 1.0)
    assert rows["winnow"].at_edge and not rows["full"].at_edge
    assert rows["winnow"].to_full is not None and rows["winnow"].to_full.mean == pytest.approx(
        -0.05, abs=0.05
    )
    found = shown({task: rows_of(DESIGN, done, task, 0.5) for task in TASKS})
    assert found["bike"] == {"counts": True, "to_full": "no loss", "to_smaller": "better"}
    assert goal(found) == {
        "tasks": 6,
        "counting": 6,
        "no_loss": 6,
        "better": 6,
        "worse": 0,
        "met": True,
    }


def test_a_task_without_a_waste_does_not_count() -> None:
    done = planted(DESIGN, means(winnow=89.95, smaller=89.5, shorter=89.95, uniform=89.9))
    found = results(DESIGN, done)["goal"]
    assert (found["counting"], found["no_loss"], found["met"]) == (0, 0, False)


def test_one_task_that_is_worse_misses_the_goal() -> None:
    done = planted(DESIGN, means(winnow=89.95, smaller=89.5))
    worse = planted(replace(DESIGN, tasks=("bike",)), means(winnow=89.0, smaller=89.5))
    found = results(DESIGN, done | worse)["goal"]
    assert (found["better"], found["worse"], found["met"]) == (5, 1, False)


def test_arms_that_are_not_complete_have_no_row() -> None:
    done = planted(DESIGN, means())
    left = {
        job: result for job, result in done.items() if job != Job("bike", "winnow", 0.5, 0.6, 4)
    }
    assert "winnow" not in rows_of(DESIGN, left, "bike", 0.5)
    assert results(DESIGN, left)["goal"]["tasks"] == len(TASKS) - 1


def test_the_table_names_edges_and_intervals() -> None:
    text = markdown(rows_of(DESIGN, planted(DESIGN, means()), "bike", 0.5))
    line = next(line for line in text.splitlines() if line.startswith("| winnow |"))
    assert "x 0.6 (edge)" in line and "±" in line


def test_calibration_error_by_hand() -> None:
    # two samples of confidence 0.9, one of which is right; two of confidence 0.6, both right
    scores = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]]))
    targets = torch.tensor([0, 1, 0, 0])
    assert calibration_error(
        [(scores[:1], targets[:1]), (scores[1:], targets[1:])]
    ) == pytest.approx((0.8 + 0.8) / 4)


def test_measures_leave_rare_classes_out() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    inputs = torch.tensor([[1.0, 0.0]]).repeat(103, 1)
    targets = torch.tensor([0] * 100 + [1] * 3)
    measured = measures_of(problem_of("mnist-5k"), model, (inputs, targets))
    assert measured.metric == pytest.approx(100 * 100 / 103)
    assert measured.worst_class == 100.0


def test_a_network_that_has_diverged_has_no_calibration() -> None:
    model = nn.Linear(2, 2)
    model.weight.data.fill_(float("nan"))
    measured = measures_of(
        problem_of("mnist-5k"), model, (torch.ones(60, 2), torch.zeros(60, dtype=torch.int64))
    )
    assert measured.calibration_error is None and measured.worst_class is not None


def test_runs_go_on_where_they_were_stopped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(job: Job) -> dict[str, Any]:
        return {
            "metric": job.factor,
            "worst_class": None,
            "calibration_error": None,
            "cost": {"ratio": job.share},
        }

    class InThisProcess:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> "InThisProcess":
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, act: Any, job: Job) -> Any:
            from concurrent.futures import Future

            future: Any = Future()
            future.set_result(act(job))
            return future

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(jobs, "run", train)
    design = Design(tasks=("bike",), shares=(0.5,), seeds=2)
    file = tmp_path / "runs.jsonl"
    calls = iter(range(10))
    run_all(design, file, 1, lambda: next(calls) >= 5)
    assert len(load(file)) == 5
    done = run_all(design, file, 2, lambda: False)
    assert done == load(file)
    assert not [job for job in ready(design, done) if job not in done]


def test_a_training_of_a_small_task(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 10
    images = torch.randn(1200, 1, 4, 4, generator=generator) + labels[:, None, None, None]
    part = images[200:], labels[200:]
    sets = Sets(TensorDataset(images[:200], labels[:200]), part, part)
    problem = problem_of("fashion-10k")
    task = replace(problem.task, network=lambda: perceptron(16), batch_size=50)
    monkeypatch.setattr(
        jobs, "problem_of", lambda _: replace(problem, task=task, sets=lambda: sets, epochs=2)
    )
    with pytest.raises(ValueError, match="first version of Winnow was removed"):
        jobs.run(Job("fashion-10k", "winnow", 0.5, 1.0, 0))
    for name in ("smaller", "shorter"):
        result = jobs.run(Job("fashion-10k", name, 0.5, 1.0, 0))
        assert 0 <= result["metric"] <= 100 and result["worst_class"] is not None
        counts = result["cost"]
        assert counts["backward"] / counts["full_backward"] == pytest.approx(0.5, abs=0.03)


def test_the_page_and_the_results_are_those_of_the_trainings() -> None:
    done = load(RUNS)
    page = PAGE.read_text()
    assert with_tables(page, SHORT, done) == page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(results(SHORT, done)))


def test_the_table_of_all_results_is_that_of_the_results() -> None:
    found, page = json.loads(RESULTS.read_text()), OVERVIEW_PAGE.read_text()
    assert with_overview(page, found) == page


def test_the_overview_has_the_worst_tasks_first() -> None:
    design = replace(DESIGN, tasks=("bike", "text", "relief", "mnist-5k"))
    done: dict[Job, dict[str, Any]] = {}
    for task, own, smaller in (("bike", 89.95, 89.5), ("text", 89.0, 89.5), ("relief", 88.0, 87.0)):
        done |= planted(replace(design, tasks=(task,)), means(winnow=own, smaller=smaller))
    text = overview(json.loads(json.dumps(results(design, done))))
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| text, next byte",
        "| relief (mean IoU)",
        "| bike rentals (R2)",
    ]
    assert rows[0].endswith("| loses; worse than smaller batches |")
    assert rows[1].endswith("| loses; better than smaller batches |")
    assert rows[2].endswith("| no loss; better than smaller batches |")
    paired = results(design, done)["shares"]["0.5"]["tasks"]["bike"]["winnow"]["to_full"]
    assert f"| {paired['mean']:+.2f} [{paired['low']:+.2f}, {paired['high']:+.2f}] |" in rows[2]
    assert text.startswith("3 of 4 tasks are complete; what fell short comes first. On 3 of them")
    assert (
        "on 1, and to be better than smaller batches on 2. It is shown to be worse than smaller batches on 1."
        in text
    )
    assert "is not met so far." in text and text.endswith("Not finished yet: MNIST, 3,000 images.")


def test_a_task_without_a_waste_is_said_to_count_for_nothing() -> None:
    done = planted(DESIGN, means(winnow=89.95, smaller=89.5, shorter=89.95, uniform=89.9))
    text = overview(results(DESIGN, done))
    assert (
        text.count("; easy task: no way to spend less is shown to lose more than 0.2 |")
        == len(TASKS)
        and "is not met." in text
    )


def test_titles_are_of_tasks() -> None:
    assert set(TITLES) <= {problem.task.name for problem in PROBLEMS}


def test_tables_stand_between_their_marks() -> None:
    done = planted(replace(DESIGN, tasks=("bike",)), means(winnow=89.95, smaller=89.5))
    page = with_tables(f"a\n{BEGIN}\nold\n{END}\nb\n", DESIGN, done)
    assert page.startswith(f"a\n{BEGIN}\n") and page.endswith(f"{END}\nb\n") and "old" not in page
    assert (
        "**bike, at 0.5 of the cost** (to full training: no loss; to smaller batches: better)"
        in page
    )
    assert with_tables(page, DESIGN, done) == page


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="no task 'mars'"):
        problem_of("mars")


def test_a_network_that_has_diverged_counts_as_a_constant():
    problem = problem_of("bike")
    inputs, targets = problem.sets().choice
    network = problem.task.network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float("nan"))
    assert measures_of(problem, network, (inputs, targets)).metric == 0
