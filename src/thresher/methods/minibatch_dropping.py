"""Stochastic mini-batch dropping (SMD) of E2-Train: every mini-batch of an epoch is dropped with a fixed chance.

Wang et al., "E2-Train: Training State-of-the-art CNNs with Over 80% Energy Savings", NeurIPS 2019, arXiv:1910.13349.
Unbiased: what is dropped does not depend on the samples, and nothing is re-weighted.

The mini-batches of a fresh shuffle are sets of samples drawn uniformly, so an epoch without some of them is a uniformly
random subset of as many samples; that is what is planned, before anything is loaded. At least one mini-batch is kept. The
paper's learning rate follows the iterations, dropped ones included: step a scheduler once an epoch, or by
`thresher.ProgressLR`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods.card import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, chosen, ids_of


def kept_batches(batches: int, drop_fraction: float, generator: torch.Generator) -> Mask:
    """Which of `batches` mini-batches stay, each with chance 1 - drop_fraction; one of them where chance leaves none.

    Returns:
        Bool mask (batches,).
    """
    draws = torch.rand(batches, generator=generator, dtype=torch.float64).numpy()
    kept = draws >= drop_fraction
    kept[np.argmax(draws)] = True
    return kept


@dataclass(frozen=True)
class MinibatchDropping:
    """Train each epoch without a random part of its mini-batches; learning rate unchanged.

    Args:
        drop_fraction: p, chance of each mini-batch to be dropped, [0, 1). Published: 0.5.
        batch_size: B, samples of a mini-batch, 1 or more: the loader's. Published for CIFAR-10: 128.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="drop whole mini-batches at random",
        paper="arXiv:1910.13349",
        rule="its mini-batch was dropped",
        biased="No: mini-batches are dropped whatever is in them.",
        forwards="None.",
        claim="Together with the paper's two other techniques, of the energy: more than 84 % without loss for ResNet-110 on "
        "CIFAR-100, more than 90 % for 2 points of accuracy for ResNet-74 on CIFAR-10.",
        bytes_per_sample=4,
        caveat="It is random selection: a uniform subset whose size is left to chance as well.",
        missing=(
            "Selective layer update, the second technique of the paper.",
            "Predictive sign gradients, the third.",
        ),
    )
    drop_fraction: float = 0.5
    batch_size: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.drop_fraction < 1:
            raise ValueError(f"MinibatchDropping: `drop_fraction` is a share removed, within [0, 1), got {self.drop_fraction}")
        if not (isinstance(self.batch_size, int) and not isinstance(self.batch_size, bool) and self.batch_size >= 1):
            raise ValueError(f"MinibatchDropping: `batch_size` must be a whole number of 1 or more, got {self.batch_size!r}")

    def columns(self) -> dict[str, Column]:
        """The last loss, to look at; the draw does not depend on it."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """As many samples as the mini-batches that stay have."""
        n = len(records["loss"])
        sizes = np.full(-(-n // self.batch_size), self.batch_size)
        sizes[-1] = n - self.batch_size * (len(sizes) - 1)
        kept = kept_batches(len(sizes), self.drop_fraction, generator)
        ids = ids_of(chosen(n, int(sizes[kept].sum()), generator))
        facts = {
            "scheduled_fraction": self.drop_fraction,
            "actual_fraction": 1 - len(ids) / n,
            "batches": int(np.count_nonzero(kept)),
        }
        return EpochPlan(ids, facts=facts)
