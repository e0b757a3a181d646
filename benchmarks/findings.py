"""Writes into the package what the committed results say of each method, which `thresher advise` ranks methods by.

`python -m benchmarks.findings` reads the comparisons, the tables of `benchmarks.winnow` and, where it is there, the league.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thresher.experiments.advise.findings import MEASURED, Measurement

RESULTS = Path(__file__).resolve().parent / "results"

Results = Mapping[str, Any]
"""Content of a file of results."""


def of_comparison(source: str, found: Results) -> Iterator[Measurement]:
    """Yields the methods of a comparison, which are not full training and no controls.

    Args:
        source: Name of the file.
        found: Content of a results.json.
    """
    scale = 100 if all(0 <= run["metric"]["value"] <= 1 for run in found["runs"]) else 1
    for row in found["summary"]:
        if row["control_of"] is None and row["finding"] is not None:
            against = {kind: one["finding"] for kind, one in row["against"].items()}
            difference = round(scale * row["difference"], 3)
            cost = round(row["cost_ratio"], 3)
            yield Measurement(source, found["task"], row["method"], cost, difference, row["finding"], against)


def of_winnow(source: str, found: Results) -> Iterator[Measurement]:
    """Yields Winnow with each share on each training.

    Args:
        source: Name of the file.
        found: Content of winnow.json.
    """
    for share, table in found["shares"].items():
        for task, shown in table["shown"].items():
            own = table["tasks"][task]["winnow"]
            against = {"smaller": shown["to_smaller"]}
            difference = round(own["to_full"]["mean"], 3)
            cost = round(own["cost"], 3)
            yield Measurement(source, task, f"winnow:share={share}", cost, difference, shown["to_full"], against)


def of_league(source: str, found: Results) -> Iterator[Measurement]:
    """Yields each method of the league on each training.

    Args:
        source: Name of the file.
        found: Content of league.json.
    """
    for row in found["rows"]:
        against = {control: one["finding"] for control, one in row["against"].items()}
        label, difference = found["settings"][row["method"]], round(row["to_full"]["mean"], 3)
        yield Measurement(source, row["task"], label, round(row["cost"], 3), difference, row["finding"], against)


SOURCES: dict[str, Callable[[str, Results], Iterator[Measurement]]] = {
    "demo-mnist-5k": of_comparison,
    "fashion-cnn": of_comparison,
    "fashion-resnet8": of_comparison,
    "winnow": of_winnow,
    "league": of_league,
}
"""Files of results, without suffix, and how each is read. Of a method on a training, the last one counts."""


def collected(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Returns what the results in a folder say, as plain values; files that are not there are left out.

    Args:
        folder: Folder of the results.
    """
    found: dict[tuple[str, str], Measurement] = {}
    for source, read in SOURCES.items():
        path = folder / f"{source}.json"
        if path.is_file():
            found |= {(one.task, one.method): one for one in read(source, json.loads(path.read_text(encoding="utf-8")))}
    return [asdict(one) for one in found.values()]


def as_text(rows: list[dict[str, Any]]) -> str:
    """Returns the measurements as JSON, one a line.

    Args:
        rows: Measurements as plain values.
    """
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    MEASURED.write_text(as_text(collected()), encoding="utf-8")
