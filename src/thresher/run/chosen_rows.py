"""What the losses of the rows that a batch method chose are made of: their outputs, targets, weights and factors."""

from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import RowLayout
from thresher.loading.row_buffer import is_per_sample, take_rows
from thresher.loading.trees import leaves, map_where
from thresher.plans import BatchPlan
from thresher.records import NEVER_SEEN
from thresher.subset import kept_rows


def gradient_of_nothing(outputs: Any) -> Tensor:
    """Returns 0, with a gradient of 0 for everything that outputs depend on: other processes wait for that."""
    return torch.stack([leaf.flatten()[:0].sum() for leaf in leaves(outputs) if leaf.is_floating_point()]).sum()


def take_samples(tree: Any, plan: BatchPlan, layout: RowLayout) -> Any:
    """Takes the rows of some samples of every tensor that has all of them, and their items of every list of samples."""

    def take(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return take_rows([part], plan.rows)[0] if is_per_sample(part, layout.n) else part
        per = len(part) // layout.n if part.dim() else 0
        if not per or len(part) != layout.n * per or per not in (1, layout.repeat or per):
            return part
        return kept_rows(part, plan.rows.to(part.device, non_blocking=True), layout.n, drawn=plan.drawn)

    return map_where(take, tree, lambda part: isinstance(part, Tensor) or is_per_sample(part, layout.n))


def without_ignored(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Signals to choose by: a sample all of whose labels are ignored has nothing to teach, rather than no loss yet."""
    return {**found, "loss": torch.where(found["loss"] == NEVER_SEEN, 0.0, found["loss"])}


def times(value: Tensor, factor: Tensor | float | None) -> Tensor:
    """Returns a loss times a factor, in the dtype of the loss; None for a factor of 1."""
    return value if factor is None else value * (factor.to(value.dtype) if isinstance(factor, Tensor) else factor)


def joint_weights(plan: BatchPlan, weights: Tensor | None) -> Tensor | None:
    """Weights of the chosen rows, from the epoch's plan and the batch's."""
    if weights is None:
        return plan.weights
    weights = weights.index_select(0, plan.rows)
    return weights if plan.weights is None else weights * plan.weights
