"""Random-Backprop: train on a random part of every batch. What Selective-Backprop must beat at the same number of rows.

Without a paper of its own; the ablation "Random" of arXiv:1910.00762, and a baseline of Diet Selective-Backprop. Needs no
losses, so no forward pass to choose by: the rows left out are neither forwarded nor put through backward.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.card import Card
from thresher.methods.contract import Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import chosen, ids_of, share


@dataclass(frozen=True)
class RandomBackprop:
    """Train on a uniformly random part of each batch; unbiased as it is, no weights, learning rate unchanged.

    Args:
        keep: Share kept of each batch, (0, 1]: floor(keep * n) rows, at least one.

    Raises:
        ValueError: `keep` outside (0, 1].
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements()
    card: ClassVar[Card] = Card(
        summary="train on a random part of the batch",
        rule="not drawn in its batch",
        biased="no: every row is kept equally often",
        forwards="none: the rows left out are not even forwarded",
        caveat="it is random selection: what the others are compared with",
    )
    keep: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"RandomBackprop: `keep` is the share kept, within (0, 1], got {self.keep}")

    def init_state(self) -> State:
        """Nothing is remembered."""
        return {}

    def count(self, n: int) -> int | None:
        """A fixed share of each batch."""
        return max(1, share(self.keep, n))

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """A part of the batch that no other step has, drawn in the order of the ids."""
        ids = signals["id"]
        n = len(ids)
        picked = ids_of(chosen(n, max(1, share(self.keep, n)), generator)).to(ids.device, non_blocking=True)
        rows = ids.argsort(stable=True)[picked].sort().values
        facts = {"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - len(rows) / max(1, n)}
        return BatchPlan(rows, facts=facts), dict(state)
