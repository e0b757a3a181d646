"""Bases of the methods that keep the rows of a batch with the largest or the smallest scores, a fixed share of each batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.contract import Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import share

OF_PAIRS = {"learnability"}
"""Signals of pairs of samples, of shape (n, n)."""


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Returns the positions of the `k` largest scores, ordered by (score, position).

    Args:
        scores: Scores, shape (n,), floating point; one that is not finite counts as larger than all others.
        k: Number of positions, 1 or more; all n positions are returned where n is smaller.

    Returns:
        Positions, shape (min(k, n),), int64, the largest score last.
    """
    ascending = scores.nan_to_num(math.inf, math.inf, math.inf).argsort(stable=True)
    return ascending[max(0, len(scores) - k) :]


def check_keep(method: object, keep: object) -> None:
    """Refuses a `keep` that is not a share.

    Args:
        method: Method whose setting it is; its class name begins the message.
        keep: Value of the setting.

    Raises:
        ValueError: `keep` is not a number, or is outside (0, 1].
    """
    if not (isinstance(keep, int | float) and not isinstance(keep, bool) and 0 < keep <= 1):
        raise ValueError(f"{type(method).__name__}: `keep` is the share kept, within (0, 1], got {keep!r}")


def in_id_order(signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sorts the rows of a batch by id, so that a choice among them does not depend on the order of the rows.

    Args:
        signals: Signals by name, each of shape (n,); "id" is among them.

    Returns:
        Row numbers in the order of the ids, shape (n,), int64, and the signals in that order.
    """
    by_id = signals["id"].argsort(stable=True)
    return by_id, rows_in_order(signals, by_id)


def rows_in_order(signals: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Returns the signals of a batch with its rows in another order; those of pairs in this order along both dimensions.

    Args:
        signals: Signals by name, each of shape (n, ...).
        order: Row numbers, shape (n,), int64.
    """
    found = {name: values.detach().index_select(0, order) for name, values in signals.items()}
    return {name: values.index_select(1, order) if name in OF_PAIRS else values for name, values in found.items()}


def plan_of(rows: Tensor, n: int, keep: float, weights: Tensor | None = None, *, drawn: bool = False) -> BatchPlan:
    """Returns a plan with the scheduled and the actual fraction as its facts.

    Args:
        rows: Row numbers, ascending, shape (k,), int64.
        n: Number of rows of the batch.
        keep: Scheduled share kept, (0, 1].
        weights: Factors on the losses, shape (k,), float32. Default None: 1 for all.
        drawn: Whether the rows were drawn, so that a row may appear several times.
    """
    facts = {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - len(rows) / max(1, n)}
    return BatchPlan(rows, weights=weights, facts=facts, drawn=drawn)


@dataclass(frozen=True)
class KeepLargest:
    """Keeps the floor(keep * n) rows of each batch with the largest scores, at least one; ties are ordered by (score, id).

    Subclasses define the score. A sample without a finite score is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5.

    Raises:
        ValueError: `keep` is outside (0, 1].
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    keep: float = 0.5

    def __post_init__(self) -> None:
        check_keep(self, self.keep)

    def init_state(self) -> State:
        """Returns an empty state: nothing is remembered from step to step."""
        return {}

    def count(self, n: int) -> int | None:
        """Returns the number of rows that are kept of a batch of `n`."""
        return max(1, share(self.keep, n))

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Returns the score of each sample, shape (n,); not finite where a signal is not.

        Args:
            signals: Signals by name, each of shape (n,), in the order of the ids.
        """
        raise NotImplementedError

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the rows with the largest scores; of equal scores those with the higher ids."""
        by_id, ordered = in_id_order(signals)
        picked = top_positions(self.scores(ordered), max(1, share(self.keep, len(by_id))))
        return plan_of(by_id.index_select(0, picked).sort().values, len(by_id), self.keep), dict(state)


@dataclass(frozen=True)
class KeepSmallest(KeepLargest):
    """Keeps the rows with the smallest values, ordered by (value, id); subclasses return the negative value as the score."""

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the rows with the smallest values; of equal values those with the lower ids."""
        return super().plan_batch({**signals, "id": -signals["id"]}, state, step=step, generator=generator)
