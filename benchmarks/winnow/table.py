"""From trainings to findings: paired differences, findings after Holm's correction, and the tables."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import ARMS, OWN_RATE, Arm, Design, Done, Job, chosen_factor
from benchmarks.winnow.tasks import problem_of
from thresher_lab.comparison.statistics import ALPHA, Paired, against_controls, findings, holm
from thresher_lab.training.files import markdown_table

MARGIN = 0.2
"""Loss in points that does not matter."""

WASTERS = ("shorter", "uniform")
"""Arms of which one must lose more than the margin, so that a task counts."""

BEGIN, END = "<!-- tables of benchmarks.winnow -->", "<!-- end of the tables -->"
"""Lines of a page that the tables stand between."""

OVERVIEW = "<!-- table of benchmarks.winnow -->", "<!-- end of the table -->"
"""Lines of docs/evidence/results.md that the overview stands between."""

TITLES = {
    "fashion-10k": "Fashion-MNIST, 10,000 images",
    "fashion-10k-noisy": "Fashion-MNIST, 10,000 images, 20 % wrong labels",
    "fashion-imbalanced": "Fashion-MNIST, classes of 2,000 to 100 images",
    "fashion-20k": "Fashion-MNIST, 20,000 images",
    "fashion-augmented-10": "Fashion-MNIST, augmented, 10 epochs",
    "fashion-augmented-40": "Fashion-MNIST, augmented, 40 epochs",
    "fashion-resnet8": "Fashion-MNIST, ResNet-8",
    "mnist-5k": "MNIST, 3,000 images",
    "bike": "bike rentals (R2)",
    "text": "text, next byte",
    "relief": "relief (mean IoU)",
}
"""What tasks are called in the overview; others go by their names."""

WORDS = {
    "no loss": "no loss",
    "loses": "loses",
    "unclear": "inconclusive",
    ("better",): "better than smaller batches",
    ("worse",): "worse than smaller batches",
    ("no better",): "no better than smaller batches",
    ("unclear",): "tied with smaller batches",
}
"""Words for findings against full training and, as tuples, against smaller batches."""

NO_LOSS_ON, BETTER_ON = 5, 3
"""Goal: number of tasks without a loss, and with more than smaller batches."""


@dataclass(frozen=True)
class Row:
    """The counted trainings of one arm.

    Attributes:
        factor: Chosen factor on the rate of the task.
        at_edge: Whether that is the first or last factor of the grid, so that the best one may lie outside.
        n: Number of counted seeds.
        metric: Mean metric in points.
        cost: Mean cost as a share of full training.
        worst_class: Mean accuracy of the worst class; None for regression.
        calibration_error: Mean calibration error; None for regression.
        to_full: Differences to full training; None for full training.
        to_smaller: Differences to smaller batches of the same share; None for full training and for smaller batches.
    """

    factor: float
    at_edge: bool
    n: int
    metric: float
    cost: float
    worst_class: float | None
    calibration_error: float | None
    to_full: Paired | None
    to_smaller: Paired | None


Rows = Mapping[str, Row]
"""Rows by arm."""


def rows_of(design: Design, done: Done, task: str, share: float) -> Rows:
    """Returns the rows of one task at one share: those of the arms of which every counted training is done."""
    values = {arm.name: _counted(design, done, task, arm, share) for arm in ARMS}
    return {
        arm.name: _row(design, done, task, arm, share, values) for arm in ARMS if values[arm.name]
    }


def results(design: Design, done: Done) -> dict[str, Any]:
    """Returns all rows, what they show, and whether the goal is met.

    Args:
        design: How much is run.
        done: Results of the trainings.
    """
    rows = {
        share: {task: rows_of(design, done, task, share) for task in design.tasks}
        for share in design.shares
    }
    return {
        "margin": MARGIN,
        "design": asdict(design),
        "trainings": len(done),
        "shares": {
            str(share): {
                "tasks": {
                    task: {arm: asdict(row) for arm, row in of_task.items()}
                    for task, of_task in of_share.items()
                },
                "shown": shown(of_share),
            }
            for share, of_share in rows.items()
        },
        "goal": goal(shown(rows[0.5])) if 0.5 in rows else None,
    }


def shown(rows: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    """Returns the findings on each task: whether it counts, and how Winnow differs, corrected for the number of tasks.

    Args:
        rows: Rows by task, of one share; tasks that are not complete are left out.
    """
    complete = {
        task: of_task
        for task, of_task in rows.items()
        if {"full", "winnow", "smaller", "shorter"} <= set(of_task)
    }
    to_full = {task: _not_none(of_task["winnow"].to_full) for task, of_task in complete.items()}
    to_smaller = {
        task: _not_none(of_task["winnow"].to_smaller) for task, of_task in complete.items()
    }
    no_loss, against = findings(to_full, MARGIN), against_controls(to_smaller, MARGIN)
    lost = holm({task: min(_chances_of_waste(of_task)) for task, of_task in complete.items()})
    return {
        task: {"counts": lost[task] <= ALPHA, "to_full": no_loss[task], "to_smaller": against[task]}
        for task in complete
    }


def goal(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how far the goal is met: numbers of tasks.

    Args:
        found: Findings on each task, the result of `shown`.
    """
    counting = [one for one in found.values() if one["counts"]]
    counts = {
        "tasks": len(found),
        "counting": len(counting),
        "no_loss": sum(one["to_full"] == "no loss" for one in counting),
        "better": sum(one["to_smaller"] == "better" for one in counting),
        "worse": sum(one["to_smaller"] == "worse" for one in found.values()),
    }
    met = counts["no_loss"] >= NO_LOSS_ON and counts["better"] >= BETTER_ON and not counts["worse"]
    return counts | {"met": met}


def _counted(
    design: Design, done: Done, task: str, arm: Arm, share: float
) -> list[Mapping[str, Any]]:
    """Returns the counted trainings of an arm, by seed; none where one is missing."""
    at = 1.0 if arm.name == "full" else share
    if arm.name != "full" and arm.shares and share not in arm.shares:
        return []
    factor = chosen_factor(design, done, task, arm, at)
    if factor is None:
        return []
    jobs = [
        Job(task, arm.name, at, factor, seed) for seed in design.counted(problem_of(task), share)
    ]
    return [done[job] for job in jobs] if all(job in done for job in jobs) else []


def _row(
    design: Design,
    done: Done,
    task: str,
    arm: Arm,
    share: float,
    values: Mapping[str, list[Mapping[str, Any]]],
) -> Row:
    own = values[arm.name]
    factor = chosen_factor(design, done, task, arm, 1.0 if arm.name == "full" else share)
    assert factor is not None
    return Row(
        factor=factor,
        at_edge=factor in (design.factors[0], design.factors[-1]),
        n=len(own),
        metric=fmean(one["metric"] for one in own),
        cost=fmean(one["cost"]["ratio"] for one in own),
        worst_class=_mean_of(own, "worst_class"),
        calibration_error=_mean_of(own, "calibration_error"),
        to_full=None if arm.name == "full" else _difference(own, values["full"]),
        to_smaller=None if arm.name in ("full", "smaller") else _difference(own, values["smaller"]),
    )


def _difference(
    own: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]
) -> Paired | None:
    pairs = [a["metric"] - b["metric"] for a, b in zip(own, other, strict=False)]
    return Paired.of(pairs) if pairs else None


def _mean_of(trainings: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [one[name] for one in trainings]
    return None if None in values else fmean(values)


def _chances_of_waste(rows: Rows) -> list[float]:
    """Returns how likely differences as seen would be if a waster lost just the margin; twice, as there are two wasters."""
    there = [_not_none(rows[name].to_full) for name in WASTERS if name in rows]
    return [min(1.0, len(there) * paired.chance_below(-MARGIN)) for paired in there]


def _not_none(paired: Paired | None) -> Paired:
    assert paired is not None
    return paired


def markdown(rows: Rows) -> str:
    """Returns a table of one task in Markdown, one arm a line.

    Args:
        rows: Rows by arm.
    """
    lines = [
        "| arm | rate | cost | metric | to full | to smaller | worst class | calibration error | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        parts = [
            name,
            f"x {row.factor:g}{' (edge)' if row.at_edge else ''}",
            f"{row.cost:.3f}",
            f"{row.metric:.2f}",
        ]
        parts += [said(row.to_full), said(row.to_smaller)]
        parts += [
            "" if value is None else f"{value:.2f}"
            for value in (row.worst_class, row.calibration_error)
        ]
        lines.append("| " + " | ".join([*parts, str(row.n)]) + " |")
    return "\n".join(lines)


def with_tables(page: str, design: Design, done: Done) -> str:
    """Returns a page in Markdown with the tables of all complete tasks between its two marks.

    Args:
        page: Text with the lines `BEGIN` and `END`.
        design: How much is run.
        done: Results of the trainings.
    """
    rows = {
        share: {task: rows_of(design, done, task, share) for task in design.tasks}
        for share in design.shares
    }
    parts = [_rates(rows[share], share, design, done) for share in rows] + [
        f"**{task}, at {share:g} of the cost** ({_finding(found)})\n\n{markdown(of_share[task])}"
        for share, of_share in rows.items()
        for task, found in shown(of_share).items()
    ]
    return between_marks(page, BEGIN, END, "\n\n".join(parts))


def _rates(of_share: Mapping[str, Rows], share: float, design: Design, done: Done) -> str:
    """Returns what the rate without a look costs: Winnow at its own rate beside Winnow at the rate that was looked for."""
    arms, rows = {arm.name: arm for arm in ARMS}, []
    for task in shown(of_share):
        own, looked = (
            _counted(design, done, task, arms[name], share) for name in (OWN_RATE, "winnow")
        )
        if own:
            factor = of_share[task][OWN_RATE].factor * share**0.25
            rates = f"x {factor:.2f}", f"x {of_share[task]['winnow'].factor:g}"
            rows.append((_title(task), *rates, said(_difference(own, looked))))
    header = ("task", "rate without a look", "rate of the look", "difference")
    return (
        f"**The rate without a look, at {share:g} of the cost**\n\n{markdown_table(header, rows)}"
    )


def with_overview(page: str, found: Mapping[str, Any]) -> str:
    """Returns a page in Markdown with the overview of all complete tasks between its two marks.

    Args:
        page: Text with the lines of `OVERVIEW`.
        found: Content of the file of results, the result of `results`.
    """
    return between_marks(page, *OVERVIEW, overview(found))


def overview(found: Mapping[str, Any]) -> str:
    """Returns what Winnow reached at half of the cost, in a few words and one row for each complete task, the worst first.

    Args:
        found: Content of the file of results, the result of `results`.
    """
    half = found["shares"]["0.5"]
    shown = dict(
        sorted(
            half["shown"].items(),
            key=lambda one: _rank(one[1], half["tasks"][one[0]]["winnow"]["to_full"]["mean"]),
        )
    )
    header = (
        "task",
        "full",
        "Winnow - full",
        "Winnow - smaller batches",
        "fewer epochs - full",
        "cost",
        "finding",
    )
    rows = [
        (
            _title(task),
            f"{arms['full']['metric']:.2f}",
            _with_interval(arms["winnow"]["to_full"]),
            _with_interval(arms["winnow"]["to_smaller"]),
            _with_interval(arms["shorter"]["to_full"]),
            f"{arms['winnow']['cost']:.3f}",
            _in_words(one, arms["winnow"]["to_full"], found["margin"]),
        )
        for task, one in shown.items()
        for arms in (half["tasks"][task],)
    ]
    waiting = [_title(task) for task in found["design"]["tasks"] if task not in shown]
    unfinished = f"\n\nNot finished yet: {'; '.join(waiting)}." if waiting else ""
    return f"{_goal_in_words(found)}\n\n{markdown_table(header, rows)}{unfinished}"


def _rank(one: Mapping[str, Any], difference: float) -> tuple[bool, int, bool, float]:
    """Returns a key that sorts findings, the worst first."""
    against_full = ("loses", "unclear", "no loss").index(one["to_full"])
    return one["to_smaller"] != "worse", against_full, one["to_smaller"] == "better", difference


def _title(task: str) -> str:
    return TITLES.get(task, task)


def _in_words(one: Mapping[str, Any], to_full: Mapping[str, Any], margin: float) -> str:
    counts = (
        ""
        if one["counts"]
        else f"; easy task: no way to spend less is shown to lose more than {margin:g}"
    )
    loses = one["to_full"] == "unclear" and to_full["high"] is not None and to_full["high"] < 0
    words = f"some loss, not shown to exceed {margin:g}" if loses else WORDS[one["to_full"]]
    return f"{words}; {WORDS[one['to_smaller'],]}{counts}"


def _goal_in_words(found: Mapping[str, Any]) -> str:
    met, n = found["goal"], len(found["design"]["tasks"])
    return (
        f"{_number(met['tasks'], n)} complete; what fell short comes first. On {met['counting']} of them fewer epochs or "
        f"random rows are shown, after the correction, to lose more than {found['margin']:g} points. There, Winnow is shown to "
        f"lose no more than {found['margin']:g} points on {met['no_loss']}, and to be better than smaller batches on "
        f"{met['better']}. It is shown to be worse than smaller batches on {met['worse']}. The "
        f"goal that was set before the first training, {NO_LOSS_ON}, {BETTER_ON} and 0 tasks, is "
        f"{'met' if met['met'] else 'not met'}{'' if met['tasks'] == n else ' so far'}."
    )


def _number(tasks: int, of: int) -> str:
    return f"{tasks} of {of} tasks {'is' if tasks == 1 else 'are'}"


def _with_interval(paired: Mapping[str, Any]) -> str:
    between = "" if paired["low"] is None else f" [{paired['low']:+.2f}, {paired['high']:+.2f}]"
    return f"{paired['mean']:+.2f}{between}"


def _finding(found: Mapping[str, Any]) -> str:
    lose = f"no way to spend less is shown to lose more than {MARGIN:g} points after the correction"
    counts = "" if found["counts"] else f"; the task is easy: {lose}"
    return (
        f"to full training: {found['to_full']}; to smaller batches: {found['to_smaller']}{counts}"
    )


def said(paired: Paired | None) -> str:
    """Returns a mean with its interval as text; "" where there is none."""
    if paired is None or paired.low is None:
        return ""
    return f"{paired.mean:+.2f} ± {paired.mean - paired.low:.2f}"
