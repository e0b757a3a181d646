"""InfoBatch: prune a random part of the samples below the mean loss, and rescale what is kept of them.

Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024, arXiv:2303.04947.
Original code: github.com/NUS-HPC-AI-Lab/InfoBatch. Unbiased: the expected weighted loss is that of the full data.

Where code and paper differ: the code keeps int((1 - r) * n) of the n samples below the mean and weights them 1/(1 - r),
which loses up to one sample's weight; here their weight is n over the number kept, at least one (`rescale="ratio"`
restores the code's weight). The code's leftover weights in the annealing epochs and its scores of 3 before the first
loss are not kept.
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
from thresher.selection import Mask, Values, chosen, ids_of, on_host, quantile_cut, share


def well_learned(loss: Values, threshold: float | Literal["mean"]) -> Mask:
    """Samples strictly below the threshold; those without a finite loss are never among them.

    Args:
        loss: Shape (N,).
        threshold: "mean" of the finite losses, or the quantile in (0, 1) to cut at.

    Returns:
        Bool mask (N,).
    """
    usable = np.isfinite(loss)
    if not usable.any():
        return usable
    finite = loss if usable.all() else loss[usable]
    if threshold == "mean":
        # Rounding must not lift the mean of equal losses above them.
        cut = min(np.mean(finite, dtype=np.float64), np.float64(finite.max()))
    else:
        cut = np.float64(quantile_cut(finite, threshold))
    return (loss < cut) & usable


@dataclass(frozen=True)
class InfoBatch:
    """Soft pruning with rescaling, and full data at the end.

    The sum of weighted losses over an epoch has the full data's expectation. A batch is divided by its own size, as in the
    official code, so that an epoch of K batches in place of N takes steps N / K times as large: the total of an epoch stays.

    Args:
        prune_fraction: r, share pruned of the samples below the threshold, [0, 1). Published: 0.5.
        delta: Share of the epochs that prune; the rest train on everything, with weights 1. [0, 1]. Published: 0.875.
        threshold: "mean" (published), or a quantile in (0, 1).
        rescale: Weight of the kept samples below the threshold: "mass": their number before pruning over their number
            after; "ratio": 1 / (1 - r), as the official code.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="prune below the mean loss at random, rescale",
        paper="arXiv:2303.04947",
        rule="pruned: its loss was below the {threshold}, and it was drawn with chance {prune_fraction}",
        biased="No: the expected weighted sum of the losses over an epoch is that of all data.",
        forwards="None.",
        claim="40 % of the cost at no loss of accuracy on CIFAR-10, CIFAR-100, ImageNet-1K and ADE20K; 20 to 27 % on "
        "pre-training, diffusion and instruction tuning.",
        differences=(
            'The weight is the number below the mean over the number kept of it; the code\'s is 1 / (1 - r) (rescale="ratio").',
            "The annealing epochs have weights of 1; the code leaves the last weights where delta * epochs is not whole.",
            "Samples without a loss yet are kept; the code gives them a loss of 3.",
        ),
        bytes_per_sample=4,
    )
    prune_fraction: float = 0.5
    delta: float = 0.875
    threshold: float | Literal["mean"] = "mean"
    rescale: Literal["mass", "ratio"] = "mass"

    def __post_init__(self) -> None:
        if not 0 <= self.prune_fraction < 1:
            raise ValueError(f"InfoBatch: `prune_fraction` is a share removed, within [0, 1), got {self.prune_fraction}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"InfoBatch: `delta` is a share of the epochs, within [0, 1], got {self.delta}")
        if self.threshold != "mean" and not (isinstance(self.threshold, float) and 0 < self.threshold < 1):
            raise ValueError(f"InfoBatch: `threshold` must be 'mean' or a quantile within (0, 1), got {self.threshold!r}")
        if self.rescale not in ("mass", "ratio"):
            raise ValueError(f"InfoBatch: `rescale` must be 'mass' or 'ratio', got {self.rescale!r}")

    def columns(self) -> dict[str, Column]:
        """The last loss: 4 bytes a sample, and 4 for the weights of the epoch in progress."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Everything above the threshold, and a random part of the rest with its weight."""
        loss = on_host(records["loss"])
        n = len(loss)
        pruning = epoch > 0 and epoch + 1 <= self.delta * epochs + 1e-9
        below = well_learned(loss, self.threshold) if pruning else np.zeros(n, dtype=np.bool_)
        learned = int(np.count_nonzero(below))
        kept = max(1, share(1 - self.prune_fraction, learned))
        if not self.prune_fraction or kept >= learned:
            return EpochPlan(torch.arange(n), facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})
        mask = np.ones(n, dtype=np.bool_)
        mask[below] = chosen(learned, kept, generator)
        ids = ids_of(mask)
        factor = learned / kept if self.rescale == "mass" else 1 / (1 - self.prune_fraction)
        weights = np.where(below[mask], np.float32(factor), np.float32(1))
        facts = {"scheduled_fraction": self.prune_fraction, "actual_fraction": 1 - len(ids) / n}
        return EpochPlan(ids, weights=torch.from_numpy(weights), facts=facts)
