"""A comparison as Markdown."""

import json

from lab.report.cases import comparison, save
from thresher_lab.cli.report import report
from thresher_lab.comparison.summary import NOT_COUNTED, closing, summarize, time_beside_cost
from thresher_lab.report.page import as_markdown


def test_it_has_what_to_do_and_every_verdict():
    results, _ = comparison()
    text = as_markdown(results)
    assert text.startswith("**mine.py:build**, 12 epochs, 3 seeds, ") and closing(results)[0] in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(results["summary"]) and len({line.count(" | ") for line in lines}) == 1
    for row, line in zip(results["summary"], lines[2:], strict=True):
        assert row["method"] in line and row["verdict"] in line and f"{row['cost_ratio']:.3f}" in line


def test_a_metric_that_is_no_share_is_not_in_percent():
    results, _ = comparison(metric="loss")
    for run in results["runs"]:
        run["metric"]["value"] += 3
    results["summary"] = summarize(results["runs"], 0.5)
    assert "| loss |" in as_markdown(results)


def test_the_command_prints_it_and_writes_nothing(tmp_path, capsys):
    folder = save(tmp_path, *comparison(seeds=(0,), controls=False))
    report(folder, markdown=True)
    assert capsys.readouterr().out == as_markdown(json.loads((folder / "results.json").read_text()))
    assert not (folder / "report.html").exists()


def with_scores(results, row, ratio):
    for run in results["runs"]:
        run["cost"]["scores_ratio"] = ratio if run["method"] == row["method"] else 0.0


def test_time_that_the_cost_does_not_explain_is_said():
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    with_scores(results, row, 0.0)
    row["cpu_ratio"] = row["cost_ratio"] + 0.1
    assert time_beside_cost(results) == []
    for apart in (0.11, -0.11):
        row["cpu_ratio"] = row["cost_ratio"] + apart
        numbers = f"{row['cost_ratio']:.2f} of full training, and the CPU time {row['cpu_ratio']:.2f}"
        expected = f"{row['method']}: the counted cost is {numbers}. {NOT_COUNTED}"
        assert time_beside_cost(results) == [expected]
    for run in results["runs"]:
        run["tracing_s"] = 2.25 if run["method"] == row["method"] else None
    assert "of which tracing the model took 2.2 s of each run" in time_beside_cost(results)[0]


def test_the_cost_of_scores_is_told_from_that_of_the_run():
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    row["cost_ratio"], row["cpu_ratio"] = 1.5, 0.5
    with_scores(results, row, 1.0)
    parts = "1.00 for scores that were made before the run, and 0.50 for the run itself"
    said = f"{row['method']}: the counted cost is 1.50 of full training: {parts}. Its CPU time is "
    assert time_beside_cost(results) == [f"{said}0.50."]
    row["cpu_ratio"] = 0.75
    assert time_beside_cost(results) == [f"{said}0.75. {NOT_COUNTED}"]


def test_a_run_of_an_earlier_version_gives_no_reason():
    """Whether scores are part of its cost is not known."""
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    with_scores(results, row, 1.0)
    next(run for run in results["runs"] if run["method"] == row["method"])["cost"].pop("scores_ratio")
    row["cost_ratio"], row["cpu_ratio"] = 1.5, 0.5
    assert time_beside_cost(results) == [f"{row['method']}: the counted cost is 1.50 of full training, and the CPU time 0.50."]
