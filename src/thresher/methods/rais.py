"""RAIS: draw samples by robust estimates of their gradient norms, with weights that remove the bias.

Johnson and Guestrin, "Training Deep Models Faster with Robust, Approximate Importance Sampling", NeurIPS 2018.
It is unbiased: the expected weighted loss is that of all samples, as long as `uniform` is above 0.

The variance of a step is least where sample i is drawn in proportion to its gradient norm g_i, which is too expensive to
compute for every sample. Its square is therefore estimated by c.x_i, and the error of this estimate by d.x_i. The features x_i
are the square of the last known norm, the number of epochs since then, and a constant. Samples are drawn in proportion to
sqrt(c.x_i + k d.x_i): the less is known about a sample, the higher its probability. c and d are fitted to the samples of the
last epoch, whose norms are known now and whose features were known before.

The norm is that of the gradient with respect to the model's outputs. A sample whose norm is not finite is kept once, without a
draw.
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
"""Least number of samples to which c and d are fitted."""

TRUSTING = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
"""c and d before the first fit: the estimate is the square of the last norm, and its error the mean square of the norms."""


def features(norm: Values, age: Values, scale: float) -> Values:
    """Returns the features from which a squared gradient norm is estimated.

    Args:
        norm: Last norm of each sample, shape (n,), finite.
        age: Number of epochs since then, shape (n,).
        scale: Unit of the squared norms, their mean square, > 0.

    Returns:
        Features, shape (n, 3), float64: squared norm over `scale`, age, one.
    """
    return np.stack([norm.astype(np.float64) ** 2 / scale, age.astype(np.float64), np.ones(len(norm))], axis=1)


def nonnegative_least_squares(x: Values, y: Values) -> Values:
    """Returns the c >= 0 with the least sum of squares of y - x c, for few columns.

    Without its zeros, the solution solves the problem without a bound; therefore every set of zeros is tried. Of two columns
    that are proportional, only one is used.

    Args:
        x: Matrix, shape (n, m), float64, with a small m.
        y: Right-hand side, shape (n,), float64.

    Returns:
        Coefficients, shape (m,), float64, 0 or more.
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
    """Fits the coefficients of the features: c of the estimate, d of its error.

    Args:
        x: Features before the last epoch, shape (n, 3).
        squared: Squared norms in the last epoch, over the scale of the features, shape (n,).

    Returns:
        c and d, shape (3,), 0 or more; `TRUSTING` where there are too few samples. Errors are relative to the earlier norms, so
        that a few large norms do not dominate the fit.
    """
    if len(x) < FEWEST_PAIRS:
        return TRUSTING
    size = x[:, 0] + 1
    c = nonnegative_least_squares(x / size[:, None], squared / size)
    d = nonnegative_least_squares(x / size[:, None], np.abs(squared - x @ c) / size)
    return c, d


def gain(squared: Values, chances: Values) -> float:
    """Returns the second moment of the gradient of a uniform draw over that of a weighted draw.

    Args:
        squared: Squared gradient norms g^2, shape (n,).
        chances: Probabilities p in one draw, shape (n,), above 0 where the norm is above 0.

    Returns:
        n sum(g^2) / sum(g^2 / p), which is n sum(g^2) / sum(g)^2 where p is proportional to g; 1 where all norms are zero.
    """
    drawn = chances > 0
    spent = float(np.sum(squared[drawn] / chances[drawn]))
    return len(squared) * float(np.sum(squared)) / spent if spent else 1.0


@dataclass(frozen=True)
class Rais:
    """Draws each epoch with replacement, with robust estimates of the best probabilities p and weights 1 / (N p).

    Args:
        robustness: Factor with which the error of the estimate is added to the estimate, k, 0 or more; 0 trusts the estimate.
            Default 1; the paper solves for it instead.
        uniform: Share of the draws that is uniform, [0, 1]. It keeps the weights below 1 / uniform where all norms are known,
            and lets samples return whose norm was zero once. Default 0.01; not in the paper.
        keep: Number of draws as a share of the samples, (0, 1]. Default 1: an epoch is as long as without the method.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Rais
        >>> norms, epochs = torch.tensor([0.0, 3.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int16)
        >>> records = {"grad_norm": norms, "epoch": epochs, "grad_norm_then": norms * torch.nan, "epoch_then": epochs - 1}
        >>> plan = Rais().plan_epoch(records, epoch=1, epochs=5, generator=torch.Generator().manual_seed(0))
        >>> plan.drawn, plan.facts["gain"] > 1
        (True, True)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(own_order=True)
    card: ClassVar[Card] = Card(
        summary="draw samples by robust estimates of gradient norm, weigh them",
        paper="Johnson & Guestrin, NeurIPS 2018",
        rule="not drawn, by its last gradient norm and how old that is",
        biased="No: the expected weighted mean loss is that of all data where all samples count the same (with class weights "
        "or ignored positions the divisor is that of the samples drawn).",
        forwards="None.",
        claim="Speed-ups of at least 20 % and sometimes much more, with learning curves like those of plain training.",
        bytes_per_sample=12,
        caveat="With keep=1 an epoch costs as much as in full training: the aim is less noise per step, not fewer steps. "
        "`gain` in the history is the factor.",
        missing=(
            "A learning-rate schedule by effective iterations, which advance faster by the gain in variance.",
            "Probabilities that change with every iteration: here they change once per epoch.",
            "The features of the paper and its solution for k: here there are three features, and k is a setting.",
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
        """Returns the recorded columns: the last norm and its epoch, now and at the last plan; 12 bytes per sample."""
        return {
            "grad_norm": Column(torch.float32, fill=NEVER_SEEN),
            "epoch": Column(torch.int16, fill=-1, signal=EPOCH),
            "grad_norm_then": Column(torch.float32, fill=NEVER_SEEN, merge="plan"),
            "epoch_then": Column(torch.int16, fill=-1, merge="plan"),
        }

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns a plan of draws by the estimates, which remembers their features for the fit after the epoch."""
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
        """Returns c and d, fitted to the samples of the last epoch whose norms were known before."""
        norm, then = on_host(records["grad_norm"]), on_host(records["grad_norm_then"])
        pairs: Mask = (on_host(records["epoch"]) == epoch - 1) & np.isfinite(norm) & np.isfinite(then)
        if not pairs.any():
            return TRUSTING
        age = epoch - 1 - on_host(records["epoch_then"])[pairs]
        scale = _mean_square(then[pairs])
        return fitted_estimates(features(then[pairs], age, scale), norm[pairs].astype(np.float64) ** 2 / scale)


def _mean_square(norm: Values) -> float:
    """Returns the mean of the squares, 1 where all norms are zero."""
    return float(np.mean(norm.astype(np.float64) ** 2)) or 1.0
