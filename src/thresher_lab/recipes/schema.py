"""The fields of a recipe, and how recipes are read from their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thresher.methods import no_such


class Section(BaseModel):
    """A section of a recipe; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PaperSection(Section):
    """The publication of the settings.

    Args:
        title: Title of the paper.
        arxiv: Number of the paper on arXiv; None if it is not there.
        where: Table, figure or section of the paper.
    """

    title: str
    arxiv: str | None = None
    where: str


class DataSection(Section):
    """The data set.

    Args:
        name: Name of the data set.
        kind: Source of the samples: "folder" for images in train/ and val/ with one folder per class; "arrays" for train/ and
            val/ with data-NAME.npy and label-NAME.npy; "task" for a task of `thresher compare`, which finds its files itself.
        task: Name of the task, if `kind` is "task".
        samples: Number of training samples.
        shape: Shape of a sample in the files: (channels, height, width), (features,) or (tokens,); None for images of any size.
        classes: Number of classes; None for regression.
        test_every: Interval of test samples among the training samples, every n-th, if there is no val/. Default: there is one.
    """

    name: str
    kind: Literal["folder", "arrays", "task"]
    task: str | None = None
    samples: int = Field(ge=1)
    shape: tuple[int, ...] | None = None
    classes: int | None = Field(default=None, ge=2)
    test_every: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.kind == "task") != (self.task is not None):
            raise ValueError(
                "`task` is the name of a task with kind: task, and is left out otherwise"
            )
        if (self.kind == "folder") != (self.shape is None):
            raise ValueError(
                "`shape` is that of a sample; it is left out with kind: folder, where images have any size"
            )
        return self


class ModelSection(Section):
    """The network.

    Args:
        source: Source of the network: "timm"; "thresher" for one of `networks.NETWORKS`; "task" for that of the task in `data`.
        name: Name of the network in the source.
        arguments: Arguments of the function that creates the network, without the number of classes.
        pretrained: Name of the recipe whose weights training starts from, all but those of the last layer. Default: none.
    """

    source: Literal["timm", "thresher", "task"]
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    pretrained: str | None = None


class BatchSection(Section):
    """The batch, over all workers; here one process trains on the whole batch.

    Args:
        workers: Number of GPUs in the source.
        per_worker: Number of samples per GPU.
        accumulate: Number of batches whose gradients are added up before each step. Default: 1.
    """

    workers: int = Field(default=1, ge=1)
    per_worker: int = Field(ge=1)
    accumulate: int = Field(default=1, ge=1)

    @property
    def size(self) -> int:
        """The number of samples of one forward and backward pass."""
        return self.workers * self.per_worker

    @property
    def step(self) -> int:
        """The number of samples per step of the optimizer."""
        return self.size * self.accumulate


class OptimizerSection(Section):
    """The optimizer.

    Args:
        name: Name of the optimizer: "sgd"; "adamw"; "lamb" of timm; or "rmsprop" of timm in the form of TensorFlow, whose
            averages start from ones.
        lr: Largest learning rate, per worker or per batch.
        lr_per: Unit of `lr`: "batch", or "worker" to multiply it by the number of workers, the linear scaling rule.
        momentum: Momentum of sgd and rmsprop.
        nesterov: Whether sgd uses Nesterov momentum.
        weight_decay: Weight decay; 0 for none.
        decay_norms: Whether biases and the weights of normalization have weight decay, too.
        arguments: Other arguments of the optimizer's class.
    """

    name: Literal["sgd", "rmsprop", "adamw", "lamb"]
    lr: float = Field(gt=0)
    lr_per: Literal["worker", "batch"] = "batch"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    decay_norms: bool = True
    arguments: dict[str, Any] = Field(default_factory=dict)


class ScheduleSection(Section):
    """The learning rate over the epochs.

    Args:
        warmup_epochs: Number of epochs in which the learning rate rises, linearly with every step.
        warmup_from: Share of the learning rate at which the warm-up starts.
        decay: Form of the decay: "none"; "step" for a factor `rate` at each of `epochs`, or after every `every` epochs;
            "cosine" for a cosine to `floor` that changes per epoch and is counted from the first epoch, as in timm;
            "cosine_after_warmup" for one that is counted from the end of the warm-up, as in torchvision; "cosine_iter" for one
            that is counted from the first epoch and changes per step.
        rate: Factor of "step".
        epochs: Epochs at which "step" applies its factor.
        every: Number of epochs between the factors of "step".
        floor: Share of the learning rate at which a cosine ends.
    """

    warmup_epochs: float = Field(default=0.0, ge=0)
    warmup_from: float = Field(default=0.0, ge=0, le=1)
    decay: Literal["none", "step", "cosine", "cosine_after_warmup", "cosine_iter"] = "none"
    rate: float | None = Field(default=None, gt=0, lt=1)
    epochs: tuple[int, ...] = ()
    every: float | None = Field(default=None, gt=0)
    floor: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        set_fields = (self.rate is not None, bool(self.epochs) != (self.every is not None))
        if set_fields != (self.decay == "step",) * 2:
            raise ValueError(
                "decay: step takes `rate` and either `epochs` or `every`; other decays take none of them"
            )
        return self


class LossSection(Section):
    """The loss function.

    Args:
        name: Name of the loss function: "cross_entropy" or "mse".
        label_smoothing: Share of each target that is divided equally among all classes.
        soft_targets: Whether targets are passed to the loss function as probabilities that are already smoothed.
        class_weights: Weight of each class. Default: none.
    """

    name: Literal["cross_entropy", "mse"] = "cross_entropy"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    soft_targets: bool = False
    class_weights: tuple[float, ...] | None = None


class ImageSection(Section):
    """The transforms of images.

    Args:
        train_crop: Side in pixels to which a random part of a training image is scaled. Default: no such crop.
        pad: Width in pixels of a black margin, from which a random crop of the size of the image is taken. Default: 0.
        test_resize: Length in pixels of the shorter side of a test image. Default: not resized.
        test_crop: Side in pixels of the middle of a test image. Default: not cropped.
        interpolation: Interpolation of scaling.
        flip: Probability of a horizontal flip.
        vertical_flip: Probability of a vertical flip.
        auto_augment: Policy of augmentation: "ta_wide" for TrivialAugment of torchvision, or RandAugment in the notation of
            timm, such as "rand-m9-mstd0.5-inc1". Default: none.
        erasing: Probability that a random rectangle is erased.
        erase_with: Value of an erased rectangle: "mean", or "noise" in every pixel.
        cutout: Side in pixels of a square that is erased in every image. Default: 0.
        mean: Mean of each channel, which is subtracted. Default: that of the training images.
        std: Standard deviation of each channel, which is divided by. Default: that of the training images.
    """

    train_crop: int | None = Field(default=None, ge=1)
    pad: int = Field(default=0, ge=0)
    test_resize: int | None = Field(default=None, ge=1)
    test_crop: int | None = Field(default=None, ge=1)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    flip: float = Field(default=0.0, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    auto_augment: str | None = Field(default=None, pattern=r"^(ta_wide|rand-m\d.*)$")
    erasing: float = Field(default=0.0, ge=0, le=1)
    erase_with: Literal["mean", "noise"] = "mean"
    cutout: int = Field(default=0, ge=0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class EmaSection(Section):
    """The exponential moving average of the weights, which is tested instead of the network.

    Args:
        decay: Decay in the form of torchvision's script: for one update per step, one sample per step and one epoch; see
            `recipes.task.decay_of`.
        steps: Number of steps between updates.
    """

    decay: float = Field(gt=0, lt=1)
    steps: int = Field(ge=1)


class PublishedNumber(Section):
    """A number of the source.

    Args:
        what: Quantity, with its unit.
        value: Number, as it is printed.
        where: Table, figure or section of the source.
    """

    what: str
    value: float | str
    where: str


class Recipe(Section):
    """One experiment.

    Args:
        paper: Publication of the experiment.
        title: Title of the experiment.
        data: Data set.
        model: Network.
        method: Method that selects samples, in the form of the command line.
        epochs: Number of epochs of the training.
        batch: Batch of a step.
        optimizer: Optimizer.
        schedule: Learning rate over the epochs.
        loss: Loss function.
        pictures: Transforms of images; None for other data, and for images that are used without transforms.
        ema: Moving average of the weights that is tested. Default: none.
        metric: Metric: "accuracy", "mean IoU", or "-loss", for which larger is better, too.
        published: Numbers of the source.
        hardware: Hardware of the source.
        hours: Hours of full training on it. Default: not given.
        notes: Contradictions within the source, or between the source and its code, and the choices made here.
        not_given: Choices made here for settings that the source does not give, by field.
        smoke: Fields of a recipe that differ in a smoke test, in addition to those of `recipes.running.reduced`.
    """

    paper: PaperSection
    title: str
    data: DataSection
    model: ModelSection
    method: str
    epochs: int = Field(ge=1)
    batch: BatchSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    loss: LossSection = LossSection()
    pictures: ImageSection | None = None
    ema: EmaSection | None = None
    metric: Literal["accuracy", "mean IoU", "-loss"] = "accuracy"
    published: tuple[PublishedNumber, ...]
    hardware: str = "hardware not given"
    hours: float | None = None
    notes: tuple[str, ...] = ()
    not_given: dict[str, str] = Field(default_factory=dict)
    smoke: dict[str, Any] = Field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a training depends on, as plain values."""
        about = {"paper", "title", "published", "hardware", "hours", "notes", "not_given", "smoke"}
        return self.model_dump(mode="json", exclude=about)


RECIPE_SUFFIX = ".yaml"


def folder() -> Path:
    """Returns the folder of the recipes' files, which is that of this module."""
    return Path(__file__).parent


def recipe_names() -> list[str]:
    """Returns the names of all recipes in alphabetical order."""
    return sorted(path.stem for path in folder().glob(f"*{RECIPE_SUFFIX}"))


def file_of(name: str) -> Path:
    """Returns the file of a recipe.

    Args:
        name: One of `recipe_names()`, or the path of a file of your own that ends in .yaml.

    Raises:
        ValueError: There is no such recipe; the message lists all recipes.
        FileNotFoundError: There is no such file.
    """
    if name.endswith(RECIPE_SUFFIX):
        if not Path(name).is_file():
            raise FileNotFoundError(
                f"{name}: no such file; `thresher recipes` lists those that there are by name"
            )
        return Path(name)
    if name not in recipe_names():
        raise ValueError(
            no_such("recipe", name, recipe_names(), also=", and your own as FILE.yaml")
        )
    return folder() / f"{name}{RECIPE_SUFFIX}"


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe from its file.

    Raises:
        ValueError: The file is not YAML, or a field is unknown, missing or wrong; the message has one line per field.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(
            f"{display_path(path)}: not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{display_path(path)}: a recipe has fields such as {', '.join(Recipe.model_fields)}; got {content!r}"
        )
    return validated(content, path)


def validated(content: Mapping[str, Any], path: Path, *, inside: str = "") -> Recipe:
    """Returns a recipe with the content of a file.

    Args:
        content: Fields of the recipe by name.
        path: Path of the file, used in error messages.
        inside: Text before the names of fields in error messages. Default: none.

    Raises:
        ValueError: A field is unknown, missing or wrong; the message has one line per field.
    """
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        problems = [inside + _problem(one) for one in error.errors(include_url=False)]
        raise ValueError(
            "\n".join(f"{display_path(path)}: {problem}" for problem in problems)
        ) from None


def display_path(path: Path) -> str:
    """Returns the path of a recipe's file in the form that messages use."""
    if path.parent == folder():
        return str(Path("recipes") / path.name)
    return str(path)


def _problem(error: Any) -> str:
    """Returns the field and a sentence for one of pydantic's errors."""
    place: tuple[int | str, ...] = error["loc"]
    field = ".".join(map(str, place))
    if error["type"] == "missing":
        return f"{field}: this field is missing"
    if error["type"] == "extra_forbidden":
        return f"{field}: no such field; there are {', '.join(_fields(place[:-1]))}"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] == "value_error" else f"; got {error['input']!r}"
    return f"{field}: {message[0].lower()}{message[1:]}{got}"


def _fields(place: tuple[int | str, ...]) -> list[str]:
    """Returns the fields of the section at a place of a recipe."""
    section: Any = Recipe
    for step in place:
        if isinstance(step, str):
            section = _section_in(section.model_fields[step].annotation)
    return [*section.model_fields]


def _section_in(annotation: Any) -> type[BaseModel]:
    """Returns the section in the type of a field, which may be a tuple of sections or None."""
    inside = [annotation, *getattr(annotation, "__args__", ())]
    return next(kind for kind in inside if isinstance(kind, type) and issubclass(kind, BaseModel))
