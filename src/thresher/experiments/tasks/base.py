"""A task: data, network and a recipe that trains it well."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from thresher.experiments.tasks.data.base import Data
from thresher.experiments.training.base import Training

EVALUATION_BATCH = 1000

Batches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets."""


def one_cycle(progress: float, warm_up: float = 0.2, floor: float = 0.04) -> float:
    """Factor on the learning rate: linear from `floor` to 1 in the first `warm_up` of training, then a cosine to 0."""
    if progress < warm_up:
        return floor + (1 - floor) * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Share of right answers, in evaluation mode; the model is put back into training mode."""
    right = [(outputs.argmax(1) == targets).sum() for outputs, targets in outputs_of(model, batches)]
    return int(torch.stack(right).sum()) / sum(targets.numel() for _, targets in batches)


def outputs_of(model: nn.Module, batches: Batches) -> list[tuple[Tensor, Tensor]]:
    """What the model answers in evaluation mode, beside the targets; it is put back into training mode."""
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        found = [(model(x.to(device)), y.to(device)) for x, y in batches]
    model.train()
    return found


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how; the same seed gives every method the same start and the same shuffling.

    Args:
        name: As on the command line.
        find: Says where the data lies, or raises FileNotFoundError with what to install; None where it needs no file.
        load: Reads the data from there.
        network: Makes the network.
        lr: Largest learning rate.
        batch_size: Of training.
        momentum: Of SGD.
        weight_decay: Of the optimizer.
        optimise: "sgd", with Nesterov momentum, or "adamw".
        loss: Makes the loss that is trained.
        evaluate: Measures the network on test batches, larger is better.
        metric: Name of what it measures.
        pictures: Whether inputs are pictures that people can look at.
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
    evaluate: Callable[[nn.Module, Batches], float] = accuracy
    metric: str = "accuracy"
    pictures: bool = True

    def training(self, data: Data, seed: int) -> Training:
        """What one run trains, and how it is tested."""
        model = self.build(seed)
        test = list(zip(data.test_inputs.split(EVALUATION_BATCH), data.test_targets.split(EVALUATION_BATCH), strict=True))
        loader, optimizer = self.loader(data, seed), self.optimizer(model)

        def evaluate(model: nn.Module) -> float:
            return self.evaluate(model, test)

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
        return self.loss()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """At the largest learning rate; `schedule` scales it."""
        if self.optimise == "adamw":
            return AdamW(model.parameters(), self.lr, weight_decay=self.weight_decay)
        return SGD(model.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0)

    def schedule(self, progress: float) -> float:
        """Factor on the learning rate at `run.progress`."""
        return one_cycle(progress)

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, to tell comparisons apart."""
        return {name: getattr(self, name) for name in ("optimise", "lr", "batch_size", "momentum", "weight_decay")}


def without_folder(name: str, find: Callable[[], Path | None], folder: Path | None) -> Path | None:
    """Where the data of a task lies that takes no folder.

    Raises:
        ValueError: A folder was given.
    """
    if folder is not None:
        raise ValueError(f"--data {folder}: the task {name} brings its data or has it from a package; leave --data out")
    return find()
