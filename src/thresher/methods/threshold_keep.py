"""Threshold keep: keep each row of a batch with a probability in proportion to its gradient norm, up to the best threshold.

Row i is kept with probability p_i = min(1, s_i / tau) and weight 1 / p_i. The weighted sum is divided by the number of rows of
the batch, so the expected gradient is that of the whole batch. It is two-phase sampling as in surveys: the forward pass of all
rows is the cheap first phase, the backward pass of the kept rows the expensive second. There is no paper that uses it for
training; the threshold was derived for this library. V(tau) = mean(s_i^2 / p_i) is proportional to the variance of the sum, and
K(tau) = 1 + ratio * mean(p_i) is the cost of a row in forward passes. The product V K is least when tau^2 = ratio V / K. If all
s_i are equal, every row is kept, because leaving out rows would cost more in variance than it saves.

s_i is the norm of the gradient of the sample's loss with respect to the model's outputs, |p - y| for cross-entropy. It takes
the place of the norm of the whole gradient, because times a constant it is an upper bound of it (arXiv:1803.00942).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import (
    check_keep,
    check_whole,
    check_within,
    extended_history,
    in_id_order,
    running_sum,
)
from thresher.methods.contract import Card, Requirements, State
from thresher.plans import BatchPlan

LEAST = 1e-6
"""With `keep`, lower scores are raised to this share of the largest one: rows with a score of 0 could never be kept."""


def _ascending(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scores divided by the largest one, ascending; which of them are known; and the divisor (1 if all are 0)."""
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    known = scores.isfinite()
    values = torch.where(known, scores, 0).to(wide).clamp(min=0)
    top = torch.where((largest := values.amax()) > 0, largest, 1)
    values, order = torch.where(known, values / top, math.inf).sort()
    known = known.index_select(0, order)
    return torch.where(known, values, 1), known.to(wide), top


def best_threshold(scores: Tensor, ratio: float) -> Tensor:
    """Returns the threshold at which variance times cost is least.

    Args:
        scores: Scores, shape (m,), m >= 1, 0 or more; one that is not finite does not count.
        ratio: Cost of a backward pass in forward passes, > 0.

    Returns:
        The threshold, shape (); 0 if no score is above 0. Of equally good thresholds, the smallest.

    Example:
        >>> best_threshold(torch.tensor([1.0, 1.0, 1.0, 9.0]), ratio=2.0)
        tensor(5.1962, dtype=torch.float64)
    """
    s, known, top = _ascending(scores)
    n = known.sum()
    below = running_sum(known * s)
    certain = known.sum() - running_sum(known)
    # Of the scores above each.
    squares = running_sum((known * s * s).flip(0)).flip(0) - known * s * s
    above = torch.cat((s[1:], s[-1:]))
    tau = (squares * ratio / (n + ratio * certain).clamp(min=1)).sqrt().clamp(min=s, max=above)
    parts = torch.where(below > 0, below / tau, 0)
    product = (squares + tau * below) * (n + ratio * (certain + parts))
    best = torch.where((known > 0) & ((tau > 0) | (squares == 0)), product, math.inf).argmin()
    return torch.where(n > 0, tau.gather(0, best) * top, 0)  # `tau[best]` would wait for the device


def threshold_of_share(scores: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Returns the threshold at which rows are kept with the mean probability `keep`, and the least score that counts.

    The least score is a small share of the largest score. Lower scores are raised to it, because rows with a score of 0 could
    never be kept.

    Args:
        scores: Scores, shape (m,), m >= 1, 0 or more; one that is not finite does not count.
        keep: The share, (0, 1].

    Returns:
        The threshold and the least score, shape (), both above 0.

    Example:
        >>> threshold_of_share(torch.tensor([1.0, 1.0, 1.0, 9.0]), keep=0.5)[0]
        tensor(3., dtype=torch.float64)
    """
    s, known, top = _ascending(scores)
    s = s.clamp(min=LEAST)
    room = known.sum() * keep - (known.sum() - running_sum(known))
    below = running_sum(known * s)
    fits = (known > 0) & (room > 0) & (s * room <= below * (1 + 1e-12))
    last = torch.where(fits, torch.arange(len(s), device=s.device), -1).amax().clamp(min=0)
    return (below / torch.where(room > 0, room, 1)).gather(0, last) * top, LEAST * top


@dataclass(frozen=True)
class ThresholdKeep:
    """Keeps row i of a batch with probability p_i = min(1, s_i / tau) and weight 1 / p_i, where s_i is its gradient norm.

    The sum of the kept losses times their weights is divided by the number of rows of the batch, which makes its gradient
    unbiased. tau is computed anew in each step, from the gradient norms of the last rows. A row without a finite norm is always
    kept, with weight 1, and does not count for tau.

    Args:
        keep: Share of the rows to keep on average, (0, 1]. Chance keeps more or fewer rows of a batch, and later batches make
            up for it. Default None: the share at which variance times cost is least, which is 1 if all norms are equal.
        ratio: Cost of a backward pass in forward passes, > 0; without `keep` only. Default 2, for losses of the loop's own
            forward pass; use 3 with `forward_passes="twice"`, with which a kept row costs one more forward pass.
        history: Number of last rows from whose gradient norms tau is computed, 1 or more. Default 1024; the rows of 8 to 32
            batches make tau steady.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> from thresher import ThresholdKeep
        >>> signals = {"id": torch.arange(4), "grad_norm": torch.tensor([0.5, 0.5, 0.5, 0.5])}
        >>> method = ThresholdKeep()
        >>> plan, _ = method.plan_batch(signals, method.init_state(), step=0, generator=torch.Generator())
        >>> plan.rows, plan.weights
        (tensor([0, 1, 2, 3]), tensor([1., 1., 1., 1.]))
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements(signals=("grad_norm",), divide="batch")
    card: ClassVar[Card] = Card(
        summary="keep rows by gradient norm at the cost-optimal threshold",
        rule="not drawn in its batch, by its gradient norm",
        biased="no with one forward pass: the expected weighted sum over the kept rows is the sum over the batch. With two, "
        "batches are filled up with rows of several batches, and losses are too large by about 1/k for k kept rows of a batch",
        forwards="every sample of a batch, to choose by; none if the loop's own forward pass is enough",
        differences=(
            "There is no code and no paper: the rule and its threshold were derived here, from two-phase sampling.",
            "The gradient norm is that at the model's outputs; the norm of the last layer's gradient would also have the norm "
            "of its input as a factor.",
        ),
        caveat="less variance helps only if variance slows training down: on the planted problem `redundant` it is as "
        "good as random rows of the same cost, on `skewed` and `rare` far better. The choice takes about four times as long as "
        "that of Big Loss, because each step sorts the last 1024 gradient norms",
    )
    keep: float | None = None
    ratio: float = 2.0
    history: int = 1024

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_keep(self, self.keep)
        check_within(self, "(0, inf)", "ratio")
        check_whole(self, "history")

    def init_state(self) -> State:
        """Returns the first state: no gradient norms yet, and 0 rows seen and kept."""
        return {"history": torch.empty(0, dtype=torch.float32), "seen": 0, "kept": 0}

    def report(self, state: State) -> dict[str, float]:
        """Returns the threshold and the expected gain of the choice, for `run.history`.

        The gain is variance times cost of all rows, divided by variance times cost of the kept rows; 1 or more without `keep`.
        It applies if the variance of the gradient limits how fast the model learns.
        """
        known = state["history"][state["history"].isfinite()].double().clamp(min=0)
        if not len(known):
            return {"threshold": 0.0, "gain": 1.0}
        p, tau = self._probabilities(known, known, self.keep)
        product = torch.where(p > 0, known * known / p, 0).mean() * (1 + self.ratio * p.mean())
        gain = known.square().mean() * (1 + self.ratio) / product
        return {"threshold": float(tau), "gain": float(gain) if product > 0 else 1.0}

    def count(self, n: int) -> int | None:
        """Returns None: chance decides how many rows are kept."""
        return None

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the drawn rows with their weights. This waits for the device, because only the device knows their number."""
        by_id, ordered = in_id_order(signals)
        n = len(by_id)
        scores = ordered["grad_norm"].float()
        history = extended_history(state["history"], scores, self.history)
        draws = torch.rand(n, generator=generator, dtype=torch.float64).to(
            scores.device, non_blocking=True
        )
        if n:
            p = self._probabilities(scores, history, self._share_now(state))[0]
        else:
            p = scores
        picked = (1 - draws.to(p.dtype) <= p).nonzero().flatten()
        rows, order = by_id.index_select(0, picked).sort()
        weights = p.index_select(0, picked[order]).reciprocal().float()
        left_out = 1 - len(rows) / max(1, n)
        facts = {
            "scheduled_fraction": left_out if self.keep is None else 1 - self.keep,
            "actual_fraction": left_out,
        }
        seen = {"seen": state["seen"] + n, "kept": state["kept"] + len(rows)}
        return BatchPlan(rows, weights=weights, facts=facts), {"history": history, **seen}

    def _share_now(self, state: State) -> float | None:
        """Returns the share to keep of the next batch: `keep`, corrected for having kept too few or too many rows so far.

        The correction is spread over the next `history` rows. Without it, too few rows would be kept: gradient norms fall
        during training, so they are mostly below the norms of the last rows.
        """
        if self.keep is None:
            return None
        missing = (self.keep * state["seen"] - state["kept"]) / self.history
        return min(max(self.keep + missing, self.keep / 2), (1 + self.keep) / 2)

    def _probabilities(
        self, scores: Tensor, history: Tensor, keep: float | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the probability for each score, 1 if it is not finite or the threshold is 0, and the threshold."""
        if keep is None:
            tau = best_threshold(history, self.ratio)
            values = scores.to(tau.dtype).clamp(min=0)
        else:
            tau, least = threshold_of_share(history, keep)
            values = torch.maximum(scores.to(tau.dtype), least)
        return torch.where(scores.isfinite() & (tau > 0), (values / tau).clamp(max=1), 1), tau
