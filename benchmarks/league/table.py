"""From trainings to the league: differences paired by seed, findings corrected over the whole table, and the page."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks.kept import read_lines
from benchmarks.league.arms import (
    CONTROLS,
    DESIGN,
    ENTRIES,
    PLACEBO,
    TIMES,
    arms_of,
    counted_jobs,
    has_placebo,
    same_time,
    share_of_time,
)
from benchmarks.league.tasks import TASKS, TITLES
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Arm, Done
from benchmarks.winnow.table import MARGIN
from benchmarks.winnow.table import TITLES as WINNOW_TITLES
from thresher_lab.comparison.controls import CONTROLS as KINDS
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import Paired, against_controls, findings
from thresher_lab.training.files import markdown_table

BEGIN, END = "<!-- tables of benchmarks.league -->", "<!-- end of the tables -->"
TOP = "<!-- top of benchmarks.league -->", "<!-- end of the top -->"

Place = tuple[str, str]
"""Task and method."""
Trainings = Mapping[Place, list[Mapping[str, Any]]]
"""Counted trainings by seed."""
Against = tuple[str, str, str]
"""Task, method and control."""


BESIDE = (SAME_TIME, *CONTROLS, "placebo")
"""Controls that each method is compared with."""


def values(done: Done) -> dict[Place, list[Mapping[str, Any]]]:
    """Returns the counted trainings of each arm on each task, by seed; arms of which one is missing are left out.

    Args:
        done: Results of the trainings.
    """
    found: dict[Place, list[Mapping[str, Any]]] = {}
    for task in TASKS:
        at = {arm.name: (arm, None) for arm in arms_of(task)}
        at |= {_label(*length): length for length in _lengths(task)}
        for name, (arm, share) in at.items():
            jobs = counted_jobs(done, task, arm, share)
            if jobs is not None and all(job in done for job in jobs):
                found[task, name] = [done[job] for job in jobs]
    return found


def _lengths(task: str) -> Iterable[tuple[Arm, float]]:
    return filter(None, (same_time(task, entry.name) for entry in ENTRIES if entry.fits(task)))


def _label(arm: Arm, share: float) -> str:
    """Returns the name of fewer epochs in the table, such as `shorter@0.6`; full training and half of its epochs have theirs."""
    return f"shorter@{share:g}" if arm.name == SAME_TIME else arm.name


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
        (task, name, kind): _difference(held[task, name], held[task, control])
        for task, name in to_full
        for kind in BESIDE
        if (task, control := _arm_of(task, name, kind)) in held
    }
    no_loss, against = findings(to_full, MARGIN), against_controls(beside, MARGIN)
    rows = [_row(place, held, to_full, beside, no_loss, against) for place in to_full]
    methods = {name for entry in ENTRIES for name in (entry.name, entry.name + PLACEBO)}
    controls = [_control(task, name, held) for task, name in held if name not in methods]
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
        "open": _open(rows),
        "left_out": left_out,
        "earlier": earlier(read_lines(TIMES), held),
        "far_off": [sentence for place in held if (sentence := far_off(place, held[place]))],
    }


def against_fewer_epochs(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Says on how many tasks a method is better and worse than fewer epochs: in the same time if that was trained.

    Args:
        name: Name of the method.
        rows: Rows of the table.
    """
    of = [row["against"] for row in rows if row["method"] == name]
    kind = SAME_TIME if any(SAME_TIME in against for against in of) else "shorter"
    words = "in the same time" if kind == SAME_TIME else "at half the cost"
    found = [against[kind]["finding"] for against in of if kind in against]
    if not found:
        return "Not compared with fewer epochs yet."
    better = found.count("better")
    return f"Better than fewer epochs {words} on {better} of {len(found)} tasks, worse on {found.count('worse')}."


def _open(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the controls that methods lack on a task, in words."""
    with_placebo = {entry.name for entry in ENTRIES if has_placebo(entry)}
    lacking = {
        f"{KINDS[kind].words} on {row['task']}"
        for row in rows
        for kind in BESIDE
        if kind not in row["against"] and (kind != "placebo" or row["method"] in with_placebo)
    }
    return sorted(lacking)


def _arm_of(task: str, method: str, control: str) -> str:
    """Returns the name of the arm that is a control of a method; "" where it is not known yet."""
    if control == "placebo":
        return method + PLACEBO
    if control != SAME_TIME:
        return control
    length = same_time(task, method)
    return "" if length is None else _label(*length)


def _difference(own: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> Paired:
    return Paired.of([a["metric"] - b["metric"] for a, b in zip(own, other, strict=True)])


def _spent(place: Place, trainings: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "time": share_of_time(*place),
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


def earlier(lines: Iterable[Mapping[str, Any]], held: Trainings) -> list[str]:
    """Says which counted trainings are of an earlier version: those that came to another metric when they were trained again.

    Args:
        lines: Lines of the file of the times, which has such metrics.
        held: The counted trainings.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        task, seed = line["task"], line["seed"]
        for name, (before, now) in line["others"].items():
            if (task, name) in held and held[task, name][seed]["metric"] == before:
                found.setdefault(task, {}).setdefault(name, []).append(now - before)
    return [_of_earlier(task, of) for task, of in found.items()]


def _of_earlier(task: str, found: Mapping[str, list[float]]) -> str:
    differences = [abs(one) for of in found.values() for one in of]
    return (
        f"On {task}, the counted trainings of {', '.join(found)} are of an earlier version, which drew other samples at random; "
        f"trained again, they differ by {median(differences):.2f} points in the median, and by {max(differences):.2f} at most."
    )


def _control(task: str, name: str, held: Trainings) -> dict[str, Any]:
    own = held[task, name]
    to_full = (
        None
        if name == "full" or (task, "full") not in held
        else asdict(_difference(own, held[task, "full"]))
    )
    return {"task": task, "arm": name, **_spent((task, name), own), "to_full": to_full}


def _row(
    place: Place,
    held: Trainings,
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
        **_spent(place, held[place]),
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
            title = TITLES.get(task) or WINNOW_TITLES.get(task, task)
            parts.append(f"**{title}**\n\n{_task_table(task, rows, found)}")
    return "\n\n".join(parts)


COLUMNS = {
    SAME_TIME: "to fewer epochs, same time",
    "smaller": "to smaller",
    "shorter": "to fewer epochs",
    "uniform": "to random",
    "fewer": "to one subset",
    "placebo": "to placebo",
}
"""Columns of the table of a task, by control."""


def _task_table(task: str, rows: list[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    spent = ("metric", "cost", "CPU time", "steps")
    header = ("method", *spent, "to full", "finding", *COLUMNS.values())
    lines = [_cells(row) for row in rows]
    for control in (one for one in found["controls"] if one["task"] == task):
        to_full = "" if control["to_full"] is None else _said(control["to_full"])
        empty = ("",) * (1 + len(COLUMNS))
        lines.append((f"*{control['arm']}*", *_spent_cells(control), to_full, *empty))
    return markdown_table(header, lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    words = {"no loss": "no loss", "loses": "loses", "unclear": "cannot tell"}
    controls = [row["against"].get(kind) for kind in COLUMNS]
    against = ["" if one is None else _said(one) + _decided(one["finding"]) for one in controls]
    finding = words[row["finding"]]
    return (row["method"], *_spent_cells(row), _said(row["to_full"]), finding, *against)


def _spent_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    time = "" if row["time"] is None else f"{row['time']:.2f}"
    return (f"{row['metric']:.2f}", f"{row['cost']:.3f}", time, f"{row['steps']:.0f}")


def _decided(finding: str) -> str:
    return "" if finding == "unclear" else f" ({finding})"


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
        "CPU time",
        "loses",
        "no loss",
        "better than fewer epochs, same time",
        "worse",
        "better than smaller",
        "worse",
        "signal matters",
    )
    lines = [
        (
            row["name"],
            found["families"][row["name"]],
            str(row["tasks"]),
            row["cost"],
            row["time"],
            *(str(row[key]) for key in ("loses", "no_loss")),
            *(
                str(row[key][kind])
                for kind in (SAME_TIME, "smaller")
                for key in ("better", "worse")
            ),
            row["signal"],
        )
        for row in rows
    ]
    waiting, left_out = (
        ", ".join(f"{name} on {task}" for task, name in found[key])
        for key in ("waiting", "left_out")
    )
    off = "".join(f"\n\n{one}" for one in (*found["earlier"], *found["far_off"]))
    said = (
        f"{off}\n\nLeft out, because the targets are not the classes that the method needs: {left_out}."
        if left_out
        else off
    )
    return (
        markdown_table(header, lines)
        + said
        + (f"\n\nNot finished yet: {waiting}." if waiting else "")
        + (f"\n\nControls not trained yet: {', '.join(found['open'])}." if found["open"] else "")
    )


NAMED = {SAME_TIME: "fewer epochs in the same time", "smaller": "smaller batches"}
"""Controls that the outcome names."""


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
        **{
            f"{word.capitalize()} than {control} somewhere": [
                row["name"] for row in ordered if row[word][kind]
            ]
            for kind, control in NAMED.items()
            for word, ordered in (("worse", [*reversed(rows)]), ("better", rows))
        },
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
    findings = {
        kind: [row["against"][kind]["finding"] for row in rows if kind in row["against"]]
        for kind in (*NAMED, "placebo")
    }
    loses, no_loss = (sum(row["finding"] == word for row in rows) for word in ("loses", "no loss"))
    better, worse = (
        {kind: findings[kind].count(word) for kind in NAMED} for word in ("better", "worse")
    )
    placebos = findings["placebo"]
    times = [row["time"] for row in rows if row["time"] is not None]
    return {
        "name": name,
        "tasks": len(rows),
        "cost": _range(row["cost"] for row in rows),
        "time": _range(times),
        "loses": loses,
        "no_loss": no_loss,
        "better": better,
        "worse": worse,
        "signal_matters": placebos.count("better"),
        "signal": f"{placebos.count('better')} of {len(placebos)}" if placebos else "no placebo",
        "rank": (
            sum(better.values()) - sum(worse.values()) - loses + no_loss,
            -loses,
            fmean(row["to_full"]["mean"] for row in rows),
        ),
    }


def _range(values: Iterable[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    least, most = ordered[0], ordered[-1]
    return f"{least:.2f} to {most:.2f}" if most - least > 0.005 else f"{most:.2f}"


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
