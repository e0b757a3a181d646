"""Whether the variance ratio that `thresher advise` prints tells what stratified batches add to full training.

For each task of `benchmarks.winnow.second`, the first epochs are trained as advise trains them. Then the variance of the
gradient of stratified batches is measured over that of random ones. Beside it stands what full training gained by stratified
batches.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import load
from benchmarks.winnow.second import ONE_OF_LENGTHS, SEVEN, TASKS, TITLES, rows_of
from thresher_lab.advise.pace import torch_threads
from thresher_lab.advise.probe import Probe
from thresher_lab.training.files import markdown_table

SEEDS = range(3)
PROBE_SECONDS = 60.0
MARKS = "<!-- table of benchmarks.winnow.variance -->", "<!-- end of the table of variances -->"
ROOT = Path(__file__).resolve().parents[2]
RUNS, RESULTS = (ROOT / "benchmarks" / "results" / name for name in ("winnow-second-runs.jsonl.gz", "winnow-variance.json"))


def measured(task: str, seed: int) -> dict[str, float] | None:
    """Returns the ratio of a task after the first epochs, as advise measures it; None where the dataset holds no classes.

    Args:
        task: Name of the task.
        seed: Random seed of the network and of all batches.
    """
    problem = TASKS[task]
    with torch_threads(1):
        probe = Probe(problem.task.training(problem.sets().data, seed), epochs=problem.epochs, seed=seed)
        probe.first_epochs([], PROBE_SECONDS)
        found = probe.variance_ratio()
    return None if found is None else found.as_dict()


def gains() -> dict[str, float]:
    """Returns the points that full training gains in stratified batches, by task: the median of the seeds.

    A training that diverges would decide a mean by itself.
    """
    done, found = load(RUNS), {}
    for task in (*SEVEN, *ONE_OF_LENGTHS):
        rows = rows_of(done, task, 0.5)
        pairs = zip(rows["full, stratified"], rows["full"], strict=True)
        found[task] = float(np.median([one["metric"] - other["metric"] for one, other in pairs]))
    return found


def text(ratios: Mapping[str, Any], gained: Mapping[str, float]) -> str:
    """Returns the table and the correlation in Markdown.

    Args:
        ratios: Ratio of each seed by task; [] where it is not known.
        gained: Result of `gains`.
    """
    known = {task: fmean(values) for task, values in ratios.items() if values}
    rows = [
        (
            TITLES[task],
            f"{known[task]:.2f} ({min(ratios[task]):.2f} to {max(ratios[task]):.2f})" if task in known else "not known",
            f"{gained[task]:+.2f}",
        )
        for task in sorted(gained, key=lambda task: known.get(task, 2.0))
    ]
    correlation = spearmanr(list(known.values()), [gained[task] for task in known])[0]
    table = markdown_table(("task", "variance ratio", "median gain of full training, points"), rows)
    return (
        f"{table}\n\nOn the {len(known)} tasks whose datasets hold classes, the rank correlation of the ratio and the gain is "
        f"{correlation:+.2f}; -1 would be a ratio that orders the gains."
    )


def main() -> None:
    """Measures, and writes the results and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow.variance", description=main.__doc__)
    parser.add_argument("--page", type=Path, help="Page in Markdown whose table is written anew. Default: none.")
    parser.add_argument("--show", action="store_true", help="Measure nothing; write what there is.")
    given = parser.parse_args()
    if not given.show:
        found = {task: [measured(task, seed) for seed in SEEDS] for task in (*SEVEN, *ONE_OF_LENGTHS)}
        kept = {task: [one["ratio"] for one in ratios if one is not None] for task, ratios in found.items()}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    written = text(json.loads(RESULTS.read_text()), gains())
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), *MARKS, written))
    print(written)


if __name__ == "__main__":
    main()
