"""AdaSelection: score the samples of a batch by several selectors at once, with weights that adapt from step to step.

Zhang et al., "AdaSelection: Accelerating Deep Learning Training through Data Subsampling", arXiv:2306.10728. We found no
official code, and could not read the formulas of the paper: the following is an exact form of its prose. The method is biased
by design: nothing is re-weighted.

In step t, from 1, each selector m of the pool has a score s_i for sample i, of which it alone would keep the largest (for
coreset extremes this is the distance of a loss's rank from the middle, as a share). Then:
- the importance of sample i for m is a_i = exp(s_i) / sum exp(s_j) (equation 2);
- the weight of m becomes w * exp(beta * (L_t - L_{t-1}) / L_{t-1}), and all weights are scaled to a sum of 1 (3). L is the mean
  loss of the samples that m would keep, or the mean over all samples weighted by a (`average="weighted"`). With the plain mean
  of the batch, all weights would change alike, and the order of the samples would not change at all;
- the score of i is exp(-l_i / t ** gamma) times the sum of w * a_i over all m (4, 5), and the k largest scores are kept (6).
  The first factor is a curriculum: it favours small losses at the beginning, and is 1 for all samples later.

As written, equation (3) drifts: a relative change that goes up and down at random is above 0 on average. With `beta` above 0,
the selector whose average is noisiest for its size takes all the weight, independently of how well it selects. This is small
loss, soon after its losses come near 0; with `beta` below 0 it loses its weight. `change="log"` does not drift: it replaces the
relative change by log(L_t / L_{t-1}), whose sum over the steps is log(L_t / L_1), so that w is (L_t / L_1) ** beta, scaled,
where averages are above 0; averages that are 0 or not finite are skipped. As losses fall, that of small loss falls most: with
`beta` above 0 small loss loses its weight, with `beta` below 0 it takes all of it.

Scores are computed as logarithms, which have the same order and do not underflow. The selectors are the methods of the same
names. "uniform" stands for `RandomBackprop`: in the pool it scores all samples alike, or at random (`uniform="random"`).
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
"""Selectors that a pool may contain. The uniform selector has no class, because it ranks nothing."""

Change = Literal["relative", "log"]
HUGE = 1e33
"""Bound on losses and norms: larger ones count as this, so that sums over a batch stay finite in single precision."""


@cache
def selectors(pool: tuple[str, ...], adaboost: BoostFormula) -> tuple[KeepLargest | None, ...]:
    """Returns the selectors of a pool; None for the uniform one."""
    made: dict[str, KeepLargest | None] = {name: None if kind is None else kind() for name, kind in SELECTORS.items()}
    made["ada_boost"] = AdaBoost(weights=adaboost)
    return tuple(made[name] for name in pool)


def usable_signals(signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns which samples can be scored, and their signals.

    Args:
        signals: Signals by name, each of shape (n,), floating point.

    Returns:
        Bool mask (n,) of the samples whose signals are all finite, and the signals as float32 within [-HUGE, HUGE], NaN for the
        other samples.
    """
    usable = reduce(torch.logical_and, (values.abs() < math.inf for values in signals.values()))
    return usable, {name: torch.where(usable, each.float(), math.nan).clamp(-HUGE, HUGE) for name, each in signals.items()}


def log_importance(scores: Tensor, usable: Tensor) -> Tensor:
    """Returns the logarithm of equation (2).

    Args:
        scores: Scores, one column per selector, shape (n, M).
        usable: Mask of the samples that can be scored, bool, shape (n,).

    Returns:
        Logarithms, shape (n, M): the exponentials of each column add up to 1 over the usable samples; -inf or NaN elsewhere.
    """
    return torch.where(usable[:, None], scores, -math.inf).log_softmax(0)


def mean_of_kept(scores: Tensor, loss: Tensor, usable: Tensor, k: int) -> Tensor:
    """Returns the mean loss of the usable samples that each selector would keep.

    Args:
        scores: Scores, one column per selector, shape (n, M).
        loss: Losses, shape (n,), 0 where not usable.
        usable: Mask of the samples that can be scored, bool, shape (n,); the others are kept before them.
        k: Number of samples that each selector keeps, at most n; ties are ordered by position.

    Returns:
        Mean losses, shape (M,); NaN where no usable sample is kept.
    """
    left_out = len(loss) - k
    kept = torch.where(usable[:, None], scores, math.inf).argsort(dim=0, stable=True)[left_out:]
    return loss[kept].sum(0) / (usable.sum() - left_out).clamp(min=0)


def reweighted(log_weights: Tensor, before: Tensor, average: Tensor, beta: float, change: Change = "relative") -> Tensor:
    """Returns the logarithm of equation (3), scaled to a sum of 1.

    Args:
        log_weights: Logarithms of the weights of the selectors, shape (M,).
        before: Average losses L_{t-1}, shape (M,).
        average: Average losses L_t, shape (M,).
        beta: Factor on the change.
        change: Kind of change: "relative" (default) is (L_t - L_{t-1}) / L_{t-1}, "log" is log(L_t / L_{t-1}).

    Returns:
        Logarithms of the new weights, shape (M,). The weight of a selector stays the same, up to the scale, where an average is
        not finite or was 0, and with "log" also where it is 0, has changed its sign, or has changed by more than the range of
        single precision.
    """
    moved = (average - before) / before if change == "relative" else (average / before).log()
    return (log_weights + (beta * moved).nan_to_num(0.0, 0.0, 0.0)).log_softmax(0)


def log_scores(importance: Tensor, log_weights: Tensor, loss: Tensor, fade: float) -> Tensor:
    """Returns the logarithm of equation (5).

    Args:
        importance: Logarithm of equation (2), shape (n, M).
        log_weights: Logarithm of equation (3), shape (M,).
        loss: Losses, shape (n,).
        fade: Factor of the curriculum, 1 / t ** gamma; 0 for no curriculum.

    Returns:
        Logarithms of the scores, shape (n,).
    """
    return (importance + log_weights).logsumexp(1) - fade * loss


@dataclass(frozen=True)
class AdaSelection(KeepLargest):
    """Trains on the floor(keep * n) samples of each batch, at least one, that a weighted pool of selectors scores highest.

    Of samples with equal scores, those with the higher ids are kept. A sample without a finite loss is kept before all others
    and counts in no average.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5; published: 0.1 to 0.5.
        pool: Names of the selectors, each once: "big_loss", "small_loss", "uniform", "gradient_norm", "ada_boost",
            "coreset_extremes", "coreset_center". Default: the first three. Published: big and small loss; these with uniform;
            these three with gradient norm or coreset extremes.
        beta: Factor on the change of a selector's average loss, [-1, 1]: above 0 its weight grows with the loss, below 0 it
            grows as the loss falls, at 0 all weights stay equal. Default 0.5; not published.
        gamma: Speed at which the curriculum ends, above 0: losses count as l / t ** gamma in it. Default 0.5; not published.
        average: Average loss L of a selector: "picked" (default) is the mean over the samples that it would keep; "weighted"
            is the mean over all samples, weighted by its importance.
        curriculum: Whether small losses are favoured at the beginning. Default True.
        adaboost: Formula of the selector "ada_boost": "scaled" (default) or "paper_abs", as in `AdaBoost`.
        uniform: Scores of the selector "uniform": "flat" (default) are equal for all samples; "random" are drawn anew in each
            step.
        stop_after: Number of consecutive steps without a change after which the weights are fixed, 1 or more. The history then
            has `weights_fixed`, which can serve as the sign to stop training that the paper leaves to future work. Default
            None: never.
        stop_below: Largest change of a weight in a step that counts as one without a change, above 0. Default 0.001.
        change: Kind of change that `beta` multiplies: "relative" (default), with which all weight drifts to the selector with
            the noisiest average; "log", the change of the logarithm, without this drift for `beta` above 0.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import AdaSelection
        >>> method = AdaSelection(pool=("big_loss", "small_loss"), curriculum=False)
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([0.1, 0.9, 0.5, 0.2])}
        >>> plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=torch.Generator())
        >>> plan.rows, method.report(state)
        (tensor([0, 1]), {'weight_big_loss': 0.5, 'weight_small_loss': 0.5})
    """

    card: ClassVar[Card] = Card(
        summary="mix base selectors by weights that adapt",
        paper="arXiv:2306.10728",
        rule="not chosen in its batch, by the mixed score of the selectors",
        biased="towards the samples that the selectors of the pool prefer, at first towards small losses; nothing is "
        "re-weighted",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves",
        claim="CIFAR-10 89.39 % where full training has 92.57 % and random selection 90.74 %; CIFAR-100 71.38 %, 70.47 %, "
        "71.05 %; SVHN 93.38 %, 95.71 %, 93.32 %; means over keep = 0.1 to 0.5; at least 20 % less time (CIFAR-10)",
        caveat="by the paper's own numbers random selection is within 0.35 points on CIFAR-100, SVHN, Bike and Wikitext-2 and "
        "better on CIFAR-10; only a toy regression shows a clear gain. Here, with beta=0.5, the weights drift to Small Loss, "
        'whose average is noisiest, and with a small `keep` a network learns almost nothing. `change="log"`, which is our '
        "addition, does not drift: with keep=0.3 it is within 1.4 points of full training on three of four tasks, no better "
        "than random selection, which costs less (docs/reproduce.md). The choice takes about 50 small tensor operations per "
        "step, two and a half times the time of Big Loss",
        missing=(
            "The formulas are a reconstruction from the prose; beta, gamma and the kind of average loss are not published.",
            "The weights of several processes are not averaged: each process adapts to its own batches.",
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
        """Returns the needs: the loss, and the gradient norm where a selector of the pool needs it."""
        norms = ("grad_norm",) if "gradient_norm" in self.pool else ()
        return Requirements(signals=("loss", *norms), report=True)

    def init_state(self) -> State:
        """Returns the first state: equal weights, no average loss, and with `stop_after` the number of steps without change."""
        size = len(self.pool)
        state: State = {"log_weights": torch.full((size,), -math.log(size)), "average": torch.full((size,), math.nan)}
        return state if self.stop_after is None else {**state, "still": torch.zeros((), dtype=torch.int64)}

    def report(self, state: State) -> dict[str, float]:
        """Returns the weights of the selectors for the history; this waits for the device.

        Args:
            state: State of the method.

        Returns:
            Weights by name, such as `weight_big_loss`, which add up to 1; with `stop_after` also `weights_fixed`, 0 or 1.
        """
        weights = state["log_weights"].exp().tolist()
        found = {f"weight_{name}": weight for name, weight in zip(self.pool, weights, strict=True)}
        return found if self.stop_after is None else {**found, "weights_fixed": float(state["still"] >= self.stop_after)}

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the rows that the weighted pool scores highest, and the state with the new weights."""
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
        """Returns the scores of each selector, shape (n, M)."""
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
        """Returns L of each selector, shape (M,); for a flat uniform selector the mean of all usable samples."""
        if self.average == "weighted":
            return (importance.exp() * loss[:, None]).sum(0)
        found = mean_of_kept(scores, loss, usable, min(k, len(loss)))
        if self.uniform == "flat" and UNIFORM in self.pool:
            found[self.pool.index(UNIFORM)] = loss.sum() / usable.sum()
        return found

    def _adapted(self, state: State, average: Tensor) -> State:
        """Returns the state with the weights of this step."""
        old, before = (state[name].to(average.device, non_blocking=True) for name in ("log_weights", "average"))
        new = reweighted(old, before, average, self.beta, self.change)
        following = {"average": average}
        if self.change == "log":  # skipped averages leave no gap in the sum over the steps
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
