"""A recipe as what a comparison trains, see `training.base.Trainable`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from thresher.experiments.recipes import loading, sets
from thresher.experiments.recipes.averaging import Average, decay_of
from thresher.experiments.recipes.measuring import Measure
from thresher.experiments.recipes.networks import network
from thresher.experiments.recipes.scheduling import Factor
from thresher.experiments.recipes.schema import Recipe
from thresher.experiments.tasks.base import Task
from thresher.experiments.tasks.vision import optional
from thresher.experiments.training.base import Training
from thresher.experiments.training.specs import Composition, Spec, parse_methods

PREFIX = "recipe:"
"""Of the names of recipes where other tasks are named, too."""


@dataclass(frozen=True)
class RecipeTask:
    """A recipe, ready to be trained.

    Args:
        file: Where it stands.
        settings: What it says.
        weights: File with weights to start from, for a recipe that starts from those of another.
        loaders: Processes that load data; 0 loads it in this one.
        shortened: Epochs to train, which the schedules go through as they would through the recipe's. Default: those.
    """

    file: Path
    settings: Recipe
    weights: Path | None = None
    loaders: int = 0
    shortened: int | None = None

    @classmethod
    def of(cls, name: str, **options: Any) -> "RecipeTask":
        """A recipe by its name.

        Raises:
            ValueError: There is none, or its file is wrong.
            FileNotFoundError: There is no such file.
        """
        file = loading.file_of(name)
        return cls(file, loading.read(file), **options)

    @property
    def name(self) -> str:
        """As on the command line."""
        return PREFIX + (self.file.stem if self.file.parent == loading.folder() else str(self.file))

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, to tell comparisons apart."""
        return self.settings.settings

    @cached_property
    def task(self) -> Task | None:
        """The task that the recipe has its data from; None where it has it from elsewhere."""
        from thresher.experiments.tasks import built_in

        name = self.settings.data.task
        return None if name is None else self.telling(lambda: built_in(name))

    def telling(self, act: Callable[[], Any]) -> Any:
        """Do something, and name the recipe's file where that is not possible."""
        try:
            return act()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{loading.told(self.file)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{loading.told(self.file)}: {error}") from error

    @property
    def epochs(self) -> int:
        """To train."""
        return self.shortened or self.settings.epochs

    def spec(self, text: str | None = None) -> Spec:
        """The method: the recipe's, or another; its counts of epochs shrink with those of the training.

        Raises:
            ValueError: It is not one method, or there is no such method or setting, or no such file of scores.
        """
        found = self.given_method(text)
        missing = [file for file in scores_of(found) if not Path(file).is_file()]
        if missing:
            make = f"`thresher score --task {self.settings.data.task} --data DIR --out {missing[0]}` makes it"
            raise FileNotFoundError(f"{loading.told(self.file)}: method: no file of scores {missing[0]}; {make}")
        return scaled(found, warmup_epochs=min(1.0, self.epochs / self.settings.epochs))

    def given_method(self, text: str | None) -> Spec:
        """The recipe's method as it stands there, or the one given.

        Raises:
            ValueError: It is not one method, or there is no such method or setting.
        """
        return one_method(text or self.settings.method, "--method" if text else f"{loading.told(self.file)}: method")

    def find(self, folder: Path | None) -> Path | None:
        """Where the data lies.

        Raises:
            FileNotFoundError: It is not there; the message names the recipe and what is wanted.
            ValueError: A folder was given to a recipe that takes none.
        """
        task = self.task
        if task is not None:
            return self.telling(lambda: task.find(folder))
        return self.telling(lambda: sets.find(self.settings, folder))

    def load(self, folder: Path | None) -> sets.Sets:
        """The data from there.

        Raises:
            ValueError: It is damaged, or not as the recipe has it.
        """
        task = self.task
        if task is not None:
            return self.telling(lambda: sets.of_task(self.settings, task.load(folder)))
        assert folder is not None
        return self.telling(lambda: sets.read(self.settings, folder))

    def training(self, data: sets.Sets, seed: int) -> Training:
        """What one run trains, and how it is tested."""
        recipe = self.settings
        model: nn.Module = self.telling(lambda: self.build(seed))
        optimizer: Optimizer = self.telling(lambda: optimizer_of(recipe, model))
        criterion = criterion_of(recipe)
        loader = self._loader(data.train, shuffle=torch.Generator().manual_seed(seed))
        average = None
        if recipe.ema is not None:
            copied = round(recipe.schedule.warmup_epochs / recipe.epochs * self.epochs * len(loader))
            decay = decay_of(recipe.ema, recipe.batch.size, self.epochs)
            average = Average(model, optimizer, decay=decay, every=recipe.ema.steps, copied=copied)
        test = Measure(self._loader(data.test, shuffle=None), recipe.metric, criterion, average)
        schedule = Factor(recipe.schedule, recipe.epochs)
        also = {} if average is None else {"average": average}
        return Training(model, loader, criterion, optimizer, test, schedule, recipe.metric, also=also)

    def build(self, seed: int) -> nn.Module:
        """The network with initial weights that depend on `seed` alone; the global random state is left as it was.

        Raises:
            ValueError: There is no such network, or the weights to start from are missing or of another one.
        """
        wanted = self.settings.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with telling_field("model.arguments"):
                if wanted.source == "task":
                    assert self.task is not None
                    made: nn.Module = self.task.network(**wanted.arguments)
                else:
                    made = network(wanted.source, wanted.name, self.settings.data.classes, wanted.arguments)
        if wanted.pretrained is None and self.weights is not None:
            raise ValueError(f"--weights {self.weights}: `model.pretrained` names no recipe to start from")
        if wanted.pretrained is not None:
            if self.weights is None:
                raise ValueError(
                    f"model.pretrained: it starts from the weights of {wanted.pretrained}: train that one, then give "
                    "--weights DIR/model.pt of its folder"
                )
            start_from(made, self.weights)
        return made

    def _loader(self, dataset: Any, *, shuffle: torch.Generator | None) -> DataLoader[Any]:
        """Batches, in an order that depends on the generator alone, or in that of the data."""
        return DataLoader(
            dataset,
            batch_size=self.settings.batch.size,
            shuffle=shuffle is not None,
            generator=shuffle or torch.Generator(),
            num_workers=self.loaders,
            pin_memory=torch.cuda.is_available(),
        )


def criterion_of(recipe: Recipe) -> nn.Module:
    """The loss; of soft targets, which are smoothed already, as it is."""
    if recipe.loss.name == "mse":
        return nn.MSELoss()
    given = recipe.loss.class_weights
    weights = None if given is None else torch.tensor(given, device=PartialState().device)
    return nn.CrossEntropyLoss(weights, label_smoothing=0.0 if recipe.loss.soft_targets else recipe.loss.label_smoothing)


@contextmanager
def telling_field(name: str) -> Iterator[None]:
    """Say which field of the recipe has arguments that are not taken."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def optimizer_of(recipe: Recipe, model: nn.Module) -> Optimizer:
    """At the largest learning rate.

    Raises:
        ValueError: It does not take the arguments.
    """
    with telling_field("optimizer.arguments"):
        return _optimizer(recipe, model)


def _optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    settings = recipe.optimizer
    given: dict[str, Any] = {"lr": settings.lr * (recipe.batch.workers if settings.lr_per == "worker" else 1)}
    given |= {"weight_decay": settings.weight_decay, **settings.arguments}
    groups = _groups(model, settings.weight_decay, norms=settings.decay_norms)
    match settings.name:
        case "sgd":
            return SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, **given)
        case "rmsprop":
            return optional("timm.optim").RMSpropTF(groups, momentum=settings.momentum, **given)
        case "adamw":
            return AdamW(groups, **given)
        case "lamb":
            return optional("timm.optim").Lamb(groups, **given)


def _groups(model: nn.Module, decay: float, *, norms: bool) -> list[dict[str, Any]]:
    """Parameters with weight decay, and those of one dimension without it where they are to have none."""
    parameters = [*model.parameters()]
    if norms or not decay:
        return [{"params": parameters}]
    flat = [one for one in parameters if one.dim() <= 1]
    return [{"params": [one for one in parameters if one.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]


def start_from(model: nn.Module, file: Path) -> None:
    """Give a network the weights in a file, all but those of its last linear layer.

    Raises:
        ValueError: The file is not one of weights, or of another network.
        FileNotFoundError: There is no such file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--weights {file}: no such file")
    last = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][-1]
    own = {name: value.shape for name, value in model.state_dict().items() if not name.startswith(f"{last}.")}
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        found = {name: value for name, value in state.items() if not name.startswith(f"{last}.")}
        shapes = {name: value.shape for name, value in found.items()}
    except (AttributeError, EOFError, KeyError, RuntimeError, UnpicklingError, ValueError) as error:
        raise ValueError(f"--weights {file}: not a file of weights: {error}") from error
    differing = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
    if differing:
        name = differing[0]
        shape = {place: tuple(of[name]) if name in of else "none" for place, of in (("file", shapes), ("network", own))}
        raise ValueError(f"--weights {file}: of another network: {name} is {shape['file']} there and {shape['network']} here")
    model.load_state_dict(found, strict=False)


def one_method(text: str, where: str) -> Spec:
    """A method as on the command line.

    Args:
        text: It.
        where: It stands, for messages.

    Raises:
        ValueError: It is not one method, or there is no such method or setting.
    """
    try:
        found = parse_methods(text)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('--methods: ')}") from error
    if len(found) != 1:
        raise ValueError(f"{where}: one method is wanted, those of several stages joined by a plus; got {text!r}")
    return found[0]


def changed(spec: Spec, change: Callable[[str, Any], Any]) -> Spec:
    """A method with other values of its settings, told by name and value."""
    if isinstance(spec, Composition):
        return replace(spec, parts=tuple(changed(part, change) for part in spec.parts))
    return replace(spec, given={name: change(name, value) for name, value in spec.given.items()})


def scaled(spec: Spec, **shares: float) -> Spec:
    """A method whose settings of these names, which are counts, shrink to a share, rounded down."""
    return changed(spec, lambda name, value: int(value * shares[name]) if name in shares else value)


def scores_of(spec: Spec) -> list[str]:
    """Files of scores that a method is given, be they there or not."""
    parts = spec.parts if isinstance(spec, Composition) else (spec,)
    return [part.given["scores"] for part in parts if "scores" in part.given]
