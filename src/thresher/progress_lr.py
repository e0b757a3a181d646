"""A learning-rate schedule by progress, which is right however many steps an epoch turns out to have."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from thresher.run.pace import followed


class ProgressLR(LRScheduler):
    """Sets the learning rate as a function of progress: right however many steps an epoch turns out to have.

    It follows the training as `Run.pace` has another scheduler follow it: up to the batch that was trained on last, also where
    the loader runs ahead of the loop. In a loop that trains on each batch before it asks for the next one, this is
    `run.progress`.

    Args:
        optimizer: Optimizer whose initial learning rates are the base.
        run: Run that is followed at every `step()`, once per batch, per step of the optimizer or per epoch.
        fn: Function that maps progress in [0, 1] to a factor on the base learning rate.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import thresher
        >>> model = nn.Linear(1, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 1), torch.arange(8) % 2), batch_size=4)
        >>> run = thresher.attach(
        ...     thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=2
        ... )
        >>> schedule = ProgressLR(optimizer, run, lambda progress: 1 - progress)
        >>> for x, y in run.loader:
        ...     run.criterion(run.model(x), y).backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> run.progress, schedule.get_last_lr()
        (0.5, [0.05])
    """

    def __init__(self, optimizer: Optimizer, run: Any, fn: Callable[[float], float]) -> None:
        if not callable(fn):
            raise TypeError(f"ProgressLR: `fn` must map progress to a factor, got {type(fn).__name__}")
        self.fn, self._position = fn, followed(run._parts)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the base learning rates times `fn(progress)`."""
        factor = self.fn(self._position.progress)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without the run and the function, which are given to the new scheduler."""
        return {key: value for key, value in super().state_dict().items() if key not in {"fn", "_position"}}
