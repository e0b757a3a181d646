"""A method in a package of its own: `pip install .`, then `thresher.attach("every_other", ...)`."""

from dataclasses import dataclass

import torch

import thresher


@dataclass(frozen=True)
class EveryOther:
    """Trains on the even samples in even epochs, and on the odd ones in odd epochs."""

    stage = "epoch"
    requires = thresher.Requirements()

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=thresher.records.NEVER_SEEN)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return thresher.EpochPlan(torch.arange(epoch % 2, len(records["loss"]), 2))
