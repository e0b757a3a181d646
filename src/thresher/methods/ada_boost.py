"""AdaBoost: train on the samples of each batch with the largest AdaBoost weights, 1/2 ln((1 + l) / (1 - l)).

A base selector of AdaSelection, arXiv:2306.10728, equation (1), after the step size of arXiv:1307.1192. No official code.
Nothing is re-weighted.

The formula needs losses below 1. By default they are divided by a little more than the batch's largest: the order of the
weights is then that of the losses, so that on its own this chooses as `BigLoss` does, and differs only as a part of
AdaSelection, where the size of a weight counts. `weights="paper_abs"` takes the absolute value of the ratio and the losses
as they are: above 1 the weight falls again, as the paper's results suggest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._ranked import KeepLargest
from thresher.methods.card import Card

HEADROOM = 1e-4
"""How far above the largest loss the losses are scaled by: keeps the largest weight finite, at 4.95."""

BoostFormula = Literal["scaled", "paper_abs"]


def check_formula(field: str, value: object) -> None:
    """Refuse a way to weigh that there is none of; `field` names class and argument.

    Raises:
        ValueError: Neither "scaled" nor "paper_abs".
    """
    if value not in ("scaled", "paper_abs"):
        raise ValueError(f"{field} must be one of ('scaled', 'paper_abs'), got {value!r}")


def boost_weights(loss: Tensor, weights: BoostFormula = "scaled") -> Tensor:
    """AdaBoost's weight of each sample.

    Args:
        loss: Shape (n,), floating point.
        weights: "scaled": artanh(l / ((1 + HEADROOM) * largest)), the largest by absolute value of the finite losses;
            "paper_abs": 1/2 ln|(1 + l) / (1 - l)|, about 44 where the loss is 1.

    Returns:
        Shape (n,), finite where `loss` is.
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
    """Keep the floor(keep * n) largest AdaBoost weights of each batch, at least one; of equal weights the higher id.

    A sample without a finite loss is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1]. Published: 0.1 to 0.5.
        weights: "scaled": losses divided by a little more than the batch's largest; "paper_abs": the paper's formula on the
            losses as they are, by absolute value.

    Raises:
        ValueError: A setting out of range.
    """

    card: ClassVar[Card] = Card(
        summary="train on the batch's largest AdaBoost weights",
        paper="arXiv:2306.10728",
        rule="its AdaBoost weight was not among the largest of its batch",
        biased="towards samples of large loss; with weights='paper_abs' towards losses near 1; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves",
        claim="CIFAR-10 85.13 % where full training has 92.57 %, mean over keep = 0.1 to 0.5 (AdaSelection, table 4)",
        caveat="on its own it is Big Loss under another name; as published it falls behind random selection everywhere but "
        "on a toy regression (CIFAR-100 50.19 % against 71.05 %)",
    )
    weights: BoostFormula = "scaled"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_formula("AdaBoost: `weights`", self.weights)

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """AdaBoost's weights."""
        return boost_weights(signals["loss"], self.weights)
