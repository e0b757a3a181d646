"""Trains what is missing of the attempts to go further than Winnow, and writes the results. It goes on where it was stopped."""

import argparse
import json
import time
from pathlib import Path

from benchmarks.winnow.further.table import results, text, with_text
from benchmarks.winnow.further.trainings import ready, run
from benchmarks.winnow.jobs import run_missing


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow.further", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2.")
    parser.add_argument("--minutes", type=float, help="Minutes after which no further training begins. Default: no limit.")
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/results/winnow-further-runs.jsonl"), help="Trainings.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/winnow-further.json"), help="Results.")
    parser.add_argument("--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none.")
    given = parser.parse_args()
    end = time.monotonic() + 60 * (float("inf") if given.minutes is None else given.minutes)
    done = run_missing(ready, run, given.runs, given.jobs, lambda: time.monotonic() > end)
    given.results.write_text(json.dumps(results(done), indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(with_text(given.page.read_text(), done))
    print(text(done))


if __name__ == "__main__":
    main()
