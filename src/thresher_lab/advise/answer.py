"""The answer of `thresher advise` in a few lines: whether selection can help, why, and what rests on which measurements.

The probe shows what time could be saved. What that costs in the metric it does not show: only short runs with a smaller
budget do, and in the end a comparison. So nothing is called safe here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from thresher_lab.advise.advise import MOST_NAMED, RANDOM_HALF, ROUNDS_TO_ZERO, WORTHWHILE, in_percent, outlook_in
from thresher_lab.advise.budget import FREE, in_fewer_steps, needs_steps, odds_of_free, seeds_agree, time_sentence, times_at
from thresher_lab.advise.forecast import ALIKE, Outlook
from thresher_lab.advise.probe import NO_TIME


def answer_of(advice: Mapping[str, Any]) -> str:
    """Returns whether selection can help: "no", "perhaps not", "perhaps", "probably" or "unknown".

    Args:
        advice: Result of `advise`, with the entry `budget` where short runs were trained.
    """
    if outlook_in(advice).alike or not _saves(advice):
        return "no"
    loss = _least_lost(advice)
    if loss is None:
        return "perhaps" if advice["worth_trying"] else "unknown"
    # Short runs lose more than whole ones: a small loss there is good news, and a large one may vanish.
    if loss["finding"] != "free":
        return "perhaps not"
    return "probably" if _is_sure(loss) else "perhaps"


def answer_lines(advice: Mapping[str, Any]) -> list[str]:
    """Returns the answer in lines: whether selection can help, why, what is known of the loss, and the next command.

    Args:
        advice: Result of `advise`, with the entry `budget` where short runs were trained.
    """
    busy = ["The machine was busy, with more work than cores: the times above are rough."] if advice.get("busy") else []
    why, known = _why(advice), _on_the_loss(advice)
    if _least_lost(advice) is None or answer_of(advice) == "no":
        reasons = [f"Why: {why}", *known]
    else:  # What short runs lost decides the answer; the time that a method could save may speak against it.
        reasons = [f"Why: {known[0]}", *known[1:], why[0].upper() + why[1:]]
    return [_headline(advice), *reasons, *_on_the_time(advice), *busy, _before_next(advice), advice["next"]]


def _headline(advice: Mapping[str, Any]) -> str:
    answer, loss = answer_of(advice), _least_lost(advice)
    if answer == "unknown":
        return f"Can selection help here? Not known yet: `{advice['next']}` tells."
    said = f"Can selection help here? {answer.capitalize()}"
    if answer == "no" or loss is None:
        return f"{said}." if answer == "no" else f"{said}: {_elsewhere(_row(advice, advice['worth_trying'][0]))}."
    if answer == "perhaps not":
        less = f"at {loss['share']:g} of the cost, smaller batches lose in short runs. Whole runs lose less, often far less."
        return f"{said}: {less}"
    free, of, trainings = odds_of_free()
    doubt = "" if _is_sure(loss) else ", but seeds differ here" if len(loss["by_seed"]) > 1 else ", but this is one seed"
    where = f"{trainings} tasks of this project where whole runs of smaller batches lost {FREE} points or less"
    return f"{said}: in {free} of {of} comparisons on {where}, a way to spend less lost 0.2 points or less{doubt}."


def _is_sure(loss: Mapping[str, Any]) -> bool:
    return len(loss["by_seed"]) > 1 and seeds_agree(loss, points=True)


def _elsewhere(row: Mapping[str, Any]) -> str:
    """Returns what a method could save, and on how many trainings it lost, or may have."""
    record, most = row["record"], f"{row['method']} could save about {in_percent(row['at_most'])} of the time"
    if not record["interval_on"]:
        return f"{most}; what it loses was not measured"
    lost, known = record["under_zero_on"], len(record["interval_on"])
    may = f"and may have on {len(set(record['below_on']) - set(lost))}{' with other settings' * record['other_settings']}"
    return f"{most}; it lost on {len(lost)} of {known} tasks of this project, {may}"


def _why(advice: Mapping[str, Any]) -> str:
    outlook, worth = outlook_in(advice), advice["worth_trying"]
    rho = "" if outlook.rho is None else f" (rho {outlook.rho:.2f}; 1 is all alike)"
    if outlook.alike:
        smaller = ", and smaller batches save no time" if outlook.by_steps else ""
        return f"the samples are much alike{rho}, so that no choice beats a random one by much{smaller}."
    if not _saves(advice):
        return f"none of these methods could save {in_percent(WORTHWHILE)} of the time."
    if _too_short(outlook):
        return (
            f"the samples are still alike{rho}, as they are before a network has learned: this speaks neither for nor against."
        )
    if not worth:
        return "the methods that could save time draw at random here, or were worse than a control where they were measured."
    saving = _saving(_row(advice, worth[0]))
    if outlook.rho is None:
        return f"{saving}, but the criterion does not show how unlike the samples are."
    return f"the samples are unlike{rho}, and {saving}."


def _saving(row: Mapping[str, Any]) -> str:
    """Returns what a method could save: at the losses of the probe, and at most."""
    most = f"{row['method']} could save about {in_percent(row['at_most'])} of the time"
    if row["at_most"] - row["saves"] < ROUNDS_TO_ZERO:
        return most
    now = f"{in_percent(row['saves'])} of it" if row["saves"] >= ROUNDS_TO_ZERO else "nothing"
    return f"{most} once all samples are learned, and {now} at the losses of the probe"


def _on_the_time(advice: Mapping[str, Any]) -> list[str]:
    """Returns whether all of the probe was in warm-up, and what there was no time for."""
    trained, warm_up = advice["probe"]["epochs"], advice["probe"].get("warm_up", 0)
    rises = f"The {trained:.2g} epochs of the probe were within the warm-up of the learning rate, which takes {warm_up:.2g}."
    said = [rises] if trained <= warm_up else []
    missed = f"There was no time for {', '.join(advice.get('skipped', ()))}; --seconds gives more."
    return [*said, missed] if advice.get("skipped") else said


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
    share = _row(advice, name)["settings"].get("share")
    return on_fewer_steps(times_at(advice["step"], [share]), advice) if name == f"winnow:share={share}" else []


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


def _before_next(advice: Mapping[str, Any]) -> str:
    if not advice.get("budget", {}).get("losses"):
        return "Next (trains short runs, which show what half of the cost loses here):"
    named = advice["worth_trying"][:MOST_NAMED]
    others = [] if any(name.startswith("winnow") for name in named) else named
    arms = f"{', '.join(['Winnow at a budget', *others])} and {'their' if others else 'its'} controls"
    return f"Next (trains {arms}; --dry-run says how long it takes):"


def _least_lost(advice: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the share at which smaller batches lose least; None without short runs, or where no limits are known."""
    known = [loss for loss in advice.get("budget", {}).get("losses", ()) if loss["finding"] != "unknown"]
    return min(known, key=lambda loss: loss["lost"], default=None)


def _too_short(outlook: Outlook) -> bool:
    return outlook.rho is not None and outlook.rho >= ALIKE and not outlook.settled


def _saves(advice: Mapping[str, Any]) -> bool:
    return any(row["refused"] == NO_TIME or row.get("at_most", 0) >= WORTHWHILE for row in advice["methods"])


def _row(advice: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(row for row in advice["methods"] if row["method"] == name)
