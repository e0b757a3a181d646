"""Forgetting events: how often a sample that was classified correctly became wrong in the course of training.

Toneva et al., "An Empirical Study of Example Forgetting", ICLR 2019, arXiv:1812.05159. Original code:
github.com/mtoneva/example_forgetting. The original adds up several runs; `Scores.mean` of them gives the same order.

A sample that was never correct has no such event and is the hardest of all. Published codes disagree about its score; the
argument `never_learned` chooses one.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from thresher.score_table import Scores
from thresher.scores._common import PassCounts

NeverLearned = Literal["presentations", "infinite", "zero"]


def events_in_history(correct: Tensor) -> Tensor:
    """Counts how often each sample was classified correctly, and wrongly the next time it was seen.

    Args:
        correct: Whether each sample was classified correctly each time it was seen, shape (T, N), bool.

    Returns:
        Number of forgetting events, shape (N,), int64.

    Example:
        >>> events_in_history(torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1]], dtype=torch.bool))
        tensor([2, 0])
    """
    return (correct[:-1] & ~correct[1:]).sum(0)


def events_in_turns(turns: Tensor) -> Tensor:
    """Counts forgetting events from the values that `thresher.Forgetting` stores for each sample.

    Args:
        turns: Number of turns from wrong to correct or back, shape (N,), any integer dtype; odd while the sample is correct,
            -1 for a sample that was never seen.

    Returns:
        Number of turns from correct to wrong, shape (N,), int64; 0 for a sample that was never classified correctly or never
        seen.

    Example:
        >>> events_in_turns(torch.tensor([-1, 0, 1, 2, 5], dtype=torch.int16))
        tensor([0, 0, 0, 1, 2])
    """
    return turns.long().clamp(min=0) // 2


def score_of_never_learned(name: str, never_learned: NeverLearned, presentations: int) -> float:
    """Returns the score of a sample that was never classified correctly.

    Args:
        name: Name of the calling function, used in the error message.
        never_learned: Choice of the score, as in `forgetting`.
        presentations: Number of times that each sample was seen.

    Raises:
        ValueError: `never_learned` is not one of the allowed values.

    Example:
        >>> score_of_never_learned("forgetting", "presentations", 8)
        8.0
    """
    if never_learned not in get_args(NeverLearned):
        raise ValueError(
            f"{name}: `never_learned` must be one of {get_args(NeverLearned)}, got {never_learned!r}"
        )
    return {"presentations": float(presentations), "infinite": torch.inf, "zero": 0.0}[
        never_learned
    ]


def forgetting(
    correctness: Any,
    *,
    never_learned: NeverLearned = "presentations",
    labels: Tensor | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by its number of forgetting events in one training run.

    Args:
        correctness: Whether each sample was classified correctly each time it was seen, shape (T, N), bool, T >= 1.
        never_learned: Score of a sample that was never classified correctly. "presentations" (default): T, as in the original
            code. "infinite": as in data_diet, so that pruning keeps it before all others. "zero": as in KAKURENBO and DeepCore,
            so that it is pruned first.
        labels: Classes, shape (N,), int64. Default: None, there are no classes.
        trained: Cost of the scores, `(forward, backward)`: numbers of samples that training put through forward and backward
            passes. Default: (0, 0).
        provenance: Facts about the training run, such as its epochs and seed. Default: none.

    Returns:
        Scores of all N samples.

    Raises:
        TypeError: `correctness` is not bool.
        ValueError: `correctness` is empty or has another shape, or `never_learned` is not one of the allowed values.

    Example:
        >>> history = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.bool)
        >>> forgetting(history).values
        tensor([2., 4., 0.])
    """
    correct = torch.as_tensor(correctness)
    if correct.dtype != torch.bool:
        raise TypeError(f"forgetting: `correctness` must be bool, got {correct.dtype}")
    if correct.dim() != 2 or not correct.numel():
        raise ValueError(
            f"forgetting: `correctness` must have shape (presentations, samples), got {tuple(correct.shape)}"
        )
    times, n = correct.shape
    hardest = score_of_never_learned("forgetting", never_learned, times)
    values = torch.where(correct.any(0), events_in_history(correct).float(), hardest)
    known = {"presentations": times, "never_learned": never_learned, **(provenance or {})}
    forward, backward = trained
    return Scores(
        torch.arange(n),
        values,
        "forgetting",
        labels=labels,
        forward=forward,
        backward=backward,
        provenance=known,
    )
