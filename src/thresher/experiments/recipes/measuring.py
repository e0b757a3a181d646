"""What a network is worth, over test sets too large to be held in memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thresher.experiments.recipes.averaging import Average

Batches = Iterable[tuple[Tensor, Tensor]]


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many answers are right, and of how many."""
    return torch.stack([(outputs.argmax(1) == targets).sum(), torch.tensor(targets.numel(), device=targets.device)])


def confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """How often which class was taken for which: shape (classes, classes), a row each that is."""
    classes = outputs.shape[1]
    return torch.bincount((targets * classes + outputs.argmax(1)).flatten(), minlength=classes**2).view(classes, classes)


def mean_iou(confused: Tensor) -> float:
    """Mean of intersection over union, of the classes that are there or were answered."""
    union = confused.sum(0) + confused.sum(1) - confused.diag()
    return float((confused.diag()[union > 0] / union[union > 0]).mean())


def ratio(sums: Tensor) -> float:
    """The first number over the second."""
    return float(sums[0] / sums[1])


@dataclass(frozen=True)
class Measure:
    """Measures a network on test batches; larger is better.

    Args:
        batches: Inputs and targets; iterated anew for each test.
        metric: "accuracy", "mean IoU" or "-loss".
        criterion: The loss of "-loss", a mean over targets.
        average: Whose network is measured in place of the one given; None for that one itself.
    """

    batches: Batches
    metric: str
    criterion: Callable[[Any, Any], Tensor]
    average: Average | None = None

    def __call__(self, model: nn.Module) -> float:
        """Measure in evaluation mode; the model is put back into training mode."""
        tested = model if self.average is None else self.average.model
        device = next(tested.parameters()).device
        tested.eval()
        with torch.inference_mode():
            total = sum(self._of(tested(x.to(device)), y.to(device)) for x, y in self.batches)
        model.train()
        assert isinstance(total, Tensor)
        return mean_iou(total) if self.metric == "mean IoU" else ratio(total)

    def _of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What adds up over the batches."""
        if self.metric == "accuracy":
            return right(outputs, targets)
        if self.metric == "mean IoU":
            return confusion(outputs, targets)
        count = torch.tensor(float(targets.numel()), device=targets.device)
        return torch.stack([-self.criterion(outputs, targets) * count, count])
