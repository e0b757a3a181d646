"""GRAD-MATCH: every few epochs, a small weighted subset whose last-layer gradient is that of all data.

Killamsetty et al., "GRAD-MATCH: Gradient Matching based Data Subset Selection for Efficient Deep Model Training", ICML 2021,
arXiv:2103.00123. Original code: github.com/decile-team/cords. The subset is found by orthogonal matching pursuit with weights
above zero (`matching_pursuit`), on gradients of the last layer that one forward pass gives: p - y for its bias, and p - y times
the layer's input for its weights.

As in the code, the weight of a sample is relative to training on everything (all weights 1 match exactly), mini-batches count
alike whatever their sizes, and what is missing from the budget is filled up at random with weight 1. The weighted loss of a
batch is divided by the sum of its weights there; here weights are scaled to a mean of 1 over the subset, so that a batch counts
as much as its weights say. Either way the subset's gradient has the direction of that of all data, but is longer, as if the
learning rate were higher (1.5 to 2.3 times in `benchmarks/grad_match.py`); `weights_divisor="samples"` keeps its length.
Where the code goes beyond the paper or against it:
- Until the first selection it trains on a random subset (20 epochs of it). Here those epochs train on everything, and by
  default that is epoch 0 alone: the gradients of a random initialisation say little.
- Its warm start counts epochs up to warm_start * epochs that it leaves out. Here they train on subsets.
- Its mini-batches are runs of consecutive samples, the same at each selection: `runs="consecutive"`.
- A vector that is chosen again enters its equations a second time while its list of samples stays; one that was given back for
  a negative weight can return, and takes from the budget each time. Here each is taken once and the budget counts what is kept.
- It penalises weights from the second vector on; here from the first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._matching_pursuit import match_classes, match_runs
from thresher.methods._ranked import check_keep
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import Values, chosen, ids_of, on_host, share


@dataclass(frozen=True)
class GradMatch:
    """Every few epochs, look at all samples, choose a weighted subset by matching gradients, and train on it until the next.

    A selection takes a forward-only pass over all samples and holds their errors (N, C) and features (N, D) meanwhile. With few
    classes and `gradient="bias"` as many vectors as classes match exactly, and the rest of the subset is random; a `penalty`
    then spreads the weights. Samples whose errors or features are not finite are kept, with weight 1, before all others.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N), at least one; rounded up to whole mini-batches, or for each class. 1 keeps
            everything and selects nothing. Published: 0.1 (0.05 to 0.3).
        every: R, epochs from one selection to the next, 1 or more. Published: 20.
        per: What is chosen: "batch": mini-batches; "class": samples, class by class; "class_gradient": the same by the gradient
            of the class's own output alone. Classes are those of a classifier with one label a sample. Published: the
            first and the last.
        batch_size: B, samples of the mini-batches chosen with "batch", 1 or more; those of training are the loader's own.
            Published: 20.
        gradient: "full": of the last layer's weights and bias, which must be an `nn.Linear`; "bias": of the bias, for any
            model; not with "class_gradient". Published: "full".
        penalty: lambda, on the squared norm of the weights, 0 or more. Published: 0 for "batch", 0.5 for "class_gradient".
        tolerance: Relative distance to the target at which it stops before the budget is used up, [0, 1). Published: 1e-100,
            which is never; 0 is the same here, where a distance of 1e-6 always ends it.
        first: Epochs on everything before the first selection, 0 or more. The official code selects from epoch `every` on.
        warm_start: kappa, [0, 1]: at least ceil(warm_start * epochs * keep) epochs on everything. Published: 0 or 0.5.
        runs: How mini-batches are cut: "shuffled", anew at each selection, or "consecutive", as the official code does.
        fill: Fill up with random samples of weight 1 where matching ends before the budget, as the official code does.
        weights_divisor: What the sum of weighted losses is divided by, over the subset: "weights": their sum (mean weight 1,
            as published); "samples": all samples (the gradient is about as long as that of all data).

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="a weighted subset whose gradient is that of all data",
        paper="arXiv:2103.00123",
        rule="not in the subset that matches the gradient",
        biased=(
            "yes: the weighted gradient of the subset comes close to that of all data in the last layer, at the time of the "
            "selection; what is left grows until the next"
        ),
        forwards="every sample once at each selection, one epoch in `every`",
        claim=(
            "ResNet-18 on CIFAR-10: 7 times faster for 2.5 % less accuracy, 3 times for 0.8 %; CIFAR-100: 4.8 and 3 times for "
            "2.1 % and 0.7 % (from the source of the abstract; not checked against the paper)"
        ),
        differences=(
            "Epochs before the first selection train on everything, not on a random subset.",
            "The epochs between the warm start and the first selection are not left out.",
            "Mini-batches are cut from a fresh permutation (`runs='consecutive'` restores theirs).",
            "Each vector is taken at most once, and the budget counts the vectors kept.",
            "The penalty acts from the first vector on.",
            "Weights have mean 1 over the subset, not over each batch of it.",
        ),
        bytes_per_sample=4,
        caveat=(
            "With gradient='bias' and C classes about C vectors match exactly, carry nearly all of the weight, and the rest of "
            "the subset is random. Weights of mean 1 make the gradient longer than that of all data, as a higher learning rate "
            "would."
        ),
        missing=(
            "Matching the gradient of a validation set.",
            "Selection on several machines: the surveyed gradients must fit on one.",
            "Class weights of the criterion are not part of the gradients that are matched, nor are shares of samples with "
            "ignored positions.",
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

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        for name, least in (("every", 1), ("batch_size", 1), ("first", 0)):
            value = getattr(self, name)
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
                raise ValueError(f"GradMatch: `{name}` must be a whole number of {least} or more, got {value!r}")
        allowed = {
            "per": ("batch", "class", "class_gradient"),
            "gradient": ("full", "bias"),
            "runs": ("shuffled", "consecutive"),
            "fill": (True, False),
            "weights_divisor": ("weights", "samples"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"GradMatch: `{name}` must be one of {values}, got {getattr(self, name)!r}")
        if self.per == "class_gradient" and self.gradient == "bias":
            raise ValueError("GradMatch: `per`='class_gradient' is about one row of weights, got `gradient`='bias'; use 'full'")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"GradMatch: `penalty` must be a finite number of 0 or more, got {self.penalty}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"GradMatch: `tolerance` is a relative distance, within [0, 1), got {self.tolerance}")
        if not 0 <= self.warm_start <= 1:
            raise ValueError(f"GradMatch: `warm_start` is a share of the epochs, within [0, 1], got {self.warm_start}")

    def columns(self) -> dict[str, Column]:
        """The weights of the last selection, 0 for what was left out: 4 bytes a sample. No signal is remembered."""
        return {"weight": Column(torch.float32, merge="plan")}

    def full_epochs(self, epochs: int) -> int:
        """Epochs on everything, before the first selection."""
        return max(self.first, math.ceil(self.warm_start * epochs * self.keep - 1e-9))

    def full_pass(self, epoch: int, epochs: int) -> tuple[str, ...]:
        """What must be known of all samples before this plan; nothing between selections."""
        since = epoch - self.full_epochs(epochs)
        if since < 0 or since % self.every or self.keep == 1:
            return ()
        return self.requires.full_pass

    @property
    def requires(self) -> Requirements:
        """A pass over all samples before each selection."""
        wanted = {"error": True, "feature": self.gradient == "full", "label": self.per != "batch"}
        names = tuple(name for name, needed in wanted.items() if needed)
        return Requirements(full_pass=names, switches={"feature": 'gradient="bias"'})

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """The subset of a new selection, or of the last one; everything before the first."""
        if not self.full_pass(epoch, epochs):
            return self._plan(on_host(records["weight"]), {})
        error = on_host(records["error"])
        feature = on_host(records["feature"]) if self.gradient == "full" else np.empty((len(error), 0), np.float32)
        labels = on_host(records["label"]) if self.per != "batch" else np.zeros(len(error), np.int64)
        return self._plan(*self._selected(error, feature, labels, generator), new=True)

    def _selected(
        self, error: Values, feature: Values, labels: Values, generator: torch.Generator
    ) -> tuple[Values, dict[str, float]]:
        """Weight of every sample, shape (N,), float32, 0 where left out; and facts of the matching."""
        n = len(error)
        weight = np.ones(n)
        usable = np.flatnonzero(np.isfinite(error).all(1) & np.isfinite(feature).all(1))
        budget = max(0, max(1, share(self.keep, n)) - (n - len(usable)))
        found, distance = self._matched(error[usable], feature[usable], labels[usable], budget, generator)
        matched = int(np.count_nonzero(found))
        lacking = budget - matched if self.fill else int(n == len(usable) and not matched)
        if lacking > 0:
            others = np.flatnonzero(found == 0)
            found[others[chosen(len(others), lacking, generator)]] = 1
        if found.any():
            found *= np.count_nonzero(found) / (found.sum() if self.weights_divisor == "weights" else len(found))
        weight[usable] = found
        return weight.astype(np.float32), {"matched": matched, "matching_error": distance}

    def _matched(
        self, error: Values, feature: Values, labels: Values, budget: int, generator: torch.Generator
    ) -> tuple[Values, float]:
        if not budget:
            return np.zeros(len(error)), 0.0
        settings = {"penalty": self.penalty, "tolerance": self.tolerance}
        if self.per != "batch":
            return match_classes(error, feature, labels, budget, own_row=self.per == "class_gradient", **settings)
        shuffled = self.runs == "shuffled"
        order = torch.randperm(len(error), generator=generator).numpy() if shuffled else np.arange(len(error))
        return match_runs(error, feature, order, self.batch_size, budget, **settings)

    def _plan(self, weight: Values, facts: Mapping[str, float], *, new: bool = False) -> EpochPlan:
        n, kept = len(weight), weight > 0
        if not kept.any():
            return EpochPlan(torch.arange(n), facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})
        ids = ids_of(kept)
        return EpochPlan(
            ids,
            weights=torch.from_numpy(weight[kept]),
            facts={"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - len(ids) / n, **facts},
            remember={"weight": torch.from_numpy(weight)} if new else {},
        )
