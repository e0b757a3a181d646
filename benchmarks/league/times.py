"""Measures the CPU times of the arms: those of a task train in one process, one after another, with full training among them.

Times of the counted trainings are of no use: they were taken on other days, beside other work. `python -m benchmarks.league.times`
adds one line for each round that is missing, once the rates are chosen.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import add_line
from benchmarks.league.arms import FRESH, RUNS, TIMES, run, shared, times
from benchmarks.winnow.jobs import Done, Job, load

ROUNDS = 2
"""Number of rounds of each task."""
FULL_TRAININGS = 3
"""Number of times that full training is in a round: at its start, in its middle and at its end."""


def round_of(done: Done, task: str, seed: int) -> list[Job] | None:
    """Returns the trainings of a round in their order; None before the rates of all arms are chosen.

    Args:
        done: Results of the trainings.
        task: Name of the task.
        seed: Number of the round.
    """
    names = ["smaller", *(entry.name for entry in FRESH.entries(task))]
    half = len(names) // 2
    order = ["full", *names[:half], "full", *names[half:], "full"]
    counted = [FRESH.counted(done, task, name) for name in order]
    found = [jobs[seed] for jobs in counted if jobs]
    return found if len(found) == len(order) and all(job in done for job in found) else None


def missing(done: Done) -> Iterator[tuple[str, int]]:
    """Yields the task and the number of each round that is not measured yet and can be."""
    for task in FRESH.tasks:
        for seed in range(len(times().get(task, ())), ROUNDS):
            if round_of(done, task, seed):
                yield task, seed


def measured(done: Done, task: str, seed: int) -> dict[str, Any]:
    """Trains a round; returns the CPU seconds of its arms, and which of them came to another metric than before.

    Args:
        done: Results of the trainings.
        task: Name of the task.
        seed: Number of the round.
    """
    seconds: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for job in round_of(done, task, seed) or ():
        trained = run(job)
        seconds.setdefault(job.arm, []).append(round(trained["cpu_s"], 2))
        metrics = [done[job]["metric"], trained["metric"]]
        if metrics[0] != metrics[1]:
            others[job.arm] = metrics
    return {"task": task, "seed": seed, "cpu_s": seconds, "others": others}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.league.times", description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS, help="File of the trainings.")
    parser.add_argument("--to", type=Path, default=TIMES, help="File of the times.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = {**shared(), **load(given.runs)}
    for task, seed in missing(done):
        line = measured(done, task, seed)
        add_line(given.to, line)
        print(line, flush=True)


if __name__ == "__main__":
    main()
