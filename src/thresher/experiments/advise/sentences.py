"""The advice in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from thresher.experiments.advise.outlook import ALIKE, INPUT_BOUND, Outlook
from thresher.experiments.advise.ranking import RANDOM_HALF, WORTHWHILE, draws_blindly, worth_trying
from thresher.experiments.training.recording import EASY

ROUNDS_TO_ZERO = 0.005
"""Share that is 0 in whole percent."""
COMPUTING_PARTS = ("forward", "backward", "optimizer")


def sentences(advice: Mapping[str, Any]) -> list[str]:
    """Returns the advice in sentences.

    Args:
        advice: Result of `advise`, without the sentences.
    """
    step, rows = advice["step"], [row for row in advice["methods"] if row["refused"] is None]
    parts = ", ".join(f"{name} {in_percent(step[name] / step['full'])}" for name in COMPUTING_PARTS)
    said = [f"A step takes {_milliseconds(step['full'])}: waiting for input {in_percent(step['waiting'])}, {parts}."]
    if step["waiting"] >= INPUT_BOUND:
        said.append(_about_input(step, rows))
    said += [_about_method(row, advice) for row in advice["methods"]]
    said += [
        f"{row['method']} {does} here: this training does not give the signal `{signal}`."
        for row in rows
        for signal, does in row["missing"].items()
    ]
    said.append(
        f"Two forward passes save time only while less than {in_percent(advice['break_even_keep'])} of a batch is kept: the "
        f"scoring pass takes {in_percent(step['scoring'] / step['compute'])} of the time of training on the batch."
    )
    if advice["trace"]["fallback"] is not None:
        said.append(
            "One forward pass saves no part of the backward pass here, because the model cannot be traced: "
            f"{advice['trace']['fallback']}."
        )
    outlook = Outlook(**{name: advice["outlook"][name] for name in ("rho", "before", "gain", "half_share", "waiting")})
    return [*said, _about_losses(advice), about_outlook(outlook), *_conclusion(rows, outlook)]


def _about_input(step: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what waiting for the loader means for methods of either stage."""
    said = f"Your input pipeline takes {in_percent(step['waiting'])} of a step."
    batch = [row["saves"] for row in rows if row["stage"] == "batch"]
    if batch:
        verdict = "cannot help" if max(batch) < WORTHWHILE else f"can save little, {in_percent(max(batch))} at most"
        said += f" Methods that select in the batch load every candidate: they {verdict}."
    epoch = [row for row in rows if row["stage"] == "epoch"]
    can = [row["method"] for row in epoch if row["at_most"] >= WORTHWHILE]
    cannot = [row for row in epoch if row["at_most"] < WORTHWHILE]
    if can:
        said += f" Methods that plan epochs do not load the samples that they leave out: {_listed(can)} can help."
    reasons = ((True, "the samples left out are loaded for a forward pass"), (False, "too few samples are left out"))
    for refreshes, why in reasons:
        if names := [row["method"] for row in cannot if row["refreshes"] == refreshes]:
            said += f" This does not hold for {_listed(names)}: {why}."
    return said


def _about_method(row: Mapping[str, Any], advice: Mapping[str, Any]) -> str:
    name = row["method"]
    if row["refused"] is not None:
        return f"{name} cannot be used here: {row['refused']}"
    if row["at_most"] < ROUNDS_TO_ZERO:
        longer = f": it takes {in_percent(-row['saves'])} longer than full training" if -row["saves"] >= ROUNDS_TO_ZERO else ""
        return f"{name} saves no time{longer}."
    if row["stage"] == "batch":
        return f"{name} can save {in_percent(row['saves'])} of the time at most."
    forwards = ", which still cost a forward pass" if row["forwarded"] else ""
    does = f"it leaves out {in_percent(row['left_out'])} of the samples of {advice['epochs']} epochs{forwards}"
    if row["at_most"] - row["saves"] < ROUNDS_TO_ZERO:
        return f"{name} can save {in_percent(row['saves'])} of the time at most: {does}."
    saving = "saves no time" if row["saves"] < ROUNDS_TO_ZERO else f"can save {in_percent(row['saves'])} of the time"
    return (
        f"{name} {saving}, judged by the losses in the probe: {does}. If all samples were learned, it could save "
        f"{in_percent(row['at_most'])}."
    )


def _about_losses(advice: Mapping[str, Any]) -> str:
    """Returns how far the samples are learned."""
    losses = advice["losses"]
    epochs = advice["probe"]["epochs"]
    after = f"After {epochs:.2g} epoch{'' if epochs == 1 else 's'} of the probe"
    easy = f"{in_percent(losses.get('easy_share', 0.0))} of the samples have a loss below {in_percent(EASY)} of the largest"
    sure = "" if losses["trusted"] is None else f", {in_percent(losses['trusted'])} are right and confident"
    return f"{after}, {easy}{sure}, and {in_percent(losses['below_mean'])} have a loss below the mean."


def about_outlook(outlook: Outlook) -> str:
    """Returns what the spread of the gradient norms and the time of half a batch say, in one sentence.

    Args:
        outlook: The two, as measured.
    """
    rho = "" if outlook.rho is None else f"rho {outlook.rho:.2f}"
    if outlook.rho is None or outlook.gain is None:
        choice = "The criterion does not show how unlike the samples are"
    elif outlook.rho >= ALIKE and not outlook.settled:
        choice = (
            f"The gradients of the samples are still alike ({rho}), as they are before a network has learned: the "
            "probe was too short to say whether a choice of samples can help"
        )
    elif outlook.alike:
        choice = f"The gradients of the samples are much alike ({rho}), so that no choice beats a random one by much"
    else:
        choice = (
            f"The gradients of the samples are unlike ({rho}; 1 is all alike), so that the best unbiased choice "
            f"could get {outlook.gain:.2g} times as much out of the same cost as random samples"
        )
    smaller = f"half a batch takes {in_percent(outlook.half_share)} of the time of a whole one"
    if outlook.by_steps:
        return f"{choice}; and {smaller}, so that only methods with fewer steps save time."
    if outlook.waiting >= INPUT_BOUND:
        return f"{choice}; and {smaller}, but waiting for input takes longer than both."
    return f"{choice}; and {smaller}, so that smaller batches save time, too."


def _conclusion(rows: Sequence[Mapping[str, Any]], outlook: Outlook) -> list[str]:
    """Returns what to do, in sentences."""
    if outlook.hopeless:
        return ["Nothing will help here: the samples are alike, and smaller batches save no time. Train for fewer epochs."]
    if outlook.alike:
        return [
            "Choosing samples will not help here, because they are alike. Fewer epochs, smaller batches or "
            f"random samples ({RANDOM_HALF}) do the same."
        ]
    worth = worth_trying(rows, outlook)
    if worth:
        order = ", in this order" * (len(worth) > 1)
        said = [f"Try first: {_listed([row['method'] for row in worth])}{order}.", _reason(worth[0])]
        return said + _warning(rows, worth[0])
    if all(row["at_most"] < WORTHWHILE for row in rows):
        return [f"Selection cannot help here: none of these methods could save {in_percent(WORTHWHILE)} of the time."]
    return [f"None of these methods is recommended: compare random samples ({RANDOM_HALF}) first.", *_warning(rows, None)]


def _reason(row: Mapping[str, Any]) -> str:
    """Returns what a recommendation rests on."""
    record, saves = row["record"], in_percent(row["at_most"])
    time = f"here it could save {saves} of the time. What it does to the result, `thresher compare` measures."
    if record["standing"] == "not measured":
        return f"{row['method']} was not measured by this project; {time}"
    of = f"of {_trainings(record['on'])} that this project measured{', with other settings' * record['other_settings']}"
    better = f"was better than a control of the same cost on {len(record['better_on']) or 'none'} {of}"
    lost = f"lost more than the margin against full training on {_where(record['lost_on'])}"
    worse = f"worse on {_where(record['worse_on'])}, and {lost}"
    named = f" ({_listed(record['better_on'])})" if record["better_on"] else ""
    return f"{row['method']} {better}{named}, {worse}; {time}"


def _warning(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> list[str]:
    """Returns why methods are not recommended that would save more time, or any."""
    least = WORTHWHILE if best is None else best["at_most"]
    behind = [
        row for row in rows if row["record"]["standing"] == "behind" and row["at_most"] >= least and not draws_blindly(row)
    ]
    return [
        f"{row['method']} could save {in_percent(row['at_most'])}, but was worse than a control of the same cost where this "
        f"project measured it: {_where(row['record']['worse_on'])}."
        for row in behind
    ]


def _trainings(names: Sequence[str]) -> str:
    return f"{len(names)} training{'s' * (len(names) > 1)}"


def _where(names: Sequence[str]) -> str:
    return _listed(names) if names else "none"


def in_percent(share: float) -> str:
    """Returns a share in whole percent."""
    return f"{round(100 * share)} %"


def _milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds: three digits, or all of a number of 100 and more."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
