"""Advice on a training: where the time goes, what each way to train on less could save, and the comparison to run.

Everything is arithmetic on measured times. What a way costs in the metric, only a comparison can measure.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thresher_lab.advise.measurement import (
    SLOW_STEP,
    Announce,
    Measured,
    TimedTraining,
    accepted_settings,
    ignore,
)
from thresher_lab.advise.pace import Pace, torch_threads
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks.script import errors_placed
from thresher_lab.training.store import versions

PLANNED_EPOCHS = 20
SECONDS = 20.0
INPUT_BOUND = 0.5
"""Share of a step spent waiting for the loader from which the loader is the bottleneck."""
LITTLE = 0.25
"""Share of the time that batches of half the size save, below which the comparison leaves out steps instead."""
SEEDS = 3
CONTROLS_PER_METHOD = 5
SIDE_BY_SIDE = 2
"""Numbers of seeds, of controls of a method, and of trainings side by side, as `thresher compare` has them by default."""
LOSS_LINES = (
    "What it costs in accuracy, only a comparison can measure. A rule of thumb: if training",
    "for half of the epochs costs you 1.9 points of accuracy or more, train in full.",
)
WAY_WIDTH = 58
SHARE_WIDTH = 10

Advice = dict[str, Any]


def advise(
    task: str,
    *,
    epochs: int = PLANNED_EPOCHS,
    budget: Sequence[float] = (0.5,),
    data: Path | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    threads: int = 1,
    announce: Announce = ignore,
) -> Advice:
    """Times a training and computes what each way to train on less could save at most.

    Args:
        task: Name of the training, see `recipes.running.task_of`.
        epochs: Number of epochs of the planned training. Default: 20.
        budget: Shares of the cost of full training to pay, each within (0, 1). Default: half.
        data: Folder with the data, for tasks that take one.
        seconds: Time limit, in seconds, after which no further round of timing begins. Default: 20.
        seed: Random seed of the training and of the samples that are drawn. Default: 0.
        threads: Number of CPU threads of torch. Default: 1, as in a comparison.
        announce: Function that is called with a line about what is done now. Default: none.

    Returns:
        Plain values: task, epochs, budget, threads, versions; those of `measurement.Measured`, and under `pace` also the
        derived ones of `pace.Pace`; `ways`, the share of the time that each way saves at each budget; `comparison` with
        `command`, `trainings` and `seconds`; and `lines`, the answer in words.

    Raises:
        ValueError: An argument is out of its range, the training has no batch, or its `evaluate` returns no number.
        FileNotFoundError: The data is missing.
    """
    if epochs < 1 or threads < 1 or not seconds > 0:
        allowed = "`epochs` and `threads` must be 1 or more and `seconds` above 0"
        raise ValueError(f"advise: {allowed}, got {epochs}, {threads} and {seconds}")
    trainable = task_of(task)
    with torch_threads(threads), errors_placed(trainable):
        announce("reading the data, and preparing the training")
        training = trainable.training(trainable.load(trainable.find(data)), seed)
        measured = TimedTraining(training, seed=seed, seconds=seconds, announce=announce).measure()
        measured = replace(measured, settings=accepted_settings(training, min(budget)))
    given = {
        "task": task,
        "epochs": epochs,
        "budget": list(budget),
        "threads": threads,
        "versions": versions(),
    }
    return answer(measured, given, data)


def answer(measured: Measured, given: Mapping[str, Any], data: Path | None = None) -> Advice:
    """Computes the advice from measured times: what each way to train on less saves, the comparison to run, and the text.

    Args:
        measured: The times.
        given: Entries task, epochs, budget and threads of the advice.
        data: Folder with the data that was given. Default: none.
    """
    pace = measured.pace
    advice = {**given, **asdict(measured)}
    advice["ways"] = {}
    if pace is not None:
        # With the derived values, which `asdict` leaves out.
        advice["pace"] = pace.as_dict()
        # A reason for the fallback means that the model could not be traced.
        traced = measured.fallback is None
        for share in given["budget"]:
            for way, saved in savings(pace, share, traced=traced).items():
                advice["ways"].setdefault(way, []).append(saved)
    advice["comparison"] = comparison(measured, given, data)
    advice["lines"] = lines(measured, advice)
    return advice


def savings(pace: Pace, share: float, *, traced: bool = True) -> dict[str, float]:
    """Returns the share of the time that each way to train on less saves at most; below 0 if it is slower.

    Args:
        pace: Times of a step of full training.
        share: Share of the cost of full training to pay, (0, 1).
        traced: Whether the model can be traced, so that a backward pass can leave out rows. Default: True.
    """
    smaller = pace.of_smaller(share)
    hidden = share * pace.full + (1 - share) * pace.step(pace.scoring)
    # Only a model that can be traced leaves rows out of its backward pass.
    once = pace.forward + pace.backward * (smaller if traced else 1.0) + pace.optimizer
    times = {
        "fewer epochs": share * pace.full,
        "smaller batches, thresher.attach(share, ...)": pace.step(pace.compute * smaller, share),
        "hiding samples each epoch": share * pace.full,
        "hiding samples, with a forward pass for the hidden ones": hidden,
        "selection within the batch, in one forward pass": pace.step(once),
        "selection within the batch, in two forward passes": pace.step(
            pace.scoring + share * pace.compute
        ),
    }
    return {way: 1 - time / pace.full for way, time in times.items()}


def comparison(
    measured: Measured, given: Mapping[str, Any], data: Path | None = None
) -> dict[str, Any]:
    """Returns the comparison to run: its command, its number of trainings, and the seconds that it takes.

    Winnow is compared at each budget, with settings that the training accepts. If smaller batches save little, it trains on
    full-size batches in fewer steps.

    Args:
        measured: The times; without those of the parts of a step, `seconds` is None.
        given: Entries task, epochs and budget of the advice.
        data: Folder with the data that was given. Default: none.
    """
    pace = measured.pace
    budget = given["budget"]
    accepted = [*measured.settings]
    # `compare` leaves out the control with smaller batches where the loader cannot have them.
    shrinks = not accepted or any("spend" not in settings for settings in accepted)
    if pace is not None and _smaller_saves_little(pace):
        accepted.sort(key=lambda settings: "spend" not in settings)
    settings = accepted[0] if accepted else ""
    in_steps = "spend" in settings
    arms = ["--budget", ",".join(f"{share:.12g}" for share in budget)]
    if settings:
        arms = ["--methods", ",".join(f"winnow:share={share:.12g}{settings}" for share in budget)]
    folder = re.split(r"[\\/]", given["task"])[-1].partition(".py:")[0]
    folder = re.sub(r"[^A-Za-z0-9_]+", "-", folder).strip("-") or "training"
    options = ["--epochs", str(given["epochs"])]
    if data is not None:
        options += ["--data", str(data)]
    command = shlex.join(
        ["thresher", "compare", given["task"], *arms, *options, "--out", f"runs/{folder}"]
    )
    trainings = SEEDS * (1 + len(budget) * (CONTROLS_PER_METHOD + shrinks))
    if pace is None:
        return {"command": command, "trainings": trainings, "seconds": None}
    full = 1.0
    for share in budget:
        method = share
        if not in_steps:
            method = pace.step(pace.compute * pace.of_smaller(share), share) / pace.full
        # Winnow, its placebo, fewer epochs in the same time and smaller batches take the time of the method. Random samples and
        # fewer epochs at the same cost take a share of the time of full training.
        full += (3 + shrinks) * method + 2 * share
    epochs = SEEDS * full * given["epochs"]
    seconds = (
        epochs * measured.steps * pace.full + trainings * given["epochs"] * measured.evaluation_s
    )
    return {"command": command, "trainings": trainings, "seconds": seconds / SIDE_BY_SIDE}


def _smaller_saves_little(pace: Pace) -> bool:
    """Returns whether time is spent on steps, not on samples."""
    return 1 - pace.step(pace.compute * pace.of_smaller(0.5), 0.5) / pace.full < LITTLE


def lines(measured: Measured, advice: Mapping[str, Any]) -> list[str]:
    """Returns the answer in lines; the last one is the command.

    Args:
        measured: The times.
        advice: Result of `answer`, without the lines.
    """
    planned = advice["comparison"]
    length = "" if planned["seconds"] is None else f", {in_words(planned['seconds'])}"
    next_line = f"Next: {planned['trainings']} trainings (full training, Winnow and its controls, {SEEDS} seeds each){length}:"
    threads = advice["threads"]
    on = measured.device
    if on == "cpu":
        on = "1 CPU thread" if threads == 1 else f"{threads} CPU threads"
    epochs = advice["epochs"]
    title = f"{advice['task']}: {epochs} epochs of {measured.steps} steps, {measured.batch_size} samples a step, on {on}"
    if measured.pace is None:
        slow = f"One step did not end within {SLOW_STEP:.0f} s: it took {measured.step_s:.0f} s or more."
        return [
            title,
            "",
            f"{slow} This machine is too slow for this training.",
            "Try a smaller model, smaller batches, or a faster machine.",
            "",
            *LOSS_LINES,
            "",
            next_line,
            planned["command"],
        ]
    return [
        title,
        "",
        *_lines_on_time(measured, measured.pace),
        "",
        *_lines_on_ways(measured, advice),
        "",
        *LOSS_LINES,
        "",
        next_line,
        planned["command"],
    ]


def _lines_on_time(measured: Measured, pace: Pace) -> list[str]:
    parts = {
        "loading": pace.waiting,
        "forward": pace.forward / pace.full,
        "backward": pace.backward / pace.full,
        "optimizer": pace.optimizer / pace.full,
    }
    listed = ", ".join(f"{name} {_percent(share)}" for name, share in parts.items())
    bottleneck = f"The loader is not the bottleneck: a step waits for it {_percent(pace.waiting)} of the time."
    if pace.waiting >= INPUT_BOUND:
        bottleneck = f"The loader is the bottleneck: a step waits for it {_percent(pace.waiting)} of the time."
    said = [f"A step takes {_milliseconds(pace.full)}: {listed}.", bottleneck]
    if pace.half is not None:
        half = (
            f"Half a batch takes {_percent(pace.half_share)} of the computing time of a whole one"
        )
        little = ": smaller batches save little" if _smaller_saves_little(pace) else ""
        said.append(f"{half}{little}.")
    if measured.sizes is not None:
        said.append(_line_on_sizes(measured))
    if measured.busy:
        said.append("The machine was busy, with more work than cores: the times are rough.")
    return said


def _line_on_sizes(measured: Measured) -> str:
    sizes = measured.sizes
    if sizes is None or sizes.smallest == sizes.largest:
        return "All samples have the same size, so none is padded."
    return (
        f"Samples have {sizes.smallest} to {sizes.largest} values. Random batches are {_percent(sizes.padding)} padding, "
        f"batches of similar sizes {_percent(sizes.sorted_padding)}."
    )


def _lines_on_ways(measured: Measured, advice: Mapping[str, Any]) -> list[str]:
    """Returns the table of what each way saves."""
    columns = "".join(f"at {share:g}".rjust(SHARE_WIDTH) for share in advice["budget"])
    rows = ["Time that each way saves at most, by share of the cost".ljust(WAY_WIDTH) + columns]
    for way, saved in advice["ways"].items():
        cells = "".join(
            (_percent(share) if share >= 0.005 else "none").rjust(SHARE_WIDTH) for share in saved
        )
        rows.append(f"  {way}".ljust(WAY_WIDTH) + cells)
    if measured.fallback is not None:
        rows.append(
            f"One forward pass saves no part of the backward pass: the model cannot be traced ({measured.fallback})."
        )
    return rows


def in_words(seconds: float) -> str:
    """Returns a time in words.

    Args:
        seconds: The time, in seconds.

    Example:
        >>> in_words(42.0), in_words(840.0), in_words(9000.0)
        ('less than a minute', 'about 14 minutes', 'about 2.5 hours')
    """
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    if minutes < 100:
        count = math.ceil(minutes)
        return f"about {count} minute{'' if count == 1 else 's'}"
    return f"about {minutes / 60:.2g} hours"


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"


def _milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds: three digits, or all of a number of 100 and more."""
    if seconds >= 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{1000 * seconds:.3g} ms"
