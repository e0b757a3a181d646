"""Forgetting: each epoch, hide the samples that were forgotten least often so far.

Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning", ICLR 2019, arXiv:1812.05159.
Original code: github.com/mtoneva/example_forgetting. A sample is forgotten when it was right the last time it was seen and is
wrong now. Biased towards samples that are hard to hold on to; nothing is re-weighted.

The paper counts during one whole training and prunes before a second one: `thresher.Prune` with `thresher.scores.forgetting`.
This is the online form that KAKURENBO is compared with (`_forget_lag` of github.com/TruongThaoNguyen/kakurenbo): nothing is
hidden in the first epochs, then a fixed share. Hidden samples are refreshed, so that their counts go on and they can return.
Where the codes differ:
- A sample that was never right counts as forgotten most in Toneva's code and as never forgotten, so hidden first, in
  KAKURENBO's: `never_learned="keep"` or `"cut"`.
- `hide="once"` hides what the counts say at the end of the first epochs for good, as KAKURENBO's `_forget_original`, which
  then starts a new model, and Toneva's do.
- Ties, of which there are very many, go by whatever an unstable sort makes of them there; here by lot, anew each epoch.
- KAKURENBO's counts a sample twice that a distributed sampler repeats, and forwards hidden samples in train mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._drawing import everything
from thresher.methods.card import Card
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.scores.forgetting import events_in_turns
from thresher.selection import Mask, Values, chosen, ids_of, on_host, share

UNSEEN = -1
"""Turns of a sample that was never seen."""


def turns(old: Tensor, new: Tensor) -> Tensor:
    """How often a sample has turned from wrong to right or back: odd while it is right, 0 while it never was.

    Args:
        old: Turns so far, `UNSEEN` before the first sight; shape (n,), a signed integer dtype.
        new: Whether it is right now, shape (n,).

    Returns:
        Shape (n,), of the dtype of `old`. Where it is full it keeps its last bit, whether the sample is right, and the most
        events that fit: 16,383 in int16, 63 in int8.
    """
    most = torch.iinfo(old.dtype).max
    known = old.clamp(min=0).int()
    known = known + ((known & 1) != (new != 0).int()).int()
    return torch.where(known > most, most - 1, known).to(old.dtype)


def fewest(counts: Values, k: int, generator: torch.Generator) -> Mask:
    """Mark the `k` smallest counts, ties by lot.

    Args:
        counts: Shape (N,), integers; negative ones are never marked.
        k: How many; more than there are counts of 0 or more marks all of those.
        generator: On the CPU.

    Returns:
        Bool mask (N,).
    """
    usable = counts >= 0
    k = min(k, int(np.count_nonzero(usable)))
    if k <= 0:
        return np.zeros(len(counts), dtype=np.bool_)
    cut = np.partition(counts[usable], k - 1)[k - 1]
    mask = usable & (counts < cut)
    ties = np.flatnonzero(counts == cut)
    mask[ties[chosen(len(ties), k - int(np.count_nonzero(mask)), generator)]] = True
    return mask


@dataclass(frozen=True)
class Forgetting:
    """Train on everything first, then hide a fixed share of the samples: those forgotten least often.

    Args:
        fraction: F, share of N to hide, [0, 1). Published: 0.1 in KAKURENBO's comparison on CIFAR-100.
        start: First epoch that hides, 0 or more; below 1 a share of the epochs. Nothing is hidden in a training that ends
            before. Published: 20.
        hide: "each_epoch": by the counts so far, hidden samples being refreshed; "once": by the counts at `start`, for good.
        never_learned: A sample that was never right is kept ("keep"), or counts as never forgotten ("cut").

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        biased="Yes, towards samples that are forgotten often or never learned: nothing is re-weighted.",
        forwards='Every hidden sample once an epoch; none with hide="once".',
        claim="Offline, about 30 % of CIFAR-10 left out of a second training without loss (recalled, not checked). Of the "
        "online form, KAKURENBO's for comparison, none.",
        differences=(
            'Samples that were never right are kept, as in the original; KAKURENBO hides them first (never_learned="cut").',
            "Ties go by lot, anew each epoch; both codes leave them to an unstable sort.",
            "Hidden samples are forwarded in eval mode; KAKURENBO does so in train mode.",
            "A sample that a distributed sampler repeats is counted once.",
        ),
        bytes_per_sample=2,
        caveat="After few epochs few samples were ever forgotten: while those that never were are more than the hidden share, "
        "the choice among them is random selection.",
        missing=(
            "The margins and whole histories that the original stores.",
            "A new model after the first epochs, as in the comparison's other form: prune before a second training for that.",
        ),
    )
    fraction: float = 0.1
    start: float = 20
    hide: Literal["each_epoch", "once"] = "each_epoch"
    never_learned: Literal["keep", "cut"] = "keep"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"Forgetting: `fraction` is a share removed, within [0, 1), got {self.fraction}")
        if not (0 <= self.start < 1 or (self.start >= 1 and self.start % 1 == 0)):
            raise ValueError(
                f"Forgetting: `start` must be an epoch, a whole number of 0 or more, or a share of the epochs below 1, "
                f"got {self.start}"
            )
        for name, values in {"hide": ("each_epoch", "once"), "never_learned": ("keep", "cut")}.items():
            if getattr(self, name) not in values:
                raise ValueError(f"Forgetting: `{name}` must be one of {values}, got {getattr(self, name)!r}")

    @property
    def requires(self) -> Requirements:
        """The model, where hidden samples are refreshed."""
        return Requirements(refresh="eval" if self.hide == "each_epoch" else None)

    def columns(self) -> dict[str, Column]:
        """Turns between right and wrong: 2 bytes a sample; with hide="once" in 1, and 1 for what is hidden."""
        dtype = torch.int16 if self.hide == "each_epoch" else torch.int8
        columns = {"forgetting": Column(dtype, fill=UNSEEN, signal="correct", merge=turns)}
        if self.hide == "once":
            columns["hidden"] = Column(torch.bool, merge="plan")
        return columns

    def hides(self, epoch: int, epochs: int) -> bool:
        """Whether the first epochs are over."""
        return epoch >= (self.start * epochs if self.start < 1 else self.start) - 1e-9

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """All but the least forgotten."""
        column = records["forgetting"]
        n = len(column)
        if not self.hides(epoch, epochs) or epoch == 0:
            return everything(n)
        hidden = on_host(records["hidden"]).copy() if self.hide == "once" else np.zeros(n, dtype=np.bool_)
        if not hidden.any():
            hidden = fewest(self._counts(column), min(share(self.fraction, n), n - 1), generator)
        left_out = ids_of(hidden)
        return EpochPlan(
            ids_of(~hidden),
            refresh=left_out if self.requires.refresh else None,
            facts={"scheduled_fraction": self.fraction, "actual_fraction": len(left_out) / n},
            remember={} if self.requires.refresh else {"hidden": torch.from_numpy(hidden)},
        )

    def _counts(self, column: Tensor) -> Values:
        """Events, -1 for samples that are not to be hidden."""
        known = 1 if self.never_learned == "keep" else 0
        return np.where(on_host(column) < known, -1, on_host(events_in_turns(column)))
