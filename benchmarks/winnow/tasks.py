"""The tasks of the comparison: data with a part for the choice of rates and a part that is counted, network and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from thresher_lab.tasks import TASKS
from thresher_lab.tasks.base import Data, EvaluationBatches, Task
from thresher_lab.tasks.networks import resnet8

SPARE = 25_000
"""Number of the first training images of Fashion-MNIST that are trained on or chosen with; later ones are for testing."""

LOOKED_AT = 500
"""Number of samples that are evaluated after each epoch, to see that a run is sound; they decide nothing."""

Part = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Sets:
    """The samples of a task.

    Args:
        train: Training samples, pairs of an input and a target.
        choice: Samples that learning rates are chosen on.
        test: Samples that results are counted on.
    """

    train: Dataset[Any]
    choice: Part
    test: Part

    @property
    def data(self) -> Data:
        """The training samples, and a few samples that are evaluated after each epoch."""
        return Data(self.train, self.choice[0][:LOOKED_AT], self.choice[1][:LOOKED_AT])  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Problem:
    """A task of the comparison.

    Args:
        task: Network and settings; its rate is the middle of the grid.
        sets: Function that returns the samples.
        epochs: Number of epochs of full training.
        kind: "classes" where each sample has one class, "positions" where each has many, "values" for regression.
    """

    task: Task
    sets: Callable[[], Sets]
    epochs: int
    kind: Literal["classes", "positions", "values"] = "classes"

    def at(self, factor: float) -> Task:
        """Returns the task with another learning rate.

        Args:
            factor: Factor on the rate of the task.
        """
        return replace(self.task, lr=self.task.lr * factor)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are mirrored at random and moved by up to two pixels whenever they are drawn.

    Args:
        images: Images, shape (N, channels, H, W).
        labels: Labels, shape (N,).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns an image and its label."""
        mirrored, down, right = torch.randint(0, 10, (3,)).tolist()
        image = self.images[index].roll((down % 5 - 2, right % 5 - 2), (1, 2))
        return image.flip(2) if mirrored < 5 else image, self.labels[index]


def plain_cnn(channels: int = 16) -> nn.Sequential:
    """Returns two convolutions with stride 2 and two linear layers, without BatchNorm.

    Args:
        channels: Number of channels of the first convolution; all other sizes are in proportion to it.
    """
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(49 * 2 * channels, 4 * channels),
        nn.ReLU(),
        nn.Linear(4 * channels, 10),
    )


@cache
def fashion(
    samples: int,
    *,
    wrong: float = 0.0,
    imbalance: float = 1.0,
    augmented: bool = False,
    choice: int = 5000,
    test: int = 20_000,
) -> Sets:
    """Returns Fashion-MNIST with another split: its last training images, of which there are plenty, are test images, too.

    Args:
        samples: Number of training images, at most 20,000.
        wrong: Share of the training labels that are replaced by another class.
        imbalance: How many times as many images the first class has as the last one; classes between shrink evenly.
        augmented: Whether training images are mirrored and moved at random.
        choice: Number of images that rates are chosen on.
        test: Number of images that are counted.
    """
    loaded = TASKS["fashion-mnist"].load(None)
    images, labels = loaded.train.tensors
    rest = images[SPARE + choice :], labels[SPARE + choice :]
    counted = (
        torch.cat([loaded.test_inputs, rest[0]])[:test],
        torch.cat([loaded.test_targets, rest[1]])[:test],
    )
    ids = (
        _imbalanced(labels[:SPARE], samples, imbalance) if imbalance > 1 else torch.arange(samples)
    )
    train = images[ids], with_wrong(labels[ids], wrong)
    chosen = images[SPARE : SPARE + choice], labels[SPARE : SPARE + choice]
    return Sets(Augmented(*train) if augmented else TensorDataset(*train), chosen, counted)


@cache
def held_out(name: str, samples: int | None = None) -> Sets:
    """Returns the data of a task of the package: a random third of the test samples is to choose rates, the rest is counted.

    Args:
        name: Name of the task.
        samples: Number of training samples. Default: all.
    """
    task = TASKS[name]
    data = task.load(task.find(None))
    generator = torch.Generator().manual_seed(0)
    train = torch.randperm(len(data.train), generator=generator)[:samples]
    inputs, targets = data.test_inputs, data.test_targets
    mixed = torch.randperm(len(inputs), generator=generator)
    cut = len(mixed) // 3
    choice, test = ((inputs[ids], targets[ids]) for ids in (mixed[:cut], mixed[cut:]))
    return Sets(TensorDataset(*(tensor[train] for tensor in data.train.tensors)), choice, test)


def with_wrong(labels: Tensor, share: float) -> Tensor:
    """Returns labels of ten classes, a share of which are replaced by another class; always the same ones.

    Args:
        labels: Labels, shape (N,), int64.
        share: Share of the labels.
    """
    generator = torch.Generator().manual_seed(12345)
    chosen = torch.rand(len(labels), generator=generator) < share
    return torch.where(
        chosen, (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10, labels
    )


def _imbalanced(labels: Tensor, largest: int, imbalance: float) -> Tensor:
    ids = [
        (labels == number).nonzero()[:, 0][: round(largest * imbalance ** (-number / 9))]
        for number in range(10)
    ]
    return torch.cat(ids).sort().values


def at_least_a_constant(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns R2, or 0, the R2 of a constant, where a network is worse than that: one that has diverged gives no number.

    Args:
        model: Network.
        batches: Pairs of inputs and targets.
    """
    found = TASKS["bike"].evaluate(model, batches)
    return found if found > 0 else 0.0


def _plain(name: str) -> Task:
    found: Callable[[Path | None], Path | None] = TASKS["fashion-mnist"].find
    return Task(name, found, TASKS["fashion-mnist"].load, plain_cnn, lr=0.1, batch_size=128)


def _renamed(task: str, name: str, **settings: Any) -> Task:
    return replace(TASKS[task], name=name, **settings)


PROBLEMS: Sequence[Problem] = (
    Problem(_plain("fashion-10k"), partial(fashion, 10_000), 10),
    Problem(_plain("fashion-10k-noisy"), partial(fashion, 10_000, wrong=0.2), 10),
    Problem(_plain("fashion-imbalanced"), partial(fashion, 2000, imbalance=20), 12),
    Problem(_plain("fashion-augmented-10"), partial(fashion, 10_000, augmented=True), 10),
    Problem(
        _renamed("bike", "bike", lr=0.05, evaluate=at_least_a_constant),
        partial(held_out, "bike"),
        40,
        kind="values",
    ),
    Problem(_renamed("text", "text"), partial(held_out, "text", 500), 50, kind="positions"),
    Problem(_renamed("relief", "relief"), partial(held_out, "relief", 2000), 15, kind="positions"),
    Problem(
        replace(_plain("fashion-resnet8"), network=resnet8, lr=0.2, batch_size=64),
        partial(fashion, 3000, test=10_000),
        15,
    ),
)
"""The tasks."""


def problem_of(name: str) -> Problem:
    """Returns a task by its name.

    Raises:
        ValueError: There is no such task.
    """
    found = {problem.task.name: problem for problem in PROBLEMS}
    if name not in found:
        raise ValueError(f"no task {name!r} of this comparison; there are {', '.join(found)}")
    return found[name]
