"""Whether a smaller budget costs accuracy on a training, from short runs at full cost and with smaller batches.

Where a training is finished early, smaller batches lose little. Where it is not, as with strong augmentation or few epochs,
every way to spend less loses, and no choice of samples brings that back. No signal inside of one run shows which it is; two
short runs do.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher.experiments.advise.probe import Says, quietly
from thresher.experiments.advise.ranking import larger_budget_command, next_command
from thresher.experiments.advise.turns import torch_threads
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.training.loop import train
from thresher.experiments.training.specs import MethodSpec, Spec

FREE, NOT_FREE = 0.4, 1.2
"""Losses of smaller batches in short runs, in points, up to which half of the cost lost nothing, and from which it did."""

SEEDS = (0, 1)
SHORTEST = 2
"""Smallest number of epochs of a short run."""

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
) -> dict[str, Any]:
    """Trains short runs at full cost and with smaller batches, and returns what smaller batches lose.

    Args:
        task: Name of the training, see `recipes.resolve.task_of`.
        shares: Shares of the cost of full training, each within (0, 1).
        epochs: Number of epochs of the planned training; short runs have a quarter of them.
        data: Folder with the data, for tasks that take one.
        threads: Number of CPU threads of torch. Default: 1, as in a comparison.
        says: Function that is called with a line about what is done now. Default: none.

    Returns:
        Plain values: epochs of a short run, seeds, name and mean of the metric at full cost, losses, sentences, and next, the
        command that goes on from there. The entry of a share has `lost`, the metric at full cost minus that with smaller
        batches, mean over the seeds.

    Raises:
        ValueError: A share is smaller than one sample for each batch.
        FileNotFoundError: The data is missing.
    """
    trainable, short = task_of(task), max(SHORTEST, round(epochs / 4))
    loaded, names = trainable.load(trainable.find(data)), list[str]()

    def metric(spec: Spec, seed: int) -> float:
        says(f"training short run {len(names) + 1} of {len(SEEDS) * (1 + len(shares))}, {short} epochs")
        found = train(trainable, loaded, spec, seed=seed, epochs=short)["metric"]
        names.append(found["name"])
        return found["value"]

    with torch_threads(threads):
        losses = smaller_losses(metric, shares)
    found = {"epochs": short, "seeds": list(SEEDS), "metric": names[0], **losses}
    within = [loss["share"] for loss in found["losses"] if not _is_lost(loss["lost"], found["full"])]
    if within:
        onward = next_command(task, [], epochs=epochs, data=data, budget=within)
    else:
        onward = larger_budget_command(task, max(shares), epochs=epochs, data=data)
    return found | {"sentences": budget_sentences(found), "next": onward}


def smaller_losses(metric: TrainShort, shares: Sequence[float]) -> dict[str, Any]:
    """Returns the mean metric at full cost, and what smaller batches lose at each share.

    Args:
        metric: Function that trains a short run.
        shares: Shares of the cost.
    """
    full = [metric(MethodSpec("full"), seed) for seed in SEEDS]
    losses = []
    for share in shares:
        spec = MethodSpec("uniform", {"keep": share}, {"spend": "batches"})
        lost = [at_full - metric(spec, seed) for at_full, seed in zip(full, SEEDS, strict=True)]
        losses.append({"share": share, "lost": fmean(lost), "by_seed": lost})
    return {"full": fmean(full), "losses": losses}


def budget_sentences(found: Mapping[str, Any]) -> list[str]:
    """Returns what the short runs show.

    Args:
        found: Result of `budget_advice`, without the sentences.
    """
    points = _is_share(found["full"])
    unit, scale = (" points", 100) if points else ("", 1)
    said = []
    for loss in found["losses"]:
        lost = scale * loss["lost"]
        amount = f"lose {lost:.2f}{unit} of {found['metric']}" if lost > 0 else "lose nothing"
        apart = max(loss["by_seed"]) - min(loss["by_seed"])
        said.append(
            f"At {loss['share']:g} of the cost, smaller batches {amount} in short runs of {found['epochs']} epochs; "
            f"the seeds differ by {scale * apart:.2f}{unit}. {_verdict(lost, points)}"
        )
    return said


def _is_share(metric: float) -> bool:
    return 0 <= metric <= 1


def _is_lost(lost: float, full: float) -> bool:
    """Returns whether a loss in short runs is one that no choice of samples brings back."""
    return _is_share(full) and 100 * lost >= NOT_FREE


def _verdict(lost: float, points: bool) -> str:
    if not points:
        return (
            "The metric is no share, so that no limit is known for it; `thresher compare --budget` measures the whole training."
        )
    if lost <= FREE:
        return "Where that was up to 0.4 points, Winnow lost little or nothing: `thresher compare --budget` shows it."
    if lost < NOT_FREE:
        return "That is between what was free and what was not elsewhere; `thresher compare --budget` measures it."
    return (
        "The training is not finished at this cost: expect a loss, however the samples are chosen. A larger share may be free."
    )
