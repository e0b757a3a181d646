"""Trains what is missing of the league, and writes the results. It goes on where it was stopped."""

import argparse
import json
import time
from pathlib import Path

from benchmarks.kept import RESULTS
from benchmarks.league.arms import RUNS, ready, run, shared
from benchmarks.league.figure import figure
from benchmarks.league.table import page, results, summary, top, write
from benchmarks.winnow.jobs import load, run_missing


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.league", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="Minutes after which no further training begins. Default: no limit.",
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="File of the trainings.")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "league.json", help="File of the results."
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="Folder of the documentation, whose tables, figure and sentences are written anew. Default: none.",
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    given = parser.parse_args()
    end = time.monotonic() + 60 * (float("inf") if given.minutes is None else given.minutes)
    if given.show:
        done = load(given.runs)
    else:
        done = run_missing(
            lambda own: ready({**shared(), **own}),
            run,
            given.runs,
            given.jobs,
            lambda: time.monotonic() > end,
        )
    found = results({**shared(), **done})
    given.results.write_text(json.dumps(found, indent=1) + "\n")
    if given.docs is not None:
        evidence = given.docs / "evidence"
        write(evidence / "league.md", summary(found))
        write(evidence / "league-tasks.md", page(found))
        write(evidence / "results.md", top(found))
        (given.docs / "figures" / "league.svg").write_bytes(figure(found))
    print(summary(found))


if __name__ == "__main__":
    main()
