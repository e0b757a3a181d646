"""Seeds that are the same training, and methods that save more time in fewer steps."""

from collections.abc import Mapping, Sequence
from typing import Any


def equal_seeds(runs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Returns the seeds with which full training is one training: its metrics and losses are the same in every epoch.

    Args:
        runs: Results of `train`; runs of other methods, and those whose losses are not known, are left out.
    """
    groups: dict[str, list[int]] = {}
    for run in runs:
        if run.get("method") != "full" or run["history"][-1].get("nonfinite"):
            continue
        name = run["metric"]["name"]
        history = run["history"]
        epochs = [
            (entry.get(name), entry.get("loss_histogram", entry.get("eval_loss")))
            for entry in history
        ]
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


SMALL_PART = 0.5
"""Time saved, as a share of the rows left out, below which smaller batches save little."""


def in_fewer_steps(method: str, share: float, saved: float) -> str:
    """Returns that full-size batches in fewer steps save more time, as a sentence; "" if smaller batches save their part.

    Args:
        method: Winnow, as on the command line; for any other method the result is "".
        share: Share of the cost of full training.
        saved: Share of the time that smaller batches save.

    Example:
        >>> in_fewer_steps("winnow:share=0.5", 0.5, 0.15).partition(": ")[0]
        'winnow:share=0.5 saves about 15% of the time in smaller batches, and more in fewer full-size ones'
        >>> in_fewer_steps("winnow:share=0.5", 0.5, 0.45)
        ''
    """
    if not method.startswith("winnow") or "spend" in method or saved >= SMALL_PART * (1 - share):
        return ""
    return (
        f"{method} saves about {max(saved, 0.0):.0%} of the time in smaller batches, and more in fewer full-size ones: "
        f"--methods {method}:spend=steps. In our trainings of 160 to 1,500 steps that lost 0.4 to 7 points more."
    )
