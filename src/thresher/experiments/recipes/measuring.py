"""Metrics of networks over test sets that may be too large to fit into memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thresher.experiments.recipes.averaging import WeightAverage
from thresher.experiments.tasks.metrics import confusion_matrix, mean_iou


@dataclass(frozen=True)
class Measure:
    """Measures a network on test batches; larger is better.

    Args:
        batches: Test batches, pairs of inputs and targets; each test iterates over them again.
        metric: Name of the metric: "accuracy", "mean IoU" or "-loss".
        criterion: Loss function for "-loss", which returns a mean over targets.
        average: Average of the weights to measure instead of the network. Default: none, the network itself is measured.
    """

    batches: Iterable[tuple[Tensor, Tensor]]
    metric: str
    criterion: Callable[[Any, Any], Tensor]
    average: WeightAverage | None = None

    def __call__(self, model: nn.Module) -> float:
        """Returns the metric in evaluation mode; the model ends in training mode."""
        tested = self.tested(model)
        device = next(tested.parameters()).device
        tested.eval()
        with torch.inference_mode():
            total = sum(self._statistics(tested(x.to(device)), y.to(device)) for x, y in self.batches)
        model.train()
        assert isinstance(total, Tensor)
        return mean_iou(total) if self.metric == "mean IoU" else float(total[0] / total[1])

    def tested(self, model: nn.Module) -> nn.Module:
        """Returns the network that is measured: the model, or the average of its weights."""
        return model if self.average is None else self.average.model

    def _statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the statistics of a batch, whose sum over the batches gives the metric."""
        if self.metric == "mean IoU":
            return confusion_matrix(outputs, targets)
        count = torch.tensor(targets.numel(), device=targets.device)
        if self.metric == "accuracy":
            return torch.stack([(outputs.argmax(1) == targets).sum(), count])
        return torch.stack([-self.criterion(outputs, targets) * count.float(), count.float()])
