"""RePB: prune a part of the samples below the mean loss of their batch, weigh samples by how often they were trained on.

"RePB", ICLR 2026, openreview Zw1Uw7u6Su; code: github.com/mrazhou/RePB, which was not read. This is a reading of the paper's
text and of its reviews. Each sample whose loss was below the mean of its batch is left out of the next epoch with probability
rho; a sample that was left out has the same probability again. The weight of a kept sample is e / N: the number e of epochs so
far divided by the number N of epochs that trained on the sample. The weights do not use rho. They are right on average in the
long run only, because the mean of 1 / N is not 1 / mean of N. In the paper they grow without a limit; here they are at most 1 /
(1 - rho), the expected weight.

With a target, each epoch computes rho from it. If more samples must be left out than are below the mean, samples that were
least above it may be left out, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_within, full_plan
from thresher.methods._target import (
    CANDIDATES,
    LEFT_OUT,
    Target,
    check_epochs,
    check_target,
    counted,
)
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, draw_lots, ids_of, on_host, share, smallest


def cumulative_weights(left_out: Values, epochs: int, most: float) -> Values:
    """Returns the number of epochs so far, divided by the number of epochs that trained on a sample.

    Args:
        left_out: Number of epochs that left a sample out, shape (k,), integers below `epochs`.
        epochs: Number of epochs so far, including the one in progress.
        most: Largest weight.

    Returns:
        Weights, shape (k,), float32, within [1, most].

    Example:
        >>> cumulative_weights(np.array([0, 1, 3]), epochs=4, most=2.0).tolist()
        [1.0, 1.3333333730697632, 2.0]
    """
    return np.minimum(epochs / (epochs - left_out.astype(np.float64)), most).astype(np.float32)


@dataclass(frozen=True)
class RePb:
    """Skips a random part of the samples below the mean loss of their batches; samples that were skipped often weigh more.

    Args:
        prune_fraction: Share that is skipped of the samples below the mean loss of their batches, rho, (0, 1). Default 0.5,
            which is not taken from the paper.
        target: Share of the samples that the whole training run leaves out, [0, 0.9]; the prune fraction of each epoch is
            computed from it. Default None: the share that `prune_fraction` gives.

    Raises:
        ValueError: A setting is out of its range, or the epochs are too few for the target or too many to be counted.

    Example:
        >>> import torch
        >>> from thresher import RePb
        >>> records = {
        ...     "loss": torch.tensor([0.1, 0.9, 0.2, 0.8]),
        ...     "batch_loss": torch.tensor([0.5, 0.5, 0.5, 0.5]),
        ...     "left_out": torch.tensor([1, 0, 1, 0], dtype=torch.int16),
        ... }
        >>> plan = RePb().plan_epoch(records, epoch=2, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), sorted(plan.weights.tolist())
        (3, [1.0, 1.0, 1.5])
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="prune below the batch's mean, weigh by times trained",
        paper="openreview Zw1Uw7u6Su",
        rule="pruned: its loss was below the mean of its batch, and it was drawn",
        biased="Yes, a little: the weights e / N are right on average in the long run only. In the first epochs they are too "
        "small, and weights above 1 / (1 - rho) are cut.",
        forwards="None.",
        claim="More than 30 % of the samples skipped on 16 datasets (read in the text only).",
        differences=(
            "The code was not read: this is a reading of the text and its reviews.",
            "The number of samples that is pruned is exact, prune_fraction of those below the mean; in the paper each is "
            "drawn alone.",
            "Weights are at most 1 / (1 - rho); in the paper they have no limit.",
            "The mean is that of the rows for which the loop called the criterion, on each process by itself.",
        ),
        bytes_per_sample=10,
        missing=("Windows of more than one batch, and means over them.",),
    )
    prune_fraction: float = 0.5
    target: float | None = None

    def __post_init__(self) -> None:
        check_within(self, "(0, 1)", "prune_fraction")
        check_target(self, self.target)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored per sample, 10 bytes: its loss, the mean loss of its batch, how many epochs skipped it."""
        return {
            name: Column(torch.float32, fill=NEVER_SEEN) for name in ("loss", "batch_loss")
        } | LEFT_OUT

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan without a random part of the samples whose losses were below the means of their batches."""
        n = len(records["loss"])
        if self.target is None:
            target = None
        else:
            target = Target(self, self.target, 1, epochs, epochs)
        check_epochs(self, epochs)
        if epoch == 0:
            return full_plan(n)
        above = _above_the_mean(on_host(records["loss"]), on_host(records["batch_loss"]))
        if target is None:
            below = above < 0
            candidates = int(np.count_nonzero(below))
            if candidates:
                pruned = candidates - max(1, share(1 - self.prune_fraction, candidates))
            else:
                pruned = 0
            most = 1 / (1 - self.prune_fraction)
        else:
            below, candidates, pruned = self._for_target(above, target.due(records, epoch))
            if pruned:
                most = candidates / (candidates - pruned)
            else:
                most = 1 / (1 - self.prune_fraction)
        kept = np.ones(n, dtype=np.bool_)
        if pruned:
            kept = draw_lots(candidates - pruned, generator, n, below) | ~below
        weights = cumulative_weights(on_host(records["left_out"])[kept], epoch + 1, most)
        left_out = pruned / n
        scheduled = left_out if target is not None or not pruned else self.prune_fraction
        plan = EpochPlan(
            ids_of(kept),
            weights=torch.from_numpy(weights),
            facts={"scheduled_fraction": scheduled, "actual_fraction": left_out},
        )
        if target is None:
            return replace(plan, remember=counted(records, kept))
        return target.counted(plan, kept, records, epoch)

    def _for_target(self, above: Values, due: int) -> tuple[Mask, int, int]:
        """Returns the mask of the candidates for pruning, their number, and how many of them are pruned: `due` if possible."""
        usable = np.isfinite(above)
        below = int(np.count_nonzero(above < 0))
        wanted = max(
            due + 1, min(max(below, round(due / CANDIDATES)), share(CANDIDATES, len(above)))
        )
        candidates = min(wanted, int(np.count_nonzero(usable))) if due else 0
        return (
            smallest(above, candidates, usable=usable),
            candidates,
            max(0, min(due, candidates - 1)),
        )


def _above_the_mean(loss: Values, batch_loss: Values) -> Values:
    """Returns by how much losses are above the means of their batches, NaN if one of the two is not finite."""
    above = np.empty(len(loss), dtype=np.float32)
    for part in chunks(len(loss)):
        with np.errstate(invalid="ignore", over="ignore"):
            above[part] = loss[part] - batch_loss[part]
        above[part][~(np.isfinite(loss[part]) & np.isfinite(batch_loss[part]))] = np.nan
    return above
