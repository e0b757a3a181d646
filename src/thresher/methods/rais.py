"""RAIS: draw samples by robust estimates of their gradient norms, with weights that remove the bias.

Johnson and Guestrin, "Training Deep Models Faster with Robust, Approximate Importance Sampling", NeurIPS 2018. It is unbiased:
the expected weighted loss is the loss over all samples, as long as `uniform` is above 0.

The variance of a step is least if sample i is drawn in proportion to its gradient norm g_i, which is too expensive to compute
for every sample. Its square is therefore estimated by c.x_i, and the error of this estimate by d.x_i. The features x_i are the
square of the last known norm, the number of epochs since then, and a constant. Samples are drawn in proportion to sqrt(c.x_i +
k d.x_i): the less certain the estimate for a sample, the higher its probability. c and d are fitted to the samples of the last
epoch: their features were known before this epoch, and their norms are known since.

The norm is that of the gradient with respect to the model's outputs. A sample whose norm is not finite is kept once, without a
draw.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import (
    Chances,
    check_keep,
    check_within,
    drawn_plan,
    full_plan,
)
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import EPOCH, NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, on_host

FEWEST_PAIRS = 10
"""Least number of samples to which c and d are fitted."""

TRUSTING = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
"""c and d before the first fit: the estimate is the square of the last norm, and its error the mean square of the norms."""


def features(norm: Values, age: Values, scale: float) -> Values:
    """Returns the features from which squared gradient norms are estimated.

    Args:
        norm: Last norm of each sample, shape (n,), finite.
        age: Number of epochs since that norm was computed, shape (n,).
        scale: Unit of the squared norms, their mean square, > 0.

    Returns:
        Features, shape (n, 3), float64: squared norm over `scale`, age, one.
    """
    columns = [norm.astype(np.float64) ** 2 / scale, age.astype(np.float64), np.ones(len(norm))]
    return np.stack(columns).T  # each column in one piece of memory


class NormalEquations(NamedTuple):
    """Sums that define a least-squares problem, min |y - x c|.

    Attributes:
        gram: Sums of products of the columns of x, shape (m, m).
        moment: Sums of products of the columns with y, shape (m,).
        square: Sum of the squares of y.
        rows: Number of rows of x.
    """

    gram: Values
    moment: Values
    square: float
    rows: int


def normal_equations(pieces: Iterable[tuple[Values, Values]]) -> NormalEquations:
    """Adds up the sums of a least-squares problem with three columns.

    Args:
        pieces: Rows of the problem, piece by piece: x, shape (n, 3), and y, shape (n,), float64.
    """
    gram = np.zeros((3, 3))
    moment = np.zeros(3)
    square = 0.0
    rows = 0
    for x, y in pieces:
        gram += x.T @ x
        moment += x.T @ y
        square += float(y @ y)
        rows += len(y)
    return NormalEquations(gram, moment, square, rows)


def nonnegative_least_squares(problem: NormalEquations) -> Values:
    """Returns the c >= 0 with the least sum of squares of y - x c, for few columns.

    The entries of the solution that are not 0 solve the problem without the bound c >= 0. So every set of zeros is tried, and
    the best result is returned. Of two columns that are proportional, only one is used.

    Args:
        problem: The problem, with a small number m of columns.

    Returns:
        Coefficients, shape (m,), float64, 0 or more.
    """
    gram = problem.gram
    moment = problem.moment
    best = np.zeros(len(moment))
    least = 0.0
    better = 1e-9 * problem.square
    for free in [*product((False, True), repeat=len(moment))][1:]:
        some = np.array(free)
        c = np.zeros(len(moment))
        c[some] = np.linalg.lstsq(gram[np.ix_(some, some)], moment[some], rcond=None)[0]
        value = float(c @ gram @ c - 2 * moment @ c)
        if (c >= 0).all() and value < least - better:
            best = c
            least = value
    return best


def fitted_estimates(pairs: Callable[[], Iterable[tuple[Values, Values]]]) -> tuple[Values, Values]:
    """Fits the coefficients of the features: c of the estimate, d of its error.

    Args:
        pairs: Function that yields, piece by piece, features before the last epoch, shape (n, 3), and squared norms in the
            last epoch, divided by the scale of the features, shape (n,). It is called twice.

    Returns:
        c and d, shape (3,), 0 or more; `TRUSTING` if there are too few samples. Errors are relative to the earlier norms, so
        that a few large norms do not dominate the fit.
    """

    def relative(x: Values, y: Values) -> tuple[Values, Values]:
        size = x[:, 0] + 1
        return x / size[:, None], y / size

    problem = normal_equations(relative(x, squared) for x, squared in pairs())
    if problem.rows < FEWEST_PAIRS:
        return TRUSTING
    c = nonnegative_least_squares(problem)
    errors = normal_equations(relative(x, np.abs(squared - x @ c)) for x, squared in pairs())
    return c, nonnegative_least_squares(errors)


def gain(squared: Values, chances: Chances) -> float:
    """Returns the second moment of the gradient of a uniform draw, divided by that of a weighted draw.

    Args:
        squared: Squared gradient norms g^2, shape (N,); NaN if the probability is unknown.
        chances: Probabilities p in one draw, above 0 if the norm is above 0.

    Returns:
        n sum(g^2) / sum(g^2 / p) over the n samples with a known probability; this is n sum(g^2) / sum(g)^2 if p is
        proportional to g. 1 if all norms are zero.
    """
    total = spent = 0.0
    for part in chunks(len(squared)):
        p = chances.of(part)
        drawn = p > 0
        total += float(np.nansum(squared[part]))
        spent += float(np.sum(squared[part][drawn] / p[drawn]))
    return chances.known * total / spent if spent else 1.0


@dataclass(frozen=True)
class Rais:
    """Draws each epoch with replacement, with robust estimates of the best probabilities p and weights 1 / (N p).

    Args:
        robustness: Factor with which the error of the estimate is added to the estimate, k, 0 or more; 0 trusts the estimate.
            Default 1; the paper solves for it instead.
        uniform: Share of the draws that is uniform, [0, 1]. If all norms are known, it keeps the weights below 1 / uniform. It
            also lets samples with a norm of zero return. Default 0.01; not in the paper.
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
    requires: ClassVar[Requirements] = Requirements(order="plan")
    card: ClassVar[Card] = Card(
        summary="draw samples by robust estimates of gradient norm, weigh them",
        paper="Johnson & Guestrin, NeurIPS 2018",
        rule="not drawn, by its last gradient norm and how old that is",
        biased="No: the expected weighted mean loss is that of all data if all samples count the same (with class weights "
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
        check_within(self, "[0, inf)", "robustness")
        check_within(self, "[0, 1]", "uniform")
        check_keep(self, self.keep)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 12 bytes: the last norm and its epoch, now and before this epoch."""
        return {
            "grad_norm": Column(torch.float32, fill=NEVER_SEEN),
            "epoch": Column(torch.int16, fill=-1, signal=EPOCH),
            "grad_norm_then": Column(torch.float32, fill=NEVER_SEEN, merge="plan"),
            "epoch_then": Column(torch.int16, fill=-1, merge="plan"),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan of samples drawn by the estimated norms; it stores their features for the fit after the epoch."""
        norm = on_host(records["grad_norm"])
        scale = _mean_square(norm[part][np.isfinite(norm[part])] for part in chunks(len(norm)))
        if epoch == 0 or scale is None:
            return full_plan(len(norm))
        squared, importance = self._estimated(
            norm, epoch - on_host(records["epoch"]), scale, self._learned(records, epoch)
        )
        chances = Chances(importance)
        return drawn_plan(
            chances,
            self.keep,
            generator,
            weighted=True,
            remember={
                "grad_norm_then": records["grad_norm"].clone(),
                "epoch_then": records["epoch"].clone(),
            },
            facts={"gain": gain(squared, chances)},
        )

    def _estimated(
        self, norm: Values, age: Values, scale: float, fit: tuple[Values, Values]
    ) -> tuple[Values, Values]:
        """Returns the estimates of the squared norms, and the importances with the uniform share; NaN if not known."""
        squared = np.empty(len(norm))
        importance = np.empty(len(norm))
        c, d = fit
        total = 0.0
        known = 0
        for part in chunks(len(norm)):
            x = features(np.where(np.isfinite(norm[part]), norm[part], np.nan), age[part], scale)
            squared[part] = x @ c
            importance[part] = np.sqrt(squared[part] + self.robustness * (x @ d))
            total += float(np.nansum(importance[part]))
            known += int(np.count_nonzero(np.isfinite(norm[part])))
        importance *= 1 - self.uniform
        importance += self.uniform * total / known
        return squared, importance

    @staticmethod
    def _learned(records: Mapping[str, Tensor], epoch: int) -> tuple[Values, Values]:
        """Returns c and d, fitted to the samples of the last epoch whose norms were known before."""
        names = ("grad_norm", "epoch", "grad_norm_then", "epoch_then")
        norm, seen, then, seen_then = (on_host(records[name]) for name in names)

        def pairs() -> Iterator[tuple[Values, Values, Values]]:
            for part in chunks(len(norm)):
                both: Mask = (
                    (seen[part] == epoch - 1) & np.isfinite(norm[part]) & np.isfinite(then[part])
                )
                yield then[part][both], epoch - 1 - seen_then[part][both], norm[part][both]

        scale = _mean_square(earlier for earlier, _, _ in pairs())
        if scale is None:
            return TRUSTING
        return fitted_estimates(
            lambda: (
                (features(earlier, age, scale), now.astype(np.float64) ** 2 / scale)
                for earlier, age, now in pairs()
            )
        )


def _mean_square(pieces: Iterable[Values]) -> float | None:
    """Returns the mean of the squares of some norms, 1 if all norms are zero; None if there are no norms."""
    total = 0.0
    count = 0
    for norm in pieces:
        total += float(np.sum(norm.astype(np.float64) ** 2))
        count += len(norm)
    return (total / count or 1.0) if count else None
