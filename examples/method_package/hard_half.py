"""A method in a package of its own: `pip install .`, then `thresher.attach("hard_half", ...)`."""

from dataclasses import dataclass

import torch

import thresher
from thresher.selection import ids_of, on_host, smallest


@dataclass(frozen=True)
class HardHalf:
    """Trains on the half of the samples with the largest last losses; on all of them in the first epoch."""

    stage = "epoch"
    requires = thresher.Requirements()
    card = thresher.methods.Card(
        summary="the half with the largest losses",
        paper="",
        rule="its last loss was in the smaller half",
        biased="Yes, towards samples of large loss: nothing is re-weighted.",
        forwards="None.",
        bytes_per_sample=4,
        caveat="It is an example.",
    )

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=thresher.records.NEVER_SEEN)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        loss = on_host(records["loss"])
        left_out = len(loss) // 2 if epoch else 0
        ids = ids_of(~smallest(loss, left_out))
        n, scheduled = len(loss), 0.5 if epoch else 0.0
        return thresher.EpochPlan(
            ids, facts={"scheduled_fraction": scheduled, "actual_fraction": 1 - len(ids) / n}
        )
