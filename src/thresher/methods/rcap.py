"""RCAP: give each class a budget by its losses and its size, and draw its samples in proportion to exp(loss / beta).

"RCAP", UAI 2025, arXiv:2606.11761. Original code: github.com/atif-hassan/RCAP-dynamic-dataset-pruning
(datacull/methods/RCAP.py). Losses are cut off at log C, with C classes: a wrong label cannot count for more than a guess.
Within a class, p is the softmax of loss / beta. L is the sum of p over the samples of the class that the last epoch kept. Each
class gets a part of the budget (the number of samples to keep) in proportion to sqrt(L * share of the class), but at most its
own samples and, if the budget is large enough, at least one. Its samples are drawn without replacement with probabilities p. It
is biased towards large losses: nothing is re-weighted.

Where the code differs:
- It rounds the number of each class up, and keeps up to C samples too many. Here the numbers add up to the budget exactly: each
  is rounded down, and the classes with the largest remainders get one more.
- Samples that were not seen yet have a loss of log C, so the first epoch prunes, too. Here it keeps every sample, because
  labels are only known from training.
- Here, samples without a finite loss or without a label are kept.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng
from thresher.methods._base import check_keep, check_within, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, ids_of, on_host, share

TABLE = 2**20
"""If all labels are below this number, a table maps them to class numbers; otherwise, a binary search does."""


def budgets(wanted: Values, sizes: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Divides a budget among classes in proportion to `wanted`; none gets more than its size or, if possible, less than 1.

    Args:
        wanted: Number for each class, 0 or more, shape (C,), not all 0.
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
        left = total - exact[~free].sum()
        sum_of_free = wanted[free].sum()
        exact[free] = left * (
            wanted[free] / sum_of_free if sum_of_free > 0 else sizes[free] / sizes[free].sum()
        )
        below = free & (exact < least)
        above = free & (exact > sizes)
        gained = (least - exact)[below].sum()
        lost = (exact - sizes)[above].sum()
        fixed = above if lost >= gained else below
        if not fixed.any():
            break
        exact[fixed] = (sizes if lost >= gained else least)[fixed]
        free &= ~fixed
    rounded = np.floor(exact + 1e-9).astype(np.int64)
    remainder = np.where(rounded < sizes, exact - rounded, -1.0)
    rounded[np.argsort(-remainder, kind="stable")[: total - int(rounded.sum())]] += 1
    return rounded


class Classified:
    """The samples with a finite loss and a label, read in pieces, with classes numbered from 0.

    Args:
        loss: Last loss of each sample, shape (N,).
        label: Class of each sample, shape (N,), integers; negative if it is unknown.
        beta: Temperature, > 0.

    Attributes:
        n: Number of samples N.
        sizes: Numbers of samples of the classes, shape (C,), 1 or more.

    Example:
        >>> samples = Classified(np.float32([0.5, 9.0, np.nan]), np.int32([7, 3, 7]), beta=2.0)
        >>> samples.sizes, samples.part(slice(0, 3))[1].round(3)  # log 2 is the largest loss that counts
        (array([1, 1]), array([0.25 , 0.347, 0.   ]))
    """

    def __init__(self, loss: Values, label: NDArray[np.int32], beta: float) -> None:
        self.n = len(loss)
        self._loss = loss
        self._label = label
        self._beta = beta
        self._number, self.sizes = self._classes()

    def _classes(self) -> tuple[Callable[[Any], Any], NDArray[np.int64]]:
        """Returns the function from labels to numbers of classes, and how many samples each class has."""
        largest = int(self._label.max(initial=0))
        if largest < TABLE:
            counts = np.zeros(largest + 1, np.int64)
            for part in chunks(self.n):
                label = self._label[part]
                counts += np.bincount(
                    label[np.isfinite(self._loss[part]) & (label >= 0)], minlength=largest + 1
                )
            numbers = np.cumsum(counts > 0) - 1
            return lambda label: numbers[label], counts[counts > 0]
        there, sizes = np.unique(
            self._label[np.isfinite(self._loss) & (self._label >= 0)], return_counts=True
        )
        return lambda label: np.searchsorted(there, label), sizes

    def part(self, part: slice) -> tuple[NDArray[np.int64], Values]:
        """Returns the classes of some samples, -1 for none, and their scores: losses cut to [0, log C], divided by beta."""
        loss = self._loss[part]
        label = self._label[part]
        inside = np.isfinite(loss) & (label >= 0)
        of_class = np.where(inside, self._number(np.maximum(label, 0)), -1)
        with np.errstate(invalid="ignore"):
            cut = np.clip(loss.astype(np.float64), 0, math.log(max(1, len(self.sizes))))
        return of_class, np.where(inside, cut, 0) / self._beta

    def lasting(self, before: Mask) -> Values:
        """Returns, for each class, the sum of the probabilities of its marked samples, shape (C,).

        Args:
            before: Mask of the marked samples, shape (N,), bool.
        """
        classes = len(self.sizes)
        marked = np.zeros(classes)
        total = np.zeros(classes)
        for part in chunks(self.n):
            of_class, score = self.part(part)
            inside = of_class >= 0
            mass = np.exp(score[inside] - math.log(classes) / self._beta)
            total += np.bincount(of_class[inside], mass, classes)
            marked += np.bincount(of_class[inside], mass * before[part][inside], classes)
        return marked / total

    def keys(self, part: slice, base: int) -> NDArray[np.uint64]:
        """Returns sort keys: the class in the upper 32 bits, and below it a random number, weighted by exp(score)."""
        of_class, score = self.part(part)
        u = (rng.lots(base, range(part.start, part.stop)) + 0.5) * 2.0**-32
        bits = (np.log(-np.log(u)) - score).astype(np.float32).view(np.uint32)
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
        return of_class.astype(np.uint64) << np.uint64(32) | ordered


def drawn_by_class(samples: Classified, counts: NDArray[np.int64], base: int) -> Mask:
    """Draws samples of each class without replacement, with chances in proportion to exp(score).

    Args:
        samples: Classes and scores of all N samples.
        counts: Number of samples to draw of each class, shape (C,), at most its size.
        base: Number that differs from draw to draw, as in `rng.lots`.

    Returns:
        Bool mask (N,). If not all samples with equal lots fit into the count of a class, the lower ids are drawn.
    """
    keys = np.empty(samples.n, dtype=np.uint64)
    mask = np.zeros(samples.n, dtype=np.bool_)
    for part in chunks(samples.n):
        keys[part] = samples.keys(part, base)  # samples without a class have the largest keys
    ascending = np.sort(keys)
    first = np.cumsum(samples.sizes) - samples.sizes
    drawing = counts > 0
    last = np.where(drawing, ascending[np.maximum(first + counts - 1, 0)], np.uint64(0))
    room = np.where(drawing, first + counts - np.searchsorted(ascending, last), 0)
    for part in chunks(samples.n):
        key = keys[part]
        of_class = (key >> np.uint64(32)).astype(np.int64)
        inside = of_class < len(counts)
        of_class[~inside] = 0
        mask[part] = inside & (key < last[of_class])
        for i in np.flatnonzero(inside & drawing[of_class] & (key == last[of_class])):
            mask[part.start + i] = room[of_class[i]] > 0
            room[of_class[i]] -= 1
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
        claim="Not known: read in the code only.",
        differences=(
            "The numbers of the classes add up to the budget; the code rounds each of them up.",
            "The first epoch keeps every sample, because labels are only known from training.",
            "A class of which the last epoch kept no sample keeps one (if `keep` allows one per class), so it can return.",
            "Samples without a finite loss or without a label are kept.",
        ),
        bytes_per_sample=9,
    )
    keep: float = 0.5
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        check_within(self, "(0, inf)", "beta")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 9 bytes: its last loss, its class, and whether the last epoch kept it."""
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            "label": Column(torch.int32, fill=-1, signal="label"),
            "kept": Column(torch.bool, merge="plan"),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the drawn samples of each class."""
        loss = on_host(records["loss"])
        n = len(records["loss"])
        if epoch == 0:
            plan = full_plan(n)
            kept = np.ones(n, dtype=np.bool_)
            return EpochPlan(plan.ids, facts=plan.facts, remember={"kept": torch.from_numpy(kept)})
        samples = Classified(loss, on_host(records["label"]), self.beta)
        known = int(samples.sizes.sum())
        total = min(known, max(0, max(1, share(self.keep, n)) - (n - known)))
        kept = ~np.isfinite(loss) | (on_host(records["label"]) < 0)
        if total:
            wanted = np.sqrt(samples.lasting(on_host(records["kept"])) * samples.sizes)
            counts = budgets(wanted, samples.sizes, total)
            kept |= drawn_by_class(
                samples, counts, int(torch.randint(2**62, (), generator=generator))
            )
        return EpochPlan(
            ids_of(kept),
            facts={
                "scheduled_fraction": 1 - self.keep,
                "actual_fraction": 1 - int(np.count_nonzero(kept)) / n,
            },
            remember={"kept": torch.from_numpy(kept)},
        )
