"""Runs a part of the pack: `python -m benchmarks.gpu PART --out DIR [--data DIR] [--minutes M] [--device cuda] [--smoke]`.

`check` runs the tests that concern a device, worst first, and `speed` measures times; `check` needs pytest, too. Results are
lines of JSON in DIR/gpu-PART.jsonl. A part that was stopped goes on where it was, and makes again what failed; exit code 1 if
a test or a measurement failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import check, speed
from benchmarks.gpu.json_lines import JsonLines, OtherResultsError

PARTS = {"check": check.run, "speed": speed.run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a part, prints its table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS, help="what to run")
    parser.add_argument(
        "--data", type=Path, help="folder of datasets; check and speed make their own"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="minutes after which nothing new is begun",
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default=torch.device("cuda"),
        help="device (default: %(default)s)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run a few tests, or tiny networks, to try the pack out",
    )
    given = parser.parse_args(arguments)
    until = time.time() + 60 * given.minutes
    try:
        lines = JsonLines(given.out / f"gpu-{given.part}.jsonl", given.device, smoke=given.smoke)
    except OtherResultsError as error:
        parser.error(str(error))
    lines.forget_failures()
    return PARTS[given.part](lines, given.device, until=until, smoke=given.smoke)


if __name__ == "__main__":
    sys.exit(main())
