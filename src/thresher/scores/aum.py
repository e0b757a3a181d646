"""Area under the margin: how far the output for the label exceeds the largest other output, on average over training.

Pleiss et al., "Identifying Mislabeled Data using the Area Under the Margin Ranking", NeurIPS 2020, arXiv:2001.10528. Samples
with wrong labels have the smallest area. Larger scores mean harder samples here, so the score is minus the area.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.score_table import Scores
from thresher.scores._common import PassCounts, checked_history, of_history


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the output at the label minus the largest other output, shape (...,).

    Args:
        outputs: Logits, as published, or probabilities, shape (..., C) with C >= 2.
        labels: Classes, shape (...,), int64.

    Example:
        >>> margins(torch.tensor([[2.0, 0.5, 1.0], [0.0, 3.0, 1.0]]), torch.tensor([0, 2]))
        tensor([ 1., -2.])
    """
    index = labels.unsqueeze(-1)
    others = outputs.scatter(-1, index, torch.full_like(index, -torch.inf, dtype=outputs.dtype))
    return outputs.gather(-1, index).squeeze(-1) - others.amax(-1)


def aum(
    margins: Any,
    *,
    labels: Tensor | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the negative mean of its margins over the epochs of training.

    Args:
        margins: Margins of all samples, measured in or after each epoch, shape (T, N), T >= 1. Compute them from outputs with
            `thresher.scores.aum.margins`.
        labels: Classes, shape (N,), int64. Default: None, there are no classes.
        trained: Cost of the scores, `(forward, backward)`: numbers of samples that went through forward and backward passes, to
            train and to measure the margins. Default: (0, 0).
        provenance: Facts about the training run, such as its epochs and seed. Default: none.

    Returns:
        Scores of all N samples; NaN if a margin is not finite.

    Raises:
        TypeError: `margins` are not floating-point numbers.
        ValueError: `margins` are empty or have another shape.

    Example:
        >>> aum(torch.tensor([[1.0, -2.0], [3.0, 0.0]])).values
        tensor([-2.,  1.])
    """
    history = checked_history("aum", "margins", margins, 2)
    return of_history("aum", -history.mean(0), labels, trained, provenance, epochs=len(history))
