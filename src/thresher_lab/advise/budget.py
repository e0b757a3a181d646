"""Whether a smaller budget costs accuracy on a training, from short runs at full cost and with smaller batches.

Where a training is finished early, smaller batches lose little. Where it is not, as with strong augmentation or few epochs,
every way to spend less loses, and no choice of samples brings that back. No signal inside of one run shows which it is; two
short runs do.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from thresher_lab.advise.advise import next_command, short_epochs
from thresher_lab.advise.findings import all_measurements
from thresher_lab.advise.pace import Pace, torch_threads
from thresher_lab.advise.probe import Says, quietly
from thresher_lab.recipes.running import task_of
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec, Spec

FREE, NOT_FREE = 0.4, 1.2
"""Losses of smaller batches in short runs, in points, up to which half of the cost lost nothing, and from which it did."""

LARGEST = 0.8
"""Share of the cost up to which a larger one, halfway to the whole cost, is compared, too."""
BudgetFinding = Literal["free", "between", "lost", "unknown"]
"""What a loss in short runs is; not known where the metric is no share."""

SEEDS = (0, 1)
TrainShort = Callable[[Spec, int], float]
"""Function from a method and a seed to the metric at the end of a short run."""


def budget_advice(
    task: str,
    shares: Sequence[float],
    *,
    epochs: int,
    data: Path | None = None,
    threads: int = 1,
    says: Says = quietly,
    until: float = math.inf,
    epoch_s: float = 0.0,
) -> dict[str, Any]:
    """Trains short runs at full cost and with smaller batches, and returns what smaller batches lose.

    Args:
        task: Name of the training, see `recipes.running.task_of`.
        shares: Shares of the cost of full training, each within (0, 1).
        epochs: Number of epochs of the planned training; short runs have a quarter of them.
        data: Folder with the data, for tasks that take one.
        threads: Number of CPU threads of torch. Default: 1, as in a comparison.
        says: Function that is called with a line about what is done now. Default: none.
        until: Time, as `time.monotonic` says it, at which short runs end, finished or not. Default: no limit.
        epoch_s: Seconds that an epoch takes, so that no run begins that would not end in time. Default: not known.

    Returns:
        Plain values: epochs of a short run, seeds, name and mean of the metric at full cost, losses and sentences. The entry
        of a share has `lost`, the metric at full cost minus that with smaller batches, mean over the seeds, and `finding`.
        `losses` is empty where there was no time for a pair of runs.

    Raises:
        ValueError: A share is smaller than one sample for each batch.
        FileNotFoundError: The data is missing.
    """
    trainable, short = task_of(task), short_epochs(epochs)
    loaded, runs = trainable.load(trainable.find(data)), list[dict[str, Any]]()

    def stop(done: int, _: float) -> None:
        if done < short and time.monotonic() + (short - done) * epoch_s > until:
            raise TimeoutError

    def metric(spec: Spec, seed: int) -> float:
        stop(0, 0.0)
        says(f"training short run {len(runs) + 1} of {len(SEEDS) * (1 + len(shares))}, {short} epochs")
        runs.append(train(trainable, loaded, spec, seed=seed, epochs=short, progress=stop))
        return runs[-1]["metric"]["value"]

    with torch_threads(threads):
        losses = smaller_losses(metric, shares) | {"equal_seeds": equal_seeds(runs)}
    result = {"epochs": short, "seeds": list(SEEDS), "metric": runs[0]["metric"]["name"] if runs else "", **losses}
    return result | {"sentences": budget_sentences(result)}


def equal_seeds(runs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Returns the seeds with which full training is one training: its metrics and losses are the same in every epoch.

    Args:
        runs: Results of `train`; runs of other methods, and those whose losses are not known, are left out.
    """
    groups: dict[str, list[int]] = {}
    for run in runs:
        if run.get("method") != "full" or run["history"][-1].get("nonfinite"):
            continue
        name, history = run["metric"]["name"], run["history"]
        epochs = [(entry.get(name), entry.get("loss_histogram", entry.get("eval_loss"))) for entry in history]
        if all(loss is not None for _, loss in epochs):
            groups.setdefault(repr((run["metric"]["value"], epochs)), []).append(run["seed"])
    return [seeds for seeds in groups.values() if len(seeds) > 1]


def about_equal_seeds(seeds: Sequence[int]) -> str:
    """Returns what to do about seeds that are one training, in sentences.

    Args:
        seeds: Entry of `equal_seeds`.

    Example:
        >>> about_equal_seeds([0, 1]).partition(":")[0]
        'Seeds 0, 1 are the same training'
    """
    return (
        f"Seeds {', '.join(map(str, seeds))} are the same training: metrics and losses of full training are equal in every "
        "epoch. They count once. Use `seed` in your function, as in torch.manual_seed(seed), and set no other there."
    )


def next_after_budget(
    found: Mapping[str, Any],
    task: str,
    methods: Sequence[str],
    *,
    epochs: int,
    data: Path | None = None,
    by_steps: bool = False,
    and_steps: bool = False,
) -> str:
    """Returns the command that goes on from short runs, as a shell reads it.

    It compares all shares, because whole runs lose less than short ones. Where all of them lose in short runs, it compares a
    larger one, too, unless that would save next to nothing.

    Args:
        found: Result of `budget_advice`.
        task: Name of the training.
        methods: Recommended methods as on the command line. They are compared, too, where Winnow, whose share is the budget, is
            none of them; else the command would take twice as long.
        epochs: Number of epochs of the planned training.
        data: Folder with the data that was given. Default: none.
        by_steps: Whether only fewer steps save time, so that Winnow leaves out steps. Default: False.
        and_steps: Whether fewer steps save more time, so that Winnow is trained in both ways. Default: False.
    """
    shares = [loss["share"] for loss in found["losses"]]
    if all(loss["finding"] == "lost" for loss in found["losses"]) and max(shares) <= LARGEST:
        shares.append((1 + max(shares)) / 2)
    others = [] if any(method.startswith("winnow") for method in methods) else list(methods)
    steps = [f"winnow:share={share:g}:spend=steps" for share in shares] if by_steps or and_steps else []
    return next_command(task, steps + others, epochs=epochs, data=data, budget=[] if by_steps else shares)


def smaller_losses(metric: TrainShort, shares: Sequence[float]) -> dict[str, Any]:
    """Returns the mean metric at full cost, and what smaller batches lose at each share.

    Args:
        metric: Function that trains a short run; after a `TimeoutError`, what was trained before counts.
        shares: Shares of the cost.
    """
    full, smaller = list[float](), {share: list[float]() for share in shares}
    with suppress(TimeoutError):
        for seed in SEEDS:
            full.append(metric(MethodSpec("full"), seed))
            for share, values in smaller.items():
                values.append(metric(MethodSpec("uniform", {"keep": share}, {"spend": "batches"}), seed))
    points, losses = all(0 <= value <= 1 for value in full), []
    for share, values in smaller.items():
        if lost := [at_full - value for at_full, value in zip(full, values, strict=False)]:
            finding = _finding(100 * fmean(lost)) if points else "unknown"
            losses.append({"share": share, "lost": fmean(lost), "by_seed": lost, "finding": finding})
    return {"full": fmean(full) if full else None, "points": points, "losses": losses}


def _finding(points: float) -> BudgetFinding:
    return "free" if points <= FREE else "between" if points < NOT_FREE else "lost"


def odds_of_free() -> tuple[int, int, int]:
    """Returns in how many measured comparisons some way to spend less lost nothing, of how many, and on how many trainings.

    They are those in which smaller batches lost next to nothing over whole trainings.
    """
    known = [one for one in all_measurements() if one.smaller is not None and _finding(-one.smaller) == "free"]
    return sum(one.all_lost is not True for one in known), len(known), len({one.task for one in known})


def seeds_agree(loss: Mapping[str, Any], *, points: bool) -> bool:
    """Returns whether each seed by itself shows what the mean over the seeds does.

    Args:
        loss: Entry of `losses`.
        points: Whether the metric is a share, so that limits are known.
    """
    return not points or all(_finding(100 * lost) == loss["finding"] for lost in loss["by_seed"])


def times_at(step: Mapping[str, Any], shares: Sequence[float]) -> list[dict[str, float]]:
    """Returns what trainings at shares of the cost take, as shares of the time of full training.

    Args:
        step: `step` of the advice: the measured times.
        shares: Shares of the cost.

    Returns:
        For each share: `share`, the time in smaller batches, `batches`, and that of full-size batches in fewer steps, `steps`.
    """
    pace = Pace(**{one.name: step[one.name] for one in fields(Pace)})
    smaller = [pace.step(pace.compute * pace.of_smaller(share), share) / pace.full for share in shares]
    return [{"share": share, "batches": time, "steps": share} for share, time in zip(shares, smaller, strict=True)]


def needs_steps(times: Sequence[Mapping[str, float]]) -> bool:
    """Returns whether smaller batches save less than half of what they leave out, so that only fewer steps save time.

    Args:
        times: Result of `times_at`.
    """
    return any(1 - one["batches"] < (1 - one["share"]) / 2 for one in times)


def time_sentence(times: Sequence[Mapping[str, float]]) -> str:
    """Returns what the shares take, as a sentence.

    Args:
        times: Result of `times_at`.
    """
    said = ", and ".join(f"{one['batches']:.0%} of the time at {one['share']:g} of the cost" for one in times)
    fewer = ": only full-size batches in fewer steps, spend='steps', save time in proportion" if needs_steps(times) else ""
    return f"Smaller batches take {said}{fewer}."


def budget_sentences(found: Mapping[str, Any]) -> list[str]:
    """Returns what the short runs show.

    Args:
        found: Result of `budget_advice`, without the sentences.
    """
    unit, scale = (" points", 100) if found["points"] else ("", 1)
    if found.get("equal_seeds"):
        return [about_equal_seeds(seeds) for seeds in found["equal_seeds"]]
    said = []
    for loss in found["losses"]:
        lost = scale * loss["lost"]
        amount = f"lose {lost:.2f}{unit} of {found['metric']}" if lost > 0 else "lose nothing"
        full, by_seed = scale * found["full"], [scale * one for one in loss["by_seed"]]
        seeds = (
            f"; by seed {', '.join(f'{one:.2f}' for one in by_seed)}" if len(by_seed) > 1 else "; there was time for one seed"
        )
        limit = "" if found["points"] else " The metric is no share, so that no limit is known for it."
        said.append(
            f"At {loss['share']:g} of the cost, smaller batches {amount} in short runs of {found['epochs']} epochs "
            f"({full:.1f} to {full - lost:.1f}{seeds}).{limit}"
        )
    return said


SMALL_PART = 0.5
"""Time saved, as a share of the rows left out, below which smaller batches save little."""


def in_fewer_steps(method: str, share: float, saved: float, fewer: float | None = None) -> str:
    """Returns that full-size batches in fewer steps save more time, as a sentence; "" if smaller batches save their part.

    Args:
        method: Winnow, as on the command line; for any other method the result is "".
        share: Share of the cost of full training.
        saved: Share of the time that smaller batches save.
        fewer: Share of the time that fewer steps save. Default: not known.

    Example:
        >>> in_fewer_steps("winnow:share=0.5", 0.5, 0.15, 0.45).partition(": ")[0]
        'winnow:share=0.5 saves about 15% of the time in smaller batches, and about 45% in fewer full-size ones'
        >>> in_fewer_steps("winnow:share=0.5", 0.5, 0.45)
        ''
    """
    if not method.startswith("winnow") or "spend" in method or saved >= SMALL_PART * (1 - share):
        return ""
    if fewer is not None and fewer <= saved:
        return ""
    more = "more" if fewer is None else f"about {fewer:.0%}"
    return (
        f"{method} saves about {max(saved, 0.0):.0%} of the time in smaller batches, and {more} in fewer full-size ones: "
        f"--methods {method}:spend=steps. In our trainings of 160 to 1,500 steps that lost 0.4 to 7 points more."
    )
