"""Selective-Backprop once per epoch: keep each sample with a probability that grows with the percentile of its last loss.

This is the form with which Nguyen et al. compare, "KAKURENBO: Adaptively Hiding Samples in Deep Neural Network Training",
NeurIPS 2023, arXiv:2310.10102. Original code: github.com/TruongThaoNguyen/kakurenbo (the `_sb` scripts). It is biased towards
hard samples by design: nothing is re-weighted. The method of the paper on Selective-Backprop, which works batch by batch, is
`thresher.SelectiveBackprop`.

As in the code, percentiles come from a histogram of all losses between the smallest and the largest. They include the bin of
the sample itself, so the largest loss is always kept. One outlier puts all other losses into a few bins, which raises their
probabilities; `percentile="rank"` counts the losses instead.
Where the code differs:
- It draws from the global generator of each process; these agree only while all have drawn the same number of times.
- It forwards hidden samples in train mode.
- A loss that is not finite breaks its histogram; here such samples are kept and not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.methods._base import check_whole, check_within, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, ids_of, on_host


def share_up_to_bin(loss: Values, bins: int) -> Values:
    """Returns the share of losses in the histogram bin of each loss and in the bins below it.

    Args:
        loss: Loss of each sample, shape (n,), finite; n is 1 or more.
        bins: Number of equal bins between the smallest and the largest loss, 1 or more.

    Returns:
        Shares, shape (n,), float64, within (0, 1]; all 1 if all losses are equal.
    """
    low = np.float64(loss.min())
    high = np.float64(loss.max())
    if low == high:
        return np.ones(len(loss))
    index = np.empty(len(loss), dtype=np.int64)
    for part in chunks(len(loss)):
        scaled = (loss[part].astype(np.float64) - low) / (high - low)
        index[part] = np.minimum((scaled * bins).astype(np.int64), bins - 1)
    counts = np.cumsum(np.bincount(index, minlength=bins))
    return (counts / counts[-1])[index]


def share_up_to(loss: Values) -> Values:
    """Returns the share of losses that are not above each loss.

    Args:
        loss: Loss of each sample, shape (n,), finite.

    Returns:
        Shares, shape (n,), float64, within (0, 1].
    """
    order = np.argsort(loss)
    ordered = loss[order]
    shares = np.empty(len(loss))
    for part in chunks(len(loss)):
        shares[order[part]] = np.searchsorted(ordered, ordered[part], side="right")
    shares /= len(loss)
    return shares


def kept_by_chance(chance: Values, generator: torch.Generator) -> tuple[Mask, float]:
    """Draws each sample with its own probability, which is rounded up to a multiple of 2 ** -32.

    Args:
        chance: Probabilities, shape (N,), float64, [0, 1].
        generator: Random generator on the CPU.

    Returns:
        Mask of the drawn samples, shape (N,), and the mean of the probabilities.
    """
    lots = rng.lots(int(torch.randint(2**62, (), generator=generator)), range(len(chance)))
    mask = np.empty(len(chance), dtype=np.bool_)
    total = 0
    for part in chunks(len(chance)):
        limits = np.ceil(chance[part] * 2.0**32).astype(np.int64)
        mask[part] = lots[part] < limits
        total += int(limits.sum())
    return mask, total / (len(chance) << 32)


@dataclass(frozen=True)
class EpochSelectiveBackprop:
    """Keeps each sample with probability q ** beta, where q is the percentile of its last loss.

    About 1 / (1 + beta) of the samples are kept if the losses are spread evenly over the bins, and more if few losses are
    large. The others get a forward pass at the end of the epoch, which updates their losses.

    Args:
        beta: Selectivity, 0 or more; 0 keeps every sample. Default and published: 0.43, which aims at 70 %; published for
            Fractal-3K: 1.
        bins: Number of bins of the histogram, 1 or more. Default and published: 1000.
        min_probability: Least probability with which a sample is kept, [0, 1]. Default and published: 0.
        percentile: Kind of percentile: "histogram" (default and published), or "rank" for the exact share of the losses that
            are not above the loss of the sample.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import numpy as np
        >>> from thresher import EpochSelectiveBackprop
        >>> EpochSelectiveBackprop(beta=1.0).chances(np.array([0.1, 0.9, 0.2, np.nan])).round(2).tolist()
        [0.33, 1.0, 0.67, 1.0]
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(refresh="eval")
    card: ClassVar[Card] = Card(
        summary="Selective-Backprop once an epoch, by last losses",
        paper="arXiv:2310.10102",
        rule="hidden by chance: the lower the percentile of its last loss, the more often",
        biased="Yes, towards samples of large loss: nothing is re-weighted.",
        forwards="Every hidden sample once per epoch.",
        claim="None: the paper only compares with it. On Fractal-3K with beta = 1 its epochs took 306 s; hiding by forgetting "
        "took 398 s.",
        differences=(
            "The draw of a sample depends on the seed, the epoch and its id; in the code draws come from a global generator, "
            "which differs between processes.",
            "Hidden samples are forwarded in eval mode; in the code they are forwarded in train mode.",
            "Samples without a finite loss are kept and not counted; the code fails on them.",
        ),
        bytes_per_sample=4,
        caveat="With the published histogram one outlier decides how many samples are hidden, because all other losses fall "
        'into a few bins. percentile="rank" does not depend on outliers.',
    )
    beta: float = 0.43
    bins: int = 1000
    min_probability: float = 0.0
    percentile: Literal["histogram", "rank"] = "histogram"

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "beta")
        check_whole(self, "bins")
        check_within(self, "[0, 1]", "min_probability")
        if self.percentile not in ("histogram", "rank"):
            raise ValueError(
                f"EpochSelectiveBackprop: `percentile` must be 'histogram' or 'rank', got {self.percentile!r}"
            )

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def chances(self, loss: Values) -> Values:
        """Returns the probability with which each sample is kept.

        Args:
            loss: Last loss of each sample, shape (N,).

        Returns:
            Probabilities, shape (N,), float64; 1 if the loss is not finite.
        """
        chance = np.ones(len(loss))
        usable = np.isfinite(loss)
        if usable.any():
            finite = loss[usable]
            if self.percentile == "histogram":
                q = share_up_to_bin(finite, self.bins)
            else:
                q = share_up_to(finite)
            chance[usable] = np.maximum(q**self.beta, self.min_probability)
        return chance

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the samples that were drawn to be kept."""
        loss = on_host(records["loss"])
        if epoch == 0:
            return full_plan(len(loss))
        kept, expected = kept_by_chance(self.chances(loss), generator)
        facts = {
            "scheduled_fraction": 1 - expected,
            "actual_fraction": np.count_nonzero(~kept) / len(kept),
        }
        return EpochPlan(ids_of(kept), refresh=ids_of(~kept), facts=facts)
