"""AdaSelection beside random selection, on five tasks: as many rows of each batch, and as many optimizer steps.

Both arms fill the rows that they keep up to full batches, so that they differ in the choice of the rows and in nothing else;
random selection computes no losses to choose by. What was decided before the first run:

- At rates of 0.1, 0.3 and 0.5 with three seeds, AdaSelection is at most 1.5 points below random selection in the mean over the
  rates, and at most 3 points at each rate.
- At a rate of 0.1 it is above random selection on bike and on mnist-5k: the whole 95 % interval of ten paired seeds is above 0.
- Its weights at the end differ between the tasks: what it learned is not one answer for all. This is asked at each rate.

A point is a hundredth of the metric, accuracy or R2.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Done, Job, load, run_missing
from thresher.experiments.comparison.statistics import Paired
from thresher.experiments.tasks import built_in
from thresher.experiments.training.files import markdown_table
from thresher.experiments.training.loop import train
from thresher.experiments.training.specs import parse_methods

EPOCHS = {"bike": 10, "line": 10, "line-one-sided": 10, "mnist-5k": 20, "mnist-5k-noisy": 20}
"""Number of epochs by task."""
ARMS = {"AdaSelection": "ada_selection:keep={}:forward_passes=twice", "random": "random_backprop:keep={}:forward_passes=twice"}
"""Method by arm, given the rate."""
RATES = (0.1, 0.3, 0.5)
SEEDS = 3
CLOSE, MOST_SEEDS = {("bike", 0.1), ("mnist-5k", 0.1)}, 10
"""Comparisons that are to be won, and their number of seeds."""
MEAN_LOSS, RATE_LOSS = 1.5, 3.0
"""Points that AdaSelection may be below random selection: in the mean over the rates, and at each."""
DIFFERENT = 0.1
"""Difference of a final weight between two tasks from which their weights differ."""
BEGIN, END = "<!-- table of benchmarks.ada_selection -->", "<!-- end of the table of benchmarks.ada_selection -->"


def jobs(_: Done) -> Iterator[Job]:
    """Yields all trainings: those with three seeds first."""
    for seeds in (range(SEEDS), range(SEEDS, MOST_SEEDS)):
        for task in EPOCHS:
            for rate in RATES:
                if seeds.start == 0 or (task, rate) in CLOSE:
                    yield from (Job(task, arm, rate, 1.0, seed) for seed in seeds for arm in ARMS)


def run(job: Job) -> dict[str, Any]:
    """Trains once.

    Returns:
        metric in points, steps, forward and backward passes, CPU seconds, and the weights of the selectors at the end.
    """
    task = built_in(job.task)
    data = task.load(task.find(None))
    [spec] = parse_methods(ARMS[job.arm].format(job.share))
    trained = train(task, data, spec, seed=job.seed, epochs=EPOCHS[job.task])
    last = trained["history"][-1]
    return {
        "metric": 100 * trained["metric"]["value"],
        **{name: trained["cost"][name] for name in ("steps", "forward", "backward")},
        "cpu_s": trained["cpu_s"],
        "weights": {name.removeprefix("weight_"): last[name] for name in last if name.startswith("weight_")},
    }


def results(done: Done) -> dict[str, Any]:
    """Returns the rows that are complete, and what became of the three goals; a goal without all of its runs is None.

    Pairs have the names that `thresher.report.cards` reads.

    Raises:
        ValueError: Two arms of a row differ in their number of optimizer steps.
    """
    rows = [row for task in EPOCHS for rate in RATES if (row := _row(done, task, rate)) is not None]
    return {
        "pairs": rows,
        "means": [_mean_of(rows, task) for task in EPOCHS if sum(row["task"] == task for row in rows) == len(RATES)],
        "goals": {
            "close": _close(rows),
            "above": _above(rows),
            "weights differ": {f"{rate:g}": _weights_differ(rows, rate) for rate in RATES},
        },
    }


def _row(done: Done, task: str, rate: float) -> dict[str, Any] | None:
    """Returns the comparison on a task at a rate, over the seeds of which both arms are there; None for too few."""
    seeds = range(MOST_SEEDS if (task, rate) in CLOSE else SEEDS)
    found = {arm: [done.get(Job(task, arm, rate, 1.0, seed)) for seed in seeds] for arm in ARMS}
    pairs = [(one, two) for one, two in zip(*found.values(), strict=True) if one and two]
    if len(pairs) < SEEDS:
        return None
    ours, theirs = zip(*pairs, strict=True)
    steps = {each["steps"] for each in (*ours, *theirs)}
    if len(steps) > 1:
        raise ValueError(f"{task} at {rate}: the arms must have equal numbers of optimizer steps, got {sorted(steps)}")
    first = [one["metric"] - two["metric"] for one, two in pairs[:SEEDS]]
    paired = Paired.of([one["metric"] - two["metric"] for one, two in pairs])
    return {
        "task": task,
        "rate": rate,
        "method": _label("AdaSelection", rate),
        "other": _label("random", rate),
        "seeds": len(pairs),
        "steps": steps.pop(),
        "mean": fmean(one["metric"] for one in ours),
        "other_mean": fmean(one["metric"] for one in theirs),
        "difference": paired.mean,
        "ci95": [paired.low, paired.high],
        "difference_of_three": fmean(first),
        "weights": {name: fmean(one["weights"][name] for one in ours) for name in ours[0]["weights"]},
        "cpu_s": {"AdaSelection": fmean(one["cpu_s"] for one in ours), "random": fmean(one["cpu_s"] for one in theirs)},
    }


def _label(arm: str, rate: float) -> str:
    return parse_methods(ARMS[arm].format(rate))[0].label


def _mean_of(rows: Sequence[dict[str, Any]], task: str) -> dict[str, Any]:
    of_task = [row["difference_of_three"] for row in rows if row["task"] == task]
    return {"task": task, "difference": fmean(of_task), "worst": min(of_task)}


def _close(rows: Sequence[dict[str, Any]]) -> bool | None:
    if len(rows) < len(EPOCHS) * len(RATES):
        return None
    means = [_mean_of(rows, task) for task in EPOCHS]
    return all(found["difference"] >= -MEAN_LOSS and found["worst"] >= -RATE_LOSS for found in means)


def _above(rows: Sequence[dict[str, Any]]) -> bool | None:
    wanted = [row for row in rows if (row["task"], row["rate"]) in CLOSE and row["seeds"] == MOST_SEEDS]
    return None if len(wanted) < len(CLOSE) else all(row["ci95"][0] > 0 for row in wanted)


def _weights_differ(rows: Sequence[dict[str, Any]], rate: float) -> bool | None:
    weights = [row["weights"] for row in rows if row["rate"] == rate]
    if len(weights) < len(EPOCHS):
        return None
    return any(abs(one[name] - two[name]) > DIFFERENT for one, two in combinations(weights, 2) for name in one)


def markdown(found: dict[str, Any]) -> str:
    """Returns the table of the rows, and a sentence for each goal."""
    header = ["task", "rate", "steps", "seeds", "AdaSelection", "random", "difference", "final weights: big, small, uniform"]
    cells = [
        [
            f"`{row['task']}`",
            f"{row['rate']:g}",
            str(row["steps"]),
            str(row["seeds"]),
            f"{row['mean']:.2f}",
            f"{row['other_mean']:.2f}",
            f"{row['difference']:+.2f} [{row['ci95'][0]:+.2f}, {row['ci95'][1]:+.2f}]",
            ", ".join(f"{weight:.2f}" for weight in row["weights"].values()),
        ]
        for row in found["pairs"]
    ]
    said = {True: "yes", False: "no", None: "not all runs are there"}
    means = "; ".join(f"`{mean['task']}` {mean['difference']:+.2f} (worst {mean['worst']:+.2f})" for mean in found["means"])
    goals = found["goals"]
    return "\n".join(
        [
            markdown_table(header, cells),
            "",
            f"Mean difference over the rates, three seeds: {means}.",
            "",
            f"- At most {MEAN_LOSS:g} points below random selection in the mean, and {RATE_LOSS:g} at each rate: "
            f"{said[goals['close']]}.",
            f"- Above it at a rate of 0.1 on `bike` and `mnist-5k`, {MOST_SEEDS} seeds: {said[goals['above']]}.",
            "- Final weights differ between tasks: "
            + "; ".join(f"at a rate of {rate}, {said[differ]}" for rate, differ in goals["weights differ"].items())
            + ".",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ada_selection", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2.")
    parser.add_argument("--minutes", type=float, help="Minutes after which no further training begins. Default: no limit.")
    folder = Path("benchmarks/results")
    parser.add_argument("--runs", type=Path, default=folder / "ada_selection-runs.jsonl", help="File of the trainings.")
    parser.add_argument("--results", type=Path, default=folder / "ada_selection.json", help="File of the results.")
    parser.add_argument("--page", type=Path, help="Page in Markdown whose table is written anew. Default: none.")
    parser.add_argument("--show", action="store_true", help="Run nothing; print and write what there is.")
    given = parser.parse_args(arguments)
    end = time.monotonic() + 60 * (given.minutes or float("inf"))
    done = load(given.runs) if given.show else run_missing(jobs, run, given.runs, given.jobs, lambda: time.monotonic() > end)
    found = results(done)
    given.results.write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    print(text)
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), BEGIN, END, text))


if __name__ == "__main__":
    main()
