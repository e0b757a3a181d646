"""Small Loss: train on the samples of each batch with the smallest losses, which leaves out outliers.

Shah, Wu and Sanghavi, "Choosing the Sample with Lowest Loss makes SGD Robust", arXiv:2001.03316 (MKL-SGD). In this form it is
a base selector of AdaSelection, arXiv:2306.10728. It is biased towards easy samples by design: nothing is re-weighted.

MKL-SGD draws k samples per step and trains on the one with the lowest loss. `SmallLoss(keep=1 / k)` with batches of k samples
does the same, except that each sample appears once per epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.methods._base import KeepSmallest
from thresher.methods.contract import Card


@dataclass(frozen=True)
class SmallLoss(KeepSmallest):
    """Trains on the floor(keep * n) samples of each batch with the smallest losses, at least one.

    Of samples with equal losses, those with the lower ids are kept. A sample without a finite loss is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5; published: 0.1 to 0.5, and one sample out of k for MKL-SGD.

    Raises:
        ValueError: `keep` is outside (0, 1].

    Example:
        >>> import torch
        >>> from thresher import SmallLoss
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([0.1, 0.9, 0.5, 0.2])}
        >>> plan, state = SmallLoss(keep=0.5).plan_batch(signals, {}, step=0, generator=torch.Generator())
        >>> plan.rows
        tensor([0, 3])
    """

    card: ClassVar[Card] = Card(
        summary="train on the batch's smallest losses",
        paper="arXiv:2001.03316",
        rule="its loss was not among the smallest of its batch",
        biased="towards samples of small loss; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none if the loop's own forward pass is enough",
        claim="robust to outliers, with a proof for sums of convex losses (MKL-SGD)",
        caveat="it is made for data with outliers, not to save cost: on clean data it trains on samples that are learned "
        "already. CIFAR-100 31.96 % where random selection has 71.05 %, mean over keep = 0.1 to 0.5 (AdaSelection, table 4)",
    )

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Returns the negated losses, shape (n,)."""
        return -signals["loss"]
