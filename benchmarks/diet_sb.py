"""Diet Selective-Backprop on mnist-5k: pruning by EL2N before training and Selective-Backprop in the batch.

Together and alone, at each total share pruned, beside random rows and the controls of `thresher compare`; what the scores took
counts. Then, for two architectures, how far the samples that EL2N prunes are those that Selective-Backprop trains on least.
`python -m benchmarks.diet_sb [--quick] [--work DIR] [--out FILE.json]`; goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thresher
from benchmarks.measure import lines
from thresher.experiments.comparison.compare import compare
from thresher.experiments.comparison.scoring import make_scores
from thresher.experiments.reproduction.diet_sb import overlap
from thresher.experiments.training.specs import Spec, parse_methods
from thresher.experiments.training.store import write_json
from thresher.scores import Scores

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "diet-sb.json"
TOTALS = (0.25, 0.5, 0.625)
"""Shares of the training samples that are not trained on in an epoch."""
BEFORE = {0.25: 0.125, 0.5: 0.25, 0.625: 0.25}
"""What Diet Selective-Backprop prunes of them before training; the poster has a quarter, which at a quarter in all is all."""
TASKS = {"cnn": "mnist-5k", "mlp": "mnist-5k-mlp"}
MODELS, SCORE_EPOCHS = 3, 2


def specs(scores: Path) -> list[Spec]:
    """What is compared."""
    found = []
    for total in TOTALS:
        keep, before = 1 - total, BEFORE[total]
        inside = round(thresher.keep_in_batch(before, total), 4)
        found += [
            f"prune:scores={scores}:keep={keep}",
            f"selective_backprop:keep={keep}:forward_passes=once",
            f"prune:scores={scores}:keep={1 - before}+selective_backprop:keep={inside}:forward_passes=once",
            f"prune:scores={scores}:keep={1 - before}+random_backprop:keep={inside}",
            f"random_backprop:keep={keep}",
        ]
    return parse_methods(",".join(found))


def overlaps(dropped: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """For each two and each total: the share of what one drops that the other drops too; by chance it is the total itself."""
    names = list(dropped)
    return [
        {"share": share, "of": a, "and": b, "overlap": overlap(np.array(dropped[a]), np.array(dropped[b]), share)}
        for share in TOTALS
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]


def trained(results: Mapping[str, Any], work: Path, method: str) -> list[float]:
    """How often a method trained on each sample, in the mean over its seeds."""
    runs = [run for run in results["runs"] if run["method"] == method and run["control_of"] is None]
    found = [thresher.scores.from_run(work / run["samples"]).values for run in runs]
    return torch.stack(found).mean(0).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diet_sb", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few samples, one epoch and two seeds")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/diet-sb"), help="folder of runs and scores (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.work /= "quick" if given.quick else "full"
    suffix, epochs, seeds = ("@200", 1, [0, 1]) if given.quick else ("", 20, [0, 1, 2])
    dropped: dict[str, Sequence[float]] = {}
    results: dict[str, Any] = {}
    for architecture, task in TASKS.items():
        path = given.work / f"el2n-{architecture}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make_scores(task + suffix, "el2n", models=MODELS, epochs=SCORE_EPOCHS).save(path)
        dropped[f"el2n {architecture}"] = Scores.load(path).values.tolist()
        work = given.work / architecture
        if architecture == "cnn":
            results = compared = compare(task + suffix, specs(path), seeds, epochs, work)
        else:
            alone = parse_methods("selective_backprop:keep=0.5:forward_passes=once")
            compared = compare(task + suffix, alone, seeds, epochs, work, controls=())
        dropped[f"selective_backprop {architecture}"] = trained(compared, work, "selective_backprop:keep=0.5 once")
    found = overlaps(dropped)
    print(table(results["summary"]), "\n")
    print(lines(("dropped by", "and by", "share", "overlap"), [
        (row["of"], row["and"], f"{row['share']:.3f}", f"{row['overlap']:.3f}") for row in found
    ]))  # fmt: skip
    cost = {
        name: (scores.forward, scores.backward)
        for name in TASKS
        if (scores := Scores.load(given.work / f"el2n-{name}.parquet"))
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.out, {**results, "scores_took": cost, "overlaps": found})
    return 0


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """Methods and their controls."""
    header = ("", "accuracy", "difference to full", "cost", "CPU time")
    rows = []
    for row in summary:
        low, high = row["ci95"] or (0, 0)
        difference = (
            "" if row["difference"] is None else f"{100 * row['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        )
        name = row["method"] + (" (control)" if row["control_of"] else "")
        accuracy = f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}"
        rows.append((name, accuracy, difference, f"{row['cost_ratio']:.3f}", f"{row['cpu_ratio']:.2f}"))
    return lines(header, rows)


if __name__ == "__main__":
    sys.exit(main())
