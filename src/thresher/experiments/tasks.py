"""The tasks: data, network and a recipe that trains it well, under one name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from thresher.experiments import data as sources
from thresher.experiments.base import Trainable, Training
from thresher.experiments.data import Data
from thresher.experiments.models import perceptron, resnet8, small_cnn
from thresher.experiments.script import Script

EVALUATION_BATCH = 1000


def one_cycle(progress: float, warm_up: float = 0.2, floor: float = 0.04) -> float:
    """Factor on the learning rate: linear from `floor` to 1 in the first `warm_up` of training, then a cosine to 0."""
    if progress < warm_up:
        return floor + (1 - floor) * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how; the same seed gives every method the same start and the same shuffling.

    Args:
        name: As on the command line.
        find: Says where the data lies, or raises FileNotFoundError with what to install; None where it needs no file.
        load: Reads the data from there.
        network: Makes the network.
        lr: Largest learning rate of SGD with Nesterov momentum.
        batch_size: Of training.
        momentum: Of SGD.
        weight_decay: Of SGD.
        metric: Name of what is measured on the test set; larger is better.
    """

    name: str
    find: Callable[[Path | None], Path | None]
    load: Callable[[Path | None], Data]
    network: Callable[[], nn.Module]
    lr: float
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    metric: str = "accuracy"

    def training(self, data: Data, seed: int) -> Training:
        """What one run trains, and how it is tested."""
        model = self.build(seed)
        test = list(zip(data.test_inputs.split(EVALUATION_BATCH), data.test_targets.split(EVALUATION_BATCH), strict=True))
        evaluate = partial(accuracy, batches=test)
        loader, optimizer = self.loader(data, seed), self.optimizer(model)
        return Training(model, loader, self.criterion(), optimizer, evaluate, self.schedule, self.metric)

    def build(self, seed: int) -> nn.Module:
        """The network with initial weights that depend on `seed` alone; the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def loader(self, data: Data, seed: int) -> DataLoader[Any]:
        """Training batches, in an order that depends on `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(data.train, batch_size=self.batch_size, shuffle=True, generator=generator)

    def criterion(self) -> nn.Module:
        """The loss that is trained."""
        return nn.CrossEntropyLoss()

    def optimizer(self, model: nn.Module) -> SGD:
        """At the largest learning rate; `schedule` scales it."""
        return SGD(model.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=True)

    def schedule(self, progress: float) -> float:
        """Factor on the learning rate at `run.progress`."""
        return one_cycle(progress)

    @property
    def recipe(self) -> dict[str, float]:
        """The settings of training, to tell comparisons apart."""
        return {name: getattr(self, name) for name in ("lr", "batch_size", "momentum", "weight_decay")}


def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Share of right answers, in evaluation mode; the model is put back into training mode."""
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        right = [(model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in batches]
    model.train()
    return int(torch.stack(right).sum()) / sum(len(y) for _, y in batches)


def _without_folder(name: str, find: Callable[[], Path | None], folder: Path | None) -> Path | None:
    if folder is not None:
        raise ValueError(f"--data {folder}: the task {name} has its data from a package; only fashion-mnist takes a folder")
    return find()


TASKS = {
    task.name: task
    for task in (
        Task("digits", partial(_without_folder, "digits", lambda: None), sources.digits, partial(small_cnn, 8), lr=0.05),
        Task(
            "mnist-5k",
            partial(_without_folder, "mnist-5k", sources.find_mnist_5k),
            sources.mnist_5k,
            partial(small_cnn, 28, width=8),
            lr=0.05,
        ),
        Task(
            "mnist-5k-mlp",
            partial(_without_folder, "mnist-5k-mlp", sources.find_mnist_5k),
            sources.mnist_5k,
            partial(perceptron, 28 * 28),
            lr=0.05,
        ),
        Task(
            "fashion-mnist",
            sources.find_fashion_mnist,
            sources.fashion_mnist,
            partial(small_cnn, 28, width=32),
            lr=0.1,
            batch_size=128,
        ),
        Task(
            "fashion-mnist-resnet8",
            sources.find_fashion_mnist,
            sources.fashion_mnist,
            resnet8,
            lr=0.2,
            batch_size=128,
        ),
    )
}


def task_of(name: str) -> Trainable:
    """What is trained under a name.

    Args:
        name: Of a task; `NAME@SAMPLES` for so many of its training samples, see `data.part`; or
            `FILE.py:FUNCTION`, see `Script`.

    Raises:
        ValueError: No such task, the message lists them; no number after the @; or no such function.
        FileNotFoundError: No such file.
    """
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return Script.of(Path(path), function)
    return built_in(name)


def built_in(name: str) -> Task:
    """A task of this package; see `task_of`."""
    base, at, samples = name.partition("@")
    if base not in TASKS:
        raise ValueError(f"no task {base!r}; there are {', '.join(TASKS)}, and your own training as FILE.py:FUNCTION")
    task = TASKS[base]
    if not at:
        return task
    if not samples.isdecimal() or not int(samples):
        raise ValueError(f"task {name!r}: write {base}@SAMPLES, a number of training samples such as {base}@1000")
    return replace(task, name=name, load=partial(_part, task.load, int(samples)))


def _part(load: Callable[[Path | None], Data], samples: int, folder: Path | None) -> Data:
    return sources.part(load(folder), samples)
