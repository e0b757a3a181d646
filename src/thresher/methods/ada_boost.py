"""AdaBoost: train on the samples of each batch with the largest AdaBoost weights, 1/2 ln((1 + l) / (1 - l)).

It is a base selector of AdaSelection, arXiv:2306.10728, equation (1), after the step size of arXiv:1307.1192. There is no
official code. Nothing is re-weighted.

The logarithm needs losses below 1. By default, the losses count as they are, and the absolute value of the ratio is taken: the
weight falls again for losses above 1. The results of the paper suggest this: its AdaBoost is as bad as Small Loss on text, and
far from Big Loss. `weights="scaled"` divides the losses by a little more than the largest loss of the batch. Then larger losses
always have larger weights, and the method keeps exactly the samples of `BigLoss`. It differs only inside AdaSelection, which
uses the sizes of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import KeepLargest, check_choices
from thresher.methods.contract import Card

HEADROOM = 1e-4
"""How much larger than the largest loss the divisor is, as a share. It keeps the largest weight finite, at 4.95."""

BoostFormula = Literal["scaled", "paper_abs"]


def boost_weights(loss: Tensor, weights: BoostFormula = "paper_abs") -> Tensor:
    """Returns AdaBoost's weight of each sample.

    Args:
        loss: Loss of each sample, shape (n,), floating point.
        weights: Formula of the weights. "scaled" is artanh(l / ((1 + HEADROOM) * L)), where L is the largest absolute value of
            the finite losses; "paper_abs" is 1/2 ln|(1 + l) / (1 - l)|, about 44 for a loss of 1.

    Returns:
        Weights, shape (n,), finite for each finite loss.
    """
    tiny = torch.finfo(loss.dtype).tiny
    if weights == "paper_abs":
        above, below = ((1 + sign * loss).abs().clamp(min=tiny).log() for sign in (1, -1))
        return (above - below) / 2
    size = torch.where(loss.isfinite(), loss.abs(), tiny)
    part = loss / torch.cat((size, size.new_full((1,), tiny))).amax()
    # artanh(x / c) as log1p(2 x / (c - x)) / 2: exact to rounding for the smallest losses and for the largest.
    return torch.log1p(2 * part / (1 - part + HEADROOM)) / 2


@dataclass(frozen=True)
class AdaBoost(KeepLargest):
    """Trains on the floor(keep * n) samples of each batch with the largest AdaBoost weights, at least one.

    Of samples with equal weights, those with the higher ids are kept. A sample without a finite loss is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5; published: 0.1 to 0.5.
        weights: Formula of the weight of a loss l. "paper_abs" (default) is the formula of the paper with the absolute value of
            the ratio, 1/2 ln|(1 + l) / (1 - l)|. "scaled" first divides the losses by a little more than the largest of the
            batch, and keeps the samples that `BigLoss` keeps.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import AdaBoost
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([0.1, 0.9, 3.0, 0.2])}
        >>> for weights in ("scaled", "paper_abs"):
        ...     AdaBoost(keep=0.25, weights=weights).plan_batch(signals, {}, step=0, generator=torch.Generator())[0].rows
        tensor([2])
        tensor([1])
    """

    card: ClassVar[Card] = Card(
        summary="train on the batch's largest AdaBoost weights",
        paper="arXiv:2306.10728",
        rule="its AdaBoost weight was not among the largest of its batch",
        biased="towards losses near 1; with weights='scaled' towards large losses; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none if the loop's own forward pass is enough",
        claim="CIFAR-10 85.13 % where full training has 92.57 %, mean over keep = 0.1 to 0.5 (AdaSelection, table 4)",
        caveat="with weights='scaled' it keeps exactly what Big Loss keeps; the published numbers are below those of random "
        "selection except on a toy regression (CIFAR-100 50.19 % against 71.05 %)",
    )
    weights: BoostFormula = "paper_abs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Returns AdaBoost's weights of the samples, shape (n,)."""
        return boost_weights(signals["loss"], self.weights)
