"""Advice on a training: what selection could save on it, what to try, in sentences.

The probe trains for some epochs, or until its time is up, and asks every method that plans epochs what it would leave out by
the losses of these epochs, and by the losses if all samples but one were learned. Then it times the loader, the parts of a step
and the steps of each method in turns. Loading and computing take `overlap * max + (1 - overlap) * sum` together, where the
overlap is that of full training: 0 where one waits for the other, 1 where workers load while the model computes.
"""

import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from thresher_lab.advise.findings import STANDINGS, record_of
from thresher_lab.advise.forecast import ALIKE, GRADIENT_NORM, INPUT_BOUND, Outlook, loss_summary, outlook_of
from thresher_lab.advise.pace import torch_threads
from thresher_lab.advise.probe import Probe, Says, quietly
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks.script import errors_placed
from thresher_lab.training.files import listed
from thresher_lab.training.loop import is_busy
from thresher_lab.training.samples import EASY
from thresher_lab.training.specs import Spec
from thresher_lab.training.store import versions

WORTHWHILE = 0.05
"""Share of the time below which a saving is not worth the trouble."""
AT_RANDOM = ("uniform", "random_backprop")
"""Methods that choose samples at random: they are controls, and what they save is not recommended."""
RANDOM_HALF = "uniform:keep=0.5"
"""Method to compare where no choice of samples is recommended: half of the samples of each epoch, at random."""
PROBE_PART = 1 / 3
"""Share of the time limit that the probe may take where short runs come after it."""
MOST_NAMED = 2
"""Largest number of methods in the next command: each of them is trained with its controls."""


def worth_trying(rows: Sequence[Mapping[str, Any]], outlook: Outlook) -> list[Mapping[str, Any]]:
    """Returns the methods that are worth a comparison, the best first.

    Those come first that were better than controls of the same cost where they were measured, then those of which it is not
    decided, and then those that were not measured; those that were worse are not named. Among equals, time decides.

    Args:
        rows: Entries of `methods` in the advice.
        outlook: Numbers of the probe about any choice of samples.
    """
    if outlook.alike:
        return []
    saving = [row for row in rows if row["refused"] is None and row["at_most"] >= WORTHWHILE]
    chosen = [row for row in saving if not draws_blindly(row) and row["record"]["standing"] != "behind"]
    return sorted(chosen, key=lambda row: (STANDINGS.index(row["record"]["standing"]), -row["at_most"]))


def draws_blindly(row: Mapping[str, Any]) -> bool:
    """Returns whether a method chooses at random: always, or for want of a signal.

    Args:
        row: Entry of `methods` in the advice.
    """
    return row["method"].startswith(AT_RANDOM) or bool(row["missing"])


def named_methods(worth: Sequence[str], specs: Sequence[Spec]) -> list[str]:
    """Returns the recommended methods that the next command has, as on the command line.

    Args:
        worth: Labels of the recommended methods, the best first.
        specs: All methods that were asked for.
    """
    texts = {spec.label: spec.text for spec in specs}
    return [texts[name] for name in worth[:MOST_NAMED]]


def next_command(
    task: str, methods: Sequence[str], *, epochs: int, data: Path | None = None, budget: Sequence[float] = ()
) -> str:
    """Returns the command that compares methods on a training, as a shell reads it.

    Args:
        task: Name of the training.
        methods: Methods as on the command line; without any, and without a budget, a random half of the samples is compared.
        epochs: Number of epochs of the planned training.
        data: Folder with the data that was given. Default: none.
        budget: Shares of the cost of full training that Winnow is compared at, too. Default: none.

    Example:
        >>> next_command("fashion-mnist@20000", ["winnow:share=0.5", "infobatch"], epochs=10)
        'thresher compare fashion-mnist@20000 --methods winnow:share=0.5,infobatch --epochs 10 --out runs/fashion-mnist-20000'
    """
    named = re.split(r"[\\/]", task)[-1].partition(".py:")[0]
    folder = f"runs/{re.sub(r'[^A-Za-z0-9_]+', '-', named).strip('-') or 'training'}"
    arms = ["--methods", ",".join(methods) or RANDOM_HALF] if methods or not budget else []
    return _command("compare", task, [*arms, *_budget_option(budget)], epochs, data, "--out", folder)


def budget_command(task: str, share: float, *, epochs: int, data: Path | None = None, seconds: float | None = None) -> str:
    """Returns the command that trains short runs at a share of the cost.

    Args:
        task: Name of the training.
        share: Share of the cost.
        epochs: Number of epochs of the planned training.
        data: Folder with the data that was given. Default: none.
        seconds: Time limit, where the default does not suffice. Default: that of the command.

    Example:
        >>> budget_command("digits", 0.5, epochs=20)
        'thresher advise digits --budget 0.5 --epochs 20'
    """
    limit = () if seconds is None else ("--seconds", f"{seconds:g}")
    return _command("advise", task, _budget_option([share]), epochs, data, *limit)


def _budget_option(shares: Sequence[float]) -> list[str]:
    return ["--budget", ",".join(f"{share:.12g}" for share in shares)] if shares else []


def _command(name: str, task: str, arms: Sequence[str], epochs: int, data: Path | None, *more: str) -> str:
    options = [] if data is None else ["--data", str(data)]
    return shlex.join(["thresher", name, task, *arms, "--epochs", str(epochs), *options, *more])


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
    on = f" on {advice['threads']} CPU thread{'s' * (advice['threads'] > 1)}" * (advice["device"] == "cpu")
    waiting = in_percent(step["waiting"])
    said = [f"A step takes {_milliseconds(step['full'])}{on}: waiting for input {waiting}, {parts}."]
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
    return [*said, _about_losses(advice), about_outlook(outlook_in(advice))]


def outlook_in(advice: Mapping[str, Any]) -> Outlook:
    """Returns the numbers of the probe about any choice of samples.

    Args:
        advice: Result of `advise`.
    """
    return Outlook(**{field.name: advice["outlook"][field.name] for field in fields(Outlook)})


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
        said += f" Methods that plan epochs do not load the samples that they leave out: {listed(can)} can help."
    reasons = ((True, "the samples left out are loaded for a forward pass"), (False, "too few samples are left out"))
    for refreshes, why in reasons:
        if names := [row["method"] for row in cannot if row["refreshes"] == refreshes]:
            said += f" This does not hold for {listed(names)}: {why}."
    return said


def _about_method(row: Mapping[str, Any], advice: Mapping[str, Any]) -> str:
    name = row["method"]
    if row["refused"] is not None:
        return f"{name} cannot be used here: {row['refused']}"
    if row["at_most"] < ROUNDS_TO_ZERO:
        longer = f": it takes {in_percent(-row['saves'])} longer than full training" if -row["saves"] >= ROUNDS_TO_ZERO else ""
        return f"{name} saves no time{longer}."
    if row["stage"] == "batch":
        return f"{name} can save about {in_percent(row['saves'])} of the time."
    forwards = ", which still cost a forward pass" if row["forwarded"] else ""
    does = f"it leaves out {in_percent(row['left_out'])} of the samples of {advice['epochs']} epochs{forwards}"
    if row["at_most"] - row["saves"] < ROUNDS_TO_ZERO:
        return f"{name} can save about {in_percent(row['saves'])} of the time: {does}."
    saving = "saves no time" if row["saves"] < ROUNDS_TO_ZERO else f"can save about {in_percent(row['saves'])} of the time"
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
        return f"{choice}; and {smaller}, so that only fewer steps save time, as with spend='steps'."
    if outlook.waiting >= INPUT_BOUND:
        return f"{choice}; and {smaller}, but waiting for input takes longer than both."
    return f"{choice}; and {smaller}, so that smaller batches save time, too."


def in_percent(share: float) -> str:
    """Returns a share in whole percent."""
    return f"{round(100 * share)} %"


def _milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds: three digits, or all of a number of 100 and more."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


PLANNED_EPOCHS = 20
SECONDS = 120.0

Advice = dict[str, Any]


def advise(
    task: str,
    specs: Sequence[Spec],
    *,
    epochs: int = PLANNED_EPOCHS,
    data: Path | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    threads: int = 1,
    parts: bool = True,
    says: Says = quietly,
) -> Advice:
    """Probes a training and estimates for each method what share of the time it could save.

    Args:
        task: Name of the training, see `recipes.running.task_of`.
        specs: Methods other than full training.
        epochs: Number of epochs of the planned training; the schedules of methods refer to it. Default: 20.
        data: Folder with the data, for tasks that take one.
        seconds: Time limit, in seconds; the epochs of the probe take half of it at most. What it does not suffice for is left
            out, and named in `skipped`. Default: 120.
        seed: Random seed of the training and of the order in which things are timed. Default: 0.
        threads: Number of CPU threads of torch during the probe. Default: 1, as in a comparison.
        parts: Whether the forward pass, the backward pass and the optimizer are timed, too. Default: True.
        says: Function that is called with a line about what is done now, and how long it takes at most. Default: none.

    Returns:
        Plain values: task, epochs, device, threads, versions, probe, step, outlook, losses, trace, break_even_keep, methods,
        steps, step_s, skipped, busy (more load than cores), worth_trying (the best first), next, compare (commands),
        sentences. The entry of a method has `record`, see `findings.Record`, `saves`, the share of the wall time of full
        training that it saves with the losses of the probe, and `at_most`, that share if all samples but one were learned;
        below 0 if slower.

    Raises:
        ValueError: An argument is out of its range, the training has no batch, or its `evaluate` returns no number.
        FileNotFoundError: The data is missing.
    """
    if epochs < 1 or threads < 1 or not seconds > 0:
        allowed = "`epochs` and `threads` must be 1 or more and `seconds` above 0"
        raise ValueError(f"advise: {allowed}, got {epochs}, {threads} and {seconds}")
    trainable, was_busy, until = task_of(task), is_busy(), time.monotonic() + seconds
    with torch_threads(threads), errors_placed(trainable):
        says("reading the data, and preparing the training")
        training = trainable.training(trainable.load(trainable.find(data)), seed)
        probe = Probe(training, epochs=epochs, seed=seed, says=says, until=until, parts=parts)
        probe.try_evaluate()
        pace, signals, rows = probe.forecasts(specs, max(0.0, min(seconds / 2, until - time.monotonic())))
    records = [record_of(spec, traced=probe.fallback is None).as_dict() for spec in specs]
    rows = [row | {"record": record} for row, record in zip(rows, records, strict=True)]
    norms, losses = ([known[name].numpy() for known in signals if name in known] for name in (GRADIENT_NORM, "loss"))
    outlook = outlook_of(norms, pace, losses)
    advice = {
        "task": task,
        "epochs": epochs,
        "device": str(probe.device),
        "threads": threads,
        "versions": versions(),
        "probe": {"samples": probe.seen, "epochs": probe.trained, "warm_up": epochs * warm_up_share(training.schedule)},
        "step": pace.as_dict(),
        "outlook": outlook.as_dict(),
        "losses": loss_summary(signals[-1]),
        "trace": {"fallback": probe.fallback},
        "break_even_keep": pace.break_even,
        "methods": rows,
        "steps": epochs * len(training.loader),
        "step_s": probe.step_s,
        "skipped": probe.skipped,
        "busy": was_busy or is_busy(),
    }
    advice["worth_trying"] = worth = [row["method"] for row in worth_trying(rows, outlook)]
    limit = seconds_of_runs(advice)
    advice["next"] = budget_command(task, 0.5, epochs=epochs, data=data, seconds=limit if limit > SECONDS else None)
    advice["compare"] = next_command(task, named_methods(worth, specs), epochs=epochs, data=data)
    return advice | {"sentences": sentences(advice)}


def warm_up_share(schedule: Callable[[float], float]) -> float:
    """Returns the share of training in which the learning rate only rises, [0, 1].

    Args:
        schedule: Function from the share of training that is done to a factor on the learning rate.

    Example:
        >>> warm_up_share(lambda done: min(4 * done, 1.0)), warm_up_share(lambda done: 1 - done)
        (0.25, 0.0)
    """
    factors = [schedule(i / 1000) for i in range(1001)]
    return next((i for i in range(1000) if factors[i + 1] <= factors[i]), 1000) / 1000


def short_epochs(epochs: int) -> int:
    """Returns the number of epochs of a short run.

    Args:
        epochs: Number of epochs of the planned training.
    """
    return max(2, round(epochs / 4))


def seconds_of_runs(advice: Mapping[str, Any]) -> int:
    """Returns the time limit that suffices for short runs with two seeds at one share, and for the probe before them.

    Args:
        advice: Result of `advise`.
    """
    runs = 4 * short_epochs(advice["epochs"]) / advice["epochs"] * advice["steps"] * advice["step_s"]
    return 10 * math.ceil(runs / (1 - PROBE_PART) / 10)
