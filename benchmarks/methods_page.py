"""Writes docs/methods/README.md: the methods in the order of what was measured, so that the page never disagrees with it.

`python -m benchmarks.methods_page` reads the comparisons, the tables of the papers, the league, and Winnow's own tables.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher import methods
from thresher_lab.report.cards import (
    BY_HAND,
    NOT_MEASURED,
    STAGE_TITLES,
    compared,
    documented_methods,
    labeled_method,
    measurements,
    paper_link,
    reproduced,
    signals_of,
)
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "methods" / "README.md"

CONTROLS = {
    "shorter@time": "fewer epochs in the same time",
    "uniform": "random samples",
    "shorter": "fewer epochs",
    "smaller": "smaller batches",
}
"""Ways to spend the same cost without a method. A placebo is none: it tells whether the signals matter. One subset for all epochs
is none either: nearly every method is better than that."""

BASELINES = ("full", "random_backprop", "uniform", "uniform_rows")
"""Registered methods that are full training or random selection, which the others are compared with."""

TITLES = {
    1: "Better than its controls somewhere",
    0: "Tied: not told apart from its controls",
    -1: "Worse than its controls somewhere, and better nowhere",
}
UNTRIED = "Not tried beside controls"


@dataclass(frozen=True)
class Beside:
    """A method beside a control.

    Args:
        control: The control in words.
        finding: "better", "worse", "no better" or "unclear", corrected over all that was looked at together.
        difference: Metric less that of the control, in points.
        low: Lower end of its 95 % interval; None where there is no spread.
        high: Upper end of that interval; None where there is no spread.
    """

    control: str
    finding: str
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Trial:
    """A method with some settings on a task.

    Args:
        source: Name of the file of results.
        task: Name of the task.
        method: Name of the method.
        cost: Cost as counted, as a share of full training.
        beside: Controls of that cost, at least one.
    """

    source: str
    task: str
    method: str
    cost: float
    beside: Sequence[Beside]

    @property
    def sign(self) -> int:
        """1 where it was better than a control and worse than none, -1 where worse and better than none, and 0 otherwise."""
        found = {one.finding for one in self.beside}
        return ("better" in found) - ("worse" in found)

    @property
    def strongest(self) -> Beside:
        """The control that leaves the smallest difference."""
        return min(self.beside, key=lambda one: one.difference)

    def __str__(self) -> str:
        best = self.strongest
        between = (
            "" if best.low is None or best.high is None else f" [{best.low:+.2f}, {best.high:+.2f}]"
        )
        return f"{best.difference:+.2f}{between} to {best.control} on `{self.task}` at {self.cost:.2f} of the cost ({self.source})"


def _of_comparisons(folder: Path) -> Iterator[Trial]:
    """Yields the methods of comparisons and of the tables of papers, where they have controls."""
    for found in (*compared(folder), *reproduced(folder)):
        scale = 100 if found["share"] else 1
        for row in found["summary"]:
            beside = [
                Beside(
                    CONTROLS[kind],
                    one["finding"],
                    scale * one["difference"],
                    *_ends(one["ci95"], scale),
                )
                for kind, one in row["against"].items()
                if kind in CONTROLS and one["finding"] is not None
            ]
            if (
                row["control_of"] is None and beside and "+" not in row["method"]
            ):  # a chain is no trial of its first method
                yield Trial(
                    found["source"],
                    found["task"],
                    labeled_method(row["method"]),
                    row["cost_ratio"],
                    beside,
                )


def _ends(interval: Sequence[float] | None, scale: float) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (scale * interval[0], scale * interval[1])


def _of_league(found: Mapping[str, Any]) -> Iterator[Trial]:
    """Yields the methods of the league."""
    for row in found["rows"]:
        against = (
            (CONTROLS[kind], one) for kind, one in row["against"].items() if kind in CONTROLS
        )
        beside = [
            Beside(name, one["finding"], one["mean"], one["low"], one["high"])
            for name, one in against
        ]
        yield Trial("league.json", row["task"], row["method"], row["cost"], beside)


def _of_winnow(found: Mapping[str, Any]) -> Iterator[Trial]:
    """Yields Winnow at half of the cost; where its file has no list of what it is worse than, an interval below 0 counts."""
    shown = {
        "smaller batches": "smaller batches",
        "fewer epochs, same time": "fewer epochs in the same time",
    }
    for task in found["verdict"]["tasks"]:
        rows, beside = found["tables"][f"{task} at 0.5"], []
        for arm, name in shown.items():
            paired = rows[arm]["second_minus"]
            lost = "worse" if paired["high"] < 0 else "unclear"
            finding = "better" if task in found["verdict"][f"better than {name}"] else lost
            beside.append(Beside(name, finding, paired["mean"], paired["low"], paired["high"]))
        yield Trial("winnow-second.json", task, "winnow", rows["second version"]["cost"], beside)


def trials(folder: Path = RESULTS) -> dict[str, list[Trial]]:
    """Returns what was measured beside controls, by the name of the method.

    Args:
        folder: Folder of the results.
    """
    league, winnow = (
        json.loads((folder / name).read_text()) for name in ("league.json", "winnow-second.json")
    )
    found = {name: list[Trial]() for name in documented_methods() if name not in BASELINES}
    for trial in (*_of_comparisons(folder), *_of_league(league), *_of_winnow(winnow)):
        if trial.method in found:
            found[trial.method].append(trial)
    return found


def standing(of: Sequence[Trial]) -> int | None:
    """Returns 1 where a method was better somewhere, -1 where it was worse and never better, else 0; None without trials."""
    signs = {trial.sign for trial in of}
    return None if not of else 1 if 1 in signs else min(signs)


def in_words(of: Sequence[Trial]) -> str:
    """Returns how often a method was better and worse, with its best and worst decided trials, or the ends of undecided ones.

    Args:
        of: Trials of the method, at least one.
    """
    better, worse, tied = ([trial for trial in of if trial.sign == sign] for sign in (1, -1, 0))
    counted = f"better in {len(better)}, worse in {len(worse)} of {len(of)}"
    best = [f"best: {max(better, key=_difference)}"] if better else []
    worst = [f"worst: {min(worse, key=_difference)}"] if worse else []
    if best or worst:
        return "; ".join((counted, *best, *worst))
    low, high = min(tied, key=_difference), max(tied, key=_difference)
    return f"{counted}; {low}" if low == high else f"{counted}; from {low} up to {high}"


def _difference(trial: Trial) -> float:
    return trial.strongest.difference


def _order(name: str, of: Sequence[Trial]) -> tuple[float, str]:
    return (-sum(trial.sign for trial in of) / max(1, len(of)), name)


def index_row(name: str) -> tuple[str, ...]:
    """Returns the cells of a method in the index: link, summary, stage, paper, signals and bytes per sample.

    Args:
        name: Name of the method.
    """
    kind: Any = methods.load(name)
    return (
        f"[{name}]({name}.md)",
        kind.card.summary,
        f"`{kind.stage}`",
        paper_link(kind.card.paper),
        ", ".join(f"`{signal}`" for signal in signals_of(kind)),
        f"{kind.card.bytes_per_sample:g}",
    )


def page(folder: Path = RESULTS) -> str:
    """Returns the page.

    Args:
        folder: Folder of the results.
    """
    found = trials(folder)
    untried = {name: measurements(name, folder) for name, of in found.items() if not of}
    measured = {
        name: "no" if text == NOT_MEASURED else "without these controls"
        for name, text in untried.items()
    }
    stages = ", ".join(f"{title} (`{stage}`)" for stage, title in STAGE_TITLES.items())
    parts = [
        "# The methods",
        "Each method has a page with its settings, its differences to the official code, what is missing, and what was "
        "measured here beside controls of the same cost. `thresher methods NAME` prints the same page "
        f"without the measurements. [{BY_HAND}]({BY_HAND}) lists what the papers describe and this package does not "
        "have, and the methods that were removed.",
        "The order is that of what was measured here beside random samples, fewer epochs and smaller batches of the same "
        "cost, and fewer epochs in the same CPU time, as far as each was trained. A trial is a method with some settings "
        "on one task. It counts as better where its file finds it better than one of these controls and worse than none, "
        "and as worse the other way round; these findings are corrected for many looks. The difference in points is that "
        "to the control that leaves the smallest one, with its 95 % interval, which is not corrected: the interval of a "
        "tied trial may lie beside 0. Where a method costs more than full training, its controls are full training. The "
        "tasks are small; other tasks and settings may come out differently.",
        f"A method decides {stages}.",
    ]
    header = ("method", "what it does", "decides", "paper", "signals", "bytes per sample")
    groups = {
        title: [name for name, of in found.items() if standing(of) == sign]
        for sign, title in TITLES.items()
    }
    groups[UNTRIED] = [name for name, of in found.items() if not of]
    for title, members in groups.items():
        ordered = sorted(members, key=lambda name: _order(name, found[name]))
        rows = [
            (*index_row(name), in_words(found[name]) if found[name] else measured[name])
            for name in ordered
        ]
        parts.append(
            f"## {title}\n\n{markdown_table((*header, 'measured here'), rows) if rows else 'None.'}"
        )
    controls = markdown_table(header, [index_row(name) for name in BASELINES])
    parts.append(
        f"## Full training and random selection\n\nWith these the others are compared.\n\n{controls}"
    )
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods_page", description=__doc__)
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="page that is written (default: %(default)s)"
    )
    parser.parse_args(arguments).page.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
