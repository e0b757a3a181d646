"""From trainings to the league: differences paired by seed, findings corrected over the whole table, and the page."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks.league.arms import CONTROLS, DESIGN, ENTRIES, PLACEBO, TASKS, arms_of, counted_jobs
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Done
from benchmarks.winnow.table import MARGIN, TITLES
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import Paired, against_controls, findings
from thresher_lab.training.files import markdown_table

BEGIN, END = "<!-- tables of benchmarks.league -->", "<!-- end of the tables -->"
TOP = "<!-- top of benchmarks.league -->", "<!-- end of the top -->"

Place = tuple[str, str]
"""Task and method."""
Against = tuple[str, str, str]
"""Task, method and control."""


def values(done: Done) -> dict[Place, list[Mapping[str, Any]]]:
    """Returns the counted trainings of each arm on each task, by seed; arms of which one is missing are left out."""
    found = {}
    for task in TASKS:
        for arm in arms_of(task):
            jobs = counted_jobs(done, task, arm)
            if jobs is not None and all(job in done for job in jobs):
                found[task, arm.name] = [done[job] for job in jobs]
    return found


def results(done: Done) -> dict[str, Any]:
    """Returns the table: for each method on each task its metric, its cost, its differences, and what they show.

    Args:
        done: Results of the trainings.
    """
    held = values(done)
    to_full = {
        (task, entry.name): _difference(held[task, entry.name], held[task, "full"])
        for task in TASKS
        for entry in ENTRIES
        if {(task, entry.name), (task, "full")} <= set(held)
    }
    beside = {
        (task, name, control): _difference(held[task, name], held[task, _arm_of(name, control)])
        for task, name in to_full
        for control in (*CONTROLS, "placebo")
        if (task, _arm_of(name, control)) in held
    }
    no_loss, against = findings(to_full, MARGIN), against_controls(beside, MARGIN)
    rows = [_row(place, held, to_full, beside, no_loss, against) for place in to_full]
    controls = [
        _control(task, name, held)
        for task in TASKS
        for name in ("full", *CONTROLS)
        if (task, name) in held
    ]
    left_out = [(task, entry.name) for task in TASKS for entry in ENTRIES if not entry.fits(task)]
    places = [(task, entry.name) for task in TASKS for entry in ENTRIES]
    waiting = [place for place in places if place not in to_full and place not in left_out]
    return {
        "margin": MARGIN,
        "design": asdict(DESIGN),
        "families": {entry.name: entry.family for entry in ENTRIES},
        "settings": {entry.name: entry.spec.label for entry in ENTRIES},
        "sentences": {entry.name: against_fewer_epochs(entry.name, rows) for entry in ENTRIES},
        "rows": rows,
        "controls": controls,
        "waiting": waiting,
        "left_out": left_out,
        "far_off": [sentence for place in held if (sentence := far_off(place, held[place]))],
    }


def against_fewer_epochs(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Says on how many tasks a method is better and worse than fewer epochs: in the same time if that was trained.

    Args:
        name: Name of the method.
        rows: Rows of the table.
    """
    of = [row["against"] for row in rows if row["method"] == name]
    kind = SAME_TIME if all(SAME_TIME in against for against in of) else "shorter"
    words = "in the same time" if kind == SAME_TIME else "at half the cost"
    found = [against[kind]["finding"] for against in of if kind in against]
    if not found:
        return "Not compared with fewer epochs yet."
    better = found.count("better")
    return f"Better than fewer epochs {words} on {better} of {len(found)} tasks, worse on {found.count('worse')}."


def _arm_of(method: str, control: str) -> str:
    return method + PLACEBO if control == "placebo" else control


def _difference(own: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> Paired:
    return Paired.of([a["metric"] - b["metric"] for a, b in zip(own, other, strict=True)])


def _spent(trainings: list[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "metric": fmean(one["metric"] for one in trainings),
        "cost": fmean(one["cost"]["ratio"] for one in trainings),
        "steps": fmean(one["cost"]["steps"] for one in trainings),
    }


def far_off(place: Place, trainings: list[Mapping[str, Any]]) -> str:
    """A sentence about trainings that came to less than half of the median; empty where there are none."""
    task, name = place
    metrics = [one["metric"] for one in trainings]
    off = [f"{metric:.1f}" for metric in metrics if metric < median(metrics) / 2]
    words = f"{len(off)} of {len(metrics)} trainings of {name} on {task} failed ({', '.join(off)}; median {median(metrics):.1f})."
    return words if off else ""


def _control(task: str, name: str, held: Mapping[Place, list[Mapping[str, Any]]]) -> dict[str, Any]:
    own = held[task, name]
    to_full = (
        None
        if name == "full" or (task, "full") not in held
        else asdict(_difference(own, held[task, "full"]))
    )
    return {"task": task, "arm": name, **_spent(own), "to_full": to_full}


def _row(
    place: Place,
    held: Mapping[Place, list[Mapping[str, Any]]],
    to_full: Mapping[Place, Paired],
    beside: Mapping[Against, Paired],
    no_loss: Mapping[Place, str],
    against: Mapping[Against, str],
) -> dict[str, Any]:
    task, name = place
    controls = {
        at[2]: {**asdict(beside[at]), "finding": against[at]} for at in beside if at[:2] == place
    }
    found = {"finding": no_loss[place], "against": controls}
    return {
        "task": task,
        "method": name,
        **_spent(held[place]),
        "to_full": asdict(to_full[place]),
        **found,
    }


def page(found: Mapping[str, Any]) -> str:
    """Returns the tables of the league in Markdown, those that fell short first.

    Args:
        found: Result of `results`.
    """
    parts = [summary(found)]
    for task in TASKS:
        rows = sorted(
            (row for row in found["rows"] if row["task"] == task),
            key=lambda row: row["to_full"]["mean"],
        )
        if rows:
            parts.append(f"**{TITLES.get(task, task)}**\n\n{_task_table(task, rows, found)}")
    return "\n\n".join(parts)


def _task_table(task: str, rows: list[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    header = (
        "method",
        "metric",
        "cost",
        "steps",
        "to full",
        "finding",
        "to smaller",
        "to fewer epochs",
        "to random",
        "to placebo",
    )
    lines = [_cells(row) for row in rows]
    for control in (one for one in found["controls"] if one["task"] == task):
        to_full = "" if control["to_full"] is None else _said(control["to_full"])
        spent = (f"{control['metric']:.2f}", f"{control['cost']:.3f}", f"{control['steps']:.0f}")
        lines.append((f"*{control['arm']}*", *spent, to_full, "", "", "", "", ""))
    return markdown_table(header, lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    words = {"no loss": "no loss", "loses": "loses", "unclear": "cannot tell"}
    controls = [row["against"].get(kind) for kind in ("smaller", "shorter", "uniform", "placebo")]
    against = [
        "" if one is None else f"{_said(one)} ({_in_words(one['finding'])})" for one in controls
    ]
    spent = (f"{row['metric']:.2f}", f"{row['cost']:.3f}", f"{row['steps']:.0f}")
    return (row["method"], *spent, _said(row["to_full"]), words[row["finding"]], *against)


def _in_words(finding: str) -> str:
    return "cannot tell" if finding == "unclear" else finding


def _said(paired: Mapping[str, Any]) -> str:
    return f"{paired['mean']:+.2f} ± {paired['mean'] - paired['low']:.2f}"


def summary(found: Mapping[str, Any]) -> str:
    """Returns one line per method: on how many tasks it loses, and is better or worse than its controls; the worst first.

    Args:
        found: Result of `results`.
    """
    names = dict.fromkeys(row["method"] for row in found["rows"])
    rows = sorted((_of_method(name, found) for name in names), key=lambda row: row["rank"])
    header = (
        "method",
        "family",
        "tasks",
        "cost",
        "loses",
        "no loss",
        "better than smaller",
        "worse than smaller",
        "signal matters",
    )
    lines = [
        (
            row["name"],
            found["families"][row["name"]],
            str(row["tasks"]),
            row["cost"],
            *(str(row[key]) for key in ("loses", "no_loss", "better", "worse")),
            row["signal"],
        )
        for row in rows
    ]
    waiting, left_out = (
        ", ".join(f"{name} on {task}" for task, name in found[key])
        for key in ("waiting", "left_out")
    )
    off = "".join(f"\n\n{one}" for one in found["far_off"])
    said = (
        f"{off}\n\nLeft out, because the targets are not the classes that the method needs: {left_out}."
        if left_out
        else off
    )
    return (
        markdown_table(header, lines)
        + said
        + (f"\n\nNot finished yet: {waiting}." if waiting else "")
    )


def top(found: Mapping[str, Any]) -> str:
    """Returns the outcome in a few sentences, what fell short first.

    Args:
        found: Result of `results`.
    """
    names = dict.fromkeys(row["method"] for row in found["rows"])
    rows = sorted(
        (_of_method(name, found) for name in names), key=lambda row: row["rank"], reverse=True
    )
    found_of = {
        "Shown to lose against full training somewhere": [
            row["name"] for row in reversed(rows) if row["loses"]
        ],
        "Worse than smaller batches somewhere": [
            row["name"] for row in reversed(rows) if row["worse"]
        ],
        "Better than smaller batches somewhere": [row["name"] for row in rows if row["better"]],
        "Better than the placebo somewhere, so that the signal matters": [
            row["name"] for row in rows if row["signal_matters"]
        ],
        "Nowhere shown to lose": [row["name"] for row in rows if not row["loses"]],
    }
    tasks = len(found["design"]["tasks"])
    begin = f"[One method a family](league.md), {len(rows)} of them, on {tasks} tasks at about half of the cost. "
    return begin + " ".join(f"{said}: {', '.join(of) or 'none'}." for said, of in found_of.items())


def _of_method(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in found["rows"] if row["method"] == name]
    smaller = [row["against"]["smaller"]["finding"] for row in rows if "smaller" in row["against"]]
    placebos = [row["against"]["placebo"]["finding"] for row in rows if "placebo" in row["against"]]
    loses, no_loss = (sum(row["finding"] == word for row in rows) for word in ("loses", "no loss"))
    better, worse = smaller.count("better"), smaller.count("worse")
    least, most = (f(row["cost"] for row in rows) for f in (min, max))
    return {
        "name": name,
        "tasks": len(rows),
        "cost": f"{least:.2f} to {most:.2f}" if most - least > 0.005 else f"{most:.2f}",
        "loses": loses,
        "no_loss": no_loss,
        "better": better,
        "worse": worse,
        "signal_matters": placebos.count("better"),
        "signal": f"{placebos.count('better')} of {len(placebos)}" if placebos else "no placebo",
        "rank": (
            better - worse - loses + no_loss,
            -loses,
            fmean(row["to_full"]["mean"] for row in rows),
        ),
    }


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """Returns a page in Markdown with the tables between its two marks.

    Args:
        text: Text with the lines `BEGIN` and `END`.
        found: Result of `results`.
    """
    return between_marks(text, BEGIN, END, page(found))


def with_top(text: str, found: Mapping[str, Any]) -> str:
    """Returns a page in Markdown with the sentences of `top` between the marks `TOP`.

    Args:
        text: Text with the lines of `TOP`.
        found: Result of `results`.
    """
    return between_marks(text, *TOP, top(found))
