import json

import pytest
import torch
from benchmarks import subset_backward as bench
from benchmarks.measure import median_interval

CPU = torch.device("cpu")


def test_everyone_keeps_the_same_rows_in_the_same_round() -> None:
    one, other = bench.rows_of(0.25, 16, CPU), bench.rows_of(0.25, 16, CPU)
    state = torch.get_rng_state()
    drawn = [one() for _ in range(5)]
    assert all(torch.equal(rows, other()) for rows in drawn)
    assert len({tuple(rows.tolist()) for rows in drawn}) > 1
    assert all(len(rows) == 4 and torch.equal(rows, rows.unique()) for rows in drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_peak_memory_is_that_of_what_is_alive_together() -> None:
    def step(_: torch.Tensor) -> None:
        first = torch.zeros(1 << 18)  # 1 MiB
        del first
        second = torch.zeros(1 << 19)
        second.add_(1)
        third = second + 1
        del second, third

    assert bench.peak_memory(step, torch.arange(2)) == pytest.approx(4 << 20, rel=1e-3)


def row(form: str, over_ideal: float, memory: float, limit: float | None) -> bench.Row:
    interval = median_interval([over_ideal])
    settings = {
        "keep": 0.5,
        "kept": 4,
        "over_ideal": interval,
        "over_full": interval,
        "seconds": 1.0,
    }
    return bench.Row(form=form, memory=memory, limit=limit, **settings)


def test_time_and_memory_over_their_limits_are_missed_where_they_bind() -> None:
    one = median_interval([1.0])
    rows = [
        row("kept_rows", 1.2, 1.3, 1.08),
        *(row(form, 9.0, 9.0, None) for form in bench.FORMS[1:]),
    ]
    table = bench.Table("vit", "title", 1.0, 1, one, one, rows)
    assert table.missed() == ["vit, keep 0.5: time 1.200", "vit, keep 0.5: memory 1.300"]
    assert str(table).count("MISSED") == 2
    assert (
        bench.Table("vit", "title", 1.0, 1, one, one, [row("kept_rows", 1.07, 1.1, 1.08)]).missed()
        == []
    )


def test_limits() -> None:
    assert [bench.time_limit(keep) for keep in bench.KEEP] == [1.05, 1.1, 1.08, 1.08, 1.08, 1.08]


def test_the_figure_of_this_repository_has_a_panel_for_each_model() -> None:
    results = json.loads(bench.RESULTS.read_text())
    others = json.loads(bench.RESULTS.with_name("subset_backward-transformers.json").read_text())
    assert [table["name"] for found in (results, others) for table in found["tables"]] == list(
        bench.TASKS
    )
    assert others["missed"] == [] and bench.markdown(others).splitlines()[2:] == [
        line
        for line in (bench.ROOT / "docs" / "evidence" / "subset-backward.md")
        .read_text()
        .splitlines()
        if " width " in line or "of Trans" in line
    ]
    for table in results["tables"]:
        panel = bench.step_time_panel(table, results["batch"])
        assert panel.title == bench.TASKS[table["name"]].title
        assert [curve.name for curve in panel.curves] == ["ideal", *bench.FORMS]
        ideal, *others = panel.curves
        assert ideal.points[0] == (1.0, 1.0, 1.0, 1.0)
        rows = [row for row in table["rows"] if row["form"] == "twice"]
        ends = ("median", "low", "high")
        assert others[-1].points == [
            (row["kept"] / results["batch"], *(row["over_full"][e] for e in ends)) for row in rows
        ]
        drawn = [row["kept"] / results["batch"] for row in rows]
        slopes = [(1 - y) / (1 - x) for x, y, *_ in ideal.points if x < 1]
        assert [x for x, *_ in ideal.points] == drawn and slopes == pytest.approx(
            [1 - table["forward"]["median"]] * 5
        )


def test_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--only", "nothing"])
    assert "invalid choice" in capsys.readouterr().err
