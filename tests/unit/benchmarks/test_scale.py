"""The benchmark of large datasets: it measures what it says, judges, writes, and models what it counted."""

import json
import tracemalloc
from pathlib import Path

import pytest
from benchmarks import many_ranks, scale
from benchmarks.many_ranks import Size

from depth import depth

N = depth(100_000, 1_000_000)
LIMITS = ("MOST_RESIDENT", "MOST_STATE", "MOST_FIRST_S")


@pytest.mark.parametrize("code", [0, 1])
def test_it_runs_judges_and_writes(monkeypatch, tmp_path, capsys, code):
    monkeypatch.setattr(scale, "QUICK_N", 20_000 if code else N)
    for name in LIMITS if code else ():
        monkeypatch.setattr(scale, name, 0.0)
    out, page = tmp_path / "results" / "scale.json", tmp_path / "page.md"
    page.write_text("\n".join(("before", *scale.MARKS)))
    assert scale.main(["--quick", "--out", str(out), "--page", str(page)]) == code
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert written["missed"] == (
        ["tables of the run, added up", "saved state, tensors", "first batch after a resume in mid-epoch"] if code else []
    )
    assert f"{len(written['missed'])} limits missed" in printed and scale.page_part(written) in page.read_text()
    tables, resident = written["memory"]
    assert resident["limit"] is None and 13.25 <= tables["value"] <= 13.26  # 13 bytes, and two bits
    assert 13.25 <= written["state"]["value"] <= 13.25 + 50_000 / written["n"]
    assert [row["limit"] for row in written["plans"]] == [None, None]
    assert written["first"]["value"] > 0 and written["plans"][1]["cpu_s"] > 0


def test_limits_of_resident_memory_and_plans_are_for_the_whole_size(monkeypatch, tmp_path):
    monkeypatch.setattr(scale, "QUICK_N", 20_000)
    monkeypatch.setattr(scale, "N", 20_000)
    monkeypatch.setattr(scale, "MOST_PLAN", 0.0)
    monkeypatch.setattr(scale, "MOST_RESIDENT", -1e9)
    monkeypatch.setattr(scale, "MOST_STATE", 1000.0)  # of few samples, random states are the larger part
    assert scale.main(["--quick", "--out", str(tmp_path / "scale.json")]) == 1
    written = json.loads((tmp_path / "scale.json").read_text())
    assert written["missed"] == [*(row["name"] for row in written["memory"]), "Kakurenbo"]


def test_an_epoch_makes_no_table_of_all_samples(monkeypatch):
    """A table with a byte per sample would show, and a list of the hidden samples, 16 % of them at 40 bytes each, as well."""
    monkeypatch.setattr("thresher.loading.shuffle.PIECE", 2**10)
    made, n = scale.attached(2 * N, 2000), 2 * N
    epoch = scale.steps(made)
    next(epoch)
    tracemalloc.start()
    for _ in epoch:
        pass
    hidden, (_, peak) = made.run.history[-1]["refreshed"], tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert hidden > 0.1 * n and peak < 900_000 + 0.5 * n, peak


@pytest.mark.parametrize("size", [Size(5000, 3), Size(2**14, 16), Size(100_000, 7)])
def test_what_travels_is_what_the_formulas_say(size):
    counted = many_ranks.traffic(size)
    assert counted == many_ranks.traffic_of(size, counted["counts"]) and counted["counts"] < 64_000
    assert counted["marks"] - 24 >= size.n / 8 and counted["places"] >= size.n / 512


def test_signals_that_wait_and_travel():
    """Ids, 4 bytes for the place on the way, loss, correct and confidence; and how often the sample was trained on."""
    assert many_ranks.home() == {"noted": (8 + 4 + 1 + 4 + 1) + (8 + 4 + 1), "sent": (4 + 4 + 1 + 4) + (4 + 4)}


def test_memory_of_a_rank():
    assert many_ranks.memory(Size(2**20, 4), 31.0) == {
        "records": 13 * 2**18,
        "marks": 2**17,
        "places": 8 * 2**10,
        "noted": 31.0 * 2**18,
    }


def test_the_page_shows_the_results():
    results = json.loads(scale.RESULTS.read_text())
    page = Path(scale.__file__).parents[1] / "docs" / "scale.md"
    assert results["n"] == scale.N and not results["missed"]
    assert "\n".join((scale.MARKS[0], "", scale.page_part(results), "", scale.MARKS[1])) in page.read_text()
