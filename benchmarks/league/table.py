"""From trainings to the league: what each method shows over all tasks, its differences on each task, and the pages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.league.arms import (
    CONTROLS,
    ENTRIES,
    FIRST,
    FRESH,
    PLACEBO,
    Round,
    name_of,
    same_time,
    share_of_time,
)
from benchmarks.league.pooled import QUESTIONS, Trainings, answers, failures, standardized
from benchmarks.league.tasks import TASKS, TITLES
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Done
from benchmarks.winnow.table import MARGIN
from benchmarks.winnow.table import TITLES as WINNOW_TITLES
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import Paired, against_controls, findings
from thresher_lab.training.files import markdown_table

MARKS = "<!-- tables of benchmarks.league -->", "<!-- end of the tables of benchmarks.league -->"
KINDS = (SAME_TIME, *CONTROLS, "placebo")
"""Controls that a method is compared with on a task."""
ASKED = {
    SAME_TIME: "fewer epochs in the same time",
    "smaller": "smaller batches",
    "full": "full training",
    "placebo": "its placebo",
}
"""What each question compares with."""


def values(of: Round, done: Done) -> Trainings:
    """Returns the counted trainings by task and arm; arms of which one is missing are left out.

    Args:
        of: Which methods and seeds.
        done: Results of the trainings.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for task in of.tasks:
        for name in of.names(task):
            jobs = of.counted(done, task, name)
            if jobs is not None and all(job in done for job in jobs):
                found[task, name] = [done[job] for job in jobs]
    return found


def control_of(task: str, method: str, kind: str) -> str:
    """Returns the name of the arm that a method is compared with; "" where it is not known yet.

    Args:
        task: Name of the task.
        method: Name of the method.
        kind: Kind of control, or "full".
    """
    if kind == "placebo":
        return method + PLACEBO
    if kind != SAME_TIME:
        return kind
    share = same_time(task, method)
    return "" if share is None else name_of(share)


def over_tasks(of: Round, held: Trainings) -> list[dict[str, Any]]:
    """Returns what each method shows over all tasks, for each question; the best against fewer epochs in the same time first.

    Args:
        of: Which methods and seeds.
        held: Their counted trainings.
    """
    trained = {name: [task for task in of.tasks if (task, name) in held] for name in of.methods}
    trained = {name: tasks for name, tasks in trained.items() if tasks}
    rows = {name: _over_tasks(name, tasks, held) for name, tasks in trained.items()}
    for kind in QUESTIONS:
        by_task = {name: _by_task(name, tasks, kind, held) for name, tasks in trained.items()}
        enough = {name: of_tasks for name, of_tasks in by_task.items() if len(of_tasks) > 1}
        decided = answers({name: list(of_tasks.values()) for name, of_tasks in enough.items()})
        for name, (paired, word) in decided.items():
            points = [
                _difference(held[task, name], held[task, control_of(task, name, kind)]).mean
                for task in enough[name]
            ]
            rows[name]["against"][kind] = {
                **asdict(paired),
                "points": fmean(points),
                "answer": word if of.methods == FRESH.methods else "first seeds",
                "tasks_to_decide": paired.seeds_for(abs(paired.mean), len(enough)),
                "by_task": enough[name],
            }
    return sorted(
        rows.values(), key=lambda row: -row["against"].get(SAME_TIME, {"mean": 0})["mean"]
    )


def _by_task(name: str, tasks: Sequence[str], kind: str, held: Trainings) -> dict[str, float]:
    found = {task: standardized(held, task, name, control_of(task, name, kind)) for task in tasks}
    return {task: difference for task, difference in found.items() if difference is not None}


def _over_tasks(name: str, tasks: Sequence[str], held: Trainings) -> dict[str, Any]:
    runs = [run for task in tasks for run in held[task, name]]
    costs = [fmean(run["cost"]["ratio"] for run in held[task, name]) for task in tasks]
    times = [time for task in tasks if (time := share_of_time(task, name)) is not None]
    return {
        "method": name,
        "tasks": len(tasks),
        "trainings": len(runs),
        "failed": sum(failures(held, task, name) for task in tasks),
        "cost": [min(costs), max(costs)],
        "time": [min(times), max(times)] if times else None,
        "against": {},
    }


def results(done: Done) -> dict[str, Any]:
    """Returns the league: each method over all tasks, and on each task its metric, cost and differences.

    Args:
        done: Results of the trainings.
    """
    rounds = {"fresh": FRESH, "first": FIRST}
    held = {name: values(of, done) for name, of in rounds.items()}
    places = {
        (task, method): trainings
        for name, of in rounds.items()
        for (task, method), trainings in held[name].items()
        if method in of.methods and (task, "full") in held[name]
    }
    round_of = {method: name for name, of in rounds.items() for method in of.methods}
    to_full = {
        place: _difference(own, held[round_of[place[1]]][place[0], "full"])
        for place, own in places.items()
    }
    beside = {
        (task, method, kind): _difference(own, others[task, control])
        for (task, method), own in places.items()
        for kind in KINDS
        for others in [held[round_of[method]]]
        if (task, control := control_of(task, method, kind)) in others
    }
    no_loss, against = findings(to_full, MARGIN), against_controls(beside, MARGIN)
    methods = [row for name, of in rounds.items() for row in over_tasks(of, held[name])]
    return {
        "margin": MARGIN,
        "families": {entry.name: entry.family for entry in ENTRIES},
        "settings": {entry.name: entry.spec.label for entry in ENTRIES},
        "sentences": {row["method"]: sentence(row) for row in methods},
        "methods": methods,
        "waiting": [
            task
            for task in TASKS
            if any((task, entry.name) not in held["fresh"] for entry in FRESH.entries(task))
        ],
        "rows": [
            {
                "task": task,
                "method": method,
                "seeds": round_of[method],
                **_spent(task, method, own),
                "full": fmean(run["metric"] for run in held[round_of[method]][task, "full"]),
                "to_full": asdict(to_full[task, method]),
                "finding": no_loss[task, method],
                "against": {
                    place[2]: {**asdict(beside[place]), "finding": against[place]}
                    for place in beside
                    if place[:2] == (task, method)
                },
            }
            for (task, method), own in places.items()
        ],
        "controls": [
            {
                "task": task,
                "arm": arm,
                "seeds": name,
                **_spent(task, arm, own),
                "to_full": asdict(_difference(own, trainings[task, "full"])),
            }
            for name, trainings in held.items()
            for (task, arm), own in trainings.items()
            if arm.removesuffix(PLACEBO) not in round_of and (task, "full") in trainings
        ],
    }


def _difference(own: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> Paired:
    return Paired.of([a["metric"] - b["metric"] for a, b in zip(own, other, strict=True)])


def _spent(task: str, name: str, trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "time": share_of_time(task, name),
        "metric": fmean(one["metric"] for one in trainings),
        "cost": fmean(one["cost"]["ratio"] for one in trainings),
        "steps": fmean(one["cost"]["steps"] for one in trainings),
    }


def sentence(row: Mapping[str, Any]) -> str:
    """Returns what a method shows against fewer epochs in the same time, in a sentence.

    Args:
        row: Row of `over_tasks`.
    """
    found = row["against"].get(SAME_TIME)
    if found is None:
        return "Not compared with fewer epochs in the same time yet."
    return (
        f"Against fewer epochs in the same time, over {found['n']} tasks: {_interval(found)} standard deviations of full training "
        f"between seeds, {found['points']:+.2f} points ({found['answer']})."
    )


def summary(found: Mapping[str, Any]) -> str:
    """Returns the answers and the table of the methods in Markdown.

    Args:
        found: Result of `results`.
    """
    header = (
        "method",
        "what it does",
        "tasks",
        "cost",
        "CPU time",
        *(f"to {to}" for to in ASKED.values()),
        "failed",
    )
    rows = [_method_cells(row, found["families"]) for row in found["methods"]]
    waiting = f"\n\nNot finished yet: {', '.join(found['waiting'])}." if found["waiting"] else ""
    return f"{outcome(found)}\n\n{markdown_table(header, rows)}{waiting}"


def _method_cells(row: Mapping[str, Any], families: Mapping[str, str]) -> tuple[str, ...]:
    return (
        row["method"],
        families[row["method"]],
        str(row["tasks"]),
        _range(row["cost"]),
        _range(row["time"]),
        *(_answer(row["against"].get(kind)) for kind in QUESTIONS),
        f"{row['failed']} of {row['trainings']}" if row["failed"] else "",
    )


def _answer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    said = f"{_interval(found)}; {found['points']:+.2f} points"
    if found["answer"] == "first seeds":
        return f"*{said}*"
    if found["answer"] == "not decided":
        return f"{said} ({found['tasks_to_decide'] or 'over 1,000'})"
    return f"**{found['answer']}**: {said}"


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['mean']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def _range(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    least, most = values
    return f"{least:.2f} to {most:.2f}" if most - least > 0.005 else f"{most:.2f}"


def top(found: Mapping[str, Any]) -> str:
    """Returns the answers in a few sentences, with a link to the league.

    Args:
        found: Result of `results`.
    """
    return (
        f"[The league](league.md) trains {len(found['methods'])} methods, one a family, at about half of the cost; for "
        f"{len(FRESH.methods)} of them, fresh seeds decide. {outcome(found)}"
    )


def outcome(found: Mapping[str, Any]) -> str:
    """Returns the answers in a sentence for each question.

    Args:
        found: Result of `results`.
    """
    fresh = [row for row in found["methods"] if row["method"] in FRESH.methods]
    said: list[str] = []
    for kind, control in ASKED.items():
        answered = [
            (row["method"], row["against"][kind]) for row in fresh if kind in row["against"]
        ]
        parts = [
            f"{word}: {', '.join(names)}"
            for word in ("better", "worse", "not decided")
            if (names := [_named(name, one) for name, one in answered if one["answer"] == word])
        ]
        said.append(f"Against {control}, {'; '.join(parts) or 'nothing is trained yet'}.")
    return " ".join(said)


def _named(name: str, found: Mapping[str, Any]) -> str:
    if found["answer"] == "not decided":
        return name
    return f"{name} ({found['points']:+.2f} points over {found['n']} tasks)"


COLUMNS = {
    SAME_TIME: "to fewer epochs, same time",
    "smaller": "to smaller",
    "shorter": "to half of the epochs",
    "uniform": "to random",
    "fewer": "to one subset",
    "placebo": "to placebo",
}
"""Columns of the table of a task, by control."""


def page(found: Mapping[str, Any]) -> str:
    """Returns the tables of the tasks in Markdown: those of the fresh seeds, and those of the first.

    Args:
        found: Result of `results`.
    """
    parts: list[str] = []
    for seeds, of in (("fresh", FRESH), ("first", FIRST)):
        parts.append(f"## {seeds.capitalize()} seeds, {of.seeds[0]} to {of.seeds[-1]}")
        for task in (task for task in TASKS if task in of.tasks):
            rows = [row for row in found["rows"] if (row["task"], row["seeds"]) == (task, seeds)]
            controls = [
                row for row in found["controls"] if (row["task"], row["seeds"]) == (task, seeds)
            ]
            if rows:
                title = TITLES.get(task) or WINNOW_TITLES.get(task, task)
                parts.append(f"**{title}**\n\n{_task_table(rows, controls)}")
    return "\n\n".join(parts)


def _task_table(rows: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]]) -> str:
    kinds = [kind for kind in COLUMNS if any(kind in row["against"] for row in rows)]
    spent = ("metric", "cost", "CPU time", "steps")
    header = ("method", *spent, "to full", "finding", *(COLUMNS[kind] for kind in kinds))
    lines = [
        (
            row["method"],
            *_spent_cells(row),
            _said(row["to_full"]),
            "cannot tell" if row["finding"] == "unclear" else row["finding"],
            *(_said(row["against"].get(kind)) for kind in kinds),
        )
        for row in sorted(rows, key=lambda row: row["to_full"]["mean"])
    ]
    for row in controls:
        to_full = "" if row["arm"] == "full" else _said(row["to_full"])
        lines.append((f"*{row['arm']}*", *_spent_cells(row), to_full, *("",) * (1 + len(kinds))))
    return markdown_table(header, lines)


def _spent_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    time = "" if row["time"] is None else f"{row['time']:.2f}"
    return (f"{row['metric']:.2f}", f"{row['cost']:.3f}", time, f"{row['steps']:.0f}")


def _said(paired: Mapping[str, Any] | None) -> str:
    if paired is None:
        return ""
    decided = paired.get("finding", "unclear")
    word = "" if decided == "unclear" else f" ({decided})"
    return f"{paired['mean']:+.2f} ± {paired['mean'] - paired['low']:.2f}{word}"


def write(path: Path, tables: str) -> None:
    """Writes tables or sentences into a page in Markdown, between its marks.

    Args:
        path: The page.
        tables: Text between the marks.
    """
    path.write_text(between_marks(path.read_text(), *MARKS, tables))
