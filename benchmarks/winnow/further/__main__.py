"""Writes the results of the attempts to go further than Winnow from their trainings."""

import argparse
import json
from pathlib import Path

from benchmarks.winnow.further.table import results, text, with_text
from benchmarks.winnow.jobs import load


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.winnow.further", description=__doc__
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("benchmarks/results/winnow-further-runs.jsonl.gz"),
        help="Trainings.",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results/winnow-further.json"),
        help="Results.",
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none."
    )
    given = parser.parse_args()
    done = load(given.runs)
    given.results.write_text(json.dumps(results(done), indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(with_text(given.page.read_text(), done))
    print(text(done))


if __name__ == "__main__":
    main()
