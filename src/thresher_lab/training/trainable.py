"""What can be trained in an experiment: a task of this package, a recipe, or a user's own script."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from thresher_lab.training.store import Stateful


def constant(_: float) -> float:
    """Returns 1: the learning rate stays as it is."""
    return 1.0


@dataclass(frozen=True)
class Training:
    """The objects that one run trains with; every run gets new ones.

    Args:
        model: Network, whose initial weights depend on the seed.
        loader: Training batches, whose order depends on the seed; the dataset has a length.
        criterion: Loss function, called with the outputs of the model and the targets.
        optimizer: Optimizer of the model's parameters, at the largest learning rate.
        evaluate: Function that is called with the model after each epoch and returns the metric; larger is better.
        schedule: Function from the share of training that is done, 0 to 1, to a factor on the learning rate. Default: always 1.
        metric: Name of the number that `evaluate` returns, used in results and reports.
        downstream: Function that is called once with the trained model, after the last epoch. The number that it returns is
            the metric of the run, called "downstream" and `metric`; `evaluate` still measures each epoch. Default: none, and
            the metric of the run is that of the last epoch.
        also: Other objects that change during training and are saved in checkpoints, by name.
        classes: Names of the classes in the order of their numbers. Default None: they have numbers alone.
        show: Function from the id of a sample to what it looks like, see `shown.shown`. Default None: reports have its numbers.
        forward: Function `(model, batch) -> (outputs, targets)`. Default None: batches are pairs of inputs and targets.
        predict: Function of the trained model that returns the predicted and the right class of each sample that `evaluate`
            measures, two of shape (T,), so that reports show each class. Default: none.
        accumulate: Number of batches whose gradients are added up before each step of the optimizer. Default: 1.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model = torch.nn.Linear(2, 3)
        >>> training = Training(
        ...     model=model,
        ...     loader=DataLoader(TensorDataset(torch.randn(8, 2), torch.arange(8) % 3), batch_size=4),
        ...     criterion=torch.nn.CrossEntropyLoss(),
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     evaluate=lambda model: -model.weight.norm().item(),
        ...     schedule=lambda done: 1 - done,
        ... )
        >>> training.metric, training.schedule(0.25), training.downstream
        ('metric', 0.75, None)
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
    classes: Sequence[str] | None = None
    show: Callable[[int], Any] | None = None
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    predict: Callable[[nn.Module], tuple[Any, Any]] | None = None
    accumulate: int = 1

    def passed(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Returns the outputs of a model for a batch, and its targets.

        Args:
            model: The model of the run, which may be wrapped.
            batch: Batch of the loader.

        Raises:
            ValueError: The batch is not a pair, and there is no `forward`.
        """
        if self.forward is not None:
            return self.forward(model, batch)
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            if isinstance(batch, list | tuple):
                got = f"{len(batch)} parts"
            else:
                got = type(batch).__name__
            raise ValueError(
                f"batches must be pairs of inputs and targets, got {got}; return forward=function, too, with "
                "function(model, batch) -> (outputs, targets), or give the loader a collate_fn that makes pairs"
            )
        return model(batch[0]), batch[1]


class Trainable(Protocol):
    """The interface that a comparison needs of a task."""

    @property
    def name(self) -> str:
        """The name of the task on the command line."""
        ...

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, which distinguish one comparison from another."""
        ...

    @property
    def find(self) -> Callable[[Path | None], Path | None]:
        """A function from the folder that the user gave, if any, to the path of the data."""
        ...

    @property
    def load(self) -> Callable[[Path | None], Any]:
        """A function that reads the data from the path that `find` returned; it is called once per process."""
        ...

    def training(self, data: Any, seed: int) -> Training:
        """Returns new objects for one run."""
        ...
