"""Mercury: draw by losses of which one group at a time is refreshed, and weigh the draws without bias.

Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic Importance Sampling", SenSys 2021.
Unbiased: the expected weighted loss is that of all samples, as long as no loss is zero.

The paper refreshes a group at every iteration, of the shard of data that a device holds, and draws the next mini-batch;
here a group is refreshed at the end of every epoch, and the next epoch is drawn at once. A sample that is trained on has its
loss refreshed by that. A sample whose loss is not finite or is below zero is kept, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._drawing import draw_probabilities, drawn_plan, full_plan
from thresher.methods._ranked import check_keep
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import on_host


def group_of(epoch: int, groups: int, n: int) -> Tensor:
    """The samples whose turn it is: those with id % groups == epoch % groups.

    Returns:
        Ids, ascending, int64; none where `groups` is more than `n` and the group is empty.
    """
    return torch.arange(n)[epoch % groups :: groups]


@dataclass(frozen=True)
class Mercury:
    """Draw each epoch with replacement, with chances p proportional to the last losses, each loss times 1 / (N p).

    Args:
        groups: The losses of one of so many groups of samples are refreshed each epoch, in turn, 1 or more. Default
            10, which costs a tenth of the forward passes of an epoch; not the paper's.
        keep: Draws as a share of the samples, (0, 1]. 1: an epoch as long as without it.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(own_order=True, refresh="eval")
    card: ClassVar[Card] = Card(
        summary="draw samples by loss, refreshed a group at a time, weigh them",
        paper="SenSys 2021",
        rule="not drawn, by its last loss",
        biased="No: the expected weighted mean loss is that of all data, as long as no loss is zero and samples count alike "
        "(no class weights or ignored positions, whose divisor is that of the samples drawn).",
        forwards="One group of samples once an epoch but the last: N / groups.",
        bytes_per_sample=4,
        caveat="With keep=1 an epoch costs what full training costs, and the refreshed group: it is to make steps less noisy, "
        "not fewer. What keep < 1 saves, random selection of the same size saves without a refresh. On none of the planted "
        "problems (`thresher.testing`) does it beat random samples: weights 1 / p by the loss are large for small losses, "
        "whose gradient is not as small as the loss.",
        missing=(
            "Resharding samples across workers by importance.",
            "Scheduling the exchange of samples by the bandwidth that is there.",
            "A refresh and a draw at every iteration: here both happen once an epoch.",
        ),
    )
    groups: int = 10
    keep: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.groups, int) and not isinstance(self.groups, bool) and self.groups >= 1):
            raise ValueError(f"Mercury: `groups` must be a whole number of 1 or more, got {self.groups!r}")
        check_keep(self, self.keep)

    def columns(self) -> dict[str, Column]:
        """The last loss: 4 bytes a sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Draws by the losses that are known, and one group to refresh."""
        loss = on_host(records["loss"])
        refresh = group_of(epoch, self.groups, len(loss)) if epoch + 1 < epochs else None
        if epoch == 0:
            return full_plan(len(loss), refresh)
        return drawn_plan(draw_probabilities(loss), self.keep, generator, weighted=True, refresh=refresh)
