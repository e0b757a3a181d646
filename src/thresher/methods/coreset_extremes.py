"""Coreset approximation 1: train on the largest and the smallest losses of each batch, half and half.

It is a base selector of AdaSelection, arXiv:2306.10728, section 3.1: the mean loss of both ends together is close to that of
the batch. There is no official code. It is biased against medium losses: nothing is re-weighted. The paper does not say what
happens with an odd number of samples; here the additional sample is one with a large loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thresher.methods._base import KeepLargest
from thresher.methods.contract import Card


def rank_distance(loss: Tensor) -> Tensor:
    """Returns how far each loss is from the median, by its rank.

    Ties in loss are ranked by position. Of two losses at the same distance, the larger counts as farther.

    Args:
        loss: Loss of each sample, shape (n,).

    Returns:
        Distances, shape (n,), float32, within [0, 1], all different: sorted by distance, the losses come from the upper and the
        lower end in turns. NaN for a loss that is not finite.
    """
    finite = loss.isfinite()
    order = torch.where(finite, loss, math.inf).argsort(stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(loss), device=loss.device))
    count = finite.sum()
    above = 2 * rank - (count - 1)
    return torch.where(finite, (above.abs() + (above > 0)) / count, math.nan)


@dataclass(frozen=True)
class CoresetExtremes(KeepLargest):
    """Trains on k = floor(keep * n) samples of each batch, at least one: ceil(k / 2) largest and floor(k / 2) smallest losses.

    Samples are sorted once by loss, with ties by id; the largest are taken from one end, the smallest from the other. Samples
    without a finite loss are kept before all others and count towards k.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5; the paper uses 0.1 to 0.5.

    Raises:
        ValueError: `keep` is outside (0, 1].

    Example:
        >>> import torch
        >>> from thresher import CoresetExtremes
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([0.1, 0.9, 0.5, 0.4])}
        >>> plan, state = CoresetExtremes(keep=0.5).plan_batch(signals, {}, step=0, generator=torch.Generator())
        >>> plan.rows
        tensor([0, 1])
    """

    card: ClassVar[Card] = Card(
        summary="train on the batch's largest and smallest losses",
        paper="arXiv:2306.10728",
        rule="its loss was in the middle of its batch",
        biased="against samples of medium loss; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none if the loop's own forward pass is enough",
        claim="CIFAR-100 69.33 % where full training has 70.47 %, mean over keep = 0.1 to 0.5 (AdaSelection, table 4)",
        caveat="it is behind random selection in all six tasks of that table (CIFAR-100 71.05 %, SVHN 67.89 % against 93.32 "
        "%): half of the samples that it trains on are learned already",
    )

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Returns how far each loss is from the median by rank, shape (n,)."""
        return rank_distance(signals["loss"])
