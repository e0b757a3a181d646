"""A task: data, a network, and settings that train it well."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from thresher.experiments.tasks.data.base import Data
from thresher.experiments.tasks.metrics import EvaluationBatches, accuracy
from thresher.experiments.training.trainable import Training

EVALUATION_BATCH = 1000


def one_cycle(progress: float, warm_up: float = 0.2, floor: float = 0.04) -> float:
    """Returns a factor on the learning rate: linear from `floor` to 1 in the share `warm_up`, then a cosine to 0."""
    if progress < warm_up:
        return floor + (1 - floor) * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


@dataclass(frozen=True)
class Task:
    """A task: data, a network, and settings of training.

    The same seed gives every method the same initial weights and the same order of samples.

    Args:
        name: Name on the command line.
        find: Function that returns the path of the data, or None if the data needs no file. It raises FileNotFoundError with
            what to install.
        load: Function that reads the data from that path.
        network: Function that creates the network.
        lr: Largest learning rate.
        batch_size: Number of samples per training batch.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the optimizer.
        optimise: Optimizer: "sgd", with Nesterov momentum, or "adamw".
        loss: Function that creates the loss function.
        evaluate: Function that measures the network on test batches; larger is better.
        metric: Name of the number that `evaluate` returns.
        has_images: Whether the inputs are images that a report can show.
        classes: Names of the classes in the order of their numbers. Default None: they have numbers alone.
    """

    name: str
    find: Callable[[Path | None], Path | None]
    load: Callable[[Path | None], Data]
    network: Callable[[], nn.Module]
    lr: float
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    optimise: Literal["sgd", "adamw"] = "sgd"
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss
    evaluate: Callable[[nn.Module, EvaluationBatches], float] = accuracy
    metric: str = "accuracy"
    has_images: bool = True
    classes: tuple[str, ...] | None = None

    def training(self, data: Data, seed: int) -> Training:
        """Returns new objects for one run."""
        model = self.build(seed)
        test = evaluation_batches(data)
        loader, optimizer = self.loader(data, seed), self.optimizer(model)

        def evaluate(model: nn.Module) -> float:
            return self.evaluate(model, test)

        criterion = self.criterion()
        return Training(model, loader, criterion, optimizer, evaluate, self.schedule, metric=self.metric, classes=self.classes)

    def build(self, seed: int) -> nn.Module:
        """Returns the network, whose initial weights depend on `seed` alone; the global random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def loader(self, data: Data, seed: int) -> DataLoader[Any]:
        """Returns the training batches, in an order that depends on `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(data.train, batch_size=self.batch_size, shuffle=True, generator=generator)

    def criterion(self) -> nn.Module:
        """Returns a new loss function."""
        return self.loss()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns an optimizer at the largest learning rate; `schedule` scales it."""
        if self.optimise == "adamw":
            return AdamW(model.parameters(), self.lr, weight_decay=self.weight_decay)
        return SGD(model.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0)

    def schedule(self, progress: float) -> float:
        """Returns the factor on the learning rate at `run.progress`."""
        return one_cycle(progress)

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, which distinguish one comparison from another."""
        return {name: getattr(self, name) for name in ("optimise", "lr", "batch_size", "momentum", "weight_decay")}


def evaluation_batches(data: Data) -> EvaluationBatches:
    """Returns the test samples in batches."""
    return list(zip(data.test_inputs.split(EVALUATION_BATCH), data.test_targets.split(EVALUATION_BATCH), strict=True))


def without_folder(name: str, find: Callable[[], Path | None], folder: Path | None) -> Path | None:
    """Returns the path of the data of a task that takes no folder.

    Raises:
        ValueError: A folder was given.
    """
    if folder is not None:
        raise ValueError(f"--data {folder}: the task {name} brings its data or has it from a package; leave --data out")
    return find()
