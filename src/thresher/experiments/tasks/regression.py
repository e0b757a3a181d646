"""Regression: the two regression tasks of AdaSelection, and a line whose outliers are all on one side."""

from functools import partial

import torch
from torch import nn

from thresher.experiments.tasks.base import Task, without_folder
from thresher.experiments.tasks.data import regression
from thresher.experiments.tasks.metrics import EvaluationBatches, outputs_of
from thresher.experiments.tasks.networks.convolutional import perceptron


def r_squared(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns R2, the share of the variance of the targets that the outputs explain: at most 1, and 0 for their mean."""
    outputs, targets = (torch.cat(parts).cpu().double() for parts in zip(*outputs_of(model, batches), strict=True))
    return 1 - float((outputs - targets).square().sum() / (targets - targets.mean(0)).square().sum())


REGRESSION_TASKS = (
    Task(
        "line",
        partial(without_folder, "line", lambda: None),
        regression.noisy_line,
        partial(perceptron, 1, classes=1),
        lr=0.02,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=r_squared,
        metric="R2",
        has_images=False,
    ),
    Task(
        "line-one-sided",
        partial(without_folder, "line-one-sided", lambda: None),
        partial(regression.noisy_line, one_sided=True),
        partial(perceptron, 1, classes=1),
        lr=0.02,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=r_squared,
        metric="R2",
        has_images=False,
    ),
    Task(
        "bike",
        partial(without_folder, "bike", regression.find_bike),
        regression.bike,
        partial(perceptron, 43, classes=1),
        lr=0.05,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=r_squared,
        metric="R2",
        has_images=False,
    ),
)
