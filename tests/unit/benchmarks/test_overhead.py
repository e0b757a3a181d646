"""The benchmark of the overhead: what is done by hand is what run.criterion does."""

import json

import pytest
import torch
from benchmarks import overhead

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
