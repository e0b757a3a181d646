"""Every number of the README is one of a committed result, or of the code."""

import json
import re
from pathlib import Path

from benchmarks.winnow.jobs import SHORT
from benchmarks.winnow.second import LARGEST_LOSS, NO_LOSS_ON, SEVEN

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


def test_winnow_at_half_of_the_cost():
    found = result("winnow-second")
    verdict, tables = found["verdict"], {task: found["tables"][f"{task} at 0.5"] for task in SEVEN}
    on, tasks, most, wanted, better, in_time = said(
        r"On (\d+) of the (\d+) tasks the interval rules out a loss above ([\d.]+) points; the goal was (\d+)\. "
        r"Winnow is shown to be better than smaller batches on (\d+), and than fewer epochs in the same CPU time on (\d+)\."
    )
    counted = ("loses little", "tasks", "better than smaller batches", "better than fewer epochs in the same time")
    assert (on, tasks, better, in_time) == tuple(len(verdict[name]) for name in counted)
    assert (most, wanted) == (LARGEST_LOSS, NO_LOSS_ON) and "of eight seeds" in SENTENCES and found["seeds"] == 8
    more = {
        task: rows["second version"]["metric"] - rows["second version, rate of full training"]["metric"]
        for task, rows in tables.items()
    }
    assert said(r"at that of full training it lost at most ([\d.]+) points more") == [round(max(more.values()), 1)]
    assert said(r"The trainings took ([\d.]+) to ([\d.]+) of the CPU time") == [
        round(choose(rows["second version"]["cpu"] for rows in tables.values()), 2) for choose in (min, max)
    ]
    assert len(SHORT.factors) == 3 and "best of three learning rates" in SENTENCES


def test_the_number_of_methods():
    others = said(r"KAKURENBO, InfoBatch, Selective-Backprop, AdaSelection and (\d+) others, and Winnow")[0]
    assert len(thresher.methods.names()) == 5 + others
