"""RCAP: give each class a budget by its losses and its size, and draw its samples in proportion to exp(loss / beta).

"RCAP", UAI 2025, arXiv:2606.11761. Original code: github.com/atif-hassan/RCAP-dynamic-dataset-pruning
(datacull/methods/RCAP.py). Losses are cut off at log C, with C classes: a wrong label cannot count for more than a guess.
Within a class, p is the softmax of loss / beta. With L the sum of p over the samples of the class that the last epoch kept, a
class gets a part of the budget in proportion to sqrt(L * share of the class), but no more than its samples, and no class is
left without any as long as the budget has one for each. Its samples are drawn without replacement with chances p. It is biased
towards large losses: nothing is re-weighted.

Where the code differs:
- It rounds the number of each class up, so that up to C samples too many are kept. Here they add up to the budget exactly:
  each is rounded down, and the largest remainders get one more.
- Losses that were never seen are log C, so that the first epoch has a budget, too. Here it keeps every sample, because labels
  are only known from the training.
- Samples without a finite loss are kept, and so are those without a label.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng
from thresher.exact import chunks
from thresher.methods._drawing import full_plan
from thresher.methods._ranked import check_keep
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, ids_of, on_host, share


def budgets(wanted: Values, sizes: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Divides a budget among classes in proportion to numbers, within their sizes; each class gets one where there are enough.

    Args:
        wanted: Numbers of the classes, shape (C,), 0 or more, not all 0.
        sizes: Numbers of samples of the classes, shape (C,), 1 or more.
        total: Budget, at most the sum of the sizes.

    Returns:
        Budgets of the classes, shape (C,), which add up to `total`; of equal remainders the lower class gets the sample.

    Example:
        >>> budgets(np.array([3.0, 1.0, 0.0]), np.array([4, 10, 10]), 8).tolist()
        [4, 3, 1]
    """
    least = np.full(len(sizes), int(total >= len(sizes)))
    exact = np.zeros(len(sizes))
    free = np.ones(len(sizes), dtype=np.bool_)
    while free.any():
        left, sum_of_free = total - exact[~free].sum(), wanted[free].sum()
        exact[free] = left * (wanted[free] / sum_of_free if sum_of_free > 0 else sizes[free] / sizes[free].sum())
        below, above = free & (exact < least), free & (exact > sizes)
        gained, lost = (least - exact)[below].sum(), (exact - sizes)[above].sum()
        fixed = above if lost >= gained else below
        if not fixed.any():
            break
        exact[fixed] = (sizes if lost >= gained else least)[fixed]
        free &= ~fixed
    found = np.floor(exact + 1e-9).astype(np.int64)
    remainder = np.where(found < sizes, exact - found, -1.0)
    found[np.argsort(-remainder, kind="stable")[: total - int(found.sum())]] += 1
    return found


def drawn_by_class(label: NDArray[np.int32], score: Values, counts: NDArray[np.int64], base: int) -> Mask:
    """Draws samples of each class without replacement, with chances in proportion to exp(score).

    Args:
        label: Class of each sample, shape (N,), [0, C); negative for samples that take no part.
        score: Scores, shape (N,), finite where the sample takes part.
        counts: Number of samples to draw of each class, shape (C,), at most its size.
        base: Number that differs from draw to draw, as in `rng.lots`.

    Returns:
        Bool mask (N,).
    """
    key = np.full(len(label), np.iinfo(np.uint64).max)
    for part in chunks(len(label)):
        inside = label[part] >= 0
        u = (rng.lots(base, range(part.start, part.stop)) + 0.5) * 2.0**-32
        order = (np.log(-np.log(u)) - score[part]).astype(np.float32)  # the smallest of a class are drawn
        bits = order.view(np.uint32)
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
        key[part] = np.where(inside, label[part].astype(np.uint64) << np.uint64(32) | ordered, key[part])
    last = np.cumsum(np.bincount(label[label >= 0], minlength=len(counts)))
    first = last - np.bincount(label[label >= 0], minlength=len(counts))
    ascending = np.sort(key)
    mask = np.zeros(len(label), dtype=np.bool_)
    cuts = np.where(counts > 0, ascending[np.clip(first + counts - 1, 0, len(label) - 1)], 0)
    inside = np.flatnonzero(label >= 0)
    mask[inside] = key[inside] <= cuts[label[inside]]
    for tied in np.flatnonzero(np.bincount(label[mask], minlength=len(counts)) > counts):
        equal = np.flatnonzero(key == cuts[tied])
        mask[equal[len(equal) - (np.count_nonzero(label[mask] == tied) - counts[tied]) :]] = False
    return mask


@dataclass(frozen=True)
class Rcap:
    """Gives each class a budget by its losses and its size, and draws its samples by their losses.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N) samples, at least one. Default 0.5.
        beta: Temperature of the softmax of the losses, > 0; a small one prefers large losses. Default 1; published: 1/3 to 3.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Rcap
        >>> records = {"loss": torch.tensor([0.1, 0.6, 0.2, 0.5, 0.1, 0.1]), "kept": torch.ones(6, dtype=torch.bool)}
        >>> records["label"] = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32)
        >>> plan = Rcap().plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), len(set(plan.ids.tolist()) & {4, 5})
        (3, 1)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements()
    card: ClassVar[Card] = Card(
        summary="budgets by class, samples drawn by exp(loss)",
        paper="arXiv:2606.11761",
        rule="not drawn by its last loss within the budget of its class",
        biased="Yes, towards samples of large loss and classes that are small or hard: nothing is re-weighted.",
        forwards="None.",
        claim="Read in the code only.",
        differences=(
            "The numbers of the classes add up to the budget; the code rounds each of them up.",
            "The first epoch keeps every sample, because labels are known from the training.",
            "A class whose last losses are all drawn away keeps one sample, so that it can return.",
            "Samples without a finite loss or without a label are kept.",
        ),
        bytes_per_sample=9,
    )
    keep: float = 0.5
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if not (isinstance(self.beta, int | float) and 0 < self.beta < math.inf):
            raise ValueError(f"Rcap: `beta` is a temperature, above 0, got {self.beta!r}")

    def columns(self) -> dict[str, Column]:
        """Returns the columns, 9 bytes per sample: the last loss, the class, and whether the last epoch kept the sample."""
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            "label": Column(torch.int32, fill=-1, signal="label"),
            "kept": Column(torch.bool, merge="plan"),
        }

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns a plan with the drawn samples of each class."""
        loss, n = on_host(records["loss"]), len(records["loss"])
        if epoch == 0:
            plan, kept = full_plan(n), np.ones(n, dtype=np.bool_)
            return EpochPlan(plan.ids, facts=plan.facts, remember={"kept": torch.from_numpy(kept)})
        label = np.where(np.isfinite(loss), on_host(records["label"]), np.int32(-1))
        known = int(np.count_nonzero(label >= 0))
        total = min(known, max(0, max(1, share(self.keep, n)) - (n - known)))
        kept = label < 0
        if total:
            label = _numbered(label)
            score = self._scores(loss, label)
            counts = self._counts(score, label, on_host(records["kept"]), total)
            kept |= drawn_by_class(label, score, counts, int(torch.randint(2**62, (), generator=generator)))
        return EpochPlan(
            ids_of(kept),
            facts={"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - int(np.count_nonzero(kept)) / n},
            remember={"kept": torch.from_numpy(kept)},
        )

    def _scores(self, loss: Values, label: NDArray[np.int32]) -> Values:
        """Returns the losses within [0, log C], divided by the temperature; 0 for samples that take no part."""
        return np.where(label >= 0, np.clip(loss, 0, np.float32(math.log(label.max() + 1))), 0) / np.float32(self.beta)

    def _counts(self, score: Values, label: NDArray[np.int32], before: Mask, total: int) -> NDArray[np.int64]:
        """Returns how many samples of each class are drawn."""
        inside = label >= 0
        of_class, chance = label[inside], np.exp(score[inside].astype(np.float64) - score.max())
        sizes = np.bincount(of_class)
        lasting = np.bincount(of_class, chance * before[inside], len(sizes)) / np.bincount(of_class, chance)
        return budgets(np.sqrt(lasting * sizes), sizes, total)


def _numbered(label: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the classes numbered from 0 without gaps; negative numbers stay."""
    there = np.unique(label[label >= 0]) if label.max() >= 2**20 else np.flatnonzero(np.bincount(label[label >= 0]))
    if len(there) == int(there[-1]) + 1:
        return label
    return np.where(label >= 0, np.searchsorted(there, label), -1).astype(np.int32)
