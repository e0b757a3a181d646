"""AdaSelection in several readings, beside random selection, on eight tasks: as many rows and as many optimizer steps.

All arms fill the rows that they keep up to full batches, so that they differ in the choice of the rows and in nothing else;
random selection computes no losses to choose by. The readings differ in what a selector's importances are made of:

- ranks, the default: the same importances for every selector, in its own order;
- votes: 1/k on the k rows that a selector alone would keep, the literal "majority vote";
- spread: softmaxes of scores with standard deviation 1;
- softmax: softmaxes of losses in units of their mean and a vote of random rows, the default before, with a slower curriculum.

Readings are also trained at equal weights (beta=0), where the share of the rows kept that are random draws tells whether the
selectors have the same voice. What was decided before the first run:

- With equal weights at a rate of 0.1, at most half of the rows that the default keeps are random draws.
- At a rate of 0.1, the default is at most 1.5 points below random selection on bike and on mnist-5k, in the mean of ten seeds.
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
from thresher_lab.comparison.statistics import Paired
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import Data, Task, with_wrong_labels
from thresher_lab.tasks.images import WRONG_LABELS
from thresher_lab.training.files import markdown_table
from thresher_lab.training.loop import train
from thresher_lab.training.specs import parse_methods

EPOCHS = {
    "bike": 10,
    "line": 10,
    "line-one-sided": 10,
    "digits": 10,
    "digits-noisy": 10,
    "mnist-5k": 10,
    "mnist-5k-noisy": 10,
    "text@2000": 8,
}
"""Number of epochs by task; `digits-noisy` is `digits` with every fifth label wrong."""
TWICE = ":forward_passes=twice"
READINGS = {
    "AdaSelection": "",
    "votes": ":importance=votes",
    "spread": ":importance=spread",
    "softmax": ":importance=softmax:gamma=0.5",
}
"""Settings of AdaSelection by the name of the reading."""
EQUAL = ", equal weights"
RANDOM, OURS = "random", "AdaSelection"
ARMS = (
    {name: f"ada_selection:keep={{}}{settings}{TWICE}" for name, settings in READINGS.items()}
    | {
        f"{name}{EQUAL}": f"ada_selection:keep={{}}{settings}:beta=0{TWICE}"
        for name, settings in READINGS.items()
    }
    | {RANDOM: f"random_backprop:keep={{}}{TWICE}"}
)
"""Method by arm, given the rate."""
RATES = (0.1, 0.3, 0.5)
LOWEST = 0.1
SEEDS = 3
CLOSE, MOST_SEEDS = ("bike", "mnist-5k"), 10
"""Tasks on which the default is held to its goal, and the number of seeds at the lowest rate on all tasks."""
MOST_LOSS, MOST_RANDOM = 1.5, 0.5
"""Points that the default may be below random selection, and the share of its rows that may be random draws."""
DIFFERENT = 0.1
"""Difference of a final weight between two tasks from which their weights differ."""
BEGIN, END = (
    "<!-- table of benchmarks.ada_selection -->",
    "<!-- end of the table of benchmarks.ada_selection -->",
)


def jobs(_: Done) -> Iterator[Job]:
    """Yields all trainings: those of the goals first, then those of the table, then further seeds."""
    pair = (OURS, RANDOM)
    equal = [name for name in ARMS if name.endswith(EQUAL)]
    others = [name for name in READINGS if name != OURS]
    yield from (
        Job(task, arm, LOWEST, 1.0, seed)
        for seed in range(MOST_SEEDS)
        for task in CLOSE
        for arm in pair
    )
    for seed in range(SEEDS):
        for task in EPOCHS:
            found = [(arm, rate) for rate in RATES for arm in pair]
            found += [(arm, rate) for rate in RATES[:2] for arm in others] + [
                (arm, LOWEST) for arm in equal
            ]
            yield from (
                Job(task, *one, 1.0, seed)
                for one in found
                if not (task in CLOSE and one[0] in pair and one[1] == LOWEST)
            )
    rest = [task for task in EPOCHS if task not in CLOSE]
    yield from (
        Job(task, arm, LOWEST, 1.0, seed)
        for seed in range(SEEDS, MOST_SEEDS)
        for task in rest
        for arm in pair
    )


def task_of(name: str) -> tuple[Task, Data]:
    """Returns a task and its data."""
    noisy = name == "digits-noisy"
    task = built_in("digits" if noisy else name)
    data = task.load(task.find(None))
    return task, with_wrong_labels(data, WRONG_LABELS) if noisy else data


def run(job: Job) -> dict[str, Any]:
    """Trains once.

    Returns:
        metric in points, steps, forward and backward passes, CPU seconds, and of AdaSelection the weights of the selectors at
        the end and the share of its rows that were random draws.
    """
    task, data = task_of(job.task)
    [spec] = parse_methods(ARMS[job.arm].format(job.share))
    trained = train(task, data, spec, seed=job.seed, epochs=EPOCHS[job.task])
    last = trained["history"][-1]
    return {
        "metric": 100 * trained["metric"]["value"],
        **{name: trained["cost"][name] for name in ("steps", "forward", "backward")},
        "cpu_s": trained["cpu_s"],
        "weights": {
            name.removeprefix("weight_"): last[name] for name in last if name.startswith("weight_")
        },
        "random_share": last.get("random_share"),
    }


def results(done: Done) -> dict[str, Any]:
    """Returns the pairs of the default and random selection, the readings, and what became of the goals; None where runs lack.

    Pairs have the names that `thresher_lab.report.cards` reads.

    Raises:
        ValueError: Two arms of a row differ in their number of optimizer steps.
    """
    rows = [row for task in EPOCHS for rate in RATES if (row := _row(done, task, rate)) is not None]
    shares = {name: _random_share(done, f"{name}{EQUAL}") for name in READINGS}
    return {
        "pairs": rows,
        "readings": [
            found
            for rate in RATES[:2]
            for arm in (*READINGS, RANDOM)
            if (found := _reading(done, arm, rate))
        ],
        "random_share": shares,
        "goals": {
            "random share": None if (share := shares[OURS]) is None else share <= MOST_RANDOM,
            "close": _close(rows),
            "weights differ": {f"{rate:g}": _weights_differ(rows, rate) for rate in RATES},
        },
    }


def _row(done: Done, task: str, rate: float) -> dict[str, Any] | None:
    """Returns the comparison on a task at a rate, over the seeds of which both arms are there; None for too few."""
    found = {
        arm: [done.get(Job(task, arm, rate, 1.0, seed)) for seed in range(MOST_SEEDS)]
        for arm in (OURS, RANDOM)
    }
    pairs = [(one, two) for one, two in zip(*found.values(), strict=True) if one and two]
    if len(pairs) < SEEDS:
        return None
    ours, theirs = zip(*pairs, strict=True)
    steps = {each["steps"] for each in (*ours, *theirs)}
    if len(steps) > 1:
        raise ValueError(
            f"{task} at {rate}: the arms must have equal numbers of optimizer steps, got {sorted(steps)}"
        )
    paired = Paired.of([one["metric"] - two["metric"] for one, two in pairs])
    return {
        "task": task,
        "rate": rate,
        "method": _label(OURS, rate),
        "other": _label(RANDOM, rate),
        "seeds": len(pairs),
        "steps": steps.pop(),
        "mean": fmean(one["metric"] for one in ours),
        "other_mean": fmean(one["metric"] for one in theirs),
        "difference": paired.mean,
        "ci95": [paired.low, paired.high],
        "weights": {
            name: fmean(one["weights"][name] for one in ours) for name in ours[0]["weights"]
        },
        "random_share": fmean(one["random_share"] for one in ours),
        "cpu_s": {
            OURS: fmean(one["cpu_s"] for one in ours),
            RANDOM: fmean(one["cpu_s"] for one in theirs),
        },
    }


def _label(arm: str, rate: float) -> str:
    return parse_methods(ARMS[arm].format(rate))[0].label


def _reading(done: Done, arm: str, rate: float) -> dict[str, Any] | None:
    """Returns the mean metric of an arm on each task over the first seeds; None before all runs are there."""
    found = {
        task: [done.get(Job(task, arm, rate, 1.0, seed)) for seed in range(SEEDS)]
        for task in EPOCHS
    }
    if not all(all(runs) for runs in found.values()):
        return None
    return {
        "reading": arm,
        "rate": rate,
        "means": {task: fmean(one["metric"] for one in of if one) for task, of in found.items()},
    }


def _random_share(done: Done, arm: str) -> float | None:
    """Returns the share of random draws among the rows that an arm keeps at the lowest rate, in the mean over the tasks."""
    found = [
        done.get(Job(task, arm, LOWEST, 1.0, seed)) for task in EPOCHS for seed in range(SEEDS)
    ]
    return fmean(one["random_share"] for one in found if one) if all(found) else None


def _close(rows: Sequence[dict[str, Any]]) -> bool | None:
    wanted = [
        row
        for row in rows
        if row["task"] in CLOSE and row["rate"] == LOWEST and row["seeds"] == MOST_SEEDS
    ]
    return (
        None if len(wanted) < len(CLOSE) else all(row["difference"] >= -MOST_LOSS for row in wanted)
    )


def _weights_differ(rows: Sequence[dict[str, Any]], rate: float) -> bool | None:
    weights = [row["weights"] for row in rows if row["rate"] == rate]
    if len(weights) < len(EPOCHS):
        return None
    return any(
        abs(one[name] - two[name]) > DIFFERENT
        for one, two in combinations(weights, 2)
        for name in one
    )


def markdown(found: dict[str, Any]) -> str:
    """Returns the table of the pairs, the table of the readings, and a sentence for each goal."""
    header = [
        "task",
        "rate",
        "steps",
        "seeds",
        "AdaSelection",
        "random",
        "difference",
        "random draws",
        "final weights",
    ]
    cells = [
        [
            f"`{row['task']}`",
            f"{row['rate']:g}",
            str(row["steps"]),
            str(row["seeds"]),
            f"{row['mean']:.2f}",
            f"{row['other_mean']:.2f}",
            f"{row['difference']:+.2f} [{row['ci95'][0]:+.2f}, {row['ci95'][1]:+.2f}]",
            f"{row['random_share']:.2f}",
            ", ".join(f"{weight:.2f}" for weight in row["weights"].values()),
        ]
        for row in found["pairs"]
    ]
    named = {OURS: "ranks, the default"}
    readings = [
        [
            named.get(row["reading"], row["reading"]),
            f"{row['rate']:g}",
            *(f"{mean:.1f}" for mean in row["means"].values()),
        ]
        for row in found["readings"]
    ]
    shares = ", ".join(
        f"{named.get(name, name)} {'not known' if share is None else f'{share:.2f}'}"
        for name, share in found["random_share"].items()
    )
    said = {True: "yes", False: "no", None: "not all runs are there"}
    goals = found["goals"]
    return "\n".join(
        [
            markdown_table(header, cells),
            "",
            "Final weights are those of Big Loss, Small Loss and uniform selection. The readings, mean of three seeds:",
            "",
            markdown_table(["reading", "rate", *(f"`{task}`" for task in EPOCHS)], readings),
            "",
            f"Share of random draws among the rows kept, with equal weights at a rate of {LOWEST:g}: {shares}.",
            "",
            f"- With equal weights at {LOWEST:g}, at most half of the rows are random draws: {said[goals['random share']]}.",
            f"- At {LOWEST:g} on `bike` and `mnist-5k`, at most {MOST_LOSS:g} points below random selection: "
            f"{said[goals['close']]}.",
            "- Final weights differ between tasks: "
            + "; ".join(
                f"at a rate of {rate}, {said[differ]}"
                for rate, differ in goals["weights differ"].items()
            )
            + ".",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ada_selection", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="Minutes after which no further training begins. Default: no limit.",
    )
    folder = Path("benchmarks/results")
    parser.add_argument(
        "--runs",
        type=Path,
        default=folder / "ada_selection-runs.jsonl.gz",
        help="File of the trainings.",
    )
    parser.add_argument(
        "--results", type=Path, default=folder / "ada_selection.json", help="File of the results."
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose table is written anew. Default: none."
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    given = parser.parse_args(arguments)
    end = time.monotonic() + 60 * (given.minutes or float("inf"))
    done = (
        load(given.runs)
        if given.show
        else run_missing(jobs, run, given.runs, given.jobs, lambda: time.monotonic() > end)
    )
    found = results(done)
    given.results.write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    print(text)
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), BEGIN, END, text))


if __name__ == "__main__":
    main()
