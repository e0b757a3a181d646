"""Hooks of a criterion: called once per loss, with the arguments and the result that the loop sees."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_torch

OF_ALL_MODULES: tuple[Mapping[int, Any], ...] = (
    of_torch._global_forward_pre_hooks,
    of_torch._global_forward_hooks,
    of_torch._global_backward_pre_hooks,
    of_torch._global_backward_hooks,
)
"""Hooks that torch calls for every module."""


def own_hooks(criterion: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """Returns the tables of the hooks that are registered with a criterion."""
    return criterion._forward_pre_hooks, criterion._forward_hooks, criterion._backward_pre_hooks, criterion._backward_hooks


def hooks_of(criterion: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """Returns the tables of all hooks that a call of a criterion calls; torch fills these very tables later, too."""
    return *own_hooks(criterion), *OF_ALL_MODULES


def call_with_hooks(criterion: nn.Module, outputs: Any, targets: Any, compute: Callable[[Any, Any], Tensor]) -> Tensor:
    """Calls a criterion with its hooks, of which `compute` stands for its `forward`.

    Args:
        criterion: The user's criterion.
        outputs: First argument of the criterion.
        targets: Second argument of the criterion.
        compute: Function of the arguments, as hooks have left them, that returns the loss.
    """
    before = criterion.__dict__.get("forward")

    def restore() -> None:
        criterion.__dict__.pop("forward", None)
        if before is not None:
            criterion.__dict__["forward"] = before

    def forward(outputs: Any, targets: Any) -> Tensor:
        restore()
        return compute(outputs, targets)

    criterion.__dict__["forward"] = forward
    try:
        return criterion(outputs, targets)
    finally:
        restore()


def call_without_hooks(criterion: nn.Module, outputs: Any, targets: Any) -> Tensor:
    """Calls a criterion and none of its hooks."""
    return criterion.forward(outputs, targets) if any(hooks_of(criterion)) else criterion(outputs, targets)
