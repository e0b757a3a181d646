"""Files in benchmarks/results: trainings as JSON lines, packed where their name ends in .gz, and comparisons without details.

`python -m benchmarks.kept runs/mnist-5k/results.json benchmarks/results/demo-mnist-5k.json` copies the results of a comparison.
Of each epoch it keeps what a curve and the verdicts need; counts by class and by loss, step times and settings of the epoch are
left out. The same comparison makes them again, in its folder.
"""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

OF_AN_EPOCH = ("epoch", "cost", "cpu_s", "backward", "nonfinite")
"""Entries of the history that are kept, beside the metric."""


def read_lines(path: Path) -> list[Any]:
    """Returns the lines of a file of JSON lines; [] where there is no such file."""
    if not path.exists():
        return []
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def add_line(path: Path, line: Any) -> None:
    """Adds a line to a file of JSON lines.

    Each line is packed by itself, so that a process that is stopped loses none of those before; `pack` makes the file smaller.

    Args:
        path: The file.
        line: Content of the line, plain values.
    """
    text = (json.dumps(line) + "\n").encode()
    with path.open("ab") as file:
        file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def pack(path: Path) -> None:
    """Packs all lines of a file anew, together, where its name ends in .gz."""
    if path.suffix == ".gz" and path.exists():
        packed, beside = (
            gzip.compress(gzip.decompress(path.read_bytes()), 9, mtime=0),
            path.with_suffix(".new"),
        )
        if len(packed) < path.stat().st_size:
            beside.write_bytes(packed)
            beside.replace(path)


def without_details(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a results.json with a short history of each run.

    Args:
        results: Content of a results.json.
    """
    runs = []
    for run in results["runs"]:
        kept = (*OF_AN_EPOCH, run["metric"]["name"])
        runs.append(
            run
            | {
                "history": [
                    {name: epoch[name] for name in kept if name in epoch}
                    for epoch in run["history"]
                ]
            }
        )
    return {**results, "runs": runs}


def as_text(results: Mapping[str, Any]) -> str:
    """Returns the content of a results.json as JSON with a line for each run and each row.

    Args:
        results: Content of a results.json.
    """
    parts = []
    for name, value in results.items():
        if name in ("runs", "summary"):
            text = (
                "[\n"
                + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value)
                + "\n]"
            )
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of a comparison")
    parser.add_argument("to", type=Path, help="file that is written, in benchmarks/results")
    given = parser.parse_args(arguments)
    given.to.write_text(as_text(without_details(json.loads(given.results.read_text()))))


if __name__ == "__main__":
    main()
