"""AdaSelection: score the samples of a batch by several selectors at once, with weights that adapt from step to step.

Zhang et al., "AdaSelection: Accelerating Deep Learning Training through Data Subsampling", arXiv:2306.10728. There is no
official code, and the formulas of the paper are not public: the following is one reading of its prose. The method is biased by
design: nothing is re-weighted.

In step t, from 1, with losses l_i whose mean in the batch is lbar, and k samples to keep:
- u_i = l_i / lbar. For Big Loss the importance a_i of sample i is the softmax of u over the batch, for Small Loss that of -u,
  and for the other selectors that of the score by which they alone would keep samples, computed from u (2). The uniform
  selector has 1 / k on k random samples and 0 elsewhere, so that it decides where it has the weight.
- L is the average loss of a selector across all samples, sum a_i l_i. Its weight becomes w * exp(beta * (L_t - L_{t-1}) /
  L_{t-1}), and all weights are scaled to a sum of 1 (3).
- The score of i is exp(-u_i / t ** gamma) times the sum of w * a_i over the selectors (4, 5), and the k largest scores are kept
  (6). The first factor is a curriculum: it favours small losses at the beginning, and is 1 for all samples later.

The prose asks for a "majority vote", for "the average loss across all the samples in the mini-batch", and for results near
random selection where Big Loss and Small Loss both fail (SVHN in table 4). It does not fix what a selector's importance is made
of, what is averaged, or how the uniform selector votes. About 40 readings were tried on seven small tasks, and this one is near
random selection, or between it and the best selector, on all of them. Losses are divided by their mean because softmaxes of
losses as they are depend on the unit of the loss: with this, losses times 100 choose the same samples. Of losses that can be
below 0, lbar is the mean size, without which the order would turn round.

Equation (3) drifts in every reading: a relative change that goes up and down at random is above 0 on average, so that the
selector whose average is noisiest for its size takes the weight in the end, independently of how well it selects. In this
reading it is the uniform selector where few samples are kept, or Big Loss.

`AdaSelection.variant("literal")` is the first reading that was tried: losses as they are, L is the mean loss of the samples
that the selector alone would keep, and the uniform selector scores all samples alike, which never changes their order. It
learns next to nothing where few samples are kept, because the weight drifts to small loss.

Scores are computed as logarithms, which have the same order and do not underflow. The selectors are the methods of the same
names; "uniform" stands for `RandomBackprop`.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import KeepLargest, in_id_order, plan_of, top_positions
from thresher.methods.ada_boost import AdaBoost, BoostFormula, check_formula
from thresher.methods.big_loss import BigLoss
from thresher.methods.contract import Card, Requirements, State
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

BY_LARGE_LOSSES = {"big_loss", "gradient_norm", "ada_boost", "coreset_extremes"}
"""Selectors that keep samples of large loss, such as outliers and wrong labels."""
LITERAL: dict[str, Any] = {"normalise": False, "average": "picked", "uniform": "flat"}
"""Settings of the variant "literal"."""

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


def over_mean(values: Tensor, usable: Tensor) -> Tensor:
    """Returns values in units of their mean size in the batch, u.

    Args:
        values: Losses or norms, shape (n,), NaN where not usable.
        usable: Mask of the samples that can be scored, bool, shape (n,).

    Returns:
        The values divided by the mean of their absolute values, which is the mean where none is below 0, shape (n,); unchanged
        where all are 0.
    """
    size = torch.where(usable, values.abs(), 0.0).sum() / usable.sum()
    return values / torch.where(size > 0, size, 1.0)


def drawn(draws: Tensor, usable: Tensor, k: int) -> Tensor:
    """Marks the k usable samples with the largest draws.

    Args:
        draws: Random numbers, shape (n,), [0, 1).
        usable: Mask of the samples that can be scored, bool, shape (n,).
        k: Number of samples to mark; where fewer are usable, others are marked, too.

    Returns:
        Bool mask (n,).
    """
    order = torch.where(usable, draws, -1.0).argsort(descending=True, stable=True)
    return torch.zeros_like(usable).index_fill_(0, order[:k], True)


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


def reweighted(log_weights: Tensor, before: Tensor, average: Tensor, beta: float) -> Tensor:
    """Returns the logarithm of equation (3), scaled to a sum of 1.

    Args:
        log_weights: Logarithms of the weights of the selectors, shape (M,).
        before: Average losses L_{t-1}, shape (M,).
        average: Average losses L_t, shape (M,).
        beta: Factor on the relative change.

    Returns:
        Logarithms of the new weights, shape (M,). The weight of a selector stays the same, up to the scale, where an average is
        not finite or was 0.
    """
    moved = (average - before) / before
    return (log_weights + (beta * moved).nan_to_num(0.0, 0.0, 0.0)).log_softmax(0)


def log_scores(importance: Tensor, log_weights: Tensor, loss: Tensor, fade: float) -> Tensor:
    """Returns the logarithm of equation (5).

    Args:
        importance: Logarithm of equation (2), shape (n, M).
        log_weights: Logarithm of equation (3), shape (M,).
        loss: Losses, in the units of the curriculum, shape (n,).
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
            these three with gradient norm or coreset extremes. Without "uniform" a warning is given, see Warns.
        beta: Factor on the relative change of a selector's average loss, [0, 1]: its weight grows with the loss, and at 0 all
            weights stay equal. Default 0.5; not published. Within [-1, 1] with `normalise=False`; with other settings, values
            below 0 are refused, because the weight goes to the selector whose losses are learned already.
        gamma: Speed at which the curriculum ends, above 0: losses count as u / t ** gamma in it. Default 0.5; not published.
        average: Average loss L of a selector: "weighted" (default) is the mean over all samples, weighted by its importance;
            "picked" is the mean over the samples that it alone would keep.
        curriculum: Whether small losses are favoured at the beginning. Default True.
        adaboost: Formula of the selector "ada_boost": "scaled" (default) or "paper_abs", as in `AdaBoost`.
        uniform: Vote of the selector "uniform": "drawn" (default) gives all its importance to a random subset of the size that
            is kept, drawn anew in each step; "flat" gives all samples the same, which never changes their order.
        stop_after: Number of consecutive steps without a change after which the weights are fixed, 1 or more. The history then
            has `weights_fixed`, which can serve as the sign to stop training that the paper leaves to future work. Default
            None: never.
        stop_below: Largest change of a weight in a step that counts as one without a change, above 0. Default 0.001.
        normalise: Whether losses and gradient norms are divided by their mean in the batch before they are compared. Default
            True; with False the choice depends on the unit of the loss.

    Raises:
        ValueError: A setting is out of its range.

    Warns:
        UserWarning: The pool has a selector that keeps large losses and not "uniform": where large losses are wrong labels or
            outliers, no selector can take the weight from it.

    Example:
        >>> import torch
        >>> from thresher import AdaSelection
        >>> method = AdaSelection(pool=("big_loss", "uniform"), curriculum=False)
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([0.1, 0.9, 0.5, 0.2])}
        >>> plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=torch.Generator())
        >>> len(plan.rows), method.report(state)
        (2, {'weight_big_loss': 0.5, 'weight_uniform': 0.5})
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
        "better on CIFAR-10; only a toy regression shows a clear gain. Here it is within a point of random selection with as "
        "many optimizer steps on five tasks, or up to two points above it (docs/results.md), and random selection costs less, "
        "because it scores nothing. The weights drift: a noisy average changes by more than 0 on average, so that the selector "
        "with the noisiest average takes the weight. With keep=0.1 this is the uniform one on all five tasks; with 0.3 and 0.5 "
        "it is Big Loss on one task of them. The choice takes about 60 small tensor operations per step, six times those of "
        "Big Loss",
        differences=(
            "The formulas of the paper are not public, and its prose can be read in many ways. The default is one reading, out "
            "of about 40 that were tried on seven small tasks: the one that is near random selection, or between it and the "
            "best selector, on all of them, as most numbers of the paper are. It takes losses in units of their mean, averages "
            "over all samples, and a uniform selector that votes for a random subset.",
            'AdaSelection.variant("literal") is the first reading, which learns next to nothing with a small `keep`.',
        ),
        missing=(
            "beta, gamma and the kind of average loss are not published; the defaults are ours.",
            "The weights of several processes are not averaged: each process adapts to its own batches.",
        ),
    )
    pool: tuple[str, ...] = ("big_loss", "small_loss", UNIFORM)
    beta: float = 0.5
    gamma: float = 0.5
    average: Literal["weighted", "picked"] = "weighted"
    curriculum: bool = True
    adaboost: BoostFormula = "scaled"
    uniform: Literal["drawn", "flat"] = "drawn"
    stop_after: int | None = None
    stop_below: float = 1e-3
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pool, list):
            object.__setattr__(self, "pool", tuple(self.pool))
        if not (isinstance(self.pool, tuple) and self.pool and set(self.pool) <= set(SELECTORS)):
            raise ValueError(f"AdaSelection: `pool` must be some of {', '.join(SELECTORS)}, got {self.pool!r}")
        if len(set(self.pool)) < len(self.pool):
            raise ValueError(f"AdaSelection: `pool` must have each selector once, got {self.pool!r}")
        self._check_beta()
        for name in ("gamma", "stop_below"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"AdaSelection: `{name}` must be a finite number above 0, got {getattr(self, name)}")
        choices = {"average": ("weighted", "picked"), "uniform": ("drawn", "flat"), "normalise": (True, False)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"AdaSelection: `{name}` must be one of {allowed}, got {getattr(self, name)!r}")
        check_formula("AdaSelection: `adaboost`", self.adaboost)
        if self.stop_after is not None and not (isinstance(self.stop_after, int) and self.stop_after >= 1):
            raise ValueError(
                f"AdaSelection: `stop_after` must be a whole number of 1 or more, or None, got {self.stop_after!r}"
            )
        self._warn_without_uniform()

    def _check_beta(self) -> None:
        if not -1 <= self.beta <= 1:
            raise ValueError(f"AdaSelection: `beta` must be within [0, 1], got {self.beta}")
        if self.beta < 0 and self.normalise:
            raise ValueError(
                f"AdaSelection: `beta` must be within [0, 1], got {self.beta}: below 0 all weight goes to the selector whose "
                "losses fall fastest, which keeps what is learned already. Use 0 for weights that stay equal, or "
                'AdaSelection.variant("literal", beta=...) for the reading that allows it'
            )

    def _warn_without_uniform(self) -> None:
        large = [name for name in self.pool if name in BY_LARGE_LOSSES]
        if self.normalise and large and UNIFORM not in self.pool:
            warnings.warn(
                f"AdaSelection: `pool` is {self.pool!r}, which has {large[0]!r} and not {UNIFORM!r}. Where large losses are "
                "wrong labels or outliers, no selector can take the weight from it, and training may fail. Add "
                f"{UNIFORM!r} to `pool`.",
                stacklevel=4,
            )

    @classmethod
    def variant(cls, name: Literal["literal"], **settings: Any) -> "AdaSelection":
        """Returns another reading of the paper.

        Args:
            name: Name of the reading: "literal" takes losses as they are, averages of the samples that a selector alone would
                keep, and a uniform selector that scores all samples alike. It learns next to nothing where few are kept.
            **settings: Further settings.

        Raises:
            ValueError: There is no reading of this name, or a setting is out of its range.

        Example:
            >>> AdaSelection.variant("literal", keep=0.3).average
            'picked'
        """
        if name != "literal":
            raise ValueError(f"AdaSelection.variant: `name` must be 'literal', got {name!r}")
        return cls(**LITERAL | settings)

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
        if self.normalise:
            values = {name: over_mean(each, usable) for name, each in values.items()}
        scores = self._scores(values, usable, k, generator)
        importance = log_importance(scores, usable)
        state = self._adapted(state, self._averages(scores, importance, loss, usable, k))
        fade = (step + 1) ** -self.gamma if self.curriculum else 0.0
        total = log_scores(importance, state["log_weights"], values["loss"], fade)
        return plan_of(by_id[top_positions(total, k)].sort().values, len(by_id), self.keep), state

    def _scores(self, values: Mapping[str, Tensor], usable: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """Returns the scores of each selector, shape (n, M)."""
        loss, columns = values["loss"], []
        for selector in selectors(self.pool, self.adaboost):
            if selector is not None:
                columns.append(selector.scores(values))
            elif self.uniform == "drawn":
                draws = torch.rand(len(loss), generator=generator, dtype=torch.float32).to(loss.device, non_blocking=True)
                columns.append(torch.where(drawn(draws, usable, k), 0.0, -HUGE))
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
        new = reweighted(old, before, average, self.beta)
        if self.stop_after is None:
            return {**state, "average": average, "log_weights": new}
        still = state["still"].to(average.device, non_blocking=True)
        fixed = still >= self.stop_after
        counts = (before.isfinite() & average.isfinite()).all() & ((new.exp() - old.exp()).abs() < self.stop_below).all()
        return {
            **state,
            "average": average,
            "log_weights": torch.where(fixed, old, new),
            "still": torch.where(fixed, still, torch.where(counts, still + 1, 0)),
        }
