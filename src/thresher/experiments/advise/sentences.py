"""The advice in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from thresher.experiments.training.recording import EASY

WORTHWHILE = 0.05
"""Share of the time below which a saving is not worth the trouble."""
ROUNDS_TO_ZERO = 0.005
"""Share that is 0 in whole percent."""
INPUT_BOUND = 0.5
"""Share of a step spent waiting for the loader from which the input pipeline decides what can be saved."""
AT_RANDOM = ("uniform", "random_backprop")
"""Methods that choose samples at random: they are controls, and what they save is not recommended."""
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
    said.append(
        f"Two forward passes save time only while less than {in_percent(advice['break_even_keep'])} of a batch is kept: the "
        f"scoring pass takes {in_percent(step['scoring'] / step['compute'])} of the time of training on the batch."
    )
    if advice["trace"]["fallback"] is not None:
        said.append(
            "One forward pass saves no part of the backward pass here, because the model cannot be traced: "
            f"{advice['trace']['fallback']}."
        )
    return [*said, _about_losses(advice), _conclusion(rows)]


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


def _conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    worth = [row for row in rows if row["at_most"] >= WORTHWHILE]
    if not worth:
        return f"Selection cannot help here: none of these methods could save {in_percent(WORTHWHILE)} of the time."
    chosen = [row for row in worth if not row["method"].startswith(AT_RANDOM)]
    best = max(chosen or worth, key=lambda row: row["at_most"])
    return (
        f"{best['method']} could save the most time: {in_percent(best['at_most'])}. The probe does not show what that does to "
        "the result: `thresher compare` measures it, beside controls of the same cost."
    )


def in_percent(share: float) -> str:
    """Returns a share in whole percent."""
    return f"{round(100 * share)} %"


def _milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds: three digits, or all of a number of 100 and more."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
