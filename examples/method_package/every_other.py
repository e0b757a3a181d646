"""A method in a package of its own: `pip install .`, then `thresher.attach("every_other", ...)`."""

from dataclasses import dataclass

import torch

import thresher


@dataclass(frozen=True)
class EveryOther:
    """Trains on the even samples in even epochs, and on the odd ones in odd epochs."""

    stage = "epoch"
    requires = thresher.Requirements()
    card = thresher.methods.Card(
        summary="every other sample, in turn",
        paper="",
        rule="its id is odd in an even epoch, or even in an odd one",
        biased="No: in two epochs each sample comes once.",
        forwards="None.",
        bytes_per_sample=4,
        caveat="It is an example.",
    )

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=thresher.records.NEVER_SEEN)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        n = len(records["loss"])
        ids = torch.arange(epoch % min(2, n), n, 2)
        return thresher.EpochPlan(ids, facts={"scheduled_fraction": 0.5, "actual_fraction": 1 - len(ids) / n})
