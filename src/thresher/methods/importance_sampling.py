"""Importance sampling with replacement (ISWR): draw the samples of an epoch in proportion to their losses.

This is the form with which Nguyen et al. compare, "KAKURENBO: Adaptively Hiding Samples in Deep Neural Network Training",
NeurIPS 2023, arXiv:2310.10102. Original code: github.com/TruongThaoNguyen/kakurenbo (`ImportanceSamplerWithReplacement`).
As published it is biased towards hard samples; `weights="unbiased"` removes the bias.

Where the code differs:
- It already draws epoch 0 uniformly with replacement (`first_epoch="uniform"`). Here epoch 0 trains on every sample once.
- It forwards the whole dataset before each epoch except the first, in train mode and without `no_grad`. Here the same number of
  passes runs at the end of each epoch except the last, in eval mode. `losses="last"` saves them: it uses the loss of each
  sample from its last training step.
- It adds up the losses of samples that a distributed sampler repeats.
- It uses `torch.multinomial`, which refuses more than 2^24 samples.
A sample whose loss is zero is never drawn. A sample whose loss is not finite or is below zero has no probability: it is kept
once, without a draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import Chances, check_choices, check_keep, drawn_plan, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import on_host


@dataclass(frozen=True)
class ImportanceSampling:
    """Draws each epoch with replacement, with probabilities p proportional to the losses.

    Args:
        weights: Weights of the losses: "none" (default and published), no weights; "unbiased", 1 / (N p).
        losses: Losses that the probabilities are computed from. "fresh" (default and published): losses of a forward pass over
            all samples after each epoch. "last": losses of the last training step of each sample, at no cost.
        keep: Number of draws as a share of the samples, (0, 1]. Default and published: 1, an epoch is as long as without the
            method.
        first_epoch: Samples of epoch 0: "all" (default) is every sample once; "uniform" draws them with equal probabilities,
            as in the official code.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import ImportanceSampling
        >>> records = {"loss": torch.tensor([0.0, 0.9, 0.0, 0.8])}
        >>> method = ImportanceSampling(losses="last")
        >>> plan = method.plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> sorted(set(plan.ids.tolist()))
        [1, 3]
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="draw samples by loss, with replacement",
        paper="arXiv:2310.10102",
        rule="not drawn: the smaller its loss, the more often",
        biased="Yes, towards samples of large loss: nothing is re-weighted. No with "
        'weights="unbiased": the expected mean loss is that of all data, as long as no loss is zero.',
        forwards='Every sample once per epoch except the last; none with losses="last".',
        claim="None: the paper only compares with it. On Fractal-3K its epochs took 576 s; hiding by forgetting took 398 s.",
        differences=(
            'Epoch 0 trains on every sample; the code draws it uniformly with replacement (first_epoch="uniform").',
            "The forward-only pass runs in eval mode and without gradient; in the code it runs in train mode and builds a "
            "graph.",
            "Draws invert the cumulative distribution; the code's torch.multinomial refuses more than 2^24 samples.",
            "A sample without a finite loss of 0 or more is kept once; the code fails on it.",
        ),
        bytes_per_sample=4,
        caveat="With its published defaults it costs more than full training: as many steps, and a pass over all samples. "
        'keep < 1 and losses="last" reduce the cost. weights="unbiased" beats random samples on none of '
        "the planted problems (`thresher.testing`).",
    )
    weights: Literal["none", "unbiased"] = "none"
    losses: Literal["fresh", "last"] = "fresh"
    keep: float = 1.0
    first_epoch: Literal["all", "uniform"] = "all"

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        check_choices(self)

    @property
    def requires(self) -> Requirements:
        """What the method needs: the order of training and, with `losses="fresh"`, the model."""
        return Requirements(order="plan", refresh="eval" if self.losses == "fresh" else None)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan of samples drawn by loss; with "fresh", all samples get a forward pass after the epoch."""
        loss = on_host(records["loss"])
        if epoch == 0 and self.first_epoch == "all":
            plan = full_plan(len(loss))
        else:
            chances = Chances(loss if epoch else np.ones(len(loss), dtype=np.float32))
            plan = drawn_plan(chances, self.keep, generator, weighted=self.weights == "unbiased")
        if self.losses == "fresh" and epoch + 1 < epochs:
            return replace(plan, refresh=torch.arange(len(loss)))
        return plan
