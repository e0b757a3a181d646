"""Winnow: every step has a smaller batch, mostly of the samples about which the network was least certain.

Developed for this library. It combines online batch selection (Loshchilov & Hutter, arXiv:1511.06343), sampling in proportion
to the loss, and the uncertainty of the last prediction as a score. What is new: as many steps as full training, each with the
same share of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng
from thresher.methods._base import check_within, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, ids_of, on_host, smallest

MEASURED_FROM = 0.3
"""Share of training after which the agreement of loss and uncertainty is checked: earlier, both are uninformative."""

SOONEST = 3
"""First epoch in which the agreement is checked in short runs: a network that has seen little is uninformative."""

MOST_MEASURED = 2**16
"""Largest number of samples that the agreement is measured on."""

LEAST_SPREAD = 0.14
"""Standard deviation of the uncertainties, as a share of their mean, below which the agreement is not judged.

If all samples are nearly equally uncertain, the choice is nearly uniform even with wrong labels, and the ranks of the
uncertainties mean little: sequences of text without a wrong label had a correlation of 0.3."""

WELL_AGREED = 0.85
"""Rank correlation of loss and uncertainty below which large losses are likely to be wrong labels."""


LARGEST_FACTOR = 1e6
"""Largest lambda. If nearly all scores are 0, the sum of min(1, lambda * score) stays below the number of rows of the epoch."""


def visits_per_score(score: Values, k: int) -> float:
    """Returns the factor lambda for which the sum of min(1, lambda * score) over all samples is `k`.

    Args:
        score: Scores of the samples, shape (N,), 0 or more, float32 with values that bfloat16 can represent.
        k: Number of visits: samples to choose for an epoch.

    Returns:
        The factor, at most `LARGEST_FACTOR`.

    Example:
        >>> visits_per_score(np.array([0.5, 0.25, 0.25, 0.0], dtype=np.float32), 2)
        2.0
    """
    # A bfloat16 of 0 or more has one of 2^15 values. Counting them is faster than sorting all scores.
    counts = np.zeros(2**15, dtype=np.int64)
    for part in chunks(len(score)):
        counts += np.bincount(score[part].view(np.uint32) >> 16, minlength=2**15)
    present = np.flatnonzero(counts)[::-1]  # from the largest score
    counts = counts[present]
    values = (present.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    before = np.concatenate(
        [[0], np.cumsum(counts)[:-1]]
    )  # samples with larger scores, which are visited once
    rest = np.cumsum((counts * values)[::-1])[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = (k - before) / rest
        # The first score, from the largest, that is not visited more than once.
        fits = factors * values <= 1
    return min(
        LARGEST_FACTOR, float(factors[int(np.argmax(fits))]) if fits.any() else LARGEST_FACTOR
    )


def most_overdue(score: Values | Tensor | None, credit: Values, k: int) -> tuple[Mask, Values]:
    """Chooses the samples with the largest credits for an epoch, and returns their mask and the credits after the epoch.

    Args:
        score: Scores, shape (n,), with values that bfloat16 can represent; negative or NaN for samples without a score. None if
            no sample has a score.
        credit: Credits before the epoch (see `Winnow`), shape (n,), float32.
        k: Number of samples to choose.

    Returns:
        Mask of the chosen samples, shape (n,), bool, and the credits, shape (n,), float32.

    Example:
        >>> mask, credit = most_overdue(torch.tensor([0.5, 0.125]), np.array([0.25, 0.5]), 1)
        >>> mask.tolist(), credit.round(3)
        ([True, False], array([0.05, 0.7 ], dtype=float32))
    """
    due = np.full(len(credit), -1, dtype=np.float32)
    if score is not None:
        for part in chunks(len(due)):
            values = on_host(torch.as_tensor(score[part]).float())
            # abs removes the sign of -0.0, because scores are counted by their bits.
            np.copyto(due[part], np.abs(values), where=np.isfinite(values) & (values >= 0))
    due[due < 0] = due.max(initial=1)
    factor = np.float32(visits_per_score(due, k))
    for part in chunks(len(due)):
        due[part] = -(credit[part] + np.minimum(due[part] * factor, np.float32(1)))
    mask = smallest(due, k)
    np.negative(due, out=due)
    due[mask] -= 1
    return mask, due


def sampled(columns: Sequence[Tensor]) -> Values:
    """Returns the values of evenly spaced samples, shape (columns, k), with k below twice `MOST_MEASURED`.

    Args:
        columns: Values of the samples, one or more of shape (N,).
    """
    step = max(1, len(columns[0]) // MOST_MEASURED)
    return np.stack([on_host(values[::step].float()) for values in columns])


def agreement(loss: Values, uncertainty: Values) -> float | None:
    """Returns the rank correlation of loss and uncertainty over the samples that have both.

    Args:
        loss: Last loss of each sample, shape (N,).
        uncertainty: Last uncertainty of each sample, shape (N,).

    Returns:
        The correlation; equal values share their mean rank. None if fewer than 32 samples have both values, or if all have the
        same loss or the same uncertainty.
    """
    both = np.isfinite(loss) & np.isfinite(uncertainty)
    if np.count_nonzero(both) < 32:
        return None
    ranks = [_mean_ranks(values[both]) for values in (loss, uncertainty)]
    if any(np.ptp(ranked) == 0 for ranked in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def spread_of(uncertainty: Values) -> float:
    """Returns the standard deviation of the finite values divided by their mean; 0 if the mean is 0.

    Args:
        uncertainty: Last uncertainty of each sample, shape (N,); some must be finite.
    """
    known = uncertainty[np.isfinite(uncertainty)].astype(np.float64)
    return float(known.std() / known.mean()) if known.mean() else 0.0


def _mean_ranks(values: Values) -> NDArray[np.float64]:
    """Returns the ranks of values; equal values have the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


@dataclass(frozen=True)
class Winnow:
    """Trains each step on a share of a batch, and revisits the samples about which the network was least certain.

    An epoch has as many steps as full training, of share * B rows each, for a batch size B. The samples are chosen before the
    epoch, and `attach` puts them into stratified batches. Each sample has a credit, at first a random number in [0, 1). Each
    epoch adds min(1, lambda * score) to the credit, with lambda such that these numbers add up to the number of samples to
    choose. The samples with the largest credits are chosen, and their credit drops by 1. So a sample is used in proportion to
    its score, and its uses are spread evenly over the epochs. The score is stored whenever a sample is trained on; a sample
    without a score counts as the least certain. Samples that are not chosen are not loaded. The loss is the plain mean over
    the rows.

    Stratified batches replace the order of the loader, so that order must be random: shuffle=True. With
    `attach(stratify=None)`, the samples keep the order of any sampler that yields each sample once.

    If the model has BatchNorm, it learns with the statistics of the chosen samples, which differ from the statistics of all
    samples. Do not recompute them on all samples after training (`torch.optim.swa_utils.update_bn`): this costs accuracy.

    Args:
        share: Share of the cost of full training, (0, 1]: round(share * N) samples an epoch. 1 is full training. Default 0.5.
        score: Score of a sample. "uncertainty" (default): 1 - sum(p^2) over the predicted class probabilities, which needs no
            label. "loss": the last loss, which also prefers samples with wrong labels.
        lr_scale: Factor on the learning rate, > 0. Default 1.
        least_agreement: Rank correlation of loss and uncertainty, [-1, 1], below which the choice becomes uniform, because many
            labels are probably wrong. Checked from 30 % of training on, not before the fourth epoch, and not if all
            uncertainties are nearly equal. -1 turns the check off. Default 0.5.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Winnow
        >>> records = {"uncertainty": torch.rand(8), "loss": torch.rand(8)}
        >>> records["credit"] = torch.full((8,), -torch.inf)  # no sample has one yet
        >>> plan = Winnow(share=0.25).plan_epoch(records, epoch=1, epochs=9, generator=torch.Generator().manual_seed(0))
        >>> plan.smaller_batches, len(plan.ids), plan.lr_scale
        (True, 2, 1.0)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="smaller, stratified batches of the samples whose last predictions were most unsure",
        rule="not chosen for its epoch, for which samples with a larger {score}, if it is known, are chosen more often",
        biased="Yes, towards samples that the network was unsure of; weights that remove it cost accuracy.",
        forwards="None.",
        bytes_per_sample=8,
    )
    share: float = 0.5
    score: Literal["uncertainty", "loss"] = "uncertainty"
    lr_scale: float = 1.0
    least_agreement: float = 0.5

    def __post_init__(self) -> None:
        check_within(self, "(0, 1]", "share")
        if self.score not in ("uncertainty", "loss"):
            raise ValueError(f"Winnow: `score` must be 'uncertainty' or 'loss', got {self.score!r}")
        check_within(self, "(0, inf)", "lr_scale")
        check_within(self, "[-1, 1]", "least_agreement")

    @property
    def requires(self) -> Requirements:
        """What the method needs: stratified batches, and the optimizer if `lr_scale` is not 1."""
        by_uncertainty = self.score == "uncertainty"
        chooses = self.share < 1  # a share of 1 is full training, in the order of the loader
        return Requirements(
            optimizer=self.lr_scale != 1,
            smaller_batches=chooses,
            order="class" if chooses else "loader",
            records=chooses,
            switches={
                "optimizer": "lr_scale=1",
                **({"uncertainty": "score='loss'"} if by_uncertainty else {}),
            },
        )

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: its last uncertainty and loss, 2 bytes each, and its credit, 4 bytes."""
        without = "judges no labels"
        if self.score == "uncertainty":
            without = "draws the rows of its smaller batches uniformly"
        if self.share == 1:
            without = ""  # full training chooses nothing
        uncertainty = Column(torch.bfloat16, fill=NEVER_SEEN, optional=without)
        columns = {"uncertainty": uncertainty, "loss": Column(torch.bfloat16, fill=NEVER_SEEN)}
        return columns | {"credit": Column(torch.float32, fill=NEVER_SEEN, merge="plan")}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the samples that have the largest credits."""
        credit = on_host(records["credit"])
        n = len(credit)
        if self.share == 1:
            return replace(full_plan(n), lr_scale=self.lr_scale)
        base = int(torch.randint(2**62, (), generator=generator))
        rows = max(1, round(self.share * n))
        facts = {"scheduled_fraction": 1 - self.share, "actual_fraction": 1 - rows / n}
        known = {name: records[name] for name in ("uncertainty", "loss") if name in records}
        measured, spread = self._measured(known)
        soon = epoch < max(SOONEST, MEASURED_FROM * epochs)
        judged = None if soon or spread < LEAST_SPREAD else measured
        doubted = judged is not None and judged < self.least_agreement
        if measured is not None:
            facts |= {
                "agreement": round(measured, 4),
                "spread": round(spread, 4),
                "uniform": float(doubted),
            }
        score = None if doubted else known.get(self.score)
        new = ~np.isfinite(credit)
        if new.any():
            credit = np.where(new, rng.uniform(base, range(n)), credit)
        mask, credit = most_overdue(score, credit, rows)
        return EpochPlan(
            ids_of(mask),
            smaller_batches=True,
            lr_scale=self.lr_scale,
            facts=facts,
            remember={"credit": torch.from_numpy(credit)},
            note=self._note(judged, doubted),
        )

    def _measured(self, known: Mapping[str, Tensor]) -> tuple[float | None, float]:
        """Returns the agreement of loss and uncertainty, None if it is not known, and the spread of the uncertainties."""
        if "uncertainty" not in known:
            return None, 0.0
        loss, uncertainty = sampled([known["loss"], known["uncertainty"]])
        measured = agreement(loss, uncertainty)
        return measured, 0.0 if measured is None else spread_of(uncertainty)

    def _note(self, judged: float | None, doubted: bool) -> str:
        if judged is None or not (doubted or (self.score == "loss" and judged < WELL_AGREED)):
            return ""
        limit = self.least_agreement if doubted else WELL_AGREED
        said = (
            f"Loss and uncertainty of the samples have a rank correlation below {limit:g} (`agreement` in run.history): many "
            "labels are wrong, or the network has not learned much yet. "
        )
        if doubted:
            return (
                said + "Winnow draws uniformly in such epochs; least_agreement=-1 turns this off."
            )
        return (
            said
            + "Winnow(score='loss') prefers samples with wrong labels; use score='uncertainty'."
        )
