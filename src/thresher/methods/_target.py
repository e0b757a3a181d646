"""The share of the samples that a whole training run leaves out: the setting `target=` of methods with a threshold.

A threshold determines which samples may be left out, but not how many: InfoBatch with a prune fraction of one half leaves out
about a fifth. With a target, each epoch leaves out an equal part of the number that is still missing. How often each sample was
left out is stored and saved with the run, so a resumed run leaves out the same samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import is_number
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import Mask, chunks, on_host, share

LEFT_OUT = {"left_out": Column(torch.int16, merge="plan")}
"""Column with the number of epochs that left a sample out."""

MOST_EPOCHS = int(torch.iinfo(torch.int16).max)
"""Largest number of epochs that such a column can count."""

MOST = 0.9
"""Largest share of the samples that one epoch leaves out for a target."""

CANDIDATES = 0.95
"""Largest share of the samples that are candidates for being left out; the others are always kept."""

CLOSE = 0.01
"""Largest difference between the target and the share really left out for which there is no warning."""


def check_target(method: object, target: float | None) -> None:
    """Checks that a `target` is a share.

    Args:
        method: Method whose setting it is; its class name starts the error message.
        target: Value of the setting.

    Raises:
        ValueError: `target` is neither None nor a number within [0, 0.9].
    """
    if target is not None and not (is_number(target) and 0 <= target <= MOST):
        raise ValueError(
            f"{type(method).__name__}: `target` is the share of the samples that the whole run leaves out, within [0, {MOST}], "
            f"or None, got {target!r}"
        )


def check_epochs(method: object, epochs: int) -> None:
    """Checks that the epochs are few enough to be counted in the column `LEFT_OUT`.

    Args:
        method: Method that has the column; its class name starts the error message.
        epochs: Number of epochs of the training run.

    Raises:
        ValueError: There are more than 32,767.
    """
    if epochs > MOST_EPOCHS:
        raise ValueError(
            f"{type(method).__name__} counts in 16 bits how often a sample was left out, got {epochs:,} epochs: train for "
            f"{MOST_EPOCHS:,} or fewer"
        )


@dataclass(frozen=True)
class Target:
    """A share of the samples to leave out, over all epochs of a training run.

    Args:
        method: Method that was given the setting, for error messages.
        share: Share of the samples that the whole training run leaves out, [0, 0.9].
        start: First epoch that leaves out samples.
        stop: Epoch after the last epoch that leaves out samples.
        epochs: Number of epochs of the training run.

    Raises:
        ValueError: The epochs that may leave out samples are too few for the share, or too many to be counted.

    Example:
        A run of ten epochs, of which the first and the last keep every sample.

        >>> target = Target(None, share=0.4, start=1, stop=9, epochs=10)
        >>> target.due({"left_out": torch.zeros(1000, dtype=torch.int16)}, epoch=1)
        500
    """

    method: object
    share: float
    start: int
    stop: int
    epochs: int

    def __post_init__(self) -> None:
        check_epochs(self.method, self.epochs)
        pruning = max(0, self.stop - self.start)
        most = MOST * pruning / self.epochs
        if self.share > most + 1e-9:
            raise ValueError(
                f"{type(self.method).__name__}: `target`={self.share} cannot be met in {self.epochs} epochs: only "
                f"{pruning} of them leave out samples, each a share of at most {MOST:g}. Lower it to "
                f"{share(most, 1000) / 1000:g} or less, or train for more epochs"
            )

    def due(self, records: Mapping[str, Tensor], epoch: int) -> int:
        """Returns the number of samples that an epoch must leave out to meet the target, at most a share of `MOST`.

        Args:
            records: Columns of the method, `LEFT_OUT` among them.
            epoch: Number of the epoch; the result is 0 for an epoch that keeps every sample.
        """
        if not self.start <= epoch < self.stop:
            return 0
        n = len(records["left_out"])
        lacking = self.share * self.epochs * n - self.left_out(records)
        return min(max(0, round(lacking / (self.stop - epoch))), share(MOST, n))

    def left_out(self, records: Mapping[str, Tensor]) -> int:
        """Returns how many samples all earlier epochs have left out.

        Args:
            records: Columns of the method, `LEFT_OUT` among them.
        """
        return int(on_host(records["left_out"]).sum(dtype=np.int64))

    def counted(
        self, plan: EpochPlan, kept: Mask, records: Mapping[str, Tensor], epoch: int
    ) -> EpochPlan:
        """Returns the plan, extended to store how often each sample was left out and to report the share left out so far.

        Args:
            plan: Plan of the epoch.
            kept: Mask of the samples that the plan keeps, shape (N,), bool.
            records: Columns of the method, `LEFT_OUT` among them.
            epoch: Number of the epoch.
        """
        so_far = (self.left_out(records) + np.count_nonzero(~kept)) / len(kept)
        realised = so_far / self.epochs
        note = ""
        if epoch == self.stop - 1 and abs(realised - self.share) > CLOSE:
            note = (
                f"{type(self.method).__name__}(target={self.share:g}) leaves out {realised:.3f} of the samples over the whole "
                "training: samples without a finite loss are always kept, and at least one sample is."
            )
        return replace(
            plan,
            remember={**plan.remember, **counted(records, kept)},
            facts={**plan.facts, "left_out_so_far": so_far / (epoch + 1)},
            note=note,
        )


def counted(records: Mapping[str, Tensor], kept: Mask) -> dict[str, Tensor]:
    """Returns the column `LEFT_OUT` after an epoch: for each sample, the number of epochs that left it out; shape (n,).

    Args:
        records: Columns of the method, `LEFT_OUT` among them.
        kept: Mask of the samples that the epoch keeps, shape (n,), bool.
    """
    before = on_host(records["left_out"])
    after = np.empty_like(before)
    for part in chunks(len(before)):
        np.add(before[part], ~kept[part], out=after[part])
    return {"left_out": torch.from_numpy(after)}
