"""The Diet Selective-Backprop experiment: what it compares, its overlaps by hand, and a run of it in small."""

import json

import pytest
from benchmarks import diet_sb


def test_what_is_compared(tmp_path):
    labels = [spec.label for spec in diet_sb.specs(tmp_path / "el2n-cnn.parquet")]
    assert len(labels) == 5 * len(diet_sb.TOTALS)
    assert "prune:scores=el2n-cnn:keep=0.75+selective_backprop:keep=0.6667 once" in labels
    assert "prune:scores=el2n-cnn:keep=0.75+selective_backprop:keep=0.5 once" in labels


def test_overlaps_by_hand(monkeypatch):
    monkeypatch.setattr(diet_sb, "TOTALS", (0.5,))
    a, b, c = [1, 2, 3, 4], [1, 4, 2, 3], [4, 3, 2, 1]
    found = diet_sb.overlaps({"a": a, "b": b, "c": c})
    assert [(row["of"], row["and"], row["overlap"]) for row in found] == [("a", "b", 0.5), ("a", "c", 0.0), ("b", "c", 0.5)]


def test_in_small(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(diet_sb, "TASKS", {"cnn": "digits", "mlp": "digits"})
    monkeypatch.setattr(diet_sb, "TOTALS", (0.5,))
    monkeypatch.setattr(diet_sb, "MODELS", 1)
    monkeypatch.setattr(diet_sb, "SCORE_EPOCHS", 1)
    out = tmp_path / "found.json"
    assert diet_sb.main(["--quick", "--work", str(tmp_path / "work"), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["scores_took"]["cnn"] == [400, 200]
    diet = next(row for row in found["summary"] if "+selective" in row["method"])
    alone = next(row for row in found["summary"] if row["method"] == "selective_backprop:keep=0.5 once")
    assert diet["cost_ratio"] > alone["cost_ratio"]
    same = next(row for row in found["overlaps"] if row["of"] == "el2n cnn" and row["and"] == "el2n mlp")
    assert same["overlap"] == 1
    printed = capsys.readouterr().out
    assert "(control)" in printed and "dropped by" in printed


@pytest.mark.parametrize("row", [{"ci95": None, "difference": None}, {"ci95": [-0.01, 0.02], "difference": 0.005}])
def test_the_table(row):
    text = diet_sb.table([{"method": "m", "control_of": None, "mean": 0.9, "std": 0.01, "cost_ratio": 1, "cpu_ratio": 1} | row])
    assert ("+0.50 [-1.00, +2.00]" in text) == (row["ci95"] is not None)
