"""From trainings to findings: differences to Winnow, what is kept, and the tables of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.marks import between_marks
from benchmarks.winnow.further.trainings import (
    BASE,
    FACTORS,
    TASKS,
    WAYS,
    Way,
    chosen_factor,
    counted_of,
)
from benchmarks.winnow.jobs import Done
from benchmarks.winnow.table import said
from thresher_lab.comparison.statistics import ALPHA, Paired, holm

BEGIN, END = (
    "<!-- tables of benchmarks.winnow.further -->",
    "<!-- end of the tables of benchmarks.winnow.further -->",
)
"""Lines of a page that the tables stand between."""


@dataclass(frozen=True)
class Line:
    """The counted trainings of one way on one task.

    Attributes:
        factor: Chosen factor on the rate of the task.
        n: Number of counted seeds.
        metric: Mean metric in points.
        cost: Mean cost as a share of full training.
        to_winnow: Differences to Winnow; None for Winnow, and where Winnow is not complete.
        to_full: Differences to full training; None for full training, and where that is not complete.
        chance: How often a mean this large would occur if the way were no better than Winnow, Holm-corrected over the attempts
            on the task; None for ways that are not attempts.
    """

    factor: float
    n: int
    metric: float
    cost: float
    to_winnow: Paired | None
    to_full: Paired | None
    chance: float | None = None


Lines = Mapping[str, Line]
"""Lines by way."""


def lines_of(done: Done, task: str) -> Lines:
    """Returns the lines of a task: those of the ways of which every counted training is done.

    Args:
        done: Results of the trainings.
        task: Name of the task.
    """
    counted = {way.name: _counted(done, way, task) for way in WAYS}
    lines = {way.name: _line(done, way, task, counted) for way in WAYS if counted[way.name]}
    attempts = {way.name for way in WAYS if way.attempt}
    tested = {
        name: line.to_winnow.chance(0.0)
        for name, line in lines.items()
        if name in attempts and line.to_winnow
    }
    corrected = holm(tested)
    return {
        name: Line(**{**vars(line), "chance": corrected.get(name)}) for name, line in lines.items()
    }


def kept(lines: Mapping[str, Lines]) -> list[str]:
    """Returns the names of the attempts that win: better on a task after the correction, and worse on none.

    Args:
        lines: Lines by task.
    """
    return [
        way.name
        for way in WAYS
        if way.attempt and _wins([of_task.get(way.name) for of_task in lines.values()])
    ]


def results(done: Done) -> dict[str, Any]:
    """Returns all lines, and what is kept.

    Args:
        done: Results of the trainings.
    """
    lines = {task: lines_of(done, task) for task in TASKS}
    return {
        "trainings": len(done),
        "tasks": {
            task: {name: asdict(line) for name, line in of_task.items()}
            for task, of_task in lines.items()
        },
        "kept": kept(lines),
    }


def text(done: Done) -> str:
    """Returns the finding and the tables in Markdown, one table a task.

    Args:
        done: Results of the trainings.
    """
    lines = {task: lines_of(done, task) for task in TASKS}
    tables = [f"**{task}**\n\n{_table(of_task)}" for task, of_task in lines.items() if of_task]
    return "\n\n".join([_finding(lines), *tables])


def with_text(page: str, done: Done) -> str:
    """Returns a page in Markdown with the finding and the tables between its two marks.

    Args:
        page: Text with the lines `BEGIN` and `END`.
        done: Results of the trainings.
    """
    return between_marks(page, BEGIN, END, text(done))


def _counted(done: Done, way: Way, task: str) -> Sequence[Mapping[str, Any]]:
    factor = chosen_factor(done, way, task)
    jobs = [] if factor is None else counted_of(way, task, factor)
    return [done[job] for job in jobs] if all(job in done for job in jobs) else []


def _line(
    done: Done, way: Way, task: str, counted: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Line:
    factor = chosen_factor(done, way, task)
    assert factor is not None
    own = [one[way.measure] for one in counted[way.name]]

    def differences(name: str) -> Paired | None:
        other = [one["metric"] for one in counted[name]]
        return (
            Paired.of([a - b for a, b in zip(own, other, strict=True)])
            if other and name != way.name
            else None
        )

    cost = fmean(one["cost"]["ratio"] for one in counted[way.name])
    return Line(factor, len(own), fmean(own), cost, differences(BASE), differences("full"))


def _wins(lines: Sequence[Line | None]) -> bool:
    there = [line for line in lines if line is not None and line.to_winnow is not None]
    return len(there) == len(lines) and any(map(_better, there)) and not any(map(_worse, there))


def _better(line: Line) -> bool:
    return line.chance is not None and line.chance <= ALPHA


def _worse(line: Line) -> bool:
    return (
        line.to_winnow is not None and line.to_winnow.high is not None and line.to_winnow.high < 0
    )


def _finding(lines: Mapping[str, Lines]) -> str:
    attempts = [way.name for way in WAYS if way.attempt]
    missing = [
        way.name for way in WAYS if not all(way.name in of_task for of_task in lines.values())
    ]
    sentences = [f"**Kept: {', '.join(kept(lines)) or 'nothing'}.**"]
    for beginning, judge in (
        ("Better than Winnow after the correction", _better),
        ("Worse, without a correction", _worse),
    ):
        found = {
            name: [task for task, known in lines.items() if name in known and judge(known[name])]
            for name in attempts
        }
        parts = [f"{name} (on {', '.join(tasks)})" for name, tasks in found.items() if tasks]
        sentences.append(f"{beginning}: {'; '.join(parts) or 'none'}.")
    if missing:
        sentences.append(f"Not complete on all tasks: {'; '.join(missing)}.")
    return " ".join(sentences)


def _table(lines: Lines) -> str:
    rows = [
        "| way | rate | cost | accuracy | to Winnow | to full training | chance | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        edge = " (edge)" if line.factor in (FACTORS[0], FACTORS[-1]) else ""
        parts = [name, f"x {line.factor:g}{edge}", f"{line.cost:.3f}", f"{line.metric:.2f}"]
        parts += [
            said(line.to_winnow),
            said(line.to_full),
            "" if line.chance is None else f"{line.chance:.3f}",
            str(line.n),
        ]
        rows.append("| " + " | ".join(parts) + " |")
    return "\n".join(rows)
