"""The learning rate of a run: scaled inside optimizer.step, and scheduled by progress where the steps are not known."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from thresher.run.run import Run


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
