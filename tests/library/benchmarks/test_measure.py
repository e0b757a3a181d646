import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import overhead
from benchmarks.measure import Row, Side, compare, judgment, lines, median_interval, take_turns

from depth import depth, in_verify
from thresher_lab.advise.pace import Spent


def test_interval_of_21_values_by_hand() -> None:
    # P(X <= 5) for X binomial (21, 1/2) is (1 + 21 + 210 + 1330 + 5985 + 20349) / 2^21 = 27896 / 2097152 = 0.01330;
    # P(X <= 6) adds 54264 / 2097152 and makes 0.03918, which leaves less than 95 %: ranks 6 and 16 it is.
    values = [float(v) for v in range(1, 22)]
    random.Random(0).shuffle(values)
    found = median_interval(values)
    assert (found.median, found.low, found.high) == (11.0, 6.0, 16.0)
    assert found.coverage == pytest.approx(1 - 2 * 27896 / 2097152)


def test_interval_of_few_values_is_all_of_them_and_says_what_that_covers() -> None:
    found = median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.median, found.low, found.high, found.coverage) == (3.0, 1.0, 5.0, 1 - 2 / 32)
    assert median_interval([7.0]).coverage == 0.0
    assert median_interval([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(depth(1000, 2000)):
        found = median_interval([draw.expovariate(1.0) for _ in range(21)])
        held += found.low <= 0.6931 <= found.high
    assert held / depth(1000, 2000) == pytest.approx(found.coverage, abs=0.015)


def busy(times: int) -> Side:
    return Side(f"{times}", lambda _: sum(range(times)))


def test_a_over_a_is_about_one_and_more_work_is_more() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    again, double = compare(busy(20_000), [busy(40_000)], pairs=21, calls=3)
    assert again.name == "20000 again (A/A)"
    assert again.limit is None and again.ok
    assert again.cpu.median == pytest.approx(1, abs=0.25)
    assert double.cpu.median == pytest.approx(2, abs=0.5)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_sides_take_turns_and_what_was_put_off_is_done_once_a_round() -> None:
    seen: list[str] = []
    one = Side("one", seen.append, lambda: "one")
    two = Side(
        "two", seen.append, lambda: "two", finish=lambda: seen.append("two's rest"), limit=1e9
    )
    rows = compare(one, [two], pairs=4, calls=2, warm_up=0)
    assert seen.count("one") == 2 * seen.count("two") == 16
    assert seen.count("two's rest") == 4
    for start in range(0, len(seen), 7):
        assert (
            sorted(seen[start : start + 3])
            == sorted(seen[start + 3 : start + 6])
            == ["one", "one", "two"]
        )
        assert seen[start + 6] == "two's rest"
    assert [row.ok for row in rows] == [True, True]


def test_a_row_above_its_limit_is_not_ok() -> None:
    interval = median_interval([2.0, 3.0, 4.0])
    settings = {
        "name": "x",
        "cpu": interval,
        "wall": median_interval([1.0]),
        "cpu_s": 0.0,
        "wall_s": 0.0,
        "pairs": 3,
        "calls": 1,
    }
    assert not Row(**settings, limit=2.5, judged="cpu").ok
    assert Row(**settings, limit=2.5, judged="wall").ok
    assert Row(**settings, limit=None, judged="cpu").ok
    settings["cpu_s"] = 1.5
    assert Row(**settings, limit=None, judged="cpu", limit_s=1.5).ok
    assert not Row(**settings, limit=None, judged="cpu", limit_s=1.4).ok
    assert not Row(**settings, limit=2.5, judged="cpu", limit_s=1.5).ok


def test_judgment_names_every_limit() -> None:
    assert judgment(None, ok=True) == ""
    assert (
        judgment(6.0, ok=True) == "<= 6 ok"
        and judgment(6.0, ok=False, limit_s=2.0) == "<= 6, <= 2 s MISSED"
    )
    assert judgment(None, ok=True, limit_s=0.25) == "<= 0.25 s ok"


def test_table_is_aligned() -> None:
    assert lines(("", "B"), [("first", "1"), ("x", "234")]) == "         B\nfirst    1\nx      234"


def test_quick_overhead_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*sides: Any, **settings: Any) -> list[Row]:
        return compare(*sides, **{**settings, "pairs": 3, "calls": 2})

    monkeypatch.setattr(overhead, "compare", few)
    out, names = (
        tmp_path / "results" / "overhead.json",
        ["plan", "start", "records", "criterion", "step"],
    )
    code = overhead.main(["--quick", "--n", "3000", "--out", str(out), "--only", *names])
    results, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert [table["name"] for table in results["tables"]] == [
        *names[:4],
        "criterion with backward",
        "step",
    ]
    assert results["device"]["type"] == "cpu" and results["versions"]["torch"] == torch.__version__
    assert code == bool(results["missed"])
    assert f"{len(results['missed'])} limits missed" in printed
    for table in results["tables"]:
        assert table["title"] in printed and table["n"] == 3000
        for row in table["rows"]:
            assert row["name"] in printed
            assert row["ok"] == (row["limit"] is None or row["value"] <= row["limit"])
        if table["name"] != "records":
            assert table["rows"][0]["name"].endswith("again (A/A)")
    records = next(table for table in results["tables"] if table["name"] == "records")["rows"]
    assert {row["name"]: row["value"] for row in records}["Kakurenbo"] == 9.0


@in_verify
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    (row,) = overhead.plan_memory(1_000_000, torch.device("cpu"), [overhead.RANDPERM])
    assert row.value == pytest.approx(8, abs=1)


def test_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        overhead.main(["--only", "nothing"])
    assert "invalid choice" in capsys.readouterr().err


def test_what_was_put_off_is_done_once_a_round_and_counts() -> None:
    seen: list[str] = []
    sides = [
        lambda: seen.append("a") or Spent(1.0, 2.0),
        lambda: seen.append("b") or Spent(3.0, 4.0),
    ]
    last = [None, lambda: seen.append("rest of b") or Spent(10.0, 20.0)]
    assert take_turns(sides, rounds=2, seed=0, calls=3, warm_up=0, last=last) == [
        [(3.0, 6.0)] * 2,
        [(19.0, 32.0)] * 2,
    ]
    assert [sorted(seen[i : i + 7]) for i in (0, 7)] == [["a"] * 3 + ["b"] * 3 + ["rest of b"]] * 2
    assert seen[6] == seen[13] == "rest of b"
