"""Classes of relief, pixel by pixel; see `data.relief`."""

from functools import partial

import torch
from torch import nn

from thresher.experiments.tasks.base import Batches, Task, outputs_of, without_folder
from thresher.experiments.tasks.data import relief
from thresher.experiments.tasks.networks.unet import UNet


def mean_iou(model: nn.Module, batches: Batches) -> float:
    """Intersection over union of what the model marks as a class and what is of it, over all pixels; the mean over classes.

    Classes that are neither marked nor there do not count.
    """
    tables = []
    for outputs, targets in outputs_of(model, batches):
        classes = outputs.shape[1]
        pairs = targets * classes + outputs.argmax(1)
        tables.append(pairs.flatten().bincount(minlength=classes**2).view(classes, classes))
    table = torch.stack(tables).sum(0)
    both, either = table.diag(), table.sum(0) + table.sum(1) - table.diag()
    return float((both / either)[either > 0].mean())


TASKS = tuple(
    Task(
        name,
        partial(without_folder, name, find),
        load,
        partial(UNet, 4, width=8, classes=len(relief.CLASSES)),
        lr=4e-3,
        batch_size=32,
        weight_decay=0.01,
        optimise="adamw",
        evaluate=mean_iou,
        metric="mean_iou",
        pictures=False,
    )
    for name, find, load in (
        ("relief", relief.find_relief, relief.relief),
        ("relief-made", lambda: None, relief.relief_made),
    )
)
