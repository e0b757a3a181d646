"""The benchmark of the overhead: what is done by hand is what run.criterion does."""

import json

import pytest
import torch
from benchmarks import overhead
from benchmarks.measure import compare

from thresher import methods

N = 1000
CPU = torch.device("cpu")


def test_the_plans_of_every_method_that_plans_epochs_are_measured():
    measured = {
        f"{type(make()).__module__}:{type(make()).__name__}"
        for make in (overhead.METHODS | overhead.OTHERS).values()
    }
    assert measured == {info.target for info in methods.infos().values() if info.stage == "epoch"}
    assert (
        set(overhead.DRAWING)
        <= set(overhead.WEIGHED)
        <= set(overhead.OTHERS)
        >= set(overhead.MIDDLE)
    )


def test_limits_of_other_plans(monkeypatch, tmp_path):
    """At ten million samples a ratio, at any size the seconds of ImportanceSampling; bytes in a process of their own."""
    monkeypatch.setattr(
        overhead, "compare", lambda *sides, **how: compare(*sides, **{**how, "pairs": 1})
    )

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


def test_the_start_of_stratified_batches_is_limited_at_ten_million_samples():
    assert overhead.start_limit("Winnow", overhead.TEN_MILLION) == 2.5
    assert (
        overhead.start_limit("Winnow", 1_281_167) is None
        and overhead.start_limit("Kakurenbo", 1000) == 5
    )
