"""InfoBatch: prune a random part of the samples below the mean loss, and raise the weight of the remaining ones.

Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024, arXiv:2303.04947. Original
code: github.com/NUS-HPC-AI-Lab/InfoBatch. It is unbiased: the expected weighted loss is the loss over the full data.

The code keeps int((1 - r) * n) of the n samples below the mean with a weight of 1 / (1 - r), which can lose up to the weight of
one sample. Here their weight is n divided by the number kept, which is at least one (`rescale="ratio"` restores the weight of
the code). Two details of the code are left out: weights of the last pruned epoch in the annealing epochs, and a loss of 3 for
samples that were not seen yet.

A prune fraction of 0.3, 0.5 or 0.7 leaves out 12, 20 or 28 % of CIFAR-10, because it is a share of the samples below the mean,
in the epochs that prune. `target` is the share of all samples over the whole training run, which is not part of the paper: the
threshold of each epoch is then the quantile of the losses that leaves out as much. The method stays unbiased with any
threshold, because the threshold depends on earlier epochs only. The first epoch keeps every sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_within, full_plan
from thresher.methods._target import CANDIDATES, LEFT_OUT, Target, check_target
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import (
    Mask,
    Values,
    draw_lots,
    ids_of,
    on_host,
    quantile_cut,
    share,
    smallest,
)


def well_learned(loss: Values, threshold: float | Literal["mean"]) -> Mask:
    """Marks the samples whose loss is strictly below the threshold; never a sample without a finite loss.

    Args:
        loss: Last loss of each sample, shape (N,).
        threshold: Threshold: "mean" for the mean of the finite losses, or a quantile of them, (0, 1).

    Returns:
        Bool mask (N,).
    """
    usable = np.isfinite(loss)
    if not usable.any():
        return usable
    finite = loss if usable.all() else loss[usable]
    if threshold == "mean":
        cut = finite.mean(dtype=np.float64)
    else:
        cut = np.float64(quantile_cut(finite, threshold))
    return (loss < cut) & usable


@dataclass(frozen=True)
class InfoBatch:
    """Skips a random part of the samples below the mean loss, and raises the weights of the other samples below it.

    The sum of the weighted losses over an epoch has the same expectation as with all data. The sum over a batch is divided
    by the size of the batch, as in the official code: an epoch with K instead of N samples takes fewer steps, but each is N / K
    times as large, and their total stays the same. The last epochs train on all samples.

    Args:
        prune_fraction: Share pruned of the samples below the threshold, r, [0, 1). Default and published: 0.5.
        delta: Share of the epochs that prune, [0, 1]; the other epochs train on every sample with weight 1. Default and
            published: 0.875.
        threshold: Threshold of the loss: "mean" (default and published), or a quantile within (0, 1).
        rescale: Weight of the remaining samples below the threshold: "mass" (default) is their number before pruning divided
            by their number afterwards; "ratio" is 1 / (1 - r), as in the official code.
        target: Share of the samples that the whole training run leaves out, [0, 0.9], at most what the epochs that prune can
            leave out. It determines the threshold of each epoch; if this would be above 95 % of the losses, the prune fraction
            is raised instead, and with it the weights, to 19 at most. Large targets need a smaller learning rate: an epoch that
            keeps a quarter of the samples takes steps four times as large. With 0.5 in ten epochs, up to 2 of 5 trainings of
            our league diverged. Default None: as many samples as the threshold gives.

    Raises:
        ValueError: A setting is out of its range, settings contradict each other, or the epochs are too few for the target.

    Example:
        >>> import torch
        >>> from thresher import InfoBatch
        >>> records = {"loss": torch.tensor([0.1, 0.9, 0.2, 0.8])}
        >>> plan = InfoBatch().plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), sorted(plan.weights.tolist())
        (3, [1.0, 1.0, 2.0])
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="prune below the mean loss at random, rescale",
        paper="arXiv:2303.04947",
        rule="pruned: its loss was below the {threshold}, and it was drawn with chance {prune_fraction}",
        biased="No: the expected weighted sum of the losses over an epoch is that of all data.",
        forwards="None.",
        claim="Saves 40 % of the cost without a loss of accuracy on CIFAR-10, CIFAR-100, ImageNet-1K and ADE20K, and 20 to "
        "27 % in pre-training, diffusion models and instruction tuning.",
        differences=(
            "The weight is the number of samples below the mean divided by the number of them that is kept; in the code it is "
            '1 / (1 - r) (rescale="ratio").',
            "All weights are 1 in the annealing epochs; the code leaves the last weights where delta * epochs is not whole.",
            "Samples that were not seen yet are kept; the code gives them a loss of 3.",
        ),
        bytes_per_sample=4,
    )
    prune_fraction: float = 0.5
    delta: float = 0.875
    threshold: float | Literal["mean"] = "mean"
    rescale: Literal["mass", "ratio"] = "mass"
    target: float | None = None

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "prune_fraction")
        check_within(self, "[0, 1]", "delta")
        if self.threshold != "mean" and not (
            isinstance(self.threshold, float) and 0 < self.threshold < 1
        ):
            raise ValueError(
                f"InfoBatch: `threshold` must be 'mean' or a quantile within (0, 1), got {self.threshold!r}"
            )
        if self.rescale not in ("mass", "ratio"):
            raise ValueError(
                f"InfoBatch: `rescale` must be 'mass' or 'ratio', got {self.rescale!r}"
            )
        check_target(self, self.target)
        if self.target is not None and (
            not self.prune_fraction or self.threshold != "mean" or self.rescale != "mass"
        ):
            raise ValueError(
                f"InfoBatch: `target`={self.target} chooses the threshold and the weights: set `prune_fraction` above 0, and "
                "leave out `threshold` and `rescale`"
            )

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes; with `target` also how often it was left out, 2."""
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            **({} if self.target is None else LEFT_OUT),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with all samples above the threshold and a random part of the others, with their weights."""
        loss = on_host(records["loss"])
        n = len(loss)
        stop = share(self.delta, epochs)
        if self.target is None:
            target = None
        else:
            target = Target(self, self.target, 1, stop, epochs)
        if not self.prune_fraction or not 1 <= epoch < stop:
            return full_plan(n)
        if target is None:
            below = well_learned(loss, self.threshold)
            learned = int(np.count_nonzero(below))
            kept = max(1, share(1 - self.prune_fraction, learned))
        else:
            below, learned, kept = self._for_target(loss, target.due(records, epoch))
        if kept >= learned:
            plan = full_plan(n)
            mask = np.ones(n, dtype=np.bool_)
        else:
            mask = draw_lots(kept, generator, n, below)
            mask |= ~below
            if self.rescale == "mass":
                factor = learned / kept
            else:
                factor = 1 / (1 - self.prune_fraction)
            weights = np.array([1, factor], dtype=np.float32)[
                below[np.flatnonzero(mask)].view(np.uint8)
            ]
            left_out = 1 - (n - learned + kept) / n
            scheduled = self.prune_fraction if target is None else left_out
            facts = {"scheduled_fraction": scheduled, "actual_fraction": left_out}
            plan = EpochPlan(ids_of(mask), weights=torch.from_numpy(weights), facts=facts)
        if target is None:
            return plan
        return target.counted(plan, mask, records, epoch)

    def _for_target(self, loss: Values, due: int) -> tuple[Mask, int, int]:
        """Returns the mask of the candidates for pruning, their number, and how many of them to keep to prune `due` samples."""
        usable = np.isfinite(loss)
        known = int(np.count_nonzero(usable))
        due = min(due, share(CANDIDATES, known))
        wanted = max(due + 1, round(due / self.prune_fraction))
        learned = min(max(due + 1, min(wanted, share(CANDIDATES, len(loss)))), known)
        below = smallest(loss, learned, usable=usable)
        return below, learned, max(1, learned - due) if due else learned
