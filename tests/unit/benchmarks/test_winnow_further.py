import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.winnow.further import proxy, trainings
from benchmarks.winnow.further.proxy import chosen, operations, quarter_cnn, train_beside
from benchmarks.winnow.further.table import BEGIN, END, kept, lines_of, results, text, with_text
from benchmarks.winnow.further.trainings import (
    BASE,
    BUDGET,
    FACTORS,
    SEEDS,
    TASKS,
    WAYS,
    Job,
    TailAverage,
    chosen_factor,
    looks_of,
    ready,
    run,
)
from benchmarks.winnow.further.variants import AveragedUncertainty, ChangingShare, ThresholdKeep, average, chances
from benchmarks.winnow.jobs import load
from benchmarks.winnow.tasks import Sets, plain_cnn, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from depth import in_verify
from thresher import EpochPlan, Winnow
from thresher.experiments.tasks.base import Data
from thresher.records import NEVER_SEEN, Records
from thresher.testing import check_method

ROOT = Path(__file__).parents[3]
RUNS, RESULTS = (ROOT / "benchmarks" / "results" / name for name in ("winnow-further-runs.jsonl", "winnow-further.json"))
PAGE = ROOT / "docs" / "winnow.md"

ATTEMPTS = [way.name for way in WAYS if way.attempt]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plan_of(method: Winnow, records: Mapping[str, torch.Tensor], epoch: int = 5, epochs: int = 10) -> EpochPlan:
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator())


def test_the_average_begins_with_the_first_value() -> None:
    records = Records(AveragedUncertainty(factor=0.75).columns(), n=3, device=torch.device("cpu"))
    for value in (0.8, 0.4, 0.0):
        records.write(torch.tensor([1]), {"uncertainty": torch.tensor([value]), "loss": torch.tensor([1.0])})
    after = 0.75 * (0.75 * 0.8 + 0.25 * 0.4)
    assert records["averaged"].tolist() == pytest.approx([NEVER_SEEN, after, NEVER_SEEN])
    assert float(records["uncertainty"][1]) == 0.0
    assert average(0.5, torch.tensor([NEVER_SEEN, 1.0]), torch.tensor([0.2, 0.0])).tolist() == pytest.approx([0.2, 0.5])


def test_rows_are_drawn_by_the_average_and_not_by_the_last_uncertainty() -> None:
    last = torch.linspace(0.1, 0.9, 200)
    records = {"uncertainty": last, "loss": last, "averaged": torch.where(torch.arange(200) < 50, 0.5, 0.0)}
    plan = plan_of(AveragedUncertainty(), records)
    assert plan.keys is not None
    assert plan.keys.isfinite().tolist() == [True] * 50 + [False] * 150
    assert plan_of(Winnow(), records).keys is not None


def test_where_winnow_draws_uniformly_so_does_the_average() -> None:
    last = torch.linspace(0.1, 0.9, 200)
    records = {"uncertainty": last, "loss": last.flip(0), "averaged": last}
    own, other = plan_of(AveragedUncertainty(), records), plan_of(Winnow(), records)
    assert own.facts["uniform"] == 1.0 and own.keys is not None and other.keys is not None
    assert torch.equal(own.keys, other.keys)


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


def test_the_answer_does_not_depend_on_the_order_of_the_rows() -> None:
    loss, found = torch.rand(20, generator=generator()), []
    for ids in (torch.arange(20), torch.randperm(20, generator=generator(1))):
        signals = {"id": ids, "loss": loss[ids]}
        plan, _ = ThresholdKeep(0.7, "loss").plan_batch(signals, {}, step=0, generator=generator())
        assert plan.weights is not None and len(plan.rows) == 14
        found.append(dict(zip(ids[plan.rows].tolist(), plan.weights.tolist(), strict=True)))
    assert found[0] == found[1]


def test_a_row_above_the_threshold_is_always_kept_and_equal_scores_have_equal_weights() -> None:
    for loss in (torch.tensor([9.0, 0.1, 0.1, 0.1]), torch.tensor([float("nan"), 0.1, 0.1, 0.1])):
        for seed in range(20):
            plan, _ = ThresholdKeep(0.5, "loss").plan_batch(
                {"id": torch.arange(4), "loss": loss}, {}, step=0, generator=generator(seed)
            )
            assert 0 in plan.rows.tolist() and plan.weights is not None
            assert plan.weights.tolist() == pytest.approx([0.5, 1.5])
    for level in (0.0, 1.0):
        same = {"id": torch.arange(8), "loss": torch.full((8,), level)}
        plan, _ = ThresholdKeep(0.75, "loss").plan_batch(same, {}, step=0, generator=generator())
        assert plan.weights is not None and plan.weights.tolist() == pytest.approx([1.0] * 6)


@in_verify
def test_the_variants_keep_the_contract_of_methods() -> None:
    for method in (AveragedUncertainty(), ChangingShare(0.35), ThresholdKeep()):
        check_method(method)


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


def test_operations_by_hand() -> None:
    # 5 rows of 3 numbers to 2: forward 2 * 5 * 3 * 2, and the same for the gradient of the weight; none for the inputs
    assert operations(nn.Linear(3, 2, bias=False), torch.zeros(5, 3)) == 120
    share = operations(quarter_cnn(), torch.zeros(8, 1, 28, 28)) / operations(plain_cnn(), torch.zeros(8, 1, 28, 28))
    assert 0.05 < share < 0.1


def test_the_small_network_chooses_its_largest_losses_or_draws_by_its_uncertainty() -> None:
    losses, unsure = torch.tensor([0.1, 3.0, 2.0, 0.2]), torch.tensor([0.0, 0.5, 0.0, 0.5])
    assert sorted(chosen("loss", losses, unsure, 2, 7).tolist()) == [1, 2]
    for base in range(5):
        assert sorted(chosen("uncertainty", losses, unsure, 2, base).tolist()) == [1, 3]


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(n) % 10
    return torch.randn(n, 1, 28, 28, generator=generator()) + labels[:, None, None, None], labels


def test_both_networks_together_cost_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = images(300)
    data = Data(TensorDataset(x, y), x, y)
    seen: list[tuple[int, int]] = []

    def choose(score: Any, losses: torch.Tensor, unsure: torch.Tensor, k: int, base: int) -> torch.Tensor:
        seen.append((len(losses), k))
        return chosen(score, losses, unsure, k, base)

    monkeypatch.setattr(proxy, "chosen", choose)
    done = train_beside(problem_of("fashion-10k").task, data, score="loss", budget=BUDGET, seed=0, epochs=2)
    assert [n for n, _ in seen] == [128, 128, 44] * 2
    assert sum(k for _, k in seen) == done.rows and done.batches == 600
    assert done.rows / done.batches + done.share == pytest.approx(BUDGET, abs=0.001)


def test_a_small_network_must_be_small() -> None:
    x, y = images(20)
    task, data = problem_of("fashion-10k").task, Data(TensorDataset(x, y), x, y)
    with pytest.raises(ValueError, match=r"costs 1\.000 .* may cost 0\.5: make it smaller"):
        train_beside(task, data, score="loss", budget=BUDGET, seed=0, epochs=1, proxy=plain_cnn)


@pytest.mark.parametrize(
    "name", [BASE, "averaged uncertainty, factor 0.5", "share 0.35 to 0.65", "then in the forward pass, by loss"]
)
def test_a_training_of_a_few_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_images(monkeypatch)
    result = run(Job("fashion-10k", name, BUDGET, 1.0, 0))
    assert result["cost"]["ratio"] == pytest.approx(BUDGET, abs=0.02)
    assert 0 <= result["metric"] <= 100 and ("averaged" in result) == (name == BASE)


def test_a_training_of_a_few_images_with_a_small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    few_images(monkeypatch)
    result = run(Job("fashion-10k", "chosen by a small network's uncertainty", BUDGET, 1.0, 1000))
    assert result["cost"]["ratio"] == pytest.approx(BUDGET, abs=0.01) and 0.05 < result["cost"]["proxy"] < 0.1


def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = images(300)
    part = x[200:], y[200:]
    problem = problem_of("fashion-10k")
    task = replace(problem.task, batch_size=20)
    sets = Sets(TensorDataset(x[:200], y[:200]), part, part)
    monkeypatch.setattr(trainings, "problem_of", lambda _: replace(problem, task=task, sets=lambda: sets, epochs=2))


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


def test_averaged_weights_have_a_rate_of_their_own_in_the_same_trainings() -> None:
    done = planted({})
    rates = {way.name: chosen_factor(done, way, "fashion-10k") for way in WAYS}
    assert rates[BASE] == 1.0 and rates["averaged weights"] == FACTORS[1]
    done |= {job: {**done[job], "averaged": 90.0 * (job.factor == 1.6)} for job in done}
    assert chosen_factor(done, next(way for way in WAYS if way.name == "averaged weights"), "fashion-10k") == 1.6


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
