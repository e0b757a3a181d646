"""Divides the losses of kept rows by the number of all rows of the batch, for methods with `divide="batch"`."""

from dataclasses import replace

import torch
from torch import Tensor

from thresher.losses.base import Criterion
from thresher.methods.contract import BatchMethod, requirements_of, title_given
from thresher.methods.full import FullData
from thresher.plans import BatchPlan
from thresher.run.parts import RunConfig, SelectionMode
from thresher.warning import warn


def divides_by_batch(method: BatchMethod | None) -> bool:
    """Returns whether a batch method declares that kept losses are divided by the number of all rows of the batch."""
    return method is not None and requirements_of(method).divide == "batch"


def warn_of_sum(config: RunConfig) -> None:
    """Warns if the criterion returns a sum, which the loop may divide by a constant, and batches become smaller."""
    if config.adapter is None or config.adapter.reduction != "sum" or config.by_batch:
        return
    plans_smaller = config.spend != "steps" and requirements_of(config.epoch_method).smaller_batches
    selects = config.batch_method is not None or not isinstance(config.epoch_method, FullData)
    chooses_in_batch = config.mode.is_in_forward or config.mode is SelectionMode.WITHOUT_LOSSES
    if plans_smaller or chooses_in_batch or (config.spend == "batches" and selects):
        warn(
            f"`criterion` has reduction='sum', and {title_given(config.methods[-1])} trains on fewer rows per step. If the "
            "loop divides the sum by a constant, such as the batch size, its steps become smaller: use reduction='mean'."
        )


def divisible_before(criterion: Criterion | None) -> bool:
    """Returns whether multiplying the weights of all rows by a number multiplies the loss by it."""
    # A mean with class weights divides by the weights of the rows, which cancels a common factor; a sum is not divided at all.
    return criterion is None or not (criterion.class_weights or criterion.reduction == "sum")


class UnevenLabels:
    """Warns if losses were scaled by the share of kept rows although samples had different numbers of labels.

    Args:
        device: Device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._uneven = torch.zeros((), dtype=torch.bool, device=device)
        self._warned = False

    def note(self, counts: Tensor) -> None:
        """Notes how many labels count in each sample of a batch, shape (n,); nothing waits for the device."""
        # A flag on the device, read once an epoch, so that no step waits for the device.
        if len(counts):
            self._uneven |= counts.min() != counts.max()

    def warn(self) -> None:
        """Warns once if samples had different numbers of labels; it waits for the device."""
        if self._warned or not self._uneven:
            return
        self._warned = True
        warn(
            "The method divides kept losses by the number of rows of the batch, but samples had different numbers of labels "
            "that count. If rows are chosen before the forward pass, the mean over the kept labels is multiplied by the share "
            "of kept rows, which is not the share of kept labels. Use forward_passes='once'. This warning is given once."
        )


def part_of_batch(plan: BatchPlan, n: int) -> BatchPlan:
    """Returns a plan with weights, so that the mean over kept rows is their sum divided by all rows of the batch.

    Args:
        plan: Plan of a batch.
        n: Number of rows of the batch.

    Example:
        >>> part_of_batch(BatchPlan(torch.tensor([0, 3])), 8).weights
        tensor([0.2500, 0.2500])
    """
    k = len(plan.rows)
    # Whole batches get no weights, so that they are trained on bit for bit as without the method.
    if k in (0, n):
        return plan
    if plan.weights is None:
        weights = torch.ones(k, dtype=torch.float32, device=plan.rows.device)
    else:
        weights = plan.weights
    return replace(plan, weights=weights * (k / n))


def check_divisor(config: RunConfig) -> None:
    """Checks that the losses of the criterion can be divided by all rows of the batch, as the method declares."""
    adapter = config.adapter
    if not config.by_batch or config.mode.is_in_forward or divisible_before(adapter):
        return
    if adapter is not None and adapter.class_weights:
        how = "class weights"
    else:
        how = "reduction='sum'"
    raise ValueError(
        f"`criterion`: {title_given(config.batch_method)} divides kept losses by the number of rows of the batch. If rows "
        f"are chosen before the forward pass, their losses get a weight instead, and the criterion has {how}, with which the "
        f"result would be wrong. Use forward_passes='once', or a criterion without {how}."
    )
