"""Trainings that comparisons share: looks at rates, and a file that a later call goes on with."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.winnow.jobs import (
    SHORT,
    Arm,
    Job,
    chosen_factor,
    load,
    looks_of,
    run_missing,
    train_arm,
)
from benchmarks.winnow.table import TITLES
from benchmarks.winnow.tasks import PROBLEMS, Sets, problem_of
from torch.utils.data import TensorDataset

from thresher_lab.comparison.controls import FULL_TRAINING
from thresher_lab.tasks.networks import perceptron
from thresher_lab.training.specs import MethodSpec

FULL = Arm("full", lambda _: FULL_TRAINING)
SMALLER = Arm("smaller", lambda share: MethodSpec("uniform", {"keep": share}, {"spend": "batches"}))
SHORTER = Arm("shorter", lambda _: FULL_TRAINING, shorter=True)


def test_every_arm_looks_at_the_same_grid_with_seeds_that_are_not_counted() -> None:
    looks = looks_of(SHORT, "bike", "full", 1.0)
    assert [job.factor for job in looks] == [0.6, 0.6, 1.0, 1.0, 1.6, 1.6]
    assert all(job.looks for job in looks)
    assert not any(replace(job, seed=SHORT.seeds - 1).looks for job in looks)


def test_of_equal_rates_the_smallest_is_chosen_and_an_arm_may_take_the_rate_of_full_training() -> (
    None
):
    done = {job: {"metric": 1.0} for job in looks_of(SHORT, "bike", "full", 1.0)}
    assert chosen_factor(SHORT, done, "bike", FULL, 1.0) == 0.6
    assert chosen_factor(SHORT, done, "bike", SMALLER, 0.5) is None
    done |= {
        job: {"metric": float(job.factor == 1.6)} for job in looks_of(SHORT, "bike", "full", 1.0)
    }
    assert chosen_factor(SHORT, done, "bike", replace(SMALLER, rate_of="full"), 0.5) == 1.6


class InThisProcess:
    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, act: Any, job: Job) -> Any:
        future: Any = Future()
        future.set_result(act(job))
        return future


def test_runs_go_on_where_they_were_stopped(tmp_path) -> None:
    jobs = looks_of(SHORT, "bike", "full", 1.0)
    file = tmp_path / "runs.jsonl"
    calls = iter(range(10))

    def run_some(workers: int, until: Any) -> Any:
        def train(job: Job) -> dict[str, Any]:
            return {"metric": job.factor}

        return run_missing(lambda _: iter(jobs), train, file, workers, until, pool=InThisProcess())

    run_some(1, lambda: next(calls) >= 5)
    assert len(load(file)) == 5
    done = run_some(2, lambda: False)
    assert done == load(file) and list(done) == jobs


def test_a_training_of_a_small_task() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 10
    images = torch.randn(1200, 1, 4, 4, generator=generator) + labels[:, None, None, None]
    part = images[200:], labels[200:]
    sets = Sets(TensorDataset(images[:200], labels[:200]), part, part)
    problem = problem_of("fashion-10k")
    task = replace(problem.task, network=lambda: perceptron(16), batch_size=50)
    small = replace(problem, task=task, sets=lambda: sets, epochs=2)
    for arm in (SMALLER, SHORTER):
        result = train_arm(Job("fashion-10k", arm.name, 0.5, 1.0, 0), arm, small)
        assert 0 <= result["metric"] <= 100
        counts = result["cost"]
        assert counts["backward"] / counts["full_backward"] == pytest.approx(0.5, abs=0.03)


def test_titles_are_of_tasks() -> None:
    assert set(TITLES) <= {problem.task.name for problem in PROBLEMS}


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
    assert problem.task.evaluate(network, [(inputs, targets)]) == 0
