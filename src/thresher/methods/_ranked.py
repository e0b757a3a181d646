"""The base of methods that keep the samples of a batch with the largest scores: a fixed share of it, ties by id."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.contract import Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import share


def largest(scores: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest scores; those that are not finite come first of all, ties go to the later position.

    Args:
        scores: Shape (n,).
        k: How many, 1 or more; all where there are fewer.

    Returns:
        Positions, shape (min(k, n),), int64, the largest last.
    """
    ascending = scores.nan_to_num(math.inf, math.inf, math.inf).argsort(stable=True)
    return ascending[max(0, len(scores) - k) :]


def check_keep(method: object, keep: object) -> None:
    """Refuse a `keep` that is no share.

    Raises:
        ValueError: Outside (0, 1], or no number.
    """
    if not (isinstance(keep, int | float) and not isinstance(keep, bool) and 0 < keep <= 1):
        raise ValueError(f"{type(method).__name__}: `keep` is the share kept, within (0, 1], got {keep!r}")


def in_id_order(signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows sorted by id, shape (n,), and the signals in that order: an answer then does not depend on the rows' order."""
    by_id = signals["id"].argsort(stable=True)
    return by_id, {name: values.detach().index_select(0, by_id) for name, values in signals.items()}


def plan_of(rows: Tensor, n: int, keep: float, weights: Tensor | None = None, *, drawn: bool = False) -> BatchPlan:
    """A plan with its facts, from ascending rows of a batch of n."""
    facts = {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - len(rows) / max(1, n)}
    return BatchPlan(rows, weights=weights, facts=facts, drawn=drawn)


@dataclass(frozen=True)
class Ranked:
    """Keeps floor(keep * n) samples of a batch, at least one: those with the largest scores.

    Subclasses say what the score is. A sample without a finite score is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1].

    Raises:
        ValueError: `keep` outside (0, 1].
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    keep: float = 0.5

    def __post_init__(self) -> None:
        check_keep(self, self.keep)

    def init_state(self) -> State:
        """Nothing is remembered."""
        return {}

    def count(self, n: int) -> int | None:
        """A fixed share of each batch."""
        return max(1, share(self.keep, n))

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """What is ranked, shape (n,), not finite where a signal is not; `signals` are in the order of the ids."""
        raise NotImplementedError

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """The rows with the largest scores."""
        by_id, ordered = in_id_order(signals)
        picked = largest(self.scores(ordered), max(1, share(self.keep, len(by_id))))
        return plan_of(by_id.index_select(0, picked).sort().values, len(by_id), self.keep), dict(state)
