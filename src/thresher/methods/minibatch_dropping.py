"""Stochastic mini-batch dropping (SMD) of E2-Train: every mini-batch of an epoch is dropped with a fixed probability.

Wang et al., "E2-Train: Training State-of-the-art CNNs with Over 80% Energy Savings", NeurIPS 2019, arXiv:1910.13349.
It is unbiased without weights: which mini-batches are dropped does not depend on their samples.

The mini-batches of a shuffled epoch are sets of samples that are drawn uniformly. An epoch without some of them is therefore a
uniformly random subset of as many samples, which is chosen before anything is loaded. At least one mini-batch is kept. The
learning rate of the paper follows the iterations, dropped ones included: step a scheduler once per epoch, or use
`thresher.ProgressLR`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_whole, check_within
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, chosen, ids_of


def kept_batches(batches: int, drop_fraction: float, generator: torch.Generator) -> Mask:
    """Marks the mini-batches that are kept, each with probability 1 - drop_fraction, at least one of them.

    Args:
        batches: Number of mini-batches, 1 or more.
        drop_fraction: Probability that a mini-batch is dropped, [0, 1).
        generator: Random generator on the CPU.

    Returns:
        Bool mask (batches,).
    """
    draws = torch.rand(batches, generator=generator, dtype=torch.float64).numpy()
    kept = draws >= drop_fraction
    kept[np.argmax(draws)] = True
    return kept


@dataclass(frozen=True)
class MinibatchDropping:
    """Leaves out randomly chosen mini-batches in each epoch; the learning rate does not change.

    Args:
        drop_fraction: Probability that a mini-batch is dropped, p, [0, 1). Default and published: 0.5.
        batch_size: Number of samples per mini-batch, B, 1 or more; use the batch size of the loader. Default 128, as published
            for CIFAR-10.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import MinibatchDropping
        >>> method, records = MinibatchDropping(batch_size=10), {"loss": torch.zeros(100)}
        >>> plan = method.plan_epoch(records, epoch=0, epochs=5, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids) == 10 * plan.facts["batches"]
        True
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(records=False)
    card: ClassVar[Card] = Card(
        summary="drop whole mini-batches at random",
        paper="arXiv:1910.13349",
        rule="its mini-batch was dropped",
        biased="No: mini-batches are dropped independently of their samples.",
        forwards="None.",
        claim="Together with the two other techniques of the paper it saves more than 84 % of the energy without a loss of "
        "accuracy for ResNet-110 on CIFAR-100, and more than 90 % at a loss of 2 points for ResNet-74 on CIFAR-10.",
        bytes_per_sample=4,
        caveat="It is random selection: a uniform subset whose size is random, too.",
        missing=(
            "Selective layer update, the second technique of the paper.",
            "Predictive sign gradients, the third.",
        ),
    )
    drop_fraction: float = 0.5
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "drop_fraction")
        check_whole(self, "batch_size")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, for information only; 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with as many random samples as the kept mini-batches have."""
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
