import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks import compiled as bench
from benchmarks.measure import Interval

from depth import DEEP, depth

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PAGE = f"before\n{bench.MARKS[0]}\nold\n{bench.MARKS[1]}\nafter\n"


def test_a_value_is_judged_by_its_whole_interval() -> None:
    judged = [
        bench.row_of("steps", "lm", "x", Interval(1.0, low, high, 0.95), limit).judged
        for low, high, limit in ((0.9, 1.1, 1.1), (1.11, 1.2, 1.1), (0.9, 1.2, 1.1), (0.9, 9.0, None))
    ]
    assert judged == ["met", "missed", "cannot tell", ""]
    assert bench.Row("lengths", "lm", "x", 1.2, 1.1).judged == "missed"


def test_a_hundred_lengths_in_a_fixed_order() -> None:
    lengths = bench.lengths_of(500, 160)
    assert len(lengths) == 500 and len(set(lengths)) == 100 and max(lengths) <= 160 and min(lengths) >= 61
    assert lengths == bench.lengths_of(500, 160) and lengths[:100] != sorted(lengths[:100])
    assert set(bench.lengths_of(6, 24)) <= set(range(9, 25))


def test_rows_of_parts_that_are_not_measured_stay(tmp_path) -> None:
    path = tmp_path / "compiled.json"
    assert bench.measured_before(path, "steps", quick=False) == []
    path.write_text(json.dumps({"quick": False, "rows": [{"part": "steps", "value": 1}, {"part": "lengths", "value": 2}]}))
    assert bench.measured_before(path, "steps", quick=False) == [{"part": "steps", "value": 1}]
    assert bench.measured_before(path, "steps", quick=True) == []


def test_all_values_are_named_and_have_their_limits() -> None:
    assert set(bench.STEP_LIMITS.values()) == {1.10, 1.15} and set(bench.STEP_LIMITS) <= set(bench.TASKS)
    assert list(bench.parts(True)) == list(bench.parts(False)) == ["lengths", "memory", "steps", "exactness", "compilations"]


def test_gradients_are_compared_with_those_of_the_model(monkeypatch) -> None:
    """Without a compiler, so that it takes no time; one that gives other gradients is seen."""
    make = bench.thresher.subset_backward
    monkeypatch.setattr(bench.thresher, "subset_backward", lambda model, **_: make(model))
    (row,) = bench.exactness("vit", 4)
    assert row.value < 1e-12 == row.limit
    monkeypatch.setattr(bench.thresher, "subset_backward", lambda model, **_: torch.nn.Sequential(model, torch.nn.Softmax(1)))
    (row,) = bench.exactness("vit", 4)
    assert row.judged == "missed"


def test_results_are_what_is_printed_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "results" / "compiled.json", tmp_path / "page.md"
    page.write_text(PAGE)
    only = depth(["--only", "lengths"], [])
    code = bench.main(["--quick", *only, "--out", str(out), "--page", str(page)])
    results, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert results["quick"] and results["versions"]["torch"] == torch.__version__
    assert {row["part"] for row in results["rows"]} == ({*bench.parts(True)} if DEEP else {"lengths"})
    assert code == bool(results["missed"]) and f"{len(results['missed'])} limits missed" in printed
    value = {(row["part"], row["what"]): row["value"] for row in results["rows"]}
    assert value["lengths", "traces"] == 2 and value["lengths", "trainings that ended with the plain model"] == 0
    if DEEP:
        assert value["compilations", "8 steps of varying rows"] == 2
        assert value["exactness", "float64 gradient, relative error"] < 1e-12
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert len(re.findall(r"^\| (?:steps|memory|exactness|compilations|lengths) \|", text, re.MULTILINE)) == len(
        results["rows"]
    )
    assert all(row["what"] in text and row["what"] in printed for row in results["rows"])
