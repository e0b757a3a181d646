"""A probe: samples that are held back from training, whose losses say whether the network gets worse on what it does not see.

From time to time the held-back samples get a forward-only pass. The loss of each is compared with its loss in the best
evaluation so far: the same samples twice, so that it does not matter how hard they are. Losses are compared on a scale that is
logarithmic for large ones: a network that becomes too sure of itself has a few losses that grow and grow while it is right as
often as before, and that is no damage. A single evaluation may be bad by chance, since a network at a high learning rate is
better in one epoch and worse in the next. So the network falls behind only where two evaluations in a row are worse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thresher.records import Column
from thresher.selection import Mask, Values, chosen, on_host

BEHIND = 3.0
"""Standard errors of the mean difference by which an evaluation is worse than the best one."""

LARGE = 0.9
"""Quantile of the best evaluation from which on losses are large ones, which count by their logarithm."""

FEWEST_SAMPLES, FEWEST_TIMES = 32, 3
"""Smallest number of held-back samples; the best evaluation, and two that are worse."""

FORWARD_SHARE = 1 / 3
"""Cost of a forward-only pass, in trained samples: a backward pass costs two forward passes."""

HELD, WAS_BEHIND, GIVEN_BACK = float("-inf"), float("inf"), 1.0
"""Marks of samples: held back; held back, and the last evaluation was worse; trained on again. All others have 0.

Marks of held-back samples are not finite, so that a placebo leaves these samples where they are."""


class Rise(NamedTuple):
    """Difference between two evaluations.

    Attributes:
        mean: Mean of the differences of the squeezed losses; above 0 where the later evaluation is worse.
        error: Standard error of that mean.
    """

    mean: float
    error: float

    @property
    def behind(self) -> bool:
        """Whether the later evaluation is worse by more than chance explains."""
        return self.mean > BEHIND * self.error


def rise(best: Values, now: Values) -> Rise | None:
    """Returns how much the losses of held-back samples have risen since their best evaluation.

    A loss l is squeezed to log(1 + (l - a) / (b - a)), where a is the smallest loss of the best evaluation and b its `LARGE`
    quantile.

    Args:
        best: Losses in the best evaluation, shape (n,); samples where they are not finite are left out.
        now: Losses of the same samples now, shape (n,); what is not finite counts as a large loss.

    Returns:
        The rise; None where fewer than two samples are left.

    Example:
        >>> rise(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])).behind
        True
    """
    there = np.isfinite(best)
    if np.count_nonzero(there) < 2:
        return None
    best = best[there].astype(np.float64)
    now = np.where(np.isfinite(now), now, np.finfo(np.float32).max)[there].astype(np.float64)
    low = best.min()
    scale = np.quantile(best, LARGE) - low or 1.0
    differences = np.log1p(np.maximum(now - low, 0) / scale) - np.log1p((best - low) / scale)
    return Rise(float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences))))


class Reading(NamedTuple):
    """What the records of a probe say before an epoch.

    Attributes:
        held: Marks of the samples that are held back in the epoch, shape (N,).
        fell: Whether the network has fallen behind, now or before: no sample is held back any more.
        facts: Numbers for the history.
        remember: Values of the columns to replace.
    """

    held: Mask
    fell: bool
    facts: Mapping[str, float]
    remember: Mapping[str, Tensor]


@dataclass(frozen=True)
class HeldBack:
    """Held-back samples, and how often they are evaluated.

    Args:
        samples: Number of samples that are held back.
        times: Number of evaluations; there is none after the last epoch, which no plan could use.

    Example:
        >>> probe = HeldBack(samples=50, times=4)
        >>> [epoch for epoch in range(10) if probe.due(epoch, 10)]
        [1, 3, 5, 7]
    """

    samples: int
    times: int

    def columns(self) -> dict[str, Column]:
        """Returns the columns of the probe: the mark of each sample, and its loss in the best evaluation, 2 bytes each."""
        return {name: Column(torch.bfloat16, merge="plan") for name in ("held_back", "probe_loss")}

    def due(self, epoch: int, epochs: int) -> bool:
        """Returns whether the samples are evaluated at the end of an epoch."""
        return 0 <= epoch < epochs - 1 and (epoch + 1) * (self.times + 1) // epochs > epoch * (self.times + 1) // epochs

    def rows(self, share: float, n: int, epochs: int) -> float:
        """Returns how many samples are trained on in each epoch, so that the evaluations are part of the budget.

        Args:
            share: Share of the cost of full training, evaluations included.
            n: Number of samples of the dataset.
            epochs: Number of epochs of the training.

        Raises:
            ValueError: Too many samples are held back, or there are too few evaluations to compare.
        """
        times = min(self.times, epochs - 1)
        if times < FEWEST_TIMES:
            raise ValueError(
                f"Winnow: `probe` compares {FEWEST_TIMES} evaluations at least, and a training of {epochs} epochs has {times} "
                "of them: leave `probe` out"
            )
        rows = share * n - self.samples * times * FORWARD_SHARE / epochs
        if not 1 <= rows <= n - self.samples:
            raise ValueError(
                f"Winnow: `probe` holds back {self.samples} of {n} samples, and at share={share:g} each epoch is to train on "
                f"{max(rows, 0):.0f} of the {max(n - self.samples, 0)} that are left: hold back fewer samples"
            )
        return rows

    def look(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> Reading:
        """Returns what the records say: they are compared once after each evaluation.

        Args:
            records: Mapping from the name of a column to its values, shape (N,).
            epoch: Number of the epoch that is planned.
            epochs: Number of epochs of the training.
            generator: Random generator on the CPU, from which the held-back samples are drawn before the first epoch.
        """
        marks = on_host(records["held_back"].float())
        held = np.isinf(marks)
        if (marks == GIVEN_BACK).any():
            return Reading(held, fell=True, facts={"guard": 1.0}, remember={})
        if not held.any():
            held = chosen(len(marks), self.samples, generator)
            return _held_on(held, HELD, np.full(len(marks), np.nan), {})
        if not self.due(epoch - 1, epochs):
            return Reading(held, fell=False, facts={"guard": 0.0}, remember={})
        best, now = (on_host(records[name].float()) for name in ("probe_loss", "loss"))
        finite = now[held & np.isfinite(now)]
        facts = {"probe_loss": round(float(finite.mean(dtype=np.float64)), 4)} if len(finite) else {}
        rose = rise(best[held], now[held])
        behind = rose is not None and rose.behind
        if behind and (marks == WAS_BEHIND).any():
            given_back = torch.full((len(marks),), GIVEN_BACK, dtype=torch.bfloat16)
            return Reading(np.zeros_like(held), True, {"guard": 1.0, **facts}, {"held_back": given_back})
        better = rose is None or rose.mean < 0
        return _held_on(held, WAS_BEHIND if behind else HELD, now if better else best, facts)


def _held_on(held: Mask, mark: float, losses: Values, facts: Mapping[str, float]) -> Reading:
    """Returns that samples are held back, and remembers their mark and their losses."""
    columns = {"held_back": np.where(held, mark, 0), "probe_loss": np.where(held, losses, 0)}
    remember = {name: torch.from_numpy(values).bfloat16() for name, values in columns.items()}
    return Reading(held, fell=False, facts={"guard": 0.0, **facts}, remember=remember)
