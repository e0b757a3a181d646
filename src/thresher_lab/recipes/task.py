"""A recipe in the form that a comparison trains; see `training.trainable.Trainable`."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from thresher_lab.recipes import datasets
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.batches import rate_of, with_batch
from thresher_lab.recipes.networks import network
from thresher_lab.recipes.schema import EmaSection, Recipe, ScheduleSection
from thresher_lab.tasks.base import Task, confusion_matrix, mean_iou
from thresher_lab.tasks.vision import optional
from thresher_lab.training.specs import Composition, Spec, parse_methods
from thresher_lab.training.trainable import Training


def decay_of(ema: EmaSection, batch: int, epochs: int) -> float:
    """Returns the weight of the old average at each update: 1 - (1 - decay) * batch * steps / epochs, as in torchvision.

    Args:
        ema: Section of the recipe.
        batch: Number of samples per step.
        epochs: Number of epochs of the training.
    """
    return 1 - min(1.0, (1 - ema.decay) * batch * ema.steps / epochs)


class WeightAverage:
    """The moving average of weights and buffers, updated after steps of the optimizer.

    Args:
        model: Network to average; it does not change.
        optimizer: Optimizer of the network.
        decay: Weight of the old average at each update, see `decay_of`.
        every: Number of steps between updates.
        copied: Number of steps, those of the warm-up, in which the average is a copy of the network.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, decay: float, every: int, copied: int
    ) -> None:
        self._own = model
        self._every = every
        self._copied = copied
        self._steps = 0
        self._averaged = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True
        )
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def model(self) -> nn.Module:
        """The network with averaged weights; before the first update the network itself."""
        if self._averaged.n_averaged:
            return self._averaged.module
        return self._own

    def state_dict(self) -> dict[str, Any]:
        """Returns the average and the number of steps."""
        return {"steps": self._steps, "averaged": self._averaged.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state."""
        self._steps = state_dict["steps"]
        self._averaged.load_state_dict(state_dict["averaged"])
        self._averaged.to(next(self._own.parameters()).device)

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        self._averaged.to(next(self._own.parameters()).device)
        if self._steps <= self._copied:
            self._averaged.n_averaged.zero_()
        self._averaged.update_parameters(self._own)


EPOCH_TOLERANCE = 1e-9
"""Number that is added to a number of epochs before it is rounded down."""


@dataclass(frozen=True)
class LearningRateFactor:
    """The factor on the largest learning rate.

    Epochs are those of the recipe: a training with fewer epochs goes through the same schedule faster.

    Args:
        schedule: Section of the recipe.
        epochs: Number of epochs of the recipe.
    """

    schedule: ScheduleSection
    epochs: int

    def __call__(self, progress: float) -> float:
        """Returns the factor when a share of training, [0, 1], is done."""
        epoch = progress * self.epochs
        warmup = self.schedule.warmup_epochs
        if epoch < warmup:
            return self.schedule.warmup_from + (1 - self.schedule.warmup_from) * epoch / warmup
        whole = math.floor(epoch + EPOCH_TOLERANCE)
        match self.schedule.decay:
            case "step":
                return self._stepped(epoch + EPOCH_TOLERANCE)
            case "cosine":
                return self._cosine(whole / self.epochs)
            case "cosine_after_warmup":
                return self._cosine((whole - warmup) / (self.epochs - warmup))
            case "cosine_iter":
                return self._cosine(progress)
            case "none":
                return 1.0

    def _stepped(self, epoch: float) -> float:
        """Returns `rate` to the power of the number of steps so far."""
        every = self.schedule.every
        rate = self.schedule.rate or 1.0
        if every is not None:
            return rate ** math.floor(epoch / every)
        return rate ** sum(epoch >= boundary for boundary in self.schedule.epochs)

    def _cosine(self, done: float) -> float:
        """Returns the factor of a cosine from 1 to `floor`."""
        floor = self.schedule.floor
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))


@dataclass(frozen=True)
class Measure:
    """Measures a network on test batches; larger is better.

    Args:
        batches: Test batches, pairs of inputs and targets; each test iterates over them again.
        metric: Name of the metric: "accuracy", "mean IoU" or "-loss".
        criterion: Loss function for "-loss", which returns a mean over targets.
        average: Average of the weights to measure instead of the network. Default: none, the network itself is measured.
    """

    batches: Iterable[tuple[Tensor, Tensor]]
    metric: str
    criterion: Callable[[Any, Any], Tensor]
    average: WeightAverage | None = None

    def __call__(self, model: nn.Module) -> float:
        """Returns the metric in evaluation mode; the model ends in training mode."""
        tested = self.tested(model)
        device = next(tested.parameters()).device
        tested.eval()
        with torch.inference_mode():
            total = sum(
                self._statistics(tested(x.to(device)), y.to(device)) for x, y in self.batches
            )
        model.train()
        assert isinstance(total, Tensor)
        if self.metric == "mean IoU":
            return mean_iou(total)
        return float(total[0] / total[1])

    def tested(self, model: nn.Module) -> nn.Module:
        """Returns the network that is measured: the model, or the average of its weights."""
        return model if self.average is None else self.average.model

    def _statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the statistics of a batch, whose sum over the batches gives the metric."""
        if self.metric == "mean IoU":
            return confusion_matrix(outputs, targets)
        count = torch.tensor(targets.numel(), device=targets.device)
        if self.metric == "accuracy":
            return torch.stack([(outputs.argmax(1) == targets).sum(), count])
        return torch.stack([-self.criterion(outputs, targets) * count.float(), count.float()])


PREFIX = "recipe:"
"""Prefix of the name of a recipe in places that also take other tasks."""


@dataclass(frozen=True)
class RecipeTask:
    """A recipe that can be trained.

    Args:
        file: File of the recipe.
        settings: Content of the recipe.
        weights: File with the initial weights, for a recipe that starts from those of another recipe. Default: none.
        workers: Number of processes that load data; with 0, the training process loads it. Default: 0.
        shortened: Number of epochs to train; the schedules shrink or stretch to it. Default: that of the recipe.
        before: Content of the recipe with its own batch, see `batched`. Default: the settings have it.
    """

    file: Path
    settings: Recipe
    weights: Path | None = None
    workers: int = 0
    shortened: int | None = None
    before: Recipe | None = None

    @classmethod
    def of(cls, name: str, **options: Any) -> "RecipeTask":
        """Returns a recipe by its name.

        Raises:
            ValueError: There is no such recipe, or its file is wrong.
            FileNotFoundError: There is no such file.
        """
        file = loading.file_of(name)
        return cls(file, loading.read_recipe(file), **options)

    def batched(self, batch_size: int | None = None, accumulate: int | None = None) -> Self:
        """Returns the recipe with another batch; see `batches.with_batch`."""
        return replace(
            self, settings=with_batch(self.settings, batch_size, accumulate), before=self.settings
        )

    @property
    def name(self) -> str:
        """The name on the command line."""
        return PREFIX + (self.file.stem if self.file.parent == loading.folder() else str(self.file))

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, which distinguish one comparison from another."""
        return self.settings.settings

    @cached_property
    def task(self) -> Task | None:
        """The task that the data comes from; None if the recipe reads a folder."""
        from thresher_lab.tasks import built_in

        name = self.settings.data.task
        if name is None:
            return None
        return self.naming_file(lambda: built_in(name))

    def naming_file(self, act: Callable[[], Any]) -> Any:
        """Returns the result of a function; an error of it gets the name of the recipe's file."""
        try:
            return act()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{loading.display_path(self.file)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{loading.display_path(self.file)}: {error}") from error

    @property
    def epochs(self) -> int:
        """The number of epochs to train."""
        return self.shortened or self.settings.epochs

    def spec(self, text: str | None = None) -> Spec:
        """Returns the method, with counts that fit the training, see `scaled`.

        Args:
            text: Method in the form of the command line. Default: that of the recipe.

        Raises:
            ValueError: The text is not one method, or there is no such method or setting.
            FileNotFoundError: There is no such file of scores.
        """
        method = self.given_method(text)
        missing = [file for file in score_files(method) if not Path(file).is_file()]
        if missing:
            make = f"`thresher score --task {self.name} --data DIR --out {missing[0]}` makes it"
            raise FileNotFoundError(
                f"{loading.display_path(self.file)}: method: no file of scores {missing[0]}; {make}"
            )
        return self.scaled(method)

    def scaled(self, spec: Spec) -> Spec:
        """Returns a method whose counts of epochs shrink with the epochs; those of batches grow where batches are smaller."""
        if self.before is None:
            batches = 1.0
        else:
            batches = self.before.batch.size / self.settings.batch.size
        return scale_counts(
            spec, warmup_epochs=min(1.0, self.epochs / self.settings.epochs), warmup_steps=batches
        )

    def given_method(self, text: str | None) -> Spec:
        """Returns the given method, or that of the recipe if none is given, without changes.

        Raises:
            ValueError: The text is not one method, or there is no such method or setting.
        """
        return one_method(
            text or self.settings.method,
            "--method" if text else f"{loading.display_path(self.file)}: method",
        )

    def find(self, folder: Path | None) -> Path | None:
        """Returns the path of the data.

        Raises:
            FileNotFoundError: There is no such data; the message names the recipe and the files that it needs.
            ValueError: A folder was given, and the task of the recipe takes none.
        """
        task = self.task
        if task is not None:
            return self.naming_file(lambda: task.find(folder))
        return self.naming_file(lambda: datasets.find_folder(self.settings, folder))

    def load(self, folder: Path | None) -> datasets.TrainAndTest:
        """Reads the data from the path that `find` returned.

        Raises:
            ValueError: The data is damaged or does not match the recipe.
        """
        task = self.task
        if task is not None:
            return self.naming_file(lambda: datasets.from_task(self.settings, task.load(folder)))
        assert folder is not None
        return self.naming_file(lambda: datasets.read_folder(self.settings, folder))

    def training(self, data: datasets.TrainAndTest, seed: int) -> Training:
        """Returns new objects for one run."""
        recipe = self.settings
        model: nn.Module = self.naming_file(lambda: self.build(seed))
        optimizer: Optimizer = self.naming_file(lambda: optimizer_of(recipe, model))
        criterion = criterion_of(recipe)
        loader = self._loader(data.train, shuffle=torch.Generator().manual_seed(seed))
        average = None
        if recipe.ema is not None:
            steps = math.ceil(len(loader) / recipe.batch.accumulate)
            copied = round(recipe.schedule.warmup_epochs / recipe.epochs * self.epochs * steps)
            decay = decay_of(recipe.ema, recipe.batch.step, self.epochs)
            average = WeightAverage(
                model, optimizer, decay=decay, every=recipe.ema.steps, copied=copied
            )
        test = Measure(self._loader(data.test, shuffle=None), recipe.metric, criterion, average)
        schedule = LearningRateFactor(recipe.schedule, recipe.epochs)
        more: dict[str, Any] = {
            "also": {} if average is None else {"average": average},
            "accumulate": recipe.batch.accumulate,
        }
        more["classes"] = None if self.task is None else self.task.classes
        return Training(model, loader, criterion, optimizer, test, schedule, recipe.metric, **more)

    def build(self, seed: int) -> nn.Module:
        """Returns the network, whose initial weights depend on `seed` alone; the global random state does not change.

        Raises:
            ValueError: There is no such network, or the weights to start from are missing or belong to another network.
        """
        wanted = self.settings.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with naming_field("model.arguments"):
                if wanted.source == "task":
                    assert self.task is not None
                    model: nn.Module = self.task.network(**wanted.arguments)
                else:
                    model = network(
                        wanted.source, wanted.name, self.settings.data.classes, wanted.arguments
                    )
        if wanted.pretrained is None and self.weights is not None:
            raise ValueError(
                f"--weights {self.weights}: `model.pretrained` names no recipe to start from"
            )
        if wanted.pretrained is not None:
            if self.weights is None:
                raise ValueError(
                    f"model.pretrained: it starts from the weights of {wanted.pretrained}: train that one, then give "
                    "--weights DIR/model.pt of its folder"
                )
            start_from(model, self.weights)
        return model

    def _loader(self, dataset: Any, *, shuffle: torch.Generator | None) -> DataLoader[Any]:
        """Returns batches in an order that depends on the generator alone; without one, in the order of the data."""
        return DataLoader(
            dataset,
            batch_size=self.settings.batch.size,
            shuffle=shuffle is not None,
            generator=shuffle or torch.Generator(),
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
        )


def criterion_of(recipe: Recipe) -> nn.Module:
    """Returns the loss function; soft targets are already smoothed, so it does not smooth them again."""
    if recipe.loss.name == "mse":
        return nn.MSELoss()
    class_weights = recipe.loss.class_weights
    if class_weights is None:
        weights = None
    else:
        weights = torch.tensor(class_weights, device=PartialState().device)
    return nn.CrossEntropyLoss(
        weights, label_smoothing=0.0 if recipe.loss.soft_targets else recipe.loss.label_smoothing
    )


@contextmanager
def naming_field(name: str) -> Iterator[None]:
    """Names the field of the recipe in the error about arguments that are not allowed."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def optimizer_of(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Returns the optimizer at the largest learning rate.

    Raises:
        ValueError: The optimizer does not take the arguments.
    """
    with naming_field("optimizer.arguments"):
        return _make_optimizer(recipe, model)


def _make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    settings = recipe.optimizer
    options: dict[str, Any] = {
        "lr": rate_of(recipe),
        "weight_decay": settings.weight_decay,
        **settings.arguments,
    }
    groups = _parameter_groups(model, settings.weight_decay, norms=settings.decay_norms)
    match settings.name:
        case "sgd":
            return SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, **options)
        case "rmsprop":
            return optional("timm.optim").RMSpropTF(groups, momentum=settings.momentum, **options)
        case "adamw":
            return AdamW(groups, **options)
        case "lamb":
            return optional("timm.optim").Lamb(groups, **options)


def _parameter_groups(model: nn.Module, decay: float, *, norms: bool) -> list[dict[str, Any]]:
    """Returns groups of parameters; if `norms` is false, those of one dimension, biases and norms, have no weight decay."""
    parameters = [*model.parameters()]
    if norms or not decay:
        return [{"params": parameters}]
    flat = [one for one in parameters if one.dim() <= 1]
    return [
        {"params": [one for one in parameters if one.dim() > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]


def start_from(model: nn.Module, file: Path) -> None:
    """Loads the weights of a file into a network, all but those of its last linear layer.

    Raises:
        ValueError: The file has no weights, or the weights of another network.
        FileNotFoundError: There is no such file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--weights {file}: no such file")
    last = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][-1]
    kept_shapes = {
        name: value.shape
        for name, value in model.state_dict().items()
        if not name.startswith(f"{last}.")
    }
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        loaded = {name: value for name, value in state.items() if not name.startswith(f"{last}.")}
        shapes = {name: value.shape for name, value in loaded.items()}
    except (AttributeError, EOFError, KeyError, RuntimeError, UnpicklingError, ValueError) as error:
        raise ValueError(f"--weights {file}: not a file of weights: {error}") from error
    differing = sorted(
        name
        for name in kept_shapes.keys() | shapes.keys()
        if kept_shapes.get(name) != shapes.get(name)
    )
    if differing:
        name = differing[0]
        shape = {
            place: tuple(of[name]) if name in of else "none"
            for place, of in (("file", shapes), ("network", kept_shapes))
        }
        raise ValueError(
            f"--weights {file}: of another network: {name} is {shape['file']} there and {shape['network']} here"
        )
    model.load_state_dict(loaded, strict=False)


def one_method(text: str, where: str) -> Spec:
    """Parses one method in the form of the command line.

    Args:
        text: Method, or methods of several stages joined by a plus.
        where: Option or field of the text, used in error messages.

    Raises:
        ValueError: The text is not one method, or there is no such method or setting.
    """
    try:
        specs = parse_methods(text)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('--methods: ')}") from error
    if len(specs) != 1:
        raise ValueError(
            f"{where}: one method is wanted, those of several stages joined by a plus; got {text!r}"
        )
    return specs[0]


def map_settings(spec: Spec, change: Callable[[str, Any], Any]) -> Spec:
    """Returns the method with each setting replaced by `change(name, value)`."""
    if isinstance(spec, Composition):
        return replace(spec, parts=tuple(map_settings(part, change) for part in spec.parts))
    return replace(spec, given={name: change(name, value) for name, value in spec.given.items()})


def scale_counts(spec: Spec, **shares: float) -> Spec:
    """Returns the method with the settings of these names, which are counts, multiplied by a share and rounded down."""
    return map_settings(
        spec, lambda name, value: int(value * shares[name]) if name in shares else value
    )


def score_files(spec: Spec) -> list[str]:
    """Returns the files of scores among the settings of a method; they need not exist."""
    return [part.given["scores"] for part in spec.parts if "scores" in part.given]
