import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.winnow.further.table import BEGIN, END, kept, lines_of, results, text, with_text
from benchmarks.winnow.further.trainings import (
    BASE,
    SEEDS,
    TASKS,
    WAYS,
    Job,
    TailAverage,
    looks_of,
    ready,
)
from benchmarks.winnow.further.variants import AveragedUncertainty, ChangingShare, ThresholdKeep, chances
from benchmarks.winnow.jobs import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thresher import EpochPlan, Winnow

ROOT = Path(__file__).parents[3]
RUNS, RESULTS = (ROOT / "benchmarks" / "results" / name for name in ("winnow-further-runs.jsonl", "winnow-further.json"))
PAGE = ROOT / "docs" / "winnow-measured.md"

ATTEMPTS = [way.name for way in WAYS if way.attempt]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plan_of(method: Winnow, records: Mapping[str, torch.Tensor], epoch: int = 5, epochs: int = 10) -> EpochPlan:
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator())


def test_rows_are_drawn_by_the_average_and_not_by_the_last_uncertainty() -> None:
    last = torch.linspace(0.1, 0.9, 200)
    records = {"uncertainty": last, "loss": last, "averaged": torch.where(torch.arange(200) < 50, 0.5, 0.0)}
    plan = plan_of(AveragedUncertainty(), records)
    assert plan.keys is not None
    assert plan.keys.isfinite().tolist() == [True] * 50 + [False] * 150
    assert plan_of(Winnow(paced=False), records).keys is not None


def test_the_share_changes_by_the_same_step_with_the_mean_of_the_budget() -> None:
    records = {name: torch.linspace(0.1, 0.9, 200) for name in ("uncertainty", "loss")}
    method = ChangingShare(0.35, last=0.65, lr_scale=1.0)
    plans = [plan_of(method, records, epoch) for epoch in range(10)]
    steps = [after.share - before.share for before, after in pairwise(plans)]
    assert (plans[0].share, plans[-1].share) == (0.35, pytest.approx(0.65))
    assert steps == pytest.approx([0.3 / 9] * 9) and sum(plan.share for plan in plans) == pytest.approx(5.0)
    assert {plan.lr_scale for plan in plans} == {1.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=40), st.floats(0.05, 1.0))
def test_chances_have_the_wanted_sum_and_one_threshold(scores: list[float], keep: float) -> None:
    ascending, total = torch.tensor(scores, dtype=torch.float64).sort().values, keep * len(scores)
    found = chances(ascending, total)
    assert float(found.sum()) == pytest.approx(total, rel=1e-6)
    assert float(found.max()) <= 1 and bool((found.diff() >= 0).all())
    below = found < 1 - 1e-9
    thresholds = (ascending / found)[below]
    if len(thresholds):
        assert thresholds.tolist() == pytest.approx([float(thresholds[0])] * len(thresholds), rel=1e-6)
        assert bool((ascending[~below] >= thresholds[0] * (1 - 1e-6)).all())


@pytest.mark.parametrize("score", ["loss", "grad_norm"])
def test_the_expected_loss_is_that_of_the_batch(score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.tensor([4.0, 0.1, 0.7, 2.0, 0.2, 0.4, 1.0])
    means = []
    for place in range(500):  # evenly spaced random numbers: the mean over them is the expectation, but for the spacing
        monkeypatch.setattr(torch, "rand", lambda *_, place=place, **__: torch.tensor((place + 0.5) / 500))
        signals = {"id": torch.arange(7), "loss": loss, "grad_norm": loss.sqrt()}
        plan, _ = ThresholdKeep(0.5, score).plan_batch(signals, {}, step=0, generator=generator())
        assert plan.weights is not None and len(plan.rows) in (3, 4)
        means.append(float((plan.weights * loss[plan.rows]).mean()))
    assert sum(means) / len(means) == pytest.approx(float(loss.mean()), rel=0.003)


def test_the_average_of_the_weights_is_that_of_the_last_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    average, seen = TailAverage(model, optimizer, steps=8), []
    for step in range(8):
        model.weight.grad = torch.full((1, 1), float(step))
        optimizer.step()
        seen.append(float(model.weight.detach()))
    assert [float(p.detach()) for p in average.model.parameters()] == pytest.approx([sum(seen[-2:]) / 2])
    again = TailAverage(model, optimizer, steps=8)
    again.load_state_dict(average.state_dict())
    assert torch.equal(*(next(iter(one.model.parameters())) for one in (again, average)))


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(n) % 10
    return torch.randn(n, 1, 28, 28, generator=generator()) + labels[:, None, None, None], labels


def planted(different: Mapping[tuple[str, str], float], without: tuple[str, str] | None = None) -> dict[Job, dict[str, Any]]:
    """Returns results of 88 points, with noise, and with the given differences of ways on tasks; some may be left out."""
    done: dict[Job, dict[str, Any]] = {}
    while waiting := [job for job in ready(done) if job not in done and (job.arm, job.task) != without]:
        for job in waiting:
            noise = 0.02 * ((7 * job.seed + 3 * len(job.arm)) % 5 - 2)
            value = 88.0 + noise + different.get((job.arm, job.task), 0.0) - (0.0 if job.factor == 1.0 else 1.0) * job.looks
            done[job] = {"metric": value, "averaged": value, "cost": {"ratio": job.share}}
    return done


def test_every_way_looks_at_the_same_grid_with_seeds_that_are_not_counted() -> None:
    for way in WAYS:
        looks = looks_of(way, "fashion-10k")
        assert [job.factor for job in looks] == [0.6, 0.6, 1.0, 1.0, 1.6, 1.6] and all(job.looks for job in looks)
    counted = [job for job in ready(planted({})) if not job.looks]
    assert {job.seed for job in counted} == set(range(SEEDS)) and not set(range(SEEDS)) & {1000, 1001}


def lines(done: Mapping[Job, Any]) -> dict[str, Any]:
    return {task: lines_of(done, task) for task in TASKS}


def test_a_way_that_is_better_on_one_task_is_kept() -> None:
    name = ATTEMPTS[0]
    won = lines(planted({(name, TASKS[1]): 0.5}))
    assert kept(won) == [name]
    assert won[TASKS[1]][name].to_winnow.mean == pytest.approx(0.5, abs=0.05) and won[TASKS[1]][name].chance < 0.001
    assert won[TASKS[0]][name].chance > 0.025
    assert won[TASKS[0]][BASE].chance is None and won[TASKS[0]]["full"].chance is None


def test_a_way_that_is_worse_on_another_task_or_not_complete_is_not_kept() -> None:
    name = ATTEMPTS[0]
    worse = planted({(name, TASKS[1]): 0.5, (name, TASKS[2]): -0.5})
    assert kept(lines(worse)) == []
    assert f"**Kept: nothing.** Better than Winnow after the correction: {name} (on {TASKS[1]})." in text(worse)
    assert f"Worse, without a correction: {name} (on {TASKS[2]})." in text(worse)
    missing = planted({(name, TASKS[1]): 0.5}, without=(name, TASKS[2]))
    assert kept(lines(missing)) == [] and f"Not complete on all tasks: {name}." in text(missing)


def test_the_correction_is_over_the_ways_of_a_task() -> None:
    done = planted({})
    found = {name: line for name, line in lines_of(done, TASKS[0]).items() if line.chance is not None}
    assert list(found) == ATTEMPTS
    least = min(found, key=lambda name: found[name].to_winnow.chance(0.0))
    assert found[least].chance == pytest.approx(min(1.0, len(ATTEMPTS) * found[least].to_winnow.chance(0.0)))


def test_the_page_and_the_results_are_those_of_the_trainings() -> None:
    done = load(RUNS)
    page = PAGE.read_text()
    assert with_text(page, done) == page and BEGIN in page and END in page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(results(done)))


def test_every_committed_training_has_the_cost_that_it_should_have() -> None:
    for job, result in load(RUNS).items():
        assert result["cost"]["ratio"] == pytest.approx(job.share, abs=0.01), job
