"""Dyn-Unc: how much the probability of a sample's label varies from epoch to epoch, on average over training.

He et al., "Large-scale Dataset Pruning with Dynamic Uncertainty", CVPR workshops 2024, arXiv:2306.05175, keep the 75 % of the
samples that vary most. The official code leaves the last epoch out, skips probabilities of exactly 0 and multiplies by 10; here
`as_in_code` does the same.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.score_table import Scores
from thresher.scores._common import PassCounts, checked_history, checked_window, of_history


def window_deviations(history: Tensor, window: int) -> Tensor:
    """Returns the standard deviation (with Bessel's correction) of each window of epochs.

    Args:
        history: Values after each epoch, shape (T, N).
        window: Number of epochs of a window, 2 to T.

    Returns:
        Deviations, shape (T - window + 1, N).

    Example:
        >>> window_deviations(torch.tensor([[0.1], [0.5], [0.9], [0.9]]), 2).squeeze(1)
        tensor([0.2828, 0.2828, 0.0000])
    """
    return history.unfold(0, window, 1).std(-1)


def dyn_unc(
    probabilities: Any,
    *,
    window: int = 10,
    as_in_code: bool = False,
    labels: Tensor | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the mean, over windows of epochs, of the standard deviation of the probability of its label.

    Args:
        probabilities: Probability of the label of each sample after each epoch, shape (T, N), T >= `window`.
        window: Number of epochs of a window, 2 or more. Default and published: 10.
        as_in_code: Whether the last epoch is left out, a probability of 0 is not part of any window, and the result is
            multiplied by 10, as in the official code; a sample without a whole window has NaN. Default False.
        labels: Classes, shape (N,), int64. Default: None, there are no classes.
        trained: Cost of the scores, `(forward, backward)`: numbers of samples that went through forward and backward passes, to
            train and to compute the probabilities. Default: (0, 0).
        provenance: Facts about the training run, such as its epochs and seed. Default: none.

    Returns:
        Scores of all N samples, 0 or more; NaN if a probability is not finite.

    Raises:
        TypeError: `probabilities` are not floating-point numbers.
        ValueError: `probabilities` are empty or have another shape, or there are fewer epochs than `window`.

    Example:
        >>> history = torch.tensor([[0.1, 0.3], [0.5, 0.3], [0.9, 0.3], [0.9, 0.3]])
        >>> dyn_unc(history, window=2).values
        tensor([0.1886, 0.0000])
    """
    history = checked_history("dyn_unc", "probabilities", probabilities, 2)
    epochs = len(history)
    checked_window("dyn_unc", window, epochs - as_in_code)
    if as_in_code:
        values = torch.stack([_of_sample(one[one != 0], window) for one in history[:-1].T])
    else:
        values = window_deviations(history, window).mean(0)
    settings = {"epochs": epochs, "window": window, "as_in_code": as_in_code}
    return of_history("dyn_unc", values, labels, trained, provenance, **settings)


def _of_sample(values: Tensor, window: int) -> Tensor:
    """Returns ten times the mean deviation of the windows of one sample; NaN if there is no whole window."""
    nothing = values.new_full((), torch.nan)
    if len(values) < window:
        return nothing
    return 10 * window_deviations(values.unsqueeze(1), window).mean()
