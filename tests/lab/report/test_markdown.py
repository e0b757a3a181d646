"""A comparison as Markdown."""

import json

from lab.report.cases import comparison, save
from thresher_lab.cli.report import report
from thresher_lab.comparison.summary import conclude, summarize
from thresher_lab.report.page import as_markdown


def test_it_has_what_to_do_and_every_verdict():
    results, _ = comparison()
    text = as_markdown(results)
    assert (
        text.startswith("**mine.py:build**, 12 epochs, 3 seeds, ")
        and conclude(results).sentences[0] in text
    )
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert (
        len(lines) == 2 + len(results["summary"])
        and len({line.count(" | ") for line in lines}) == 1
    )
    for row, line in zip(results["summary"], lines[2:], strict=True):
        assert (
            row["method"] in line and row["verdict"] in line and f"{row['cost_ratio']:.3f}" in line
        )


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
