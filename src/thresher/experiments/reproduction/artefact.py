"""A table or figure of a paper, at the scale of two cores: what is trained, what the paper says, and what it claims."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thresher.experiments.comparison.job import Control
from thresher.experiments.comparison.statistics import LEAST_SEEDS, Paired

Run = dict[str, Any]
Runs = Mapping[str, Mapping[int, Run]]
"""By row and seed; the row of full training is called `full`."""
Measured = Mapping[str, Runs]
"""By part."""
Value = Callable[[Measured, int], float]
"""A number of one seed's runs."""
Verdict = Literal["reproduced", "not reproduced", "cannot tell"]

VERDICTS: tuple[Verdict, ...] = ("not reproduced", "cannot tell", "reproduced")
"""In the order in which they are told."""
FULL = "full"


@dataclass(frozen=True)
class Part:
    """Runs of one task, compared with each other.

    Args:
        name: For the page and for claims.
        task: See `tasks.task_of`.
        epochs: Of every run.
        rows: Name of a row, in the paper's words, to a method as on the command line; full training is always a row, `full`.
            `{scores}` stands for a file of scores, see `scores`.
        published: The paper's numbers by row, as it prints them.
        scores: What `thresher score` is asked before: name of the score, models and epochs.
        controls: Trained beside every row, at its cost.
    """

    name: str
    task: str
    epochs: int
    rows: Mapping[str, str]
    published: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[str, int, int] | None = None
    controls: tuple[Control, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What a paper says, as a number of each seed that should be above another.

    Args:
        text: One sentence.
        value: Of one seed.
        above: What it should exceed.
        scale: By which to multiply the numbers for people: 100 for points.
    """

    text: str
    value: Value
    above: float = 0.0
    scale: float = 100.0

    def judge(self, measured: Measured, seeds: Sequence[int]) -> dict[str, Any]:
        """Text, mean, ci95, above, scale and verdict; values that are not finite tell nothing."""
        values = [self.value(measured, seed) for seed in seeds]
        found: dict[str, Any] = {"claim": self.text, "above": self.above, "scale": self.scale}
        if not all(map(math.isfinite, values)):
            return {**found, "mean": None, "ci95": None, "verdict": "cannot tell"}
        paired = Paired.of(values)
        ends = None if paired.low is None else [paired.low, paired.high]
        return {**found, "mean": paired.mean, "ci95": ends, "verdict": judged(paired, self.above)}


def judged(paired: Paired, above: float) -> Verdict:
    """Reproduced where the whole 95 % interval is above the limit, not reproduced where all of it is below."""
    if paired.n < LEAST_SEEDS or paired.low is None or paired.high is None:
        return "cannot tell"
    if paired.low > above:
        return "reproduced"
    return "not reproduced" if paired.high < above else "cannot tell"


@dataclass(frozen=True)
class Table:
    """Of the page.

    Args:
        title: Above it.
        header: Names of the columns.
        rows: As they are printed.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


Tables = Callable[[Measured, Mapping[str, Any]], Sequence[Table]]
"""From what was measured, and the results of `compare` by part."""


@dataclass(frozen=True)
class Artefact:
    """One table or figure.

    Args:
        name: On the command line.
        paper: Which one, and where in it.
        shows: What it is about, a few words.
        here: What stands for the paper's models and data.
        parts: What is trained.
        claims: What should hold.
        tables: Of the page; by default one a part, see `tables_of_parts`.
        seeds: Distinct, at least three.
    """

    name: str
    paper: str
    shows: str
    here: str
    parts: Sequence[Part]
    claims: Sequence[Claim]
    tables: Tables | None = None
    seeds: Sequence[int] = (0, 1, 2)


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several claims: all must be reproduced, and one that is not decides."""
    return next(verdict for verdict in VERDICTS if verdict in verdicts)


def metric(part: str, row: str) -> Value:
    """What a row's runs reach."""
    return lambda measured, seed: measured[part][row][seed]["metric"]["value"]


def cost(part: str, row: str) -> Value:
    """Counted cost of a row's runs, as a share of full training."""
    return lambda measured, seed: measured[part][row][seed]["cost"]["ratio"]


def cpu(part: str, row: str) -> Value:
    """CPU time of a row's runs, as a share of full training with the same seed."""
    return lambda measured, seed: measured[part][row][seed]["cpu_s"] / measured[part][FULL][seed]["cpu_s"]


def minus(left: Value, right: Value) -> Value:
    """A difference, seed by seed."""
    return lambda measured, seed: left(measured, seed) - right(measured, seed)


def over(left: Value, right: Value) -> Value:
    """A ratio, seed by seed."""
    return lambda measured, seed: left(measured, seed) / right(measured, seed)


def mean_of(values: Sequence[Value]) -> Value:
    """The mean of several, seed by seed."""
    return lambda measured, seed: statistics.mean(value(measured, seed) for value in values)


def largest_of(values: Sequence[Value]) -> Value:
    """The largest of several, seed by seed."""
    return lambda measured, seed: max(value(measured, seed) for value in values)


def tables_of_parts(artefact: Artefact, results: Mapping[str, Any]) -> list[Table]:
    """One table a part: each row beside full training, its controls and the paper's number."""
    return [_table(part, results[part.name]) for part in artefact.parts]


def _table(part: Part, results: Mapping[str, Any]) -> Table:
    labels = {label: row for row, label in results["labels"].items()}
    own = [row for row in results["summary"] if row["control_of"] is None]
    controls = {row["control_of"]: row for row in results["summary"] if row["control_of"] is not None}
    header = ["", f"{results['metric']} here", "difference to full [95 % interval]", "cost", "CPU time", "in the paper"]
    rows = []
    for found in own:
        row = labels[found["method"]]
        rows.append([row, *figures(found), part.published.get(row, "")])
        if found["method"] in controls:
            rows.append([f"  random samples at the cost of {row}", *figures(controls[found["method"]]), ""])
    return Table(f"{part.name}: {part.task}, {part.epochs} epochs", header, rows)


def figures(row: Mapping[str, Any], scale: float = 100) -> list[str]:
    """Mean and spread, difference to full with interval, cost and CPU time of a row of a summary."""
    spread = "" if row["std"] is None else f" ± {scale * row['std']:.2f}"
    return [
        f"{scale * row['mean']:.2f}{spread}",
        "" if row["difference"] is None else with_interval(row["difference"], row["ci95"], scale),
        f"{row['cost_ratio']:.3f}",
        f"{row['cpu_ratio']:.2f}",
    ]


def with_interval(mean: float, ci95: Sequence[float] | None, scale: float = 100) -> str:
    """A signed number with its interval."""
    ends = "" if ci95 is None else f" [{scale * ci95[0]:+.2f}, {scale * ci95[1]:+.2f}]"
    return f"{scale * mean:+.2f}{ends}"
