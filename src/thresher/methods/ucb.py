"""UCB and epsilon-greedy: keep the largest moving means of the losses, and explore by their variance or by chance.

Raju et al., "Accelerating Deep Learning with Dynamic Data Pruning", arXiv:2111.12621. Read in the abstract and in a port to
timm by other authors. The moving mean and variance of the losses of a sample are

    v <- (1 - a) v + a (l - m)^2,    m <- (1 - a) m + a l

in this order, after each epoch that trained on it. "ucb" keeps the largest m + c v; "epsilon" keeps the largest m, except that
a share epsilon of the kept samples is drawn from all others. A choice is used for `every` epochs. It is biased towards large
losses: nothing is re-weighted.

The first epoch keeps every sample, so each has a mean. The port computes in double precision; here means and variances are
float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_keep, check_whole, check_within, full_plan
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import EPOCH, NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, draw_lots, ids_of, largest, on_host, share

LARGEST = np.finfo(np.float32).max
"""Largest variance and score. The limit keeps the scores of samples with a mean finite."""


def moments(
    loss: Values, mean: Values, variance: Values, seen: Mask, alpha: float
) -> tuple[Values, Values]:
    """Returns the moving means and variances after an epoch, each of shape (N,), float32.

    Args:
        loss: Last loss of each sample, shape (N,).
        mean: Moving means, shape (N,), float32; NaN for a sample that has none yet.
        variance: Moving variances, shape (N,), float32.
        seen: Mask of the samples that the last epoch trained on, shape (N,), bool. A loss that is not finite changes nothing.
        alpha: Weight of the new loss, (0, 1].

    Example:
        >>> mean, variance = np.float32([1.0, np.nan]), np.float32([0.0, 0.0])
        >>> moments(np.float32([3.0, 3.0]), mean, variance, np.array([True, True]), alpha=0.5)
        (array([2., 3.], dtype=float32), array([2., 0.], dtype=float32))
    """
    mean = mean.copy()
    variance = variance.copy()
    for part in chunks(len(loss)):
        new, m, v = (values[part].astype(np.float64) for values in (loss, mean, variance))
        there = seen[part] & np.isfinite(new)
        away = np.where(np.isnan(m), 0.0, new - np.where(np.isnan(m), 0.0, m))
        with np.errstate(over="ignore", invalid="ignore"):
            variance[part] = np.where(
                there, np.minimum((1 - alpha) * v + alpha * away**2, LARGEST), v
            )
            mean[part] = np.where(there, np.where(np.isnan(m), new, m + alpha * away), m)
    return mean, variance


@dataclass(frozen=True)
class Ucb:
    """Keeps the samples with the largest moving means of their losses, with a bonus for variance or a random part.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N) samples, at least one. Default 0.5.
        explore: Kind of exploration: "ucb" (default) adds `c` times the moving variance to the moving mean; "epsilon" draws a
            share `epsilon` of the kept samples from the samples that would be left out.
        c: Factor on the variance, 0 or more. Default 1, which is not taken from the paper.
        epsilon: Share of the kept samples that is drawn, [0, 1]. Default 0.1, which is not taken from the paper.
        alpha: Weight of a new loss in the moving mean and variance, (0, 1]. Default 0.2, which is not taken from the paper.
        every: Number of epochs for which a choice is used, 1 or more. Default 1.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Ucb
        >>> nothing = torch.full((4,), torch.nan)
        >>> records = {"loss": torch.tensor([0.1, 0.9, 0.2, 0.8]), "mean": nothing, "variance": torch.zeros(4)}
        >>> records |= {"epoch": torch.zeros(4, dtype=torch.int32), "kept": torch.ones(4, dtype=torch.bool)}
        >>> Ucb().plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0)).ids
        tensor([1, 3])
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="the largest moving mean losses, and some exploration",
        paper="arXiv:2111.12621",
        rule="the moving mean of its losses was not among the largest",
        biased="Yes, towards samples of large loss: nothing is re-weighted.",
        forwards="None.",
        claim="Up to two times less time on CIFAR-10 and CIFAR-100. At high rates of pruning, random selection in each epoch "
        "is a strong baseline, as the authors say.",
        differences=(
            "The factors c, epsilon and alpha of the paper were not available; these defaults are our own.",
            "The first epoch keeps every sample.",
            "Samples without a finite loss are kept, before all others.",
        ),
        bytes_per_sample=17,
        missing=(
            "A rule for samples that were left out long ago: they keep their last mean. The paper has no rule, either.",
        ),
    )
    keep: float = 0.5
    explore: Literal["ucb", "epsilon"] = "ucb"
    c: float = 1.0
    epsilon: float = 0.1
    alpha: float = 0.2
    every: int = 1

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if self.explore not in ("ucb", "epsilon"):
            raise ValueError(f"Ucb: `explore` must be 'ucb' or 'epsilon', got {self.explore!r}")
        check_within(self, "[0, inf)", "c")
        check_within(self, "[0, 1]", "epsilon")
        check_within(self, "(0, 1]", "alpha")
        check_whole(self, "every")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 17 bytes: loss, moving mean and variance, epoch last seen, last choice."""
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            "mean": Column(torch.float32, fill=math.nan, merge="plan"),
            "variance": Column(torch.float32, merge="plan"),
            "epoch": Column(torch.int32, fill=-1, signal=EPOCH),
            "kept": Column(torch.bool, merge="plan"),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the samples of the largest scores, or with the last choice while it holds."""
        loss = on_host(records["loss"])
        if epoch == 0:
            return full_plan(len(loss))
        seen = on_host(records["epoch"]) == epoch - 1
        mean, variance = moments(
            loss, on_host(records["mean"]), on_host(records["variance"]), seen, self.alpha
        )
        known = np.isfinite(loss) & np.isfinite(mean)
        choice = on_host(records["kept"])
        if (epoch - 1) % self.every == 0 or not choice.any():
            choice = self._chosen(self._scores(mean, variance, known), known, generator)
        kept = choice | ~known
        return EpochPlan(
            ids_of(kept),
            facts={
                "scheduled_fraction": 1 - self.keep,
                "actual_fraction": np.count_nonzero(~kept) / len(kept),
            },
            remember={
                name: torch.from_numpy(v)
                for name, v in (("mean", mean), ("variance", variance), ("kept", choice))
            },
        )

    def _scores(self, mean: Values, variance: Values, known: Mask) -> Values:
        """Returns the scores, shape (N,), float32; NaN if they are not known."""
        score = np.empty_like(mean)
        c = np.float32(self.c if self.explore == "ucb" else 0)
        for part in chunks(len(mean)):
            with np.errstate(over="ignore"):
                upper = np.fmin(mean[part] + c * variance[part], LARGEST)  # LARGEST for NaN, too
            score[part] = np.where(known[part], upper, np.nan)
        return score

    def _chosen(self, score: Values, known: Mask, generator: torch.Generator) -> Mask:
        """Marks the samples with the largest scores: the share to keep, minus the samples without a score, which are kept."""
        k = max(0, max(1, share(self.keep, len(known))) - int(np.count_nonzero(~known)))
        drawn = share(self.epsilon, k) if self.explore == "epsilon" else 0
        best = largest(score, k - drawn)
        del score
        if drawn:
            best |= draw_lots(drawn, generator, len(known), known & ~best)
        return best
