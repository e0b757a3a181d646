"""IES: leave out samples whose loss curve has become straight, by the second differences of their losses over the epochs.

"Instance-dependent Early Stopping", ICLR 2025, arXiv:2502.07547. Read in the code and the abstract. A sample is mastered while
the mean of the last three |l_t - 2 l_{t-1} + l_{t-2}| is below a threshold. It is then left out of the backward pass. Its loss
is still computed once an epoch, in eval mode, so the sample can return. It is biased towards samples whose losses still change:
nothing is re-weighted. The first six epochs keep every sample.

The published thresholds are 0.001 for CIFAR-10 and 0.002 for CIFAR-100. The right threshold differs by a factor of sixty
between optimizers (github.com/ShoebAhad/TG_IES_Results, EXPERIMENT_LOG.md). So the default here, `threshold="noise"`, computes
it from the second differences of the run itself: it is set once, at 15 % of the epochs (epoch 31 of 200 in that log), to half
of the median over the samples. The log does not give its formula: this is a reading, and `noise` is its factor.

With a target there is no threshold: each epoch leaves out the samples with the smallest means, as many as the target needs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_within, full_plan, is_number
from thresher.methods._target import LEFT_OUT, Target, check_target
from thresher.methods.contract import Card, Requirements
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, ids_of, kth_smallest, smallest

START = 6
"""First epoch that leaves out samples."""
CALIBRATED = 0.15
"""Share of the epochs after which the threshold is set."""
HISTORY = {
    "last": torch.float32,
    "slope": torch.float32,
    "bend": torch.bfloat16,
    "bend_before": torch.bfloat16,
}
"""Columns with the loss one epoch ago, its difference from the loss before it, and the last two absolute second differences."""


def bends(loss: Tensor, history: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean of the last three absolute second differences of the losses, and the history after this epoch.

    Args:
        loss: Last loss of each sample, shape (N,), float32, on the CPU.
        history: Columns `HISTORY`, each of shape (N,), on the CPU; NaN where nothing is known yet.

    Returns:
        Means, shape (N,), float32, NaN where one of the last five losses is not known or not finite; and the new history.

    Example:
        >>> history = {name: torch.full((1,), torch.nan, dtype=dtype) for name, dtype in HISTORY.items()}
        >>> for loss in (1.0, 0.5, 0.3, 0.2, 0.15, 0.12):
        ...     mean, history = bends(torch.tensor([loss]), history)
        >>> round(mean.item(), 3)  # of 0.1, 0.05 and 0.02
        0.057
    """
    new = {name: torch.empty(len(loss), dtype=dtype) for name, dtype in HISTORY.items()}
    mean = torch.empty_like(loss)
    for part in chunks(len(loss)):
        last, slope, bend, before = (history[name][part] for name in HISTORY)
        rise = loss[part] - last
        now = (rise - slope).abs()
        sums = now.double() + bend + before
        mean[part] = torch.where(sums.isfinite(), sums / 3, torch.nan)
        for name, values in zip(HISTORY, (loss[part], rise, now, bend), strict=True):
            new[name][part] = values
    return mean, new


@dataclass(frozen=True)
class Ies:
    """Leaves out samples whose losses change by nearly the same amount from epoch to epoch.

    The samples left out get a forward pass at the end of each epoch, which updates their losses. So they can return.

    Args:
        threshold: A sample is left out while the mean of the last three absolute second differences of its losses is below this
            number, > 0. "noise" (default) computes the threshold from the differences of all samples. Published: 0.001 and
            0.002.
        noise: With "noise", the threshold as a multiple of the median over the samples, > 0. Default 0.5, which is not taken
            from a paper.
        target: Share of the samples that the whole training run leaves out of the backward pass, [0, 0.9]; there is then no
            threshold. Default None.

    Raises:
        ValueError: A setting is out of its range, or the epochs are too few for the target.

    Example:
        >>> import torch
        >>> from thresher import Ies
        >>> records = {name: torch.zeros(3) for name in ("last", "slope", "bend", "bend_before")}
        >>> records["loss"] = torch.tensor([0.0, 0.3, 0.0009])
        >>> plan = Ies(threshold=0.001).plan_epoch(records, epoch=6, epochs=20, generator=torch.Generator())
        >>> plan.ids, plan.refresh
        (tensor([1]), tensor([0, 2]))
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    requires: ClassVar[Requirements] = Requirements(refresh="eval")
    card: ClassVar[Card] = Card(
        summary="leave out samples whose loss curve is straight",
        paper="arXiv:2502.07547",
        rule="mastered: its loss changed by nearly the same amount in the last epochs",
        biased="Yes, towards samples whose losses still change: nothing is re-weighted.",
        forwards="Every sample that is left out, once per epoch.",
        claim="10 to 50 % fewer samples in the backward pass.",
        differences=(
            "The default threshold comes from the noise of the run, by a formula of this library; the published ones are "
            "numbers.",
            "The second differences of the two previous epochs are stored with 8 bits of precision.",
            "A sample that was not seen in an epoch counts as one whose loss did not change.",
            "Samples without a finite loss in the last five epochs are kept.",
            "The size of the last batch follows the loader; the code changes it after the first exclusion.",
        ),
        bytes_per_sample=20,
        missing=("The bound on the number of epochs in a row, which TG-IES computes.",),
    )
    threshold: float | Literal["noise"] = "noise"
    noise: float = 0.5
    target: float | None = None

    def __post_init__(self) -> None:
        if self.threshold != "noise" and not (
            is_number(self.threshold) and 0 < float(self.threshold) < math.inf
        ):
            raise ValueError(
                f"Ies: `threshold` must be 'noise' or a number above 0, got {self.threshold!r}"
            )
        check_within(self, "(0, inf)", "noise")
        check_target(self, self.target)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample, 20 bytes: its loss, its loss history, and the threshold or a count."""
        history = {
            name: Column(dtype, fill=math.nan, merge="plan") for name, dtype in HISTORY.items()
        }
        calibrates = self.threshold == "noise" and self.target is None
        if calibrates:
            threshold = {"threshold": Column(torch.float32, fill=math.nan, merge="plan")}
        else:
            threshold = {}
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            **history,
            **threshold,
            **({} if self.target is None else LEFT_OUT),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan without the samples whose loss curves are straight; these get a forward pass after the epoch."""
        n = len(records["loss"])
        if self.target is None:
            target = None
        else:
            target = Target(self, self.target, START, epochs, epochs)
        if epoch == 0:
            return full_plan(n)
        mean, remember = self._straightness(records)
        if target is not None:
            out = smallest(mean, min(target.due(records, epoch), n - 1))
        else:
            out, threshold = self._mastered(mean, records, epoch, epochs)
            remember |= threshold
        del mean
        left_out = np.count_nonzero(out) / n
        kept = ~out
        plan = EpochPlan(
            ids_of(kept),
            refresh=ids_of(out),
            facts={"scheduled_fraction": left_out, "actual_fraction": left_out},
            remember=remember,
        )
        del out
        if target is None:
            return plan
        return target.counted(plan, kept, records, epoch)

    def _straightness(self, records: Mapping[str, Tensor]) -> tuple[Values, dict[str, Tensor]]:
        """Returns the means of the last second differences, and the columns of the history after this epoch."""
        mean, history = bends(
            records["loss"].detach().cpu(), {name: records[name].detach().cpu() for name in HISTORY}
        )
        return mean.numpy(), history

    def _mastered(
        self, mean: Values, records: Mapping[str, Tensor], epoch: int, epochs: int
    ) -> tuple[Mask, dict[str, Tensor]]:
        """Returns the mask of the samples below the threshold (never all), and the new column of `_threshold`."""
        threshold, column = self._threshold(mean, records, epoch, epochs)
        if epoch >= START:
            out = mean < np.float32(threshold)
        else:
            out = np.zeros(len(mean), dtype=np.bool_)
        if out.all():
            out = smallest(mean, len(mean) - 1)
        return out, column

    def _threshold(
        self, mean: Values, records: Mapping[str, Tensor], epoch: int, epochs: int
    ) -> tuple[float, dict[str, Tensor]]:
        """Returns the threshold, NaN until it is set; and in the epoch that sets it, the column that stores it for later epochs.

        With `threshold="noise"`, it is set once, to `noise` times the median of `mean`, after the first epochs of training.

        Args:
            mean: Means of the last second differences, see `bends`.
            records: The records.
            epoch: Number of this epoch.
            epochs: Number of epochs of the training.
        """
        if self.threshold != "noise":
            return float(self.threshold), {}
        # The column has the same value for each sample.
        stored = float(records["threshold"][0])
        if math.isfinite(stored) or epoch < max(START, CALIBRATED * epochs):
            return stored, {}
        usable = mean[np.isfinite(mean)]
        if not len(usable):
            return math.nan, {}
        threshold = self.noise * float(kth_smallest(usable, (len(usable) - 1) // 2))
        return threshold, {"threshold": torch.full((len(mean),), threshold, dtype=torch.float32)}
