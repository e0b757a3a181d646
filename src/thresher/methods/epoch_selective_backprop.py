"""Selective-Backprop once an epoch: hide samples by chance of the percentile of their last loss.

As Nguyen et al. compare with it, "KAKURENBO: Adaptively Hiding Samples in Deep Neural Network Training", NeurIPS 2023,
arXiv:2310.10102. Original code: github.com/TruongThaoNguyen/kakurenbo (the `_sb` scripts). Biased towards hard samples by
design; nothing is re-weighted. Selective-Backprop as its own paper has it, batch by batch, is `thresher.SelectiveBackprop`.

As in the code a percentile is read off a histogram of all losses between the smallest and the largest and counts the
sample's own bin, so that the largest loss always stays. One outlier puts all others into a few bins, which raises their
chances: `percentile="rank"` counts losses instead.
Where the code differs:
- It draws from the global generator of every rank, which agree only as long as they drew as often.
- Its hidden samples are forwarded in train mode.
- A loss that is not finite breaks its histogram; here such samples are kept and not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._drawing import full_plan
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Values, ids_of, on_host


def share_up_to_bin(loss: Values, bins: int) -> Values:
    """Share of the losses in the bin of each loss and those below it, of equal bins from the smallest loss to the largest.

    Args:
        loss: Shape (n,), finite, n >= 1.
        bins: How many.

    Returns:
        Shape (n,), float64, within (0, 1]; all 1 where all losses are equal.
    """
    low, high = np.float64(loss.min()), np.float64(loss.max())
    if low == high:
        return np.ones(len(loss))
    scaled = (loss.astype(np.float64) - low) / (high - low)
    index = np.minimum((scaled * bins).astype(np.int64), bins - 1)
    return np.cumsum(np.bincount(index, minlength=bins))[index] / len(loss)


def share_up_to(loss: Values) -> Values:
    """Share of the losses that are not above each loss.

    Args:
        loss: Shape (n,), finite.

    Returns:
        Shape (n,), float64, within (0, 1].
    """
    return np.searchsorted(np.sort(loss), loss, side="right") / len(loss)


@dataclass(frozen=True)
class EpochSelectiveBackprop:
    """Keep each sample with chance q ** beta of the percentile q of its last loss; refresh what is hidden.

    About 1 / (1 + beta) stays where the losses spread evenly over the bins, more where few are large.

    Args:
        beta: Selectivity, 0 or more; 0 keeps everything. Published: 0.43, which aims at 70 %; 1 on Fractal-3K.
        bins: Of the histogram, 1 or more. Published: 1000.
        min_probability: Least chance of any sample, [0, 1]. Published: 0.
        percentile: "histogram", as published; "rank": the exact share of losses up to the sample's own.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(refresh="eval")
    card: ClassVar[Card] = Card(
        summary="Selective-Backprop once an epoch, by last losses",
        paper="arXiv:2310.10102",
        rule="hidden by chance of the percentile of its last loss",
        biased="Yes, towards samples of large loss: nothing is re-weighted.",
        forwards="Every hidden sample once an epoch.",
        claim="None: the paper compares with it. On Fractal-3K with beta 1 its epochs took 306 s, where hiding by forgetting "
        "took 398 s.",
        differences=(
            "Draws come from the run's own generator; the code's come from a global one that ranks have to share by luck.",
            "Hidden samples are forwarded in eval mode; the code does so in train mode.",
            "Samples without a finite loss are kept and not counted; the code cannot bin them.",
        ),
        bytes_per_sample=4,
        caveat="With the published histogram one outlier decides how many are hidden: all others fall into few bins. "
        'percentile="rank" is not moved by it.',
    )
    beta: float = 0.43
    bins: int = 1000
    min_probability: float = 0.0
    percentile: Literal["histogram", "rank"] = "histogram"

    def __post_init__(self) -> None:
        if not (isinstance(self.beta, int | float) and 0 <= self.beta < math.inf):
            raise ValueError(f"EpochSelectiveBackprop: `beta` must be a finite number of 0 or more, got {self.beta!r}")
        if not (isinstance(self.bins, int) and not isinstance(self.bins, bool) and self.bins >= 1):
            raise ValueError(f"EpochSelectiveBackprop: `bins` must be a whole number of 1 or more, got {self.bins!r}")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(
                f"EpochSelectiveBackprop: `min_probability` is a probability, within [0, 1], got {self.min_probability}"
            )
        if self.percentile not in ("histogram", "rank"):
            raise ValueError(f"EpochSelectiveBackprop: `percentile` must be 'histogram' or 'rank', got {self.percentile!r}")

    def columns(self) -> dict[str, Column]:
        """The last loss: 4 bytes a sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def chances(self, loss: Values) -> Values:
        """Chance of each sample to stay: 1 where the loss is not finite. Shapes (N,), float64 out."""
        chance, usable = np.ones(len(loss)), np.isfinite(loss)
        if usable.any():
            finite = loss[usable]
            q = share_up_to_bin(finite, self.bins) if self.percentile == "histogram" else share_up_to(finite)
            chance[usable] = np.maximum(q**self.beta, self.min_probability)
        return chance

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """One draw a sample, in the order of the ids."""
        loss = on_host(records["loss"])
        if epoch == 0:
            return full_plan(len(loss))
        chance = self.chances(loss)
        kept = torch.rand(len(loss), generator=generator, dtype=torch.float64).numpy() < chance
        refresh = ids_of(~kept)
        facts = {"scheduled_fraction": 1 - chance.mean(), "actual_fraction": len(refresh) / len(loss)}
        return EpochPlan(ids_of(kept), refresh=refresh, facts=facts)
