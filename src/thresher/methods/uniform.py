"""A fresh uniform random subset each epoch: the control of equal cost that a method must beat to be worth its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.card import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import chosen, ids_of, share


def uniform_subset(n: int, keep: float, generator: torch.Generator) -> Tensor:
    """Draw floor(keep * n) of n samples, at least one, without replacement.

    Returns:
        Ids, ascending, shape (max(1, floor(keep * n)),), int64.
    """
    return ids_of(chosen(n, max(1, share(keep, n)), generator))


@dataclass(frozen=True)
class UniformSubset:
    """Train each epoch on a random share of the samples; unbiased as it is, no weights, learning rate unchanged.

    Args:
        keep: Share kept, (0, 1].

    Raises:
        ValueError: `keep` outside (0, 1].
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="a fresh random subset each epoch",
        rule="not in the random subset",
        biased="No: every sample is kept with the same chance.",
        forwards="None.",
        bytes_per_sample=4,
        caveat="It is the random selection that the other methods are held against.",
    )
    keep: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"UniformSubset: `keep` is the share kept, within (0, 1], got {self.keep}")

    def columns(self) -> dict[str, Column]:
        """The last loss, to look at; the draw does not depend on it."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """A subset that no other epoch has."""
        n = len(records["loss"])
        ids = uniform_subset(n, self.keep, generator)
        return EpochPlan(ids, facts={"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - len(ids) / n})
