"""The learning rate of a run: scaled inside optimizer.step, and scheduled by progress where the steps are not known."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from thresher.run import Run


class StepHooks:
    """Multiplies the learning rates while `optimizer.step` runs and puts them back, bit for bit, also when it raises.

    Schedulers, gradient scalers and the user see the unscaled values at all other times.

    Args:
        optimizer: Its hooks are used; `remove` takes them away.
        stepped: Called after each step that succeeded.
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
        """A post hook does not run when the step raises, so the bound method restores in any case."""
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
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        if vars(self._optimizer).get("step") is self._guarded:
            if self._had_own:
                self._optimizer.step = self._unguarded
            else:
                del self._optimizer.step


class ProgressLR(LRScheduler):
    """Learning rate as a function of progress: right however many steps an epoch turns out to have.

    Args:
        optimizer: Its initial learning rates are the base.
        run: The run whose `progress` is asked at every `step()`, once a batch or once an epoch.
        fn: Maps progress in [0, 1] to a factor on the base learning rate.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> ProgressLR(optimizer, run, lambda p: 0.5 * (1 + math.cos(math.pi * p)))  # doctest: +SKIP
    """

    def __init__(self, optimizer: Optimizer, run: "Run", fn: Callable[[float], float]) -> None:
        if not callable(fn):
            raise TypeError(f"ProgressLR: `fn` must map progress to a factor, got {type(fn).__name__}")
        self.run = run
        self.fn = fn
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Base learning rates times `fn(run.progress)`."""
        factor = self.fn(self.run.progress)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Without the run and the function, which the new scheduler is given."""
        return {key: value for key, value in super().state_dict().items() if key not in {"run", "fn"}}
