"""The table of docs/fine-tuning.md has the numbers of the committed runs."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[3]
LINES = {
    "full, 3 epochs": "full",
    "`winnow:share=0.5`": "winnow:share=0.5",
    "1.76 epochs, in its time": "shorter@time",
    "batches of half the size": "smaller@0.500",
}


def test_the_table_is_that_of_the_runs():
    runs = defaultdict(list)
    for run in json.loads((ROOT / "benchmarks" / "results" / "finetune.json").read_text())["runs"]:
        runs[run["arm"], run["rate"]].append(run)
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    for title, arm in LINES.items():
        half, whole = (sorted(runs[arm, rate], key=lambda run: run["seed"]) for rate in (0.5, 1.0))
        cells = [", ".join(f"{100 * run['accuracy']:.2f}" for run in of) for of in (half, whole)]
        cells += [f"{whole[0]['cost']:.2f}", f"{mean(run['cpu_s'] for run in whole):.0f}"]
        assert f"| {title} | {' | '.join(cells)} |" in page
    assert {run["epochs"] for run in runs["shorter@time", 1.0]} == {1.755}
    losses = {arm: mean(run["accuracy"] for run in runs["full", 1.0]) - mean(run["accuracy"] for run in runs[arm, 1.0])
              for arm in ("winnow:share=0.5", "shorter@time")}  # fmt: skip
    assert [round(100 * losses[arm], 1) for arm in losses] == [3.5, 3.5] and "lost 3.5 points" in page
