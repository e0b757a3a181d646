"""Runs what is missing of the comparison, and writes its results. It goes on where it was stopped."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.winnow.jobs import SHORT, Design, Done, load, run_all
from benchmarks.winnow.table import markdown, results, rows_of, with_overview, with_tables


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow", description=__doc__)
    parser.add_argument("--tasks", help="Names of the tasks, separated by commas. Default: all.")
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="Minutes after which no further training begins. Default: no limit.",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("benchmarks/results/winnow-runs.jsonl.gz"),
        help="File of the trainings.",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results/winnow.json"),
        help="File of the results.",
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none."
    )
    parser.add_argument(
        "--overview",
        type=Path,
        help="Page in Markdown whose overview is written anew. Default: none.",
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    given = parser.parse_args()
    design = SHORT
    if given.tasks:
        design = replace(design, tasks=tuple(given.tasks.split(",")))
    end = time.monotonic() + (0 if given.show else 60 * (given.minutes or float("inf")))
    done = (
        load(given.runs)
        if given.show
        else run_all(design, given.runs, given.jobs, lambda: time.monotonic() > end)
    )
    given.results.write_text(json.dumps(results(design, done), indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(with_tables(given.page.read_text(), design, done))
    if given.overview is not None:
        given.overview.write_text(
            with_overview(given.overview.read_text(), json.loads(given.results.read_text()))
        )
    _print(design, done)


def _print(design: Design, done: Done) -> None:
    for share in design.shares:
        for task in design.tasks:
            if rows := rows_of(design, done, task, share):
                print(f"\n{task} at {share}\n\n{markdown(rows)}")
    print(f"\nGoal at 0.5: {results(design, done)['goal']}")


if __name__ == "__main__":
    main()
