"""A comparison as Markdown."""

import json

from thresher.cli.report import report
from thresher.experiments.comparison.closing import closing, time_beside_cost
from thresher.experiments.comparison.summary import summarise
from thresher.report.markdown import as_markdown
from unit.report.cases import comparison, save


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
    results["summary"] = summarise(results["runs"], 0.5)
    assert "| loss |" in as_markdown(results)


def test_the_command_prints_it_and_writes_nothing(tmp_path, capsys):
    folder = save(tmp_path, *comparison(seeds=(0,), controls=False))
    report(folder, markdown=True)
    assert capsys.readouterr().out == as_markdown(json.loads((folder / "results.json").read_text()))
    assert not (folder / "report.html").exists()


def test_time_that_the_cost_does_not_explain_is_said():
    results, _ = comparison(controls=False)
    row = results["summary"][1]
    row["cpu_ratio"] = row["cost_ratio"] + 0.1
    assert time_beside_cost(results) == []
    row["cpu_ratio"] = row["cost_ratio"] + 0.11
    [said] = time_beside_cost(results)
    assert said.startswith(f"{row['method']}: the counted cost is {row['cost_ratio']:.2f} of full training, and the CPU time")
    assert "tracing" not in said
    for run in results["runs"]:
        run["tracing_s"] = 2.25 if run["method"] == row["method"] else None
    assert "of which tracing the model took 2.2 s of each run" in time_beside_cost(results)[0]
    row["cpu_ratio"] = row["cost_ratio"] - 0.11
    [said] = time_beside_cost(results)
    assert said.endswith(". What is saved beside the passes through the model, such as loading, is not counted.")
    for run in results["runs"]:
        run["cost"]["scores_ratio"] = 0.11 if run["method"] == row["method"] else 0.0
    [said] = time_beside_cost(results)
    assert said.endswith(". Of the cost, 0.11 are scores that were made before the run, which its CPU time does not have.")
