"""The benchmark of the overhead: what is done by hand is what run.criterion does."""

import json

import pytest
import torch
from benchmarks import overhead
from benchmarks.measure import compare

from thresher import methods

N = 1000
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Kakurenbo", "InfoBatch", "InfoBatch, weighted", "FullData"])
def test_by_hand_the_loss_and_the_records_are_the_same(name):
    made = dict(overhead.criterion_sides(N, CPU))[name]
    run = made.run
    x, y = next(overhead.batches(run.loader))
    before = {key: column.clone() for key, column in run.records.items()}
    trained = run.trained.clone()
    weights = run.plan.weights
    if weights is not None:
        weights = torch.ones(N).index_copy_(0, run.plan.ids, weights)[run.ids]
    by_hand = overhead.loss_by_hand(before, trained, run.model(x), y, run.ids, weights)
    loss = run.criterion(run.model(x), y)
    loss.backward()
    made.optimizer.step()
    assert (weights is None) == (name != "InfoBatch, weighted")
    torch.testing.assert_close(by_hand, loss)
    for key, column in run.records.items():
        torch.testing.assert_close(before[key], column)
    assert torch.equal(trained, run.trained)


def test_the_limit_is_on_what_is_done_by_hand(tmp_path):
    out = tmp_path / "found.json"
    overhead.main(["--quick", "--only", "by hand", "--n", str(N), "--out", str(out)])
    (table,) = json.loads(out.read_text())["tables"]
    limits = {row["name"]: row["limit"] for row in table["rows"]}
    assert limits == {
        f"{name}, {what}": limit
        for name in ("Kakurenbo", "InfoBatch", "InfoBatch, weighted", "FullData")
        for what, limit in (("by hand again (A/A)", None), ("run.criterion", overhead.BY_HAND_LIMIT))
    }


def test_the_plans_of_every_method_that_plans_epochs_are_measured():
    measured = {f"{type(make()).__module__}:{type(make()).__name__}" for make in (overhead.METHODS | overhead.OTHERS).values()}
    assert measured == {info.target for info in methods.infos().values() if info.stage == "epoch"}
    assert set(overhead.DRAWING) <= set(overhead.WEIGHED) <= set(overhead.OTHERS) >= set(overhead.MIDDLE)


@pytest.mark.parametrize("name", overhead.OTHERS)
def test_what_is_measured_is_a_plan_in_the_middle_of_a_training(name):
    """Not that of an epoch that keeps everything, which costs nothing."""
    method, records = overhead.filled(name, N, CPU)
    epoch = overhead.MIDDLE.get(name, 1)
    plan = method.plan_epoch(records, epoch=epoch, epochs=overhead.EPOCHS, generator=torch.Generator().manual_seed(0))
    assert plan.drawn or plan.keys is not None or len(plan.ids) < N
    assert ("ImportanceSampling" in name or name in ("Mercury", "Rais")) == plan.drawn == (name in overhead.DRAWING)


def test_limits_of_other_plans(monkeypatch, tmp_path):
    """At ten million samples a ratio, at any size the seconds of ImportanceSampling; bytes in a process of their own."""
    monkeypatch.setattr(overhead, "compare", lambda *sides, **how: compare(*sides, **{**how, "pairs": 1}))

    def too_much(n, device, names):
        return [overhead.MemoryRow(name, 30.0, 24.0) for name in names]

    monkeypatch.setattr(overhead, "plan_memory", too_much)
    for ten_million, limit in ((N, 6.0), (N + 1, None)):
        monkeypatch.setattr(overhead, "TEN_MILLION", ten_million)
        out = tmp_path / "found.json"
        code = overhead.main(["--quick", "--only", "other plans", "--n", str(N), "--out", str(out)])
        plans, memory = json.loads(out.read_text())["tables"]
        rows = {row["name"]: row for row in plans["rows"]}
        assert {row["limit"] for name, row in rows.items() if name in overhead.OTHERS} == {limit}
        assert {name for name, row in rows.items() if row["limit_s"]} == {*overhead.DRAWING[:2]}
        assert rows["ImportanceSampling"]["limit_s"] == pytest.approx(2e-7 * N)
        assert [row["name"] for row in memory["rows"]] == ["ImportanceSampling"] and code == 1
