"""Every number of the README is one of a committed result, or of the code."""

import json
import re
from pathlib import Path

from benchmarks.winnow.table import FIRST_TASKS

import thresher

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
SENTENCES = " ".join(README.split())
RESULTS = ROOT / "benchmarks" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def said(pattern):
    found = re.search(pattern, SENTENCES)
    assert found is not None, pattern
    return [float(number) for number in found.groups()]


def test_it_is_read_in_ten_minutes():
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 400
    assert {"```diff", "## What to expect"} <= set(lines[:30]) and "docs/figures/report.png" in "\n".join(lines[:40])


def test_winnow_beside_smaller_batches():
    half = result("winnow")["shares"]["0.5"]
    better, tasks = said(r"shown to be better than smaller batches on (\d+) of (\d+) tasks, and worse on none")
    findings = [one["to_smaller"] for one in half["shown"].values()]
    assert (findings.count("better"), len(findings), findings.count("worse")) == (better, tasks, 0)
    assert [task for task, one in half["shown"].items() if one["to_full"] == "no loss"] == ["text"]
    assert said(r"a loss of ([\d.]+) points can be excluded on the text task only") == [result("winnow")["margin"]]
    seeds = {row["n"] for task in half["tasks"].values() for row in task.values()}
    assert said(r"mean of (\d+) to (\d+) seeds") == [min(seeds), max(seeds)]
    factors = set(result("winnow")["design"]["factors"])
    assert len(factors) == 3 and "best of three learning rates" in SENTENCES


def test_its_own_learning_rate():
    tasks = result("winnow")["shares"]["0.5"]["tasks"]
    lost = {task: -rows["winnow at its own rate"]["to_full"]["mean"] for task, rows in tasks.items()}
    relief = lost.pop("relief")
    factor, images, on_relief = said(
        r"scales yours by ([\d.]+)\. At that rate it lost up to ([\d.]+) points on images, and ([\d.]+) on relief"
    )
    assert factor == round(0.5**0.25, 2) and images == round(max(lost.values()), 1) and on_relief == round(relief, 1)


def test_the_time_of_an_epoch():
    least, most = said(r"An epoch took ([\d.]+) to ([\d.]+) of the CPU time")
    medians = [
        0.5 * figure["value"]["median"]
        for table in result("winnow_cost")["tables"]
        if table["part"] == "epochs"
        for figure in table["figures"]
        if figure["name"] == "Winnow at 0.5, over share"
    ]
    assert (least, most) == (round(min(medians), 2), round(max(medians), 2))


def test_the_number_of_methods():
    others = said(r"KAKURENBO, InfoBatch, Selective-Backprop, AdaSelection and (\d+) others, and Winnow")[0]
    assert len(thresher.methods.names()) == 5 + others


def test_which_tasks_the_table_has():
    half = result("winnow")["shares"]["0.5"]
    better = [task for task in FIRST_TASKS if half["shown"][task]["to_smaller"] == "better"]
    lost = {task: rows["winnow"]["to_full"]["mean"] for task, rows in half["tasks"].items()}
    assert (
        len(better) == 4 and len(FIRST_TASKS) == 5 and min(lost, key=lambda task: lost[task]) in set(FIRST_TASKS) - set(better)
    )
    assert (
        "on five of eleven tasks: four on which Winnow beats smaller batches, and the one on which it loses most" in SENTENCES
    )
