"""The learning rate of a run: scaled inside optimizer.step, and scheduled by progress where the steps are not known."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    pass


class StepHooks:
    """Multiplies the learning rates while `optimizer.step` runs, and puts them back, bit for bit, also when it raises.

    Schedulers, gradient scalers and the user see the unscaled values at all other times.

    Args:
        optimizer: Optimizer whose step hooks are used; `remove` takes them away.
        stepped: Function that is called after each step that succeeded.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None]) -> None:
        self.scale = 1.0
        self._optimizer = optimizer
        self._stepped = stepped
        self._saved: list[Any] | None = None
        self._depth = 0
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._apply()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]
        self._guard()

    def _guard(self) -> None:
        """Wraps the bound method, which restores in any case: a post hook does not run when the step raises."""
        step = self._optimizer.step

        @wraps(step)
        def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self._depth = 0
                self._restore()

        self._guarded = MethodType(guarded, self._optimizer)
        self._had_own = "step" in vars(self._optimizer)
        self._unguarded = step
        self._optimizer.step = self._guarded

    def _apply(self) -> None:
        self._depth += 1
        if self._depth > 1 or self.scale == 1.0:  # a step that calls its parent's runs the hooks twice
            return
        self._saved = []
        for group in self._optimizer.param_groups:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                self._saved.append(lr.clone())
                lr.mul_(self.scale)
            else:
                self._saved.append(lr)
                group["lr"] = lr * self.scale

    def _restore(self) -> None:
        saved, self._saved = self._saved, None
        for group, lr in zip(self._optimizer.param_groups, saved or (), strict=saved is not None):
            if isinstance(lr, torch.Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr

    def _after(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._restore()
            self._stepped()

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        if vars(self._optimizer).get("step") is self._guarded:
            if self._had_own:
                self._optimizer.step = self._unguarded
            else:
                del self._optimizer.step
