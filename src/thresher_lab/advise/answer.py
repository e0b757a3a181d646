"""The answer of `thresher advise` in a few lines: whether selection can help, why, and what rests on which measurements.

The probe shows what time could be saved. What that costs in the metric it does not show: only short runs with a smaller
budget do, and in the end a comparison. So nothing is called safe here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thresher_lab.advise.advise import MOST_NAMED, RANDOM_HALF, ROUNDS_TO_ZERO, WORTHWHILE, in_percent, outlook_in
from thresher_lab.advise.budget import in_fewer_steps, needs_steps, seeds_agree, time_sentence, times_at
from thresher_lab.advise.forecast import ALIKE, Outlook
from thresher_lab.advise.probe import PROBED_EPOCHS
from thresher_lab.advise.variance import about_strata

CanHelp = Literal["yes", "no", "unknown"]

IN_WORDS: dict[CanHelp, str] = {"yes": "Yes", "no": "No", "unknown": "Unknown"}


def answer_of(advice: Mapping[str, Any]) -> CanHelp:
    """Returns whether selection can help on a training.

    Args:
        advice: Result of `advise`, with the entry `budget` where short runs were trained.
    """
    outlook = outlook_in(advice)
    if outlook.alike or not _saves(advice):
        return "no"
    if _too_short(outlook) or outlook.rho is None or not advice["worth_trying"]:
        return "unknown"
    return "yes" if "budget" not in advice else _of_short_runs(advice)


def answer_lines(advice: Mapping[str, Any]) -> list[str]:
    """Returns the answer in lines: whether selection can help, why, what is known of the loss, and the next command.

    Args:
        advice: Result of `advise`, with the entry `budget` where short runs were trained.
    """
    strata = [about_strata(advice["strata"], advice["steps"])] if advice.get("strata") is not None else []
    busy = ["The machine was busy, with more work than cores: the times above are rough."] if advice.get("busy") else []
    said = [_headline(advice), f"Why: {_why(advice)}", *_on_the_loss(advice), *strata, *busy]
    return [*said, _before_next(advice), advice["next"]]


def _headline(advice: Mapping[str, Any]) -> str:
    answer = answer_of(advice)
    said = f"Can selection help here? {IN_WORDS[answer]}"
    if answer != "yes":
        return f"{said}."
    return (
        f"{said}, as far as short runs show. Simpler ways to spend less may do as well."
        if "budget" in advice
        else f"{said}, it can save time. What it loses is unknown."
    )


def _why(advice: Mapping[str, Any]) -> str:
    outlook, worth = outlook_in(advice), advice["worth_trying"]
    rho = "" if outlook.rho is None else f" (rho {outlook.rho:.2f}; 1 is all alike)"
    if outlook.alike:
        smaller = ", and smaller batches save no time" if outlook.by_steps else ""
        return f"the samples are much alike{rho}, so that no choice beats a random one by much{smaller}."
    if not _saves(advice):
        return f"none of these methods could save {in_percent(WORTHWHILE)} of the time."
    if _too_short(outlook):
        return f"the samples are still alike{rho}, as they are before a network has learned: {_about_probe(advice)}."
    if not worth:
        return "the methods that could save time draw at random here, or were worse than a control where they were measured."
    saving = _saving(_row(advice, worth[0]))
    if outlook.rho is None:
        return f"{saving}, but the criterion does not show how unlike the samples are."
    return f"the samples are unlike{rho}, and {saving}."


def _about_probe(advice: Mapping[str, Any]) -> str:
    epochs = advice["probe"]["epochs"]
    if epochs < PROBED_EPOCHS and epochs < advice["epochs"]:
        return f"the probe of {epochs:.2g} epochs was too short, and --seconds makes it longer"
    return f"the probe of {epochs:.2g} epoch{'s' * (epochs != 1)} was too short, and a comparison shows it"


def _saving(row: Mapping[str, Any]) -> str:
    """Returns what a method could save: at the losses of the probe, and at most."""
    most = f"{row['method']} could save about {in_percent(row['at_most'])} of the time"
    if row["at_most"] - row["saves"] < ROUNDS_TO_ZERO:
        return most
    now = f"{in_percent(row['saves'])} of it" if row["saves"] >= ROUNDS_TO_ZERO else "nothing"
    return f"{most} once all samples are learned, and {now} at the losses of the probe"


def _on_the_loss(advice: Mapping[str, Any]) -> list[str]:
    """Returns what is known of the loss: from short runs here, else from other trainings."""
    if "budget" in advice:
        times = advice["budget"]["times"]
        return [
            *advice["budget"]["sentences"],
            time_sentence(times),
            *([] if needs_steps(times) else on_fewer_steps(times, advice)),
        ]
    outlook = outlook_in(advice)
    if outlook.alike:
        others = "" if outlook.by_steps else f", and so do smaller batches and random samples ({RANDOM_HALF})"
        return [f"Fewer epochs do the same{others}."]
    if not advice["worth_trying"]:
        return ["A smaller budget without a choice of samples may still do: fewer epochs, or smaller batches."]
    name = advice["worth_trying"][0]
    measured = f"Measured elsewhere: {on_the_interval(name, _row(advice, name)['record'])}"
    share = _row(advice, name)["settings"].get("share")
    return [measured, *(on_fewer_steps(times_at(advice["step"], [share]), advice) if name == f"winnow:share={share}" else [])]


def on_fewer_steps(times: Sequence[Mapping[str, float]], advice: Mapping[str, Any]) -> list[str]:
    """Returns what fewer steps save beside smaller batches, in a sentence; nothing where that is little more.

    Args:
        times: Result of `budget.times_at`; the first share counts.
        advice: Result of `advise`.
    """
    first, step = times[0], advice["step"]
    name, rows = f"winnow:share={first['share']:g}", [row for row in advice["methods"] if "compute_s" in row]
    saves = next((row["at_most"] for row in rows if row["method"] == name), 1 - first["batches"])
    # A step of full size, and what the method does in it; the choice of rows is nothing beside it.
    longer = max([1.0, *(row["compute_s"] / step["compute"] for row in rows if row["method"].startswith("winnow"))])
    said = in_fewer_steps(name, first["share"], saves, 1 - first["steps"] * longer)
    return [said] if said else []


def on_the_interval(name: str, record: Mapping[str, Any]) -> str:
    """Returns how far the measured losses of a method reach, as a sentence; it calls nothing safe.

    Args:
        name: Name of the method.
        record: Result of `findings.Record.as_dict`.
    """
    known, below, under = record["interval_on"], record["below_on"], record["under_zero_on"]
    if not known:
        return f"no interval of the difference to full training is known for {name}."
    of = f"{len(known)} training{'s' * (len(known) > 1)}"
    other = " with other settings" if record["other_settings"] else ""
    reached = f"the interval of the difference to full training reached below the margin on {len(below)} of {of}"
    return f"for {name}{other}, {reached}, and all of it was below 0 on {len(under)} of them."


def _before_next(advice: Mapping[str, Any]) -> str:
    if "budget" not in advice:
        return "Next (trains short runs, which show what half of the cost loses here):"
    named = advice["worth_trying"][:MOST_NAMED]
    others = [] if any(name.startswith("winnow") for name in named) else named
    return f"Next (trains {', '.join(['Winnow at a budget', *others])} and {'their' if others else 'its'} controls):"


def _of_short_runs(advice: Mapping[str, Any]) -> CanHelp:
    """Returns what the best of the shares says; a loss says nothing, since a method may lose less than smaller batches."""
    budget = advice["budget"]
    free = (loss["finding"] == "free" and seeds_agree(loss, points=budget["points"]) for loss in budget["losses"])
    return "yes" if any(free) else "unknown"


def _too_short(outlook: Outlook) -> bool:
    return outlook.rho is not None and outlook.rho >= ALIKE and not outlook.settled


def _saves(advice: Mapping[str, Any]) -> bool:
    return any(row["at_most"] >= WORTHWHILE for row in advice["methods"] if row["refused"] is None)


def _row(advice: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(row for row in advice["methods"] if row["method"] == name)
