"""Command of the comparison: `python -m benchmarks.winnow --short`. It goes on where it was stopped."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.winnow.jobs import SHORT, WHOLE, run_all


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="Three rates and two seeds for each look, five or ten counted seeds."
    )
    parser.add_argument("--tasks", help="Names of the tasks, separated by commas. Default: all.")
    parser.add_argument("--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2.")
    parser.add_argument("--minutes", type=float, help="Minutes after which no further training begins. Default: no limit.")
    parser.add_argument(
        "--runs", type=Path, default=Path("benchmarks/results/winnow-runs.jsonl"), help="File of the trainings."
    )
    given = parser.parse_args()
    design = SHORT if given.short else WHOLE
    if given.tasks:
        design = replace(design, tasks=tuple(given.tasks.split(",")))
    end = time.monotonic() + 60 * (given.minutes or float("inf"))
    run_all(design, given.runs, given.jobs, lambda: time.monotonic() > end)


if __name__ == "__main__":
    main()
