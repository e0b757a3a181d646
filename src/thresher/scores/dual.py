"""DUAL: difficulty times uncertainty of a sample early in training, and a preference for easier samples if few are kept.

Cho et al., "Lightweight Dataset Pruning without Full Training via Example Difficulty and Prediction Uncertainty", ICML 2025,
arXiv:2502.06905. Official code: github.com/behaapyy/dual-pruning. The score needs the first 30 of 200 epochs only.

The standard deviation has Bessel's correction, as torch has it by default. The constants of the random draw are those of the
official code.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, checked_history, checked_window, of_history

ANCHORS = 10
"""Number of samples with the highest scores, whose mean probability is the anchor of the random draw."""
STRENGTH = 15.0
"""Sum of the parameters of the Beta distribution, minus 1."""


def beta_density(x: Tensor, a: float, b: float) -> Tensor:
    """Returns the logarithm of the density of a Beta distribution, shape (n,); -inf outside (0, 1), or if the density is 0.

    Args:
        x: Points, shape (n,), within [0, 1].
        a: First parameter, > 0.
        b: Second parameter, > 0.

    Example:
        >>> beta_density(torch.tensor([0.25, 0.5]), 2.0, 1.0).exp()
        tensor([0.5000, 1.0000])
    """
    constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return (
        torch.special.xlogy(x.new_full((), a - 1), x)
        + torch.special.xlogy(x.new_full((), b - 1), 1 - x)
        + constant
    )


def dual(
    probabilities: Any,
    *,
    window: int = 10,
    pruned: float | None = None,
    exponent: float = 4.0,
    seed: int = 0,
    labels: Tensor | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the mean, over windows of epochs, of 10 * std * (1 - mean) of the probability of its label.

    With `pruned`, samples are drawn without replacement, and the scores are their ranks in this draw. So the samples drawn
    first are kept by `Prune(scores, keep=1 - pruned)`. The chance of a sample is proportional to its score times a Beta density
    at its mean probability. The Beta distribution lies around the mean probability of the 10 samples with the highest scores;
    the more is pruned, the more it prefers easy samples.

    Args:
        probabilities: Probability of the label of each sample after each of the first epochs, shape (T, N), T >= `window`;
            published: T = 30.
        window: Number of epochs of a window, 2 or more. Default and published: 10.
        pruned: Share of the samples that will be pruned, (0, 1); samples are then drawn. Default None: no draw.
        exponent: Exponent of `pruned` in the parameters of the draw, > 0. Default 4, as in the official code for CIFAR; 11 for
            ImageNet.
        seed: Random seed of the draw. Default 0.
        labels: Classes, shape (N,), int64. Default: None, there are no classes.
        trained: Cost of the scores, `(forward, backward)`: numbers of samples that went through forward and backward passes, to
            train and to compute the probabilities. Default: (0, 0).
        provenance: Facts about the training run, such as its epochs and seed. Default: none.

    Returns:
        Scores of all N samples; NaN if a probability is not finite.

    Raises:
        TypeError: `probabilities` are not floating-point numbers.
        ValueError: `probabilities` are empty or have another shape, or a setting is out of its range.

    Example:
        >>> history = torch.tensor([[0.1, 0.9], [0.5, 0.9]])
        >>> dual(history, window=2).values
        tensor([1.9799, 0.0000])
    """
    history = checked_history("dual", "probabilities", probabilities, 2)
    checked_window("dual", window, len(history))
    if pruned is not None and not 0 < pruned < 1:
        raise ValueError(f"dual: `pruned` must be a share within (0, 1), got {pruned!r}")
    if not 0 < exponent < math.inf:
        raise ValueError(f"dual: `exponent` must be a finite number above 0, got {exponent!r}")
    windows = history.unfold(0, window, 1)
    values = (10 * windows.std(-1) * (1 - windows.mean(-1))).mean(0)
    if pruned is not None:
        values = _drawn(values, history.mean(0), pruned**exponent, seed)
    settings = {
        "epochs": len(history),
        "window": window,
        "pruned": pruned,
        "exponent": exponent,
        "seed": seed,
    }
    return of_history("dual", values, labels, trained, provenance, **settings)


def _drawn(values: Tensor, easy: Tensor, power: float, seed: int) -> Tensor:
    """Returns ranks from a draw without replacement, the highest for the first drawn; samples without a chance rank lowest."""
    finite = values.isfinite()
    highest = values.where(finite, -torch.inf).argsort(descending=True, stable=True)[
        : min(ANCHORS, int(finite.sum()))
    ]
    anchor = float(easy[highest].mean()) if len(highest) else 0.5
    b = STRENGTH * (1 - anchor) * (1 - power)
    log_chance = (
        beta_density(easy, STRENGTH + 1 - b, max(b, torch.finfo(torch.float64).tiny))
        + values.clamp(min=0).log()
    )
    waits = torch.empty(len(values), dtype=torch.float64).exponential_(generator=rng.seeded(seed))
    # Exponential waiting times with these rates end in the order of such a draw.
    keys = log_chance - waits.log()
    order = torch.where(keys.isfinite(), keys, -torch.inf).argsort(stable=True)
    places = torch.empty_like(values).index_copy_(
        0, order, torch.arange(len(values), dtype=torch.float64)
    )
    return places.where(finite, torch.nan)
