"""What is measured of a trained network: the metric of the task, the worst class and the calibration, all in points."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.winnow.tasks import Part, Problem
from thresher_lab.tasks.base import confusion_matrix, outputs_of

AT_ONCE = 500
"""Number of samples that are evaluated at once."""

BINS = 15
"""Number of bins of confidence of the calibration error."""

FEWEST = 50
"""Number of targets below which a class is too rare to be called the worst."""


@dataclass(frozen=True)
class Measures:
    """The measures of one network, in points: hundredths of the metric.

    Attributes:
        metric: Metric of the task, larger is better.
        worst_class: Smallest share of right predictions of a class that is not rare; None for regression, and where all are.
        calibration_error: Expected calibration error, smaller is better; None for regression, and for a network that has
            diverged.
    """

    metric: float
    worst_class: float | None = None
    calibration_error: float | None = None


def measures_of(problem: Problem, model: nn.Module, part: Part) -> Measures:
    """Measures a network.

    Args:
        problem: Task, whose metric is taken.
        model: Network; it ends in training mode.
        part: Samples to measure with.
    """
    batches = list(zip(part[0].split(AT_ONCE), part[1].split(AT_ONCE), strict=True))
    metric = 100 * problem.task.evaluate(model, batches)
    if problem.kind == "values":
        return Measures(metric)
    outputs = outputs_of(model, batches)
    confused = torch.stack([confusion_matrix(*pair) for pair in outputs]).sum(0)
    common = confused.sum(1) >= FEWEST
    worst = (
        (100 * (confused.diag() / confused.sum(1))[common].min()).item() if common.any() else None
    )
    sound = all(bool(scores.isfinite().all()) for scores, _ in outputs)
    return Measures(metric, worst, 100 * calibration_error(outputs) if sound else None)


def calibration_error(outputs: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the expected calibration error: how far confidence is from accuracy, over bins of equal width.

    Args:
        outputs: Pairs of scores of the classes, shape (N, classes, ...), and classes, shape (N, ...).
    """
    counts, confident, right = (torch.zeros(BINS, dtype=torch.float64) for _ in range(3))
    for scores, targets in outputs:
        confidence, predicted = scores.softmax(1).max(1)
        confidence, correct = (
            confidence.flatten().double(),
            (predicted == targets).flatten().double(),
        )
        bins = (confidence * BINS).long().clamp_(max=BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
        confident += torch.bincount(bins, confidence, minlength=BINS)
        right += torch.bincount(bins, correct, minlength=BINS)
    return float((confident - right).abs().sum() / counts.sum())
