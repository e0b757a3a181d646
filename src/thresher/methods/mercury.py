"""Mercury: draw samples in proportion to their losses, which are updated one group at a time; weights remove the bias.

Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic Importance Sampling", SenSys 2021. It is
unbiased: the expected weighted loss is the loss over all samples, as long as no loss is zero.

In the paper each device refreshes a group of its part of the data in every iteration and then draws the next mini-batch. Here
the losses of a group are updated at the end of every epoch, and the whole next epoch is drawn at once. Training on a sample
updates its loss, too. A sample whose loss is not finite or is below zero is kept once, without a draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import Chances, check_keep, check_whole, drawn_plan, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import on_host


def group_of(epoch: int, groups: int, n: int) -> Tensor:
    """Returns the samples whose losses are updated after an epoch: samples with id % groups == epoch % groups.

    Args:
        epoch: Number of the epoch, from 0.
        groups: Number of groups, 1 or more.
        n: Number of samples of the dataset.

    Returns:
        Ids, ascending, int64; empty if the group has no sample because `groups` is larger than `n`.
    """
    return torch.arange(min(epoch % groups, n), n, groups)


@dataclass(frozen=True)
class Mercury:
    """Draws the samples of each epoch with replacement, with probabilities p proportional to their last losses.

    The loss of a drawn sample gets the weight 1 / (N p).

    Args:
        groups: Number of groups of samples, 1 or more. After each epoch, one group in turn gets a forward pass that updates its
            losses. Default 10, so an update takes a tenth of the forward passes of an epoch; not from the paper.
        keep: Number of draws as a share of the samples, (0, 1]. Default 1: an epoch is as long as without the method.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Mercury
        >>> records = {"loss": torch.tensor([0.1, 0.9, 0.2, 0.8])}
        >>> plan = Mercury(groups=2).plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> plan.refresh, plan.drawn
        (tensor([1, 3]), True)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(order="plan", refresh="eval")
    card: ClassVar[Card] = Card(
        summary="draw samples by loss, refreshed a group at a time, weigh them",
        paper="SenSys 2021",
        rule="not drawn, by its last loss",
        biased="No: the expected weighted mean loss is that of all data, as long as no loss is zero and all samples count the "
        "same (with class weights or ignored positions the divisor is that of the samples drawn).",
        forwards="One group of samples per epoch except the last: N / groups.",
        bytes_per_sample=4,
        caveat="With keep=1 an epoch costs as much as full training and the refreshed group: the aim is less noise per step, "
        "not fewer steps. Random selection saves as much as keep < 1, without a refresh. On none of the planted problems "
        "(`thresher.testing`) does it beat random samples: the weights 1 / p are large for samples with small losses, whose "
        "gradients are not as small as their losses.",
        missing=(
            "Moving samples between workers by importance.",
            "Scheduling this exchange by the available bandwidth.",
            "A refresh and a draw in every iteration: here both happen once per epoch.",
        ),
    )
    groups: int = 10
    keep: float = 1.0

    def __post_init__(self) -> None:
        check_whole(self, "groups")
        check_keep(self, self.keep)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan of samples drawn by the last losses; one group gets a forward pass after the epoch."""
        loss = on_host(records["loss"])
        if epoch == 0:
            plan = full_plan(len(loss))
        else:
            plan = drawn_plan(Chances(loss), self.keep, generator, weighted=True)
        if epoch + 1 < epochs:
            return replace(plan, refresh=group_of(epoch, self.groups, len(loss)))
        return plan
