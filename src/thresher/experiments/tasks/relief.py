"""Segmentation of relief: one class per pixel; see `data.relief`."""

from functools import partial

from thresher.experiments.tasks.base import Task, without_folder
from thresher.experiments.tasks.data import relief
from thresher.experiments.tasks.metrics import pixel_mean_iou
from thresher.experiments.tasks.networks.unet import UNet

RELIEF_TASKS = tuple(
    Task(
        name,
        partial(without_folder, name, find),
        load,
        partial(UNet, 4, width=8, classes=len(relief.CLASSES)),
        lr=4e-3,
        batch_size=32,
        weight_decay=0.01,
        optimise="adamw",
        evaluate=pixel_mean_iou,
        metric="mean_iou",
        has_images=False,
    )
    for name, find, load in (
        ("relief", relief.find_relief, relief.relief),
        ("relief-made", lambda: None, relief.relief_made),
    )
)
