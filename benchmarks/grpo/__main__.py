"""Measures what selection saves in GRPO, and writes the results and the tables. The trainings go on where they were stopped."""

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.grpo import arms, step, table
from benchmarks.winnow.jobs import load, run_missing


def main() -> None:
    """Runs the command line."""
    folder = Path("benchmarks/results")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo", description=__doc__)
    parser.add_argument(
        "--time", action="store_true", help="Measure the time of steps instead of the reward."
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="Minutes after which no training begins. Default: no limit.",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=folder / "grpo-runs.jsonl.gz",
        help="JSON lines of the trainings.",
    )
    parser.add_argument(
        "--times", type=Path, default=folder / "grpo.json", help="File of the times of steps."
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none."
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    given = parser.parse_args()
    done = load(given.runs)
    end = time.monotonic() + 60 * given.minutes
    if not given.show and given.time:
        torch.set_num_threads(1)
        given.times.write_text(json.dumps(step.measured(), indent=1) + "\n")
    elif not given.show:
        done = run_missing(
            arms.ready, arms.run, given.runs, given.jobs, lambda: time.monotonic() > end
        )
    times = json.loads(given.times.read_text())
    found = step.text(times), table.text(done)
    if given.page is not None:
        page = step.with_table(given.page.read_text(), found[0])
        given.page.write_text(table.with_tables(page, found[1]))
    print(*found, sep="\n\n")


if __name__ == "__main__":
    main()
