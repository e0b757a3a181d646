"""What a comparison asks of a task, be it one of this package or a user's own training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from thresher.experiments.training.checkpoint import Stateful


def constant(_: float) -> float:
    """The learning rate as it is."""
    return 1.0


@dataclass(frozen=True)
class Training:
    """What one run trains; everything is new for every run.

    Args:
        model: The network, its initial weights a function of the seed.
        loader: Training batches, pairs of inputs and targets, their order a function of the seed; the dataset has a length.
        criterion: The loss, called with the model's outputs and the targets.
        optimizer: Of the model's parameters, at the largest learning rate.
        evaluate: Called with the model after each epoch; larger is better.
        schedule: Factor on the learning rate where a share of training, 0 to 1, is done. Default: none, always 1.
        metric: What `evaluate` measures, for people.
        downstream: Called once, with the trained model, after the last epoch: what it returns is the run's metric, called
            "downstream" and `metric`, and `evaluate` still measures each epoch. Default: the last epoch's is the run's.
        also: What else changes during training and goes into checkpoints, by name.
    """

    model: nn.Module
    loader: DataLoader[Any]
    criterion: Callable[..., Tensor]
    optimizer: Optimizer
    evaluate: Callable[[nn.Module], float]
    schedule: Callable[[float], float] = constant
    metric: str = "metric"
    downstream: Callable[[nn.Module], float] | None = None
    also: Mapping[str, Stateful] = field(default_factory=dict)


class Trainable(Protocol):
    """What a comparison asks of a task."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, to tell comparisons apart."""
        ...

    @property
    def find(self) -> Callable[[Path | None], Path | None]:
        """Says where the data lies."""
        ...

    @property
    def load(self) -> Callable[[Path | None], Any]:
        """Reads the data from there, once a process."""
        ...

    def training(self, data: Any, seed: int) -> Training:
        """What one run trains."""
        ...
