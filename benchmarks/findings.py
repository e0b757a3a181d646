"""Writes into the package what the committed results say of each method, which `thresher advise` ranks methods by.

`python -m benchmarks.findings` reads the comparisons, the tables of `benchmarks.winnow` and, where it is there, the league. It
prints how often such measurements have the sign of the decided results of the league: as advice is given, and on a training
that was not measured.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thresher_lab.advise.findings import MEASURED, Measurement, Record, kind_of_label

RESULTS = Path(__file__).resolve().parent / "results"

OWN_RATE = "winnow at its own rate"
"""Arm of `benchmarks.winnow` with the learning rate that `attach` takes by itself, as a comparison does."""

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
            low, high = (None, None) if row.get("ci95") is None else (round(scale * end, 3) for end in row["ci95"])
            given = (source, found["task"], row["method"], cost, difference, row["finding"], against)
            yield Measurement(*given, low, high, found.get("margin"))


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
            given = (source, task, f"winnow:share={share}", cost, difference, shown["to_full"], against)
            as_attached = table["tasks"][task].get(OWN_RATE, own)
            lost = {arm: row["to_full"]["mean"] for arm, row in table["tasks"][task].items() if row["to_full"] is not None}
            others = (round(lost["smaller"], 3), round(max(lost.values()), 3)) if "smaller" in lost else ()
            yield Measurement(*given, *_interval(as_attached["to_full"]), found.get("margin"), *others)


def of_league(source: str, found: Results) -> Iterator[Measurement]:
    """Yields each method of the league on each training.

    Args:
        source: Name of the file.
        found: Content of league.json.
    """
    for row in found["rows"]:
        against = {control: one["finding"] for control, one in row["against"].items()}
        label, difference = found["settings"][row["method"]], round(row["to_full"]["mean"], 3)
        given = (source, row["task"], label, round(row["cost"], 3), difference, row["finding"], against)
        yield Measurement(*given, *_interval(row["to_full"]), found.get("margin"))


def _interval(paired: Results) -> tuple[float | None, float | None]:
    """Returns both ends of an interval; None where there is none."""
    low, high = (None if paired.get(end) is None else round(paired[end], 3) for end in ("low", "high"))
    return low, high


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


@dataclass(frozen=True)
class Agreement:
    """How often what was measured on other trainings foretells a decided result.

    Args:
        right: Number of decided results that have the sign of those of the same kind of method on other trainings.
        wrong: Number of those with the other sign.
        silent: Number of those of which the other trainings say nothing, or both.
    """

    right: int
    wrong: int
    silent: int

    def __str__(self) -> str:
        told = self.right + self.wrong
        share = f"{self.right / told:.0%}" if told else "none"
        return f"{share} of {told} decided results were foretold right; nothing is said of {self.silent} more"


def agreement(rows: Sequence[Mapping[str, Any]], source: str = "league", *, unseen: bool = True) -> Agreement:
    """Foretells each decided result of a source as advice does.

    Args:
        rows: Measurements as plain values.
        source: Name of the source whose results are foretold.
        unseen: Whether they are foretold from other trainings only, as if this one had not been measured. Default: True.
    """
    known = [Measurement(**row) for row in rows]
    signs = {"ahead": 1, "behind": -1}
    found = []
    for one in (one for one in known if one.source == source and one.sign):
        others = [
            m for m in known if kind_of_label(m.method) == kind_of_label(one.method) and not (unseen and m.task == one.task)
        ]
        exact = [m for m in others if m.method == one.method]
        found.append(one.sign * signs.get(Record(exact or others).standing, 0))
    return Agreement(found.count(1), found.count(-1), found.count(0))


def as_text(rows: list[dict[str, Any]]) -> str:
    """Returns the measurements as JSON, one a line.

    Args:
        rows: Measurements as plain values.
    """
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    rows = collected()
    MEASURED.write_text(as_text(rows), encoding="utf-8")
    print(f"As advice is given: {agreement(rows, unseen=False)}")
    print(f"Had the training not been measured: {agreement(rows)}")
