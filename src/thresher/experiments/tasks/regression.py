"""Values: the regressions of AdaSelection."""

from functools import partial

import torch
from torch import nn

from thresher.experiments.tasks.base import Batches, Task, outputs_of, without_folder
from thresher.experiments.tasks.data import regression
from thresher.experiments.tasks.networks.convolutional import perceptron


def explained(model: nn.Module, batches: Batches) -> float:
    """R2, the share of the targets' variance that the answers explain: 1 at best, 0 for their mean, less for worse."""
    answers, targets = (torch.cat(parts).cpu().double() for parts in zip(*outputs_of(model, batches), strict=True))
    return 1 - float((answers - targets).square().sum() / (targets - targets.mean(0)).square().sum())


TASKS = (
    Task(
        "line",
        partial(without_folder, "line", lambda: None),
        regression.line,
        partial(perceptron, 1, classes=1),
        lr=0.02,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=explained,
        metric="R2",
        pictures=False,
    ),
    Task(
        "bike",
        partial(without_folder, "bike", regression.find_bike),
        regression.bike,
        partial(perceptron, 43, classes=1),
        lr=0.05,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=explained,
        metric="R2",
        pictures=False,
    ),
)
