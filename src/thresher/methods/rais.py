"""RAIS: draw by robust estimates of the samples' gradient norms, made of their last norms and how old those are; weigh them.

Johnson and Guestrin, "Training Deep Models Faster with Robust, Approximate Importance Sampling", NeurIPS 2018.
Unbiased: the expected weighted loss is that of all samples, as long as `uniform` is above 0.

The variance of a step is least where sample i is drawn in proportion to its gradient norm g_i. As nobody can afford to know
that, its square is estimated by c.x_i and the estimate's error by d.x_i, from features x_i of what was seen: the square of the
last norm, the epochs since, and a constant. Samples are drawn in proportion to sqrt(c.x_i + k d.x_i): the less is known of a
sample, the more of a chance it gets. c and d are learned from the samples of the epoch before, whose norms are known now and
whose features were known then.

The norm is that of the gradient with respect to the model's outputs. A sample whose norm is not finite is kept, once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._drawing import draw_probabilities, drawn_plan, full_plan
from thresher.methods._ranked import check_keep
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import EPOCH, NEVER_SEEN, Column
from thresher.selection import Mask, Values, on_host

FEWEST_PAIRS = 10
"""Samples below which nothing is learned of c and d."""

TRUSTING = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
"""c and d before anything was learned: the last norm is believed, its square wrong by the mean square."""


def features(norm: Values, age: Values, scale: float) -> Values:
    """What the estimate of a squared gradient norm is made of.

    Args:
        norm: Last norm, shape (n,), finite.
        age: Epochs since, shape (n,).
        scale: Mean square that the norms are measured in, > 0.

    Returns:
        Shape (n, 3), float64: squared norm over `scale`, age, one.
    """
    return np.stack([norm.astype(np.float64) ** 2 / scale, age.astype(np.float64), np.ones(len(norm))], axis=1)


def nonnegative_least_squares(x: Values, y: Values) -> Values:
    """The c >= 0 with the least sum of squares of y - x c; shapes (n, m), (n,) and (m,), for a small m.

    The answer solves the problem without its zeros, so that trying each set of zeros finds it. Columns that say the same
    are not both used.
    """
    gram, moment = x.T @ x, x.T @ y
    best, least, better = np.zeros(x.shape[1]), 0.0, 1e-9 * float(y @ y)
    for free in [*product((False, True), repeat=x.shape[1])][1:]:
        some = np.array(free)
        c = np.zeros(x.shape[1])
        c[some] = np.linalg.lstsq(gram[np.ix_(some, some)], moment[some], rcond=None)[0]
        value = float(c @ gram @ c - 2 * moment @ c)
        if (c >= 0).all() and value < least - better:
            best, least = c, value
    return best


def fitted_estimates(x: Values, squared: Values) -> tuple[Values, Values]:
    """The weights of the features: c of the estimate, d of its error.

    Args:
        x: Features as they were, shape (n, 3).
        squared: Squared norm as it turned out, over the scale of the features, shape (n,).

    Returns:
        c and d, shape (3,), 0 or more; `TRUSTING` where there are too few samples to learn from. Errors count relative to the
        norm there was, so that a few large ones do not decide.
    """
    if len(x) < FEWEST_PAIRS:
        return TRUSTING
    size = x[:, 0] + 1
    c = nonnegative_least_squares(x / size[:, None], squared / size)
    d = nonnegative_least_squares(x / size[:, None], np.abs(squared - x @ c) / size)
    return c, d


def gain(squared: Values, chances: Values) -> float:
    """How much smaller the second moment of the gradient of one weighted draw is than that of a uniform draw.

    Args:
        squared: Squared gradient norms, shape (n,).
        chances: Of each in one draw, shape (n,), above 0 where the norm is.

    Returns:
        n sum(g^2) / sum(g^2 / p), which is n sum(g^2) / sum(g)^2 where p is in proportion to g; 1 where all norms are zero.
    """
    drawn = chances > 0
    spent = float(np.sum(squared[drawn] / chances[drawn]))
    return len(squared) * float(np.sum(squared)) / spent if spent else 1.0


@dataclass(frozen=True)
class Rais:
    """Draw each epoch with replacement, with robust estimates of the best chances p, each loss times 1 / (N p).

    Args:
        robustness: k, how much of the estimate's error is added to the estimate, 0 or more; 0 trusts the estimate. Default 1,
            not the paper's, which solves for it.
        uniform: Share of the draws that is uniform, [0, 1]. Keeps weights below 1 / uniform where all norms are
            known, and brings back samples whose norm was zero once. Not in the paper.
        keep: Draws as a share of the samples, (0, 1]. 1: an epoch as long as without it.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(own_order=True)
    card: ClassVar[Card] = Card(
        summary="draw samples by robust estimates of gradient norm, weigh them",
        paper="Johnson & Guestrin, NeurIPS 2018",
        rule="not drawn, by its last gradient norm and how old that is",
        biased="No: the expected weighted mean loss is that of all data, where samples count alike (no class weights or "
        "ignored positions, whose divisor is that of the samples drawn).",
        forwards="None.",
        claim="Speed-ups of at least 20 % and sometimes much more, at learning curves like those of plain training.",
        bytes_per_sample=12,
        caveat="With keep=1 an epoch costs what full training costs: it is to make steps less noisy, not fewer. The history's "
        "`gain` says by how much.",
        missing=(
            "Learning rate and its schedule by effective iterations, which go on faster by the gain in variance.",
            "Chances that change with every iteration: here they change once an epoch.",
            "The paper's features and its solution for k: here three features, and k is a setting.",
        ),
    )
    robustness: float = 1.0
    uniform: float = 0.01
    keep: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.robustness < math.inf:
            raise ValueError(f"Rais: `robustness` must be a finite number of 0 or more, got {self.robustness}")
        if not 0 <= self.uniform <= 1:
            raise ValueError(f"Rais: `uniform` is a share of the draws, within [0, 1], got {self.uniform}")
        check_keep(self, self.keep)

    def columns(self) -> dict[str, Column]:
        """Last norm and when it was seen, and both as they were at the last plan: 12 bytes a sample."""
        return {
            "grad_norm": Column(torch.float32, fill=NEVER_SEEN),
            "epoch": Column(torch.int16, fill=-1, signal=EPOCH),
            "grad_norm_then": Column(torch.float32, fill=NEVER_SEEN, merge="plan"),
            "epoch_then": Column(torch.int16, fill=-1, merge="plan"),
        }

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Draws by the estimates; what they were made of is remembered, to learn from when the epoch is over."""
        norm, seen = on_host(records["grad_norm"]), on_host(records["epoch"])
        known = np.isfinite(norm)
        if epoch == 0 or not known.any():
            return full_plan(len(norm))
        c, d = self._learned(records, epoch)
        x = features(norm[known], epoch - seen[known], _mean_square(norm[known]))
        chances = np.full(len(norm), np.nan)
        chances[known] = self._chances(x @ c, x @ d)
        return drawn_plan(
            chances,
            self.keep,
            generator,
            weighted=True,
            remember={"grad_norm_then": records["grad_norm"].clone(), "epoch_then": records["epoch"].clone()},
            facts={"gain": gain(x @ c, chances[known])},
        )

    def _chances(self, squared: Values, error: Values) -> Values:
        p = draw_probabilities(np.sqrt(squared + self.robustness * error))
        return (1 - self.uniform) * p + self.uniform / len(p)

    @staticmethod
    def _learned(records: Mapping[str, Tensor], epoch: int) -> tuple[Values, Values]:
        """Learn c and d from the samples of the last epoch whose norms had been known before."""
        norm, then = on_host(records["grad_norm"]), on_host(records["grad_norm_then"])
        pairs: Mask = (on_host(records["epoch"]) == epoch - 1) & np.isfinite(norm) & np.isfinite(then)
        if not pairs.any():
            return TRUSTING
        age = epoch - 1 - on_host(records["epoch_then"])[pairs]
        scale = _mean_square(then[pairs])
        return fitted_estimates(features(then[pairs], age, scale), norm[pairs].astype(np.float64) ** 2 / scale)


def _mean_square(norm: Values) -> float:
    """Mean of the squares, 1 where all are zero."""
    return float(np.mean(norm.astype(np.float64) ** 2)) or 1.0
