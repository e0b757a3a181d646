"""Forgetting: in each epoch, hide the samples that were forgotten least often so far.

Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning", ICLR 2019, arXiv:1812.05159.
Original code: github.com/mtoneva/example_forgetting. A sample is forgotten when its prediction was right the last time and is
wrong now. The method is biased towards samples that are often forgotten: nothing is re-weighted.

The paper counts during one whole training run and prunes before a second one: `thresher.Prune` with
`thresher.scores.forgetting`. This is the online form with which KAKURENBO is compared (`_forget_lag` of
github.com/TruongThaoNguyen/kakurenbo): the first 2 epochs hide nothing, later epochs hide a fixed share. Hidden samples get a
forward pass at the end of the epoch: their counts continue, and they can return. Where the two codes differ from this
method or from each other:
- A sample that was never right counts as forgotten most often in Toneva's code. In KAKURENBO's code it counts as never
  forgotten and is hidden first. The settings are `never_learned="keep"` and `"cut"`.
- `hide="once"` hides the same samples for the rest of training, by the counts at the end of the first epochs. Toneva's code
  does so after a whole training run, and KAKURENBO's `_forget_original` after 20 epochs; both then start with a new model.
- Very many counts are equal. The codes order them by an unstable sort; here they are drawn at random, anew in each epoch.
- KAKURENBO's code counts a sample twice that a distributed sampler repeats, and forwards hidden samples in train mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_choices, check_within, full_plan
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import Mask, Values, draw_lots, ids_of, kth_smallest, on_host, share

UNSEEN_TURNS = -1
"""Value of the column `forgetting` for a sample that was never seen."""


def turns(old: Tensor, new: Tensor) -> Tensor:
    """Updates the numbers of turns: how often a prediction changed from wrong to right or from right to wrong.

    The number is odd while the prediction is right, and 0 as long as it never was right. Half of it, rounded down, is the
    number of times that the sample was forgotten.

    Args:
        old: Turns so far, shape (n,), a signed integer dtype; `UNSEEN_TURNS` for a sample that was never seen.
        new: Whether the prediction is right now, shape (n,).

    Returns:
        Turns, shape (n,), of the dtype of `old`. At the limit of the dtype, the last bit (whether the prediction is right)
        stays correct, and the number of times forgotten stays at its maximum: 16,383 in int16, 63 in int8.
    """
    most = torch.iinfo(old.dtype).max
    known = old.clamp(min=0).int()
    known = known + ((known & 1) != (new != 0).int()).int()
    return torch.where(known > most, most - 1, known).to(old.dtype)


def fewest(counts: Values, k: int, generator: torch.Generator) -> Mask:
    """Marks the `k` smallest counts; ties are drawn at random.

    Args:
        counts: Counts, shape (N,), integers; negative counts are never marked.
        k: Number of counts to mark; if there are fewer counts of 0 or more, all of these.
        generator: Random generator on the CPU.

    Returns:
        Bool mask (N,).
    """
    usable = counts >= 0
    k = min(k, int(np.count_nonzero(usable)))
    if k <= 0:
        return np.zeros(len(counts), dtype=np.bool_)
    cut = kth_smallest(counts[usable], k - 1)
    mask = usable & (counts < cut)
    return mask | draw_lots(k - int(np.count_nonzero(mask)), generator, len(counts), counts == cut)


@dataclass(frozen=True)
class Forgetting:
    """Trains on every sample in the first epochs, then hides a fixed share: the samples that were forgotten least often.

    Args:
        fraction: Share of the N samples to hide, F, [0, 1). Default and published: 0.1 (KAKURENBO's comparison on CIFAR-100).
        start: First epoch that hides samples: a whole number, 0 or more, or a share of the epochs below 1. A run that ends
            before this epoch hides nothing. Default 20, as in KAKURENBO's `_forget_original`; its `_forget_lag` starts at 2.
        hide: When samples are chosen. "each_epoch" (default): in each epoch by the counts so far; hidden samples get a forward
            pass at the end of the epoch and can return. "once": by the counts at `start`, for the rest of training.
        never_learned: Handling of samples that were never right: "keep" (default) never hides them; "cut" counts them as never
            forgotten.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Forgetting
        >>> turns = torch.tensor([1, 3, 0, 5], dtype=torch.int16)  # forgotten 0, 1, 0 and 2 times; sample 2 was never right
        >>> method = Forgetting(fraction=0.25, start=1)
        >>> plan = method.plan_epoch({"forgetting": turns}, epoch=1, epochs=10, generator=torch.Generator())
        >>> plan.ids, plan.refresh
        (tensor([1, 2, 3]), tensor([0]))
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="hide the samples that are forgotten least",
        paper="arXiv:1812.05159",
        rule="it was forgotten less often than others",
        biased="Yes, towards samples that are forgotten often or never learned: nothing is re-weighted.",
        forwards='Every hidden sample once per epoch; none with hide="once".',
        claim="For the offline form: a significant share of the samples can be left out of a second training without a loss of "
        "accuracy (the abstract has no number). For this online form there is none; KAKURENBO only compares with it.",
        differences=(
            "Hiding starts at epoch 20 by default; in KAKURENBO's online code it starts at epoch 2.",
            'Samples that were never right are kept, as in the original; KAKURENBO hides them first (never_learned="cut").',
            "Equal counts are drawn at random, anew in each epoch; both codes leave them to an unstable sort.",
            "Hidden samples are forwarded in eval mode; in KAKURENBO's code they are forwarded in train mode.",
            "A sample that a distributed sampler repeats is counted once.",
        ),
        bytes_per_sample=2,
        caveat="After few epochs few samples were ever forgotten. As long as the samples that were never forgotten are more "
        "than the hidden share, the choice among them is random selection.",
        missing=(
            "The margins and the complete histories that the original code stores.",
            "A new model after the first epochs, as in the other form of the comparison: prune before a second training "
            "instead.",
        ),
    )
    fraction: float = 0.1
    start: float = 20
    hide: Literal["each_epoch", "once"] = "each_epoch"
    never_learned: Literal["keep", "cut"] = "keep"

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "fraction")
        if not (0 <= self.start < 1 or (self.start >= 1 and self.start % 1 == 0)):
            raise ValueError(
                "Forgetting: `start` must be the number of an epoch (0, 1, ...) or a share of all epochs (below 1), "
                f"got {self.start}"
            )
        check_choices(self)

    @property
    def requires(self) -> Requirements:
        """What the method needs: the model, if hidden samples get a forward pass."""
        return Requirements(refresh="eval" if self.hide == "each_epoch" else None)

    def columns(self) -> dict[str, Column]:
        """Returns the columns, 2 bytes per sample: its number of turns, and with `hide="once"` whether it was hidden."""
        dtype = torch.int16 if self.hide == "each_epoch" else torch.int8
        columns = {"forgetting": Column(dtype, fill=UNSEEN_TURNS, signal="correct", merge=turns)}
        if self.hide == "once":
            columns["hidden"] = Column(torch.bool, merge="plan")
        return columns

    def hides(self, epoch: int, epochs: int) -> bool:
        """Returns whether an epoch hides samples."""
        return epoch >= (self.start * epochs if self.start < 1 else self.start) - 1e-9

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan without the samples that were forgotten least often."""
        recorded = on_host(records["forgetting"])
        n = len(recorded)
        if not self.hides(epoch, epochs) or epoch == 0:
            return full_plan(n)
        if self.hide == "once":
            hidden = on_host(records["hidden"]).copy()
        else:
            hidden = np.zeros(n, dtype=np.bool_)
        if not hidden.any():
            hidden = fewest(self._counts(recorded), min(share(self.fraction, n), n - 1), generator)
        return EpochPlan(
            ids_of(~hidden),
            refresh=ids_of(hidden) if self.requires.refresh else None,
            facts={
                "scheduled_fraction": self.fraction,
                "actual_fraction": np.count_nonzero(hidden) / n,
            },
            remember={} if self.requires.refresh else {"hidden": torch.from_numpy(hidden)},
        )

    def _counts(self, recorded: Values) -> Values:
        """Returns how often each sample was forgotten; -1 for samples that must not be hidden."""
        return np.where(
            recorded < (1 if self.never_learned == "keep" else 0),
            recorded.dtype.type(-1),
            recorded >> 1,
        )
