"""Forgetting events: how often a sample that was right became wrong in the course of training.

Toneva et al., "An Empirical Study of Example Forgetting", ICLR 2019, arXiv:1812.05159. Original code:
github.com/mtoneva/example_forgetting. Several runs are summed up there: `Scores.mean` of them gives the same order.

A sample that was never right has no such event and is the hardest of all; codes disagree about its score, see `never_learned`.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from thresher.scores.passes import Taken
from thresher.scores.table import Scores

NeverLearned = Literal["presentations", "infinite", "zero"]


def events(correct: Tensor) -> Tensor:
    """How often right was followed by wrong, shape (N,), int64, in a history of shape (T, N), bool."""
    return (correct[:-1] & ~correct[1:]).sum(0)


def unlearned(name: str, never_learned: NeverLearned, presentations: int) -> float:
    """Score of a sample that was never right.

    Raises:
        ValueError: No such `never_learned`.
    """
    if never_learned not in get_args(NeverLearned):
        raise ValueError(f"{name}: `never_learned` must be one of {get_args(NeverLearned)}, got {never_learned!r}")
    return {"presentations": float(presentations), "infinite": torch.inf, "zero": 0.0}[never_learned]


def forgetting(
    correctness: Any,
    *,
    never_learned: NeverLearned = "presentations",
    labels: Tensor | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Forgetting events of each sample in the course of one training.

    Args:
        correctness: Whether each sample was right at each of its presentations, shape (T, N), bool, T >= 1.
        never_learned: Score of a sample that was never right: "presentations": T, as the original code; "infinite", as
            data_diet, so that pruning keeps it before all others; "zero", as KAKURENBO and DeepCore, so that it is cut first.
        labels: Classes, shape (N,), int64; None where there are none.
        trained: Samples that the training put through forward and backward passes; the scores' cost.
        provenance: What is known of it, such as its epochs and seed.

    Raises:
        TypeError: `correctness` is not bool.
        ValueError: It is empty or has another shape, or no such `never_learned`.
    """
    correct = torch.as_tensor(correctness)
    if correct.dtype != torch.bool:
        raise TypeError(f"forgetting: `correctness` must be bool, got {correct.dtype}")
    if correct.dim() != 2 or not correct.numel():
        raise ValueError(f"forgetting: `correctness` must have shape (presentations, samples), got {tuple(correct.shape)}")
    times, n = correct.shape
    values = torch.where(correct.any(0), events(correct).float(), unlearned("forgetting", never_learned, times))
    known = {"presentations": times, "never_learned": never_learned, **(provenance or {})}
    forward, backward = trained
    return Scores(torch.arange(n), values, "forgetting", labels=labels, forward=forward, backward=backward, provenance=known)
