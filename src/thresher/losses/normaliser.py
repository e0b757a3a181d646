"""What a criterion divides the sum of its losses by, as its scalar shows: positions, positive labels, or anything else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thresher.loading.trees import leaves, map_leaves


def weighted_like(scalar: Tensor, rows: Tensor, weights: Tensor, *, usual: int) -> Tensor:
    """Returns the scalar that a criterion would have returned for weighted losses, shape ().

    Args:
        scalar: The scalar that it returned without weights, shape (), detached.
        rows: Losses by position, shape (n, positions), with gradient.
        weights: Weights of the samples, shape (n,), of the dtype of `rows`.
        usual: Number that the sum of the losses is divided by unless the scalar shows another.

    Example:
        The sum of the losses is 6 and the scalar 2, so that the criterion divides by 3.

        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> weighted_like(torch.tensor(2.0), rows, torch.tensor([1.0, 3.0]), usual=4).item()
        4.0
    """
    losses = rows.detach().double() if rows.device.type != "mps" else rows.detach()
    total, size = losses.sum(), losses.abs().sum()
    is_usual = (scalar.to(losses.dtype) * usual - total).abs() <= _tolerance(scalar) * size
    factor = torch.where(is_usual, 1.0 / usual, scalar.to(losses.dtype) / total)
    return torch.dot(weights, rows.sum(1)) * factor.to(rows.dtype)


def is_multiple(scalar: Callable[[Any], Tensor], total: Callable[[Any], Tensor], outputs: Any) -> bool | None:
    """Returns whether one function of the outputs is a constant times another, by their gradients; waits for the device.

    Args:
        scalar: Function of the outputs that returns a tensor of shape ().
        total: Another one.
        outputs: Outputs of the model, in any nesting.

    Returns:
        None where these outputs do not show it: a gradient is zero or not finite, or there is none.
    """

    def leaf_of(part: Tensor) -> Tensor:
        return part.detach().requires_grad_() if part.is_floating_point() else part

    with torch.enable_grad():
        inputs = map_leaves(leaf_of, outputs)
        wanted = [leaf for leaf in leaves(inputs) if leaf.requires_grad]
        values = scalar(inputs), total(inputs)
        if not wanted or values[0].dim() or not all(value.requires_grad for value in values):
            return None
        gradients = [torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True) for value in values]
    ours, whole = (torch.cat([part.flatten().float() for part in parts]) for parts in gradients)
    value, sum_ = (value.detach().float() for value in values)
    if not (ours.isfinite().all() and whole.isfinite().all() and whole.any()):
        return None
    factor = torch.dot(ours, whole) / torch.dot(whole, whole)
    tolerance = 10 * _tolerance(values[0])
    same = torch.allclose(ours, factor * whole, rtol=tolerance, atol=tolerance * float(ours.abs().max()))
    return same and torch.allclose(value, factor * sum_, rtol=10 * tolerance, atol=10 * tolerance * float(factor.abs()))


def _tolerance(value: Tensor) -> float:
    """Returns the largest relative difference that rounding can explain."""
    return 1e-4 if value.dtype in (torch.float32, torch.float64) else 1e-2
