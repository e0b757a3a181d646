"""Variants of Winnow, and a method that is composed with it, written as a user of the library writes a method."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher import BatchPlan, Column, EpochPlan, Requirements, Winnow
from thresher.methods.contract import Card, State
from thresher.methods.winnow import draw_keys
from thresher.records import NEVER_SEEN
from thresher.selection import on_host
from thresher.shards import shard_of

LARGEST = 1e12
"""Score of a row whose own is not finite, so that it is kept."""


def average(factor: float, old: Tensor, new: Tensor) -> Tensor:
    """Returns the exponential average of values; the first value of a sample is its first average.

    Args:
        factor: Weight of the old average, [0, 1).
        old: Averages so far, shape (n,); `NEVER_SEEN` where there is none.
        new: New values, shape (n,).
    """
    return torch.where(old == NEVER_SEEN, new, factor * old + (1 - factor) * new)


@dataclass(frozen=True)
class AveragedUncertainty(Winnow):
    """Winnow that draws in proportion to an average of all uncertainties of a sample, not to the last one.

    Losses and last uncertainties are compared as in Winnow, so that both draw uniformly in the same case.

    Args:
        factor: Weight of the old average, [0, 1). Default 0.5.
    """

    card: ClassVar[Card] = replace(Winnow.card, bytes_per_sample=8)
    factor: float = 0.5
    paced: bool = False

    def columns(self) -> dict[str, Column]:
        """Returns the columns of Winnow, and the average."""
        averaged = Column(torch.float32, fill=NEVER_SEEN, signal="uncertainty", merge=partial(average, self.factor))
        return {**super().columns(), "averaged": averaged}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns the plan of Winnow with keys by the averages."""
        plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        if plan.keys is None or plan.facts.get("uniform"):
            return plan
        base = int(torch.randint(2**62, (), generator=generator))
        averaged, first = on_host(records["averaged"]), shard_of(records).first
        return replace(plan, keys=torch.from_numpy(draw_keys(averaged, len(averaged), base, first)))


@dataclass(frozen=True)
class ChangingShare(Winnow):
    """Winnow whose share changes from `share` in the first epoch to `last` in the last one, by the same step each epoch.

    Args:
        last: Share in the last epoch, (0, 1]. Default 0.65.
    """

    last: float = 0.65
    paced: bool = False

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns the plan of Winnow with the share of the epoch."""
        settings = {field.name: getattr(self, field.name) for field in fields(Winnow)}
        now = self.share + (self.last - self.share) * epoch / max(1, epochs - 1)
        winnow = Winnow(**{**settings, "share": now})
        return winnow.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)


def chances(ascending: Tensor, total: float) -> Tensor:
    """Returns the chances min(1, s / tau) of rows to be kept, with the threshold tau at which their sum is `total`.

    Args:
        ascending: Scores, shape (n,), above 0, ascending.
        total: Expected number of rows, (0, n].

    Returns:
        Chances, shape (n,), ascending, within (0, 1].
    """
    sums = ascending.cumsum(0).flip(0)  # at m: the sum of all but the m largest
    left = (total - torch.arange(len(sums), device=sums.device)).to(sums.dtype)  # at m: what these rows share
    fits = (left > 0) & (ascending.flip(0) * left <= sums * (1 + 1e-12))
    clipped = fits.to(torch.int8).argmax()
    return (ascending * left[clipped] / sums[clipped]).clamp(max=1)


@dataclass(frozen=True)
class ThresholdKeep:
    """Keeps rows of a batch with chance p = min(1, s / tau) and weight 1 / p, so that the expected gradient is the batch's.

    The threshold tau is that at which `keep * n` rows are expected; their number differs from it by less than one. Where all
    scores are equal, so are the chances and the weights.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.75.
        score: Signal that is the score s: "grad_norm" bounds the gradient of a sample. Default "grad_norm".
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    card: ClassVar[Card] = Card(
        summary="keep rows with a chance of their score over a threshold, and weights that remove the bias",
        rule="not drawn: its score was below the threshold",
        biased="no: a row that is kept counts 1 / p times",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves",
    )
    keep: float = 0.75
    score: Literal["grad_norm", "loss", "uncertainty"] = "grad_norm"

    @property
    def requires(self) -> Requirements:
        """The signal that is the score."""
        return Requirements(signals=(self.score,))

    def init_state(self) -> State:
        """Returns an empty state: nothing is remembered from step to step."""
        return {}

    def count(self, n: int) -> int | None:
        """Returns None: the number of rows depends on chance where `keep * n` is not whole."""
        return None

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns a systematic draw among the rows, ordered by (score, id)."""
        order = signals["id"].argsort()
        score = signals[self.score].detach()[order].double().nan_to_num(LARGEST, LARGEST, LARGEST).clamp(min=1e-12)
        ascending, by_score = score.sort(stable=True)
        order, n = order[by_score], len(score)
        total, first = self.keep * n, float(torch.rand((), generator=generator, dtype=torch.float64))
        chance = chances(ascending, total)
        k = int(total - first) + 1 if total > first else 0  # the numbers first, first + 1, ... below the total
        ticks = first + torch.arange(k, device=chance.device, dtype=chance.dtype)
        picked = torch.searchsorted(chance.cumsum(0), ticks, right=True).clamp(max=n - 1)
        rows, back = order[picked].sort()
        weights = (k / n / chance[picked][back]).float()
        return BatchPlan(rows, weights=weights, facts={"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - k / n}), {}
