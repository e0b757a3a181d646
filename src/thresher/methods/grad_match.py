"""GRAD-MATCH: every few epochs, choose a small weighted subset whose last-layer gradient is close to that of all data.

Killamsetty et al., "GRAD-MATCH: Gradient Matching based Data Subset Selection for Efficient Deep Model Training", ICML 2021,
arXiv:2103.00123. Original code: github.com/decile-team/cords. The subset is found by orthogonal matching pursuit with weights
above zero, on gradients of the last layer, for which one forward pass is enough: p - y for its bias, and p - y times the input
of the layer for its weights.

As in the code, the weight of a sample is relative to training on every sample (weights of 1 for all of them match exactly), all
mini-batches count the same independently of their sizes, and the rest of the budget is filled up with random samples of weight
1. The code divides the weighted loss of a batch by the sum of its weights. Here the weights are scaled to a mean of 1 over the
subset, so a batch with larger weights counts more. In both cases the gradient of the subset has the direction of the gradient
of all data, but is longer (1.5 to 2.3 times in `benchmarks/grad_match.py`), which has the effect of a higher learning rate;
`weights_divisor="samples"` keeps its length.

Where the code differs from the paper or goes beyond it:
- Until the first selection it trains on a random subset (for 20 epochs). Here those epochs train on every sample. By default
  this is epoch 0 only, because the gradients of a random initialization carry little information.
- It leaves out the epochs between the warm start and the first selection. Here they train on subsets.
- Its mini-batches are runs of consecutive samples, the same at each selection (`runs="consecutive"`).
- A vector that is chosen again enters its equations twice, while its list of samples stays the same. A vector that was dropped
  for a negative weight can return and uses the budget each time. Here each vector is chosen at most once, and the budget counts
  the vectors that are kept.
- It penalizes weights from the second vector on; here the penalty acts from the first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_choices, check_keep, check_whole, check_within
from thresher.methods._matching_pursuit import match_classes, match_runs
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import Values, chosen, ids_of, on_host, share


@dataclass(frozen=True)
class GradMatch:
    """Chooses a weighted subset by matching gradients every few epochs, and trains on it until the next selection.

    A selection makes a forward pass over all samples. Its errors (gradients at the outputs, shape (N, C)) and features (inputs
    of the last layer, shape (N, D)) stay in memory during the selection. With C classes and `gradient="bias"`, about C vectors
    are enough for an exact match. If C is small, the rest of the subset is random; a `penalty` then spreads the weights over
    more samples. Samples whose errors or features are not finite are kept with weight 1, before all others.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N) samples, at least one, rounded up to whole mini-batches, or for each class. 1
            keeps every sample and selects nothing. Default and published: 0.1 (0.05 to 0.3).
        every: Number of epochs from one selection to the next, R, 1 or more. Default and published: 20.
        per: Unit of the choice: "batch" (default) for mini-batches, "class" for samples, class by class, "class_gradient" for
            samples by the gradient of the output of their class only. The last two need a classifier with one label per sample.
            Published: the first and the last.
        batch_size: Number of samples in the mini-batches that are chosen with "batch", B, 1 or more; training uses the batch
            size of the loader. Default and published: 20.
        gradient: Gradient that is matched. "full" (default and published): with respect to the weights and the bias of the last
            layer, which must be an `nn.Linear`. "bias": with respect to the bias, for any model; not with "class_gradient".
        penalty: Factor on the squared norm of the weights, lambda, 0 or more. Default 0, as published for "batch"; published
            for "class_gradient": 0.5.
        tolerance: Relative distance to the target at which the search ends before the budget is used up, [0, 1). Default 0;
            published: 1e-100. A distance of 1e-6 always ends the search.
        first: Number of epochs on every sample before the first selection, 0 or more. Default 1; the official code selects
            from epoch `every` on.
        warm_start: Share of training used as a warm start, kappa, [0, 1]: at least ceil(warm_start * epochs * keep) epochs
            train on every sample. Default 0; published: 0 or 0.5.
        runs: Way in which mini-batches are cut: "shuffled" (default), anew at each selection, or "consecutive", as in the
            official code.
        fill: Whether random samples of weight 1 fill up the subset if the search ends before the budget, as in the official
            code. Default True.
        weights_divisor: Divisor of the sum of the weighted losses over the subset. "weights" (default and published): the sum
            of the weights, which gives them a mean of 1. "samples": the number of all samples, which makes the gradient about
            as long as the gradient of all data.
        memory: Largest memory of the inner products of a selection, in GiB, > 0. M mini-batches, of which m are chosen, take
            M * (M + m) numbers of 8 bytes. With "class", it is the inner products of the chosen samples of a class with all
            its samples. If a selection needs more, `attach` (mini-batches) or the first selection (classes) raises an error.
            Default 4.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import GradMatch
        >>> error = torch.tensor([[0.5], [0.5], [-0.1], [0.4]])  # gradients with respect to the only output
        >>> records = {"weight": torch.zeros(4), "error": error}
        >>> method = GradMatch(keep=0.25, every=1, batch_size=1, gradient="bias", weights_divisor="samples")
        >>> plan = method.plan_epoch(records, epoch=1, epochs=5, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), plan.facts["matched"]
        (1, 1)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(switches={"feature": 'gradient="bias"'})
    card: ClassVar[Card] = Card(
        summary="a weighted subset whose gradient is that of all data",
        paper="arXiv:2103.00123",
        rule="not in the subset that matches the gradient",
        biased=(
            "yes: the weighted gradient of the subset is close to that of all data in the last layer and at the time of the "
            "selection; the difference grows until the next selection"
        ),
        forwards="every sample once per selection, which is one epoch in `every`",
        claim=(
            "the best trade-off between accuracy and time of the compared selections. Only a draft of the abstract has "
            "numbers: ResNet-18 on CIFAR-10 7 times faster at a loss of 2.5 % of accuracy, 3 times at 0.8 %; on CIFAR-100 4.8 "
            "and 3 times at 2.1 % and 0.7 %"
        ),
        differences=(
            "Epochs before the first selection train on every sample, not on a random subset.",
            "The epochs between the warm start and the first selection are not left out.",
            "Mini-batches are cut from a new permutation (`runs='consecutive'` restores those of the code).",
            "Each vector is chosen at most once, and the budget counts the vectors that are kept.",
            "The penalty acts from the first vector on.",
            "Weights have mean 1 over the subset, not over each batch of it.",
        ),
        bytes_per_sample=4,
        caveat=(
            "With gradient='bias' and C classes, about C vectors match exactly and have nearly all of the weight, and the rest "
            "of the subset is random. Weights with a mean of 1 make the gradient longer than that of all data, as a higher "
            "learning rate does."
        ),
        missing=(
            "Matching the gradient of a validation set.",
            "Selection on several machines: the gradients of all samples must fit on one machine. A selection of mini-batches "
            "holds the inner products of all pairs of them: 33 GB for 1.28 million samples in mini-batches of 20, which "
            "`attach` refuses.",
            "Class weights of the criterion in the gradients that are matched, and the shares of samples with ignored "
            "positions.",
        ),
    )
    keep: float = 0.1
    every: int = 20
    per: Literal["batch", "class", "class_gradient"] = "batch"
    batch_size: int = 20
    gradient: Literal["full", "bias"] = "full"
    penalty: float = 0.0
    tolerance: float = 0.0
    first: int = 1
    warm_start: float = 0.0
    runs: Literal["shuffled", "consecutive"] = "shuffled"
    fill: bool = True
    weights_divisor: Literal["weights", "samples"] = "weights"
    memory: float = 4.0

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        for name, least in (("every", 1), ("batch_size", 1), ("first", 0)):
            check_whole(self, name, least=least)
        check_choices(self, "fill")
        if self.per == "class_gradient" and self.gradient == "bias":
            raise ValueError(
                "GradMatch: `per`='class_gradient' needs `gradient`='full', got 'bias'"
            )
        check_within(self, "[0, inf)", "penalty")
        check_within(self, "[0, 1)", "tolerance")
        check_within(self, "(0, inf)", "memory")
        check_within(self, "[0, 1]", "warm_start")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 4 bytes: its weight in the last selection, 0 for samples left out."""
        return {"weight": Column(torch.float32, merge="plan")}

    def full_epochs(self, epochs: int) -> int:
        """Returns the number of epochs on every sample before the first selection."""
        return max(self.first, math.ceil(self.warm_start * epochs * self.keep - 1e-9))

    def full_pass(self, epoch: int, epochs: int) -> tuple[str, ...]:
        """Returns the names of the values that an epoch needs for all samples; none between selections."""
        since = epoch - self.full_epochs(epochs)
        if since < 0 or since % self.every or self.keep == 1:
            return ()
        wanted = {"error": True, "feature": self.gradient == "full", "label": self.per != "batch"}
        return tuple(name for name, needed in wanted.items() if needed)

    def check(self, ids: Tensor) -> None:
        """Checks that the inner products of all mini-batches fit into `memory`.

        Args:
            ids: Ids of the samples.

        Raises:
            ValueError: The inner products take more than `memory`.
        """
        if self.per == "batch" and self.keep < 1:
            self._check_runs(len(ids))

    def _check_runs(self, n: int) -> None:
        runs = -(-n // self.batch_size)
        chosen_runs = -(-share(self.keep, n) // self.batch_size)
        most = math.isqrt(int(self.memory * 2**27 / (1 + self.keep)))  # numbers of 8 bytes
        self._check_held(
            runs * (runs + chosen_runs),
            f"{runs:,} mini-batches of {n:,} samples",
            f"`batch_size`={-(-n // max(1, most))} or more",
        )

    def _check_held(self, numbers: int, of: str, way_out: str) -> None:
        """Raises ValueError if inner products take more than `memory`."""
        held = numbers / 2**27
        if held > self.memory:
            raise ValueError(
                f"GradMatch: a selection holds the inner products of {of}, which take {held:.1f} GiB, and `memory` allows "
                f"{self.memory:g} GiB: use {way_out}, or raise `memory`"
            )

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the subset of a new or the last selection; before the first selection, all samples."""
        if not self.full_pass(epoch, epochs):
            return self._plan(on_host(records["weight"]), {})
        error = on_host(records["error"])
        if self.gradient == "full":
            feature = on_host(records["feature"])
        else:
            feature = np.empty((len(error), 0), np.float32)
        if self.per != "batch":
            labels = on_host(records["label"])
        else:
            labels = np.zeros(len(error), np.int64)
        return self._plan(*self._selected(error, feature, labels, generator), new=True)

    def _selected(
        self, error: Values, feature: Values, labels: Values, generator: torch.Generator
    ) -> tuple[Values, dict[str, float]]:
        """Returns the weight of every sample, shape (N,), float32, 0 for samples left out, and facts for the history."""
        n = len(error)
        weight = np.ones(n)
        usable = np.flatnonzero(np.isfinite(error).all(1) & np.isfinite(feature).all(1))
        budget = max(0, max(1, share(self.keep, n)) - (n - len(usable)))
        found, distance = self._matched(
            error[usable], feature[usable], labels[usable], budget, generator
        )
        matched = int(np.count_nonzero(found))
        lacking = budget - matched if self.fill else int(n == len(usable) and not matched)
        if lacking > 0:
            others = np.flatnonzero(found == 0)
            found[others[chosen(len(others), lacking, generator)]] = 1
        if found.any():
            found *= np.count_nonzero(found) / (
                found.sum() if self.weights_divisor == "weights" else len(found)
            )
        weight[usable] = found
        return weight.astype(np.float32), {"matched": matched, "matching_error": distance}

    def _matched(
        self,
        error: Values,
        feature: Values,
        labels: Values,
        budget: int,
        generator: torch.Generator,
    ) -> tuple[Values, float]:
        if not budget:
            return np.zeros(len(error)), 0.0
        settings = {"penalty": self.penalty, "tolerance": self.tolerance}
        if self.per != "batch":
            largest = int(np.bincount(labels).max())
            wanted = -(-budget * largest // len(error))
            self._check_held(
                wanted * largest, f"{wanted:,} of {largest:,} samples of a class", "`per`='batch'"
            )
            return match_classes(
                error, feature, labels, budget, own_row=self.per == "class_gradient", **settings
            )
        shuffled = self.runs == "shuffled"
        if shuffled:
            order = torch.randperm(len(error), generator=generator).numpy()
        else:
            order = np.arange(len(error))
        return match_runs(error, feature, order, self.batch_size, budget, **settings)

    def _plan(self, weight: Values, facts: Mapping[str, float], *, new: bool = False) -> EpochPlan:
        n = len(weight)
        kept = weight > 0
        if not kept.any():
            return EpochPlan(
                torch.arange(n), facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0}
            )
        ids = ids_of(kept)
        return EpochPlan(
            ids,
            weights=torch.from_numpy(weight[kept]),
            facts={
                "scheduled_fraction": 1 - self.keep,
                "actual_fraction": 1 - len(ids) / n,
                **facts,
            },
            remember={"weight": torch.from_numpy(weight)} if new else {},
        )
