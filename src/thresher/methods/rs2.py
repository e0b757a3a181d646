"""RS2: a random subset in each epoch. By default, every sample is trained on once before any sample is trained on twice.

Okanovic et al., "Repeated Random Sampling for Minimizing the Time-to-Accuracy of Learning", ICLR 2024, arXiv:2305.18424.
Official code: github.com/PatrikOkanovic/RS2. It is unbiased in both modes.

With replacement, each epoch draws its subset from all samples, as `thresher.UniformSubset` does. Without replacement, the code
cuts one random order of the samples into consecutive slices. Here each epoch draws from the samples that were not used yet in
this round, which has the same distribution and needs one bool per sample. If fewer are left than an epoch takes, the epoch
trains on all of them and on random other samples, which are the first of the next round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_keep
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import draw_lots, ids_of, on_host, share


@dataclass(frozen=True)
class Rs2:
    """Trains each epoch on a random subset; by default all samples have a turn before any sample has a second.

    Args:
        keep: Share kept, (0, 1]: floor(keep * N) samples, at least one. Default 0.5; published: 0.01 to 0.9 on CIFAR-10, 0.1 on
            ImageNet.
        replace: Whether each subset is drawn from all samples. Default False: from the samples that have not had their turn.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Rs2
        >>> used, seen = torch.zeros(6, dtype=torch.bool), []
        >>> for epoch in range(3):
        ...     generator = torch.Generator().manual_seed(epoch)
        ...     plan = Rs2(keep=0.34).plan_epoch({"used": used}, epoch=epoch, epochs=9, generator=generator)
        ...     used, seen = plan.remember["used"], seen + plan.ids.tolist()
        >>> sorted(seen)
        [0, 1, 2, 3, 4, 5]
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(records=False)
    card: ClassVar[Card] = Card(
        summary="a random subset each epoch, every sample has its turn",
        paper="arXiv:2305.18424",
        rule="not in the random subset of this epoch",
        biased="No: every sample is kept with the same chance.",
        forwards="None.",
        claim="ResNet-18 on ImageNet with 10 % of the samples per epoch: 66 % accuracy; full training: 69 %.",
        differences=(
            "Each epoch draws from the samples that had no turn yet, in place of slices of one order, with the same "
            "distribution.",
            "If fewer samples are left than an epoch takes, the code fills its slice up to one sample less and starts anew; "
            "here the slice is full, and the samples that fill it up have had their turn in the next order.",
            "The subset has floor(keep * N) samples; the code rounds to the nearest number.",
        ),
        bytes_per_sample=1,
        missing=("Subsets with the same share of every class.",),
        caveat="It looks at no losses. Without replacement it is a shorter training, of `keep` times as many passes over all "
        "samples; what it gains over a new random subset in each epoch is that all samples come equally often.",
    )
    keep: float = 0.5
    replace: bool = False

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if self.replace not in (True, False):
            raise ValueError(f"Rs2: `replace` must be True or False, got {self.replace!r}")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 1 byte: whether it has had its turn."""
        return {"used": Column(torch.bool, merge="plan")}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with a random subset: of all samples, or of the samples that have not had their turn."""
        fresh = ~on_host(records["used"])
        n = len(fresh)
        left = int(np.count_nonzero(fresh))
        kept = max(1, share(self.keep, n))
        if left < kept:  # the last samples of an order and the first of the next
            drawn = draw_lots(kept - left, generator, n, ~fresh)
            mask = fresh | drawn
            used = drawn
        else:
            mask = draw_lots(kept, generator, n, None if self.replace else fresh)
            used = ~fresh | mask
        return EpochPlan(
            ids_of(mask),
            facts={"scheduled_fraction": 1 - self.keep, "actual_fraction": 1 - kept / n},
            remember={} if self.replace else {"used": torch.from_numpy(used)},
        )
