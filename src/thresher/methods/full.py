"""Full training: every sample, every epoch. It is the baseline with which every other method is compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import full_plan, samples_of
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column


@dataclass(frozen=True)
class FullData:
    """Trains on every sample in every epoch.

    With this method attached, a training loop computes exactly what it computes without Thresher, bit for bit on CPU.

    Example:
        >>> import torch
        >>> from thresher import FullData
        >>> records = {"loss": torch.tensor([0.5, 0.1, 0.9])}
        >>> FullData().plan_epoch(records, epoch=1, epochs=5, generator=torch.Generator()).ids
        tensor([0, 1, 2])
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(records=False)
    card: ClassVar[Card] = Card(
        summary="every sample, every epoch",
        rule="nothing is left out",
        biased="No: every sample, every epoch.",
        forwards="None.",
        bytes_per_sample=4,
    )

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, for information only; 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with all samples."""
        return full_plan(samples_of(records))
