"""A random subset, drawn uniformly in each epoch or once: the control of equal cost that every other method has to beat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import check_keep, samples_of
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import draw_lots, ids_of, on_host, share


@dataclass(frozen=True)
class UniformSubset:
    """Trains each epoch on a random subset of the samples: a new one, or the same one in all epochs.

    A new subset is unbiased without weights. The learning rate does not change.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N) samples, at least one. Default 0.7.
        fixed: Whether all epochs use the subset of the first epoch. Default False.

    Raises:
        ValueError: `keep` is outside (0, 1], or `fixed` is not True or False.

    Example:
        >>> import torch
        >>> from thresher import UniformSubset
        >>> records = {"loss": torch.zeros(10)}
        >>> plan = UniformSubset(keep=0.3).plan_epoch(records, epoch=1, epochs=5, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), plan.facts["actual_fraction"]
        (3, 0.7)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(records=False)
    card: ClassVar[Card] = Card(
        summary="a fresh random subset each epoch",
        rule="not in the random subset",
        biased="No: every sample is kept with the same chance. With `fixed`, the other samples are never trained on.",
        forwards="None.",
        bytes_per_sample=4,
        caveat="It is the random selection with which the other methods are compared.",
    )
    keep: float = 0.7
    fixed: bool = False

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if self.fixed not in (True, False):
            raise ValueError(f"UniformSubset: `fixed` must be True or False, got {self.fixed!r}")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, for information only, and whether it is in a fixed subset."""
        columns = {"loss": Column(torch.float32, fill=NEVER_SEEN)}
        if self.fixed:
            return {**columns, "kept": Column(torch.bool, merge="plan")}
        return columns

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with a new random subset, or with the fixed subset."""
        n = samples_of(records)
        kept = max(1, share(self.keep, n))
        facts = {"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - kept / n}
        if not self.fixed:
            return EpochPlan(ids_of(draw_lots(kept, generator, n)), facts=facts)
        mask = on_host(records["kept"])
        if not mask.any():
            mask = draw_lots(kept, generator, n)
        return EpochPlan(ids_of(mask), facts=facts, remember={"kept": torch.from_numpy(mask)})
