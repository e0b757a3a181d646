"""Full training: every sample, every epoch. The baseline that every other method is held against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.card import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column


@dataclass(frozen=True)
class FullData:
    """Keep everything. Attached, the loop computes what it computes unattached, bit for bit on CPU."""

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="every sample, every epoch",
        rule="nothing is left out",
        biased="No: every sample, every epoch.",
        forwards="None.",
        bytes_per_sample=4,
    )

    def columns(self) -> dict[str, Column]:
        """The last loss, to look at."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """All N samples."""
        return EpochPlan(torch.arange(len(records["loss"])), facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})
