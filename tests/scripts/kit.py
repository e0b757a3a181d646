"""What the loops of public scripts are run with: `thresher.attach` or nothing at all, and counts of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import thresher

N, B, EPOCHS = 48, 8, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns numbers of a standard normal distribution of the given shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Returns whole numbers from 0 to `high - 1`, int64, of the given shape."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Plain:
    """What a script has without Thresher, under the names of a run."""

    def __init__(self, loader: Any, criterion: Any, model: nn.Module) -> None:
        self.loader, self.model, self._criterion = loader, model, criterion
        self.ids = self.history = None

    def criterion(self, outputs: Any, targets: Any, **_: Any) -> Tensor:
        return self._criterion(outputs, targets)

    def reduce(self, losses: Tensor, *_: Any, valid: Tensor | None = None, **__: Any) -> Tensor:
        return losses.mean() if valid is None else (losses * valid).sum() / valid.sum()

    def ids_of(self, _: Tensor) -> None:
        return None

    def pace(self, scheduler: Any, total: int | None = None) -> Any:
        return scheduler


@dataclass
class Kit:
    """One training of one script.

    Args:
        method: What `attach` takes; None trains without Thresher.
        rate: Learning rate. With 0 the model stays as it is, so that the loss of each sample is known beforehand.
        rows_of: Returns the number of samples in a forward pass from the model's arguments.
    """

    method: Any
    rate: float
    rows_of: Callable[..., int] = lambda *args, **kwargs: len(
        next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    )
    epochs: int = EPOCHS
    run: Any = None
    counts: bool = True
    """Whether a hook counts; a model with a hook has no backward pass of the kept rows alone."""
    forward: int = 0
    """Rows of the forward passes with gradient, counted by a hook of the model."""
    models: list[nn.Module] = field(default_factory=list)

    def attach(
        self, *, loader: Any, criterion: Any, model: nn.Module, optimizer: Any, **settings: Any
    ) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                self.forward += self.rows_of(*args, **kwargs)

        self.models.append(model)
        if self.counts:
            model.register_forward_pre_hook(count, with_kwargs=True)
        self.run = Plain(loader, criterion, model)
        if self.method is not None:
            self.run = thresher.attach(
                self.method,
                loader=loader,
                criterion=criterion,
                model=model,
                optimizer=optimizer,
                epochs=self.epochs,
                **settings,
            )
        return self.run

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), self.rate)


@dataclass(frozen=True)
class Script:
    """The inner loop of a public script, with the lines that Thresher adds.

    Attributes:
        source: Project and file.
        train: The loop.
        losses: The loss of each sample from the model as it was made, shape (N,); None if the script's samples have no ids.
        note: What the loop has beside `run.loader`, `run.model` and `run.criterion`, in Markdown.
        refused: The methods that are refused, with a part of the message.
        rows: Number of samples in a forward pass, from the model's arguments.
    """

    source: str
    train: Callable[[Kit], None]
    losses: Callable[[nn.Module], Tensor] | None
    note: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    rows: Callable[..., int] | None = None

    @property
    def name(self) -> str:
        return self.train.__name__


SCRIPTS: list[Script] = []


def script(
    source: str, losses: Callable[[nn.Module], Tensor] | None, **settings: Any
) -> Callable[[Any], Any]:
    """Adds a loop to the scripts; the parameters are those of `Script`."""

    def add(train: Callable[[Kit], None]) -> Callable[[Kit], None]:
        SCRIPTS.append(Script(source, train, losses, **settings))
        return train

    return add


class Dicts(Dataset):
    """Samples that are dicts of tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Stream(IterableDataset):
    """A stream of the samples of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[i] for i in range(len(self.dataset)))
