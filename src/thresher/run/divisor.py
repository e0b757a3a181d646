"""What the losses of the rows that a batch method kept are divided by: the rows kept, or the rows of the batch."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import RowLayout
from thresher.losses.base import Criterion
from thresher.methods.contract import requirements_of
from thresher.plans import BatchPlan

KEPT, BATCH = "kept", "batch"


FEW = 8
"""Number of rows for which a method is asked how many it keeps."""


def divides_by_batch(divide: Any, method: Any, criterion: Criterion | None, passes: str) -> bool:
    """Returns whether kept losses are divided by the rows of the batch, after checking the argument `divide` of `attach`.

    Args:
        divide: Argument of `attach`.
        method: The batch method; None where there is none.
        criterion: The user's criterion per sample; None where there is none.
        passes: Result of `passes_of`.

    Raises:
        ValueError: `divide` is not one of the allowed values, there is no batch method, its weights are made for another
            divisor, or the criterion cannot be divided so before the forward pass.
    """
    if divide not in (None, KEPT, BATCH):
        raise ValueError(f"`divide` must be 'kept', 'batch' or None for what the method does by itself, got {divide!r}")
    if method is None:
        if divide is not None:
            raise ValueError(f"`divide` is for methods that select in the batch; none was given, got {divide!r}; leave it out")
        return False
    name, own = type(method).__name__, requirements_of(method).divide
    if own is not None and divide not in (None, own):
        raise ValueError(
            f"`divide`: the weights of {name} are made for divide={own!r}, got {divide!r}, with which they would be wrong; "
            "leave `divide` out"
        )
    by_batch = (divide or own) == BATCH
    if by_batch and passes != "once" and criterion is not None and not divisible_before(criterion):
        how = "class weights" if criterion.class_weights else "reduction='sum'"
        raise ValueError(
            f"`divide`: 'batch' gives the rows that {name} keeps before the forward pass a weight, and {how} of the criterion "
            "would cancel it or count it twice. Use forward_passes='once', divide='kept', or a criterion without it."
        )
    return by_batch


def by_chance(method: Any) -> bool:
    """Returns whether the number of rows that a batch method keeps is not known before it chooses."""
    return method.count(FEW) is None


def divisible_before(criterion: Criterion | None) -> bool:
    """Returns whether a weight that all rows of a batch have becomes a factor on its loss."""
    return criterion is None or not (criterion.class_weights or criterion.reduction == "sum")


def part_of_divisor(
    criterion: Criterion, targets: Any, layout: RowLayout, rows: Tensor, weights: Tensor | None, of_batch: Tensor | None
) -> Tensor | float:
    """Returns the part of some samples in what the scalar of their batch is divided by.

    The scalar of these samples times this part is their sum over the divisor of the batch.

    Args:
        criterion: The user's criterion per sample.
        targets: Targets of the batch.
        layout: Layout of the rows of the batch as samples.
        rows: Numbers of the samples, shape (k,), int64.
        weights: Weights of these samples, shape (k,), float; None where all are 1.
        of_batch: Weights of all samples of the batch, shape (n,), float; None where all are 1.
    """
    if criterion.reduction == "sum":
        return 1.0
    shares = criterion.shares(torch.empty(layout.n, 1, device=rows.device), targets)
    kept = shares.index_select(0, rows)
    if criterion.class_weights:  # then weights are part of the divisor, too
        kept = kept if weights is None else kept * weights
        shares = shares if of_batch is None else shares * of_batch
    return kept.sum() / shares.sum()


class UnevenLabels:
    """Notices where a share of the rows stood for a share of the labels, and the samples had different numbers of labels.

    Args:
        device: Device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._uneven = torch.zeros((), dtype=torch.bool, device=device)
        self._said = False

    def note(self, counts: Tensor) -> None:
        """Notes how many labels count in each sample of a batch, shape (n,); nothing waits for the device."""
        if len(counts):
            self._uneven |= counts.min() != counts.max()

    def warn(self) -> None:
        """Warns once where samples had different numbers of labels; it waits for the device."""
        if self._said or not self._uneven:
            return
        self._said = True
        warnings.warn(
            "divide='batch': samples of one batch had different numbers of labels that count. Where "
            "rows are chosen before the forward pass without the labels of their whole batch, the mean over the kept labels is "
            "multiplied by the share of the rows that were kept, which is not the share of the labels. Use "
            "forward_passes='once', or divide='kept'. This is said once.",
            stacklevel=6,
        )


def part_of_batch(plan: BatchPlan, n: int, shares: Tensor | None = None) -> BatchPlan:
    """Returns a plan whose mean over the kept rows is their sum over the rows of the batch.

    Args:
        plan: Plan of a batch.
        n: Number of rows of the batch.
        shares: Share of each row in the divisor of the criterion, such as its number of valid labels, shape (n,), float.
            Default: all rows have the same.

    Example:
        >>> part_of_batch(BatchPlan(torch.tensor([0, 3])), 8).weights
        tensor([0.2500, 0.2500])
    """
    k = len(plan.rows)
    if k in (0, n):
        return plan
    ones = torch.ones(k, dtype=torch.float32, device=plan.rows.device) if plan.weights is None else plan.weights
    part = k / n if shares is None else shares.index_select(0, plan.rows).sum() / shares.sum().clamp(min=1e-30)
    return replace(plan, weights=ones * part)
