"""Metrics of networks on test batches."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EvaluationBatches = Sequence[tuple[Tensor, Tensor]]
"""Test batches in memory: pairs of inputs and targets."""


def outputs_of(model: nn.Module, batches: EvaluationBatches) -> list[tuple[Tensor, Tensor]]:
    """Returns the outputs of the model in evaluation mode, paired with the targets; the model ends in training mode."""
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        found = [(model(x.to(device)), y.to(device)) for x, y in batches]
    model.train()
    return found


def accuracy(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the share of targets whose class has the largest output; the model ends in training mode."""
    right = [(outputs.argmax(1) == targets).sum() for outputs, targets in outputs_of(model, batches)]
    return int(torch.stack(right).sum()) / sum(targets.numel() for _, targets in batches)


def pixel_mean_iou(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the mean intersection over union of the classes, over all pixels; see `mean_iou`."""
    return mean_iou(torch.stack([confusion_matrix(*pair) for pair in outputs_of(model, batches)]).sum(0))


def confusion_matrix(outputs: Tensor, targets: Tensor) -> Tensor:
    """Counts the predicted classes of each target class.

    Args:
        outputs: Scores of the classes, shape (N, classes, ...).
        targets: Classes, shape (N, ...), int64.

    Returns:
        Counts, shape (classes, classes), int64; the row is the target, the column is the prediction.
    """
    classes = outputs.shape[1]
    return (targets * classes + outputs.argmax(1)).flatten().bincount(minlength=classes**2).view(classes, classes)


def mean_iou(confused: Tensor) -> float:
    """Returns the mean intersection over union of the classes that occur in targets or predictions.

    Args:
        confused: Counts of `confusion_matrix`, shape (classes, classes).
    """
    intersection = confused.diag()
    union = confused.sum(0) + confused.sum(1) - intersection
    return float((intersection / union)[union > 0].mean())
