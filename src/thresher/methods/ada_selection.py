"""AdaSelection: score the samples of a batch by several selectors at once, whose weights adapt from step to step.

Zhang et al., "AdaSelection: Accelerating Deep Learning Training through Data Subsampling", arXiv:2306.10728. No official
code was found, and its formulas were not to be had: what follows is what the prose fixes, made exact. Biased by design;
nothing is re-weighted.

At step t, from 1, with the scores s that each selector m of the pool keeps the largest of (its own; for coreset extremes
the distance of a loss's rank from the middle, as a share):
- importance of sample i to m: a_i = exp(s_i) / sum exp(s_j) (equation 2);
- weight of m: w <- w * exp(beta * (L_t - L_{t-1}) / L_{t-1}), all scaled to a sum of 1 (3). L is the mean loss of the
  samples that m would keep, or of all samples weighted by a (`average="weighted"`). Were it the plain mean of the batch,
  all weights would move alike, and the order of the samples not at all;
- score of i: exp(-l_i / t ** gamma) * sum over m of w * a_i (4, 5), the first factor a curriculum: early on small losses
  are favoured, later it is 1 for all; the k largest scores are kept (6).

Taken literally (3) drifts: a relative change that goes up and down by chance is above 0 on average, so that with `beta` above
0 the selector whose average is noisiest for its size takes all the weight, however it selects. That is small loss, soon after
its losses come near 0, and with `beta` below 0 it is left out. `change="log"` does not drift: it takes log(L_t / L_{t-1}) in
its place, whose sum over the steps is log(L_t / L_1), so that w is (L_t / L_1) ** beta, scaled, where averages are above 0;
those that are not finite, or 0, are passed over. As losses fall that of small loss falls farthest: with `beta` above 0 it loses
its weight, with `beta` below 0 it takes all.

Scores are computed as logarithms, which have the same order and do not underflow. The selectors are the methods of the same
names, and "uniform" is `RandomBackprop`: in the pool it scores all samples alike, or at random (`uniform="random"`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._ranked import KeepLargest, in_id_order, plan_of, top_positions
from thresher.methods.ada_boost import AdaBoost, BoostFormula, check_formula
from thresher.methods.big_loss import BigLoss
from thresher.methods.card import Card
from thresher.methods.contract import Requirements, State
from thresher.methods.coreset_center import CoresetCenter
from thresher.methods.coreset_extremes import CoresetExtremes
from thresher.methods.gradient_norm import GradientNorm
from thresher.methods.small_loss import SmallLoss
from thresher.plans import BatchPlan
from thresher.selection import share

UNIFORM = "uniform"
SELECTORS: dict[str, type[KeepLargest] | None] = {
    "big_loss": BigLoss,
    "small_loss": SmallLoss,
    UNIFORM: None,
    "gradient_norm": GradientNorm,
    "ada_boost": AdaBoost,
    "coreset_extremes": CoresetExtremes,
    "coreset_center": CoresetCenter,
}
"""What a pool may have. Uniform ranks nothing: it has no class."""

Change = Literal["relative", "log"]
HUGE = 1e33
"""Losses and norms beyond this count as this, so that sums of a batch stay finite in single precision."""


@cache
def selectors(pool: tuple[str, ...], adaboost: BoostFormula) -> tuple[KeepLargest | None, ...]:
    """The selectors of a pool; None for the uniform one."""
    made: dict[str, KeepLargest | None] = {name: None if kind is None else kind() for name, kind in SELECTORS.items()}
    made["ada_boost"] = AdaBoost(weights=adaboost)
    return tuple(made[name] for name in pool)


def usable_signals(signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Which samples can be scored, and their signals.

    Args:
        signals: Each of shape (n,), floating point.

    Returns:
        Bool mask (n,) of the samples with all signals finite; the signals as float32 within [-HUGE, HUGE], NaN for the others.
    """
    usable = reduce(torch.logical_and, (values.abs() < math.inf for values in signals.values()))
    return usable, {name: torch.where(usable, each.float(), math.nan).clamp(-HUGE, HUGE) for name, each in signals.items()}


def log_importance(scores: Tensor, usable: Tensor) -> Tensor:
    """Logarithm of equation (2).

    Args:
        scores: A column a selector, shape (n, M).
        usable: Bool mask (n,).

    Returns:
        Shape (n, M): the exponentials of each column add up to 1 over the usable samples; -inf or NaN for the others.
    """
    return torch.where(usable[:, None], scores, -math.inf).log_softmax(0)


def mean_of_kept(scores: Tensor, loss: Tensor, usable: Tensor, k: int) -> Tensor:
    """Mean loss of the samples that each selector would keep, of those among them with a finite loss.

    Args:
        scores: A column a selector, shape (n, M).
        loss: Shape (n,), 0 where not usable.
        usable: Bool mask (n,); the others are kept before all of these.
        k: How many each keeps, at most n; ties by the position.

    Returns:
        Shape (M,); NaN where no usable sample is kept.
    """
    left_out = len(loss) - k
    kept = torch.where(usable[:, None], scores, math.inf).argsort(dim=0, stable=True)[left_out:]
    return loss[kept].sum(0) / (usable.sum() - left_out).clamp(min=0)


def reweighted(log_weights: Tensor, before: Tensor, average: Tensor, beta: float, change: Change = "relative") -> Tensor:
    """Logarithm of equation (3), scaled to a sum of 1.

    Args:
        log_weights: Of the selectors, shape (M,).
        before: L_{t-1}, shape (M,).
        average: L_t, shape (M,).
        beta: How much a change counts.
        change: What one is: (L_t - L_{t-1}) / L_{t-1}, or log(L_t / L_{t-1}).

    Returns:
        Shape (M,). A selector's weight stays, up to the scale, where an average is not finite or was 0, and with "log" where
        it is 0, has changed its sign, or is beyond single precision's range times the last.
    """
    moved = (average - before) / before if change == "relative" else (average / before).log()
    return (log_weights + (beta * moved).nan_to_num(0.0, 0.0, 0.0)).log_softmax(0)


def log_scores(importance: Tensor, log_weights: Tensor, loss: Tensor, fade: float) -> Tensor:
    """Logarithm of equation (5).

    Args:
        importance: Logarithm of equation (2), shape (n, M).
        log_weights: Logarithm of equation (3), shape (M,).
        loss: Shape (n,).
        fade: 1 / t ** gamma, how much the curriculum counts; 0 for none.

    Returns:
        Shape (n,).
    """
    return (importance + log_weights).logsumexp(1) - fade * loss


@dataclass(frozen=True)
class AdaSelection(KeepLargest):
    """Keep the floor(keep * n) samples of each batch, at least one, that a weighted pool of selectors scores highest.

    Equal scores go to the higher id. A sample without a finite loss is kept before all others and is no part of any average.

    Args:
        keep: Share kept of each batch, (0, 1]. Published: 0.1 to 0.5.
        pool: The selectors, each once: "big_loss", "small_loss", "uniform", "gradient_norm", "ada_boost",
            "coreset_extremes", "coreset_center". Published: big and small loss; with uniform; with one of gradient norm and
            coreset extremes as well.
        beta: How a selector's weight answers the change of its average loss, [-1, 1]: above 0 it grows with the loss, below
            0 it grows as the loss falls, at 0 all weights stay equal. Not published.
        gamma: Speed at which the curriculum ends, above 0: losses count as l / t ** gamma in it. Not published.
        average: L of a selector: "picked": mean loss of the samples that it would keep; "weighted": of all by its importance.
        curriculum: Favour small losses early on.
        adaboost: How "ada_boost" weighs: "scaled" or "paper_abs", see `AdaBoost`.
        uniform: What "uniform" scores: "flat": all samples alike; "random": by chance, anew each step.
        stop_after: Steps in a row that the weights must keep still to be fixed for good, 1 or more; None: never. The history
            then says so (`weights_fixed`): the sign to stop training that the paper leaves to future work.
        stop_below: No weight moves by this much in a step that counts as still, above 0.
        change: What `beta` multiplies: "relative": the relative change, with which all weight drifts to the selector with the
            noisiest average; "log": that of the logarithm, with which it does not, for `beta` above 0.

    Raises:
        ValueError: A setting out of range.
    """

    card: ClassVar[Card] = Card(
        summary="mix base selectors by weights that adapt",
        paper="arXiv:2306.10728",
        rule="not chosen in its batch, by the mixed score of the selectors",
        biased="towards what the selectors of the pool prefer, early on towards small losses; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves",
        claim="CIFAR-10 89.39 % where full training has 92.57 % and random selection 90.74 %; CIFAR-100 71.38 %, 70.47 %, "
        "71.05 %; SVHN 93.38 %, 95.71 %, 93.32 %; means over keep = 0.1 to 0.5; at least 20 % less time (CIFAR-10)",
        caveat="by the paper's own numbers random selection is within 0.35 points on CIFAR-100, SVHN, Bike and Wikitext-2 and "
        "better on CIFAR-10; only a toy regression shows a clear gain. Here, with `beta` at 0.5, the weights drift to Small "
        "Loss, whose average is noisiest, and at low rates a network learns next to nothing. Not so with "
        '`change="log"`, ours: at a rate of 0.3 it is within 1.4 points of full training on three of four tasks, no better '
        "than random selection, which costs less (docs/reproduce.md). To decide takes some 50 small tensor operations a step, "
        "two and a half times the time of Big Loss",
        missing=(
            "The formulas are a reconstruction from the prose; beta, gamma and what the average loss is of are not published.",
            "The weights of several processes are not averaged: each adapts to its own batches.",
        ),
    )
    pool: tuple[str, ...] = ("big_loss", "small_loss", UNIFORM)
    beta: float = 0.5
    gamma: float = 0.5
    average: Literal["picked", "weighted"] = "picked"
    curriculum: bool = True
    adaboost: BoostFormula = "scaled"
    uniform: Literal["flat", "random"] = "flat"
    stop_after: int | None = None
    stop_below: float = 1e-3
    change: Change = "relative"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pool, list):
            object.__setattr__(self, "pool", tuple(self.pool))
        if not (isinstance(self.pool, tuple) and self.pool and set(self.pool) <= set(SELECTORS)):
            raise ValueError(f"AdaSelection: `pool` must be some of {', '.join(SELECTORS)}, got {self.pool!r}")
        if len(set(self.pool)) < len(self.pool):
            raise ValueError(f"AdaSelection: `pool` must have each selector once, got {self.pool!r}")
        if not -1 <= self.beta <= 1:
            raise ValueError(f"AdaSelection: `beta` must be within [-1, 1], got {self.beta}")
        for name in ("gamma", "stop_below"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"AdaSelection: `{name}` must be a finite number above 0, got {getattr(self, name)}")
        choices = {"change": ("relative", "log"), "average": ("picked", "weighted"), "uniform": ("flat", "random")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"AdaSelection: `{name}` must be one of {allowed}, got {getattr(self, name)!r}")
        check_formula("AdaSelection: `adaboost`", self.adaboost)
        if self.stop_after is not None and not (isinstance(self.stop_after, int) and self.stop_after >= 1):
            raise ValueError(
                f"AdaSelection: `stop_after` must be a whole number of 1 or more, or None, got {self.stop_after!r}"
            )

    @property
    def requires(self) -> Requirements:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The loss, and the gradient norm where a selector of the pool needs it."""
        norms = ("grad_norm",) if "gradient_norm" in self.pool else ()
        return Requirements(signals=("loss", *norms), report=True)

    def init_state(self) -> State:
        """Equal weights (as logarithms), no average loss yet, and with `stop_after` how long the weights have been still."""
        size = len(self.pool)
        state: State = {"log_weights": torch.full((size,), -math.log(size)), "average": torch.full((size,), math.nan)}
        return state if self.stop_after is None else {**state, "still": torch.zeros((), dtype=torch.int64)}

    def report(self, state: State) -> dict[str, float]:
        """The selectors' weights, for the history; waits for the device.

        Returns:
            `weight_big_loss` and so on, which add up to 1; with `stop_after` `weights_fixed`, 0 or 1.
        """
        weights = state["log_weights"].exp().tolist()
        found = {f"weight_{name}": weight for name, weight in zip(self.pool, weights, strict=True)}
        return found if self.stop_after is None else {**found, "weights_fixed": float(state["still"] >= self.stop_after)}

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """The rows that the weighted pool scores highest."""
        by_id, ordered = in_id_order({name: signals[name] for name in ("id", *self.requires.signals)})
        k = max(1, share(self.keep, len(by_id)))
        usable, values = usable_signals({name: ordered[name] for name in self.requires.signals})
        loss = values["loss"].nan_to_num(0.0)
        scores = self._scores(values, generator)
        importance = log_importance(scores, usable)
        state = self._adapted(state, self._averages(scores, importance, loss, usable, k))
        fade = (step + 1) ** -self.gamma if self.curriculum else 0.0
        total = log_scores(importance, state["log_weights"], loss, fade)
        return plan_of(by_id[top_positions(total, k)].sort().values, len(by_id), self.keep), state

    def _scores(self, values: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """Those of each selector, shape (n, M)."""
        loss, columns = values["loss"], []
        for selector in selectors(self.pool, self.adaboost):
            if selector is not None:
                columns.append(selector.scores(values))
            elif self.uniform == "random":
                draws = torch.rand(len(loss), generator=generator, dtype=torch.float32)
                columns.append(draws.to(loss.device, non_blocking=True))
            else:
                columns.append(torch.zeros_like(loss))
        return torch.stack(columns, dim=1)

    def _averages(self, scores: Tensor, importance: Tensor, loss: Tensor, usable: Tensor, k: int) -> Tensor:
        """L of each selector, shape (M,); of a flat uniform one what k random samples have on average."""
        if self.average == "weighted":
            return (importance.exp() * loss[:, None]).sum(0)
        found = mean_of_kept(scores, loss, usable, min(k, len(loss)))
        if self.uniform == "flat" and UNIFORM in self.pool:
            found[self.pool.index(UNIFORM)] = loss.sum() / usable.sum()
        return found

    def _adapted(self, state: State, average: Tensor) -> State:
        """The state with the weights of this step."""
        old, before = (state[name].to(average.device, non_blocking=True) for name in ("log_weights", "average"))
        new = reweighted(old, before, average, self.beta, self.change)
        following = {"average": average}
        if self.change == "log":  # so that its sum over the steps has no gaps
            following["average"] = torch.where(average.isfinite() & (average != 0), average, before)
        if self.stop_after is None:
            return {**state, **following, "log_weights": new}
        still = state["still"].to(average.device, non_blocking=True)
        fixed = still >= self.stop_after
        counts = (before.isfinite() & average.isfinite()).all() & ((new.exp() - old.exp()).abs() < self.stop_below).all()
        return {
            **state,
            **following,
            "log_weights": torch.where(fixed, old, new),
            "still": torch.where(fixed, still, torch.where(counts, still + 1, 0)),
        }
