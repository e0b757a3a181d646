"""Importance sampling with replacement (ISWR): draw the samples of an epoch in proportion to their losses.

As Nguyen et al. compare with it, "KAKURENBO: Adaptively Hiding Samples in Deep Neural Network Training", NeurIPS 2023,
arXiv:2310.10102. Original code: github.com/TruongThaoNguyen/kakurenbo (`ImportanceSamplerWithReplacement`).
Biased towards hard samples as published; `weights="unbiased"` corrects for it.

Where the code differs:
- Epoch 0 is drawn uniformly with replacement already: `first_epoch="uniform"`. Here it trains on everything, once.
- It forwards the whole dataset before each epoch but the first, in train mode and without `no_grad`. Here the same number of
  passes comes at the end of each epoch but the last, in eval mode; `losses="last"` saves them, with the losses that each
  sample had when it was last trained on.
- It adds up the losses of samples that a distributed sampler repeats.
- `torch.multinomial` refuses more than 2^24 samples.
A sample whose loss is zero is never drawn. One whose loss is not finite or is below zero has no chance that could be told:
it is kept, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._drawing import draw_probabilities, drawn_plan, full_plan
from thresher.methods._ranked import check_keep
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import on_host


@dataclass(frozen=True)
class ImportanceSampling:
    """Draw each epoch with replacement, with chances p proportional to the losses.

    Args:
        weights: "none": plain mean of the losses drawn, as published; "unbiased": each times 1 / (N p).
        losses: "fresh": of a forward-only pass over all samples once an epoch, as published; "last": of the sample's last
            training step, at no cost.
        keep: Draws as a share of the samples, (0, 1]. Published: 1, an epoch as long as without it.
        first_epoch: "all": every sample once; "uniform": drawn with equal chances, as the official code does.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="draw samples by loss, with replacement",
        paper="arXiv:2310.10102",
        rule="not drawn, by its loss",
        biased="Yes, towards samples of large loss: nothing is re-weighted. No with "
        'weights="unbiased": the expected mean loss is that of all data, as long as no loss is zero.',
        forwards='Every sample once an epoch but the last; none with losses="last".',
        claim="None: the paper compares with it. On Fractal-3K its epochs took 576 s, where hiding by forgetting took 398 s.",
        differences=(
            'Epoch 0 trains on everything; the code draws it uniformly with replacement (first_epoch="uniform").',
            "Losses are scored in eval mode and without gradient; the code scores in train mode and builds a graph.",
            "Draws invert the cumulative distribution; the code's torch.multinomial refuses more than 2^24 samples.",
            "A sample without a finite loss of 0 or more is kept once; the code fails on it.",
        ),
        bytes_per_sample=4,
        caveat="By its published defaults it costs more than full training: as many steps, and a pass over all samples. "
        'keep < 1 and losses="last" cost less. weights="unbiased" beats random samples on none of '
        "the planted problems (`thresher.testing`).",
    )
    weights: Literal["none", "unbiased"] = "none"
    losses: Literal["fresh", "last"] = "fresh"
    keep: float = 1.0
    first_epoch: Literal["all", "uniform"] = "all"

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        allowed = {"weights": ("none", "unbiased"), "losses": ("fresh", "last"), "first_epoch": ("all", "uniform")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"ImportanceSampling: `{name}` must be one of {values}, got {getattr(self, name)!r}")

    @property
    def requires(self) -> Requirements:
        """An order of its own; the model, where all losses are refreshed."""
        return Requirements(own_order=True, refresh="eval" if self.losses == "fresh" else None)

    def columns(self) -> dict[str, Column]:
        """The last loss: 4 bytes a sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Draws by loss, and a pass over all samples for the losses of the next epoch."""
        loss = on_host(records["loss"])
        refresh = torch.arange(len(loss)) if self.losses == "fresh" and epoch + 1 < epochs else None
        if epoch == 0 and self.first_epoch == "all":
            return full_plan(len(loss), refresh)
        chances = draw_probabilities(loss if epoch else np.ones(len(loss)))
        return drawn_plan(chances, self.keep, generator, weighted=self.weights == "unbiased", refresh=refresh)
