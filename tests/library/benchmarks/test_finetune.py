"""The table of docs/fine-tuning.md and the sentence of the README have the numbers of the committed runs."""

import json
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "finetune.json").read_text())
LINES = {
    "full, 3 epochs": "full",
    "`winnow:share=0.5`": "winnow:share=0.5",
    "1.79 epochs, in its time": "shorter@time",
    "batches of half the size": "smaller@0.500",
}


def accuracies(arm, runs="counted"):
    return [run["accuracy"] for run in FOUND[runs] if run["arm"] == arm and run["rate"] == 1.0]


def test_the_table_is_that_of_the_runs():
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    for title, arm in LINES.items():
        [row] = [row for row in FOUND["arms"] if row["method"] == arm]
        assert row["mean"] == pytest.approx(mean(accuracies(arm))) and len(accuracies(arm)) == 5
        low_high = None if arm == "full" else [100 * end for end in row["ci95"]]
        difference = (
            ""
            if low_high is None
            else f"{100 * row['difference']:.2f} [{low_high[0]:.2f}, {low_high[1]:.2f}] "
        )
        assert (
            f"| {title} | {100 * row['mean']:.2f} | {difference}| {row['cost_ratio']:.2f} | {row['cpu_ratio']:.2f} |"
            in page
        )
        # The better rate on seeds that do not count.
        assert mean(accuracies(arm, "look")) > mean(
            run["accuracy"] for run in FOUND["look"] if (run["arm"], run["rate"]) == (arm, 0.5)
        )
    lost = 100 * (mean(accuracies("full")) - mean(accuracies("winnow:share=0.5")))
    said = f"Half the cost lost {lost:.1f} points of accuracy. Full training for fewer epochs, in the same time, lost about"
    assert said in (ROOT / "README.md").read_text()
    [winnow] = [row for row in FOUND["arms"] if row["method"] == "winnow:share=0.5"]
    assert winnow["against"]["shorter@time"]["finding"] == "unclear"
