"""Fashion-MNIST with a network that one core trains in half a minute, and with several batch sizes.

`fashion-mnist-small-x4` has a batch size four times as large and, by the linear scaling rule, four times the learning rate.
`fashion-mnist-small-b` has another recipe, for the setting (B) of KAKURENBO: random views of the images, with parts erased, and
a small weight decay.
"""

from dataclasses import replace
from functools import partial

from torch import nn

from thresher.experiments.tasks.base import Task
from thresher.experiments.tasks.data import images
from thresher.experiments.tasks.networks.augmentation import RandomView
from thresher.experiments.tasks.networks.convolutional import small_cnn

SMALLEST = Task(
    "fashion-mnist-small",
    images.find_fashion_mnist,
    images.fashion_mnist,
    partial(small_cnn, 28, width=8),
    lr=0.02,
    classes=images.FASHION_CLASSES,
)


def _cnn_of_views() -> nn.Module:
    return nn.Sequential(RandomView(), small_cnn(28, width=8))


SECOND_RECIPE = replace(SMALLEST, name=f"{SMALLEST.name}-b", network=_cnn_of_views, weight_decay=2e-5)


def with_larger_batches(factor: int) -> Task:
    """Returns the task with `factor` times the batch size and the largest learning rate."""
    return Task(
        f"{SMALLEST.name}-x{factor}",
        SMALLEST.find,
        SMALLEST.load,
        SMALLEST.network,
        lr=factor * SMALLEST.lr,
        batch_size=factor * SMALLEST.batch_size,
        classes=SMALLEST.classes,
    )


SMALL_TASKS = (SMALLEST, SECOND_RECIPE, with_larger_batches(2), with_larger_batches(4), with_larger_batches(8))
