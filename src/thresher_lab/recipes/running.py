"""Trains a recipe once, at full size or as a smoke test."""

import getpass
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from thresher.scores import Scores
from thresher_lab.recipes import datasets
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.schema import Recipe
from thresher_lab.recipes.task import PREFIX, Measure, RecipeTask, map_settings, scale_counts
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import Data
from thresher_lab.tasks.script import Script
from thresher_lab.training.loop import EpochCallback, train
from thresher_lab.training.processes import number_of_processes, once_per_machine, own_rank
from thresher_lab.training.specs import Spec
from thresher_lab.training.store import RESULTS, Checkpoint, versions, whole, write_json
from thresher_lab.training.trainable import Trainable, Training

EPOCHS = 8
BATCH_SIZE = 16
SAMPLES = 128
TEST_SAMPLES = 32
CLASSES = 3
LARGE = 64
SMALL = 16
"""Sides of images in pixels: of images that the recipe crops, and of others."""
WRONG = 0.1
"""Share of the training images with a wrong label, so that some hidden samples have a low confidence and are moved back."""


@dataclass(frozen=True)
class SmokeTask(RecipeTask):
    """A recipe with reduced sizes.

    Args:
        full: Recipe at full size.
        folder: Folder for synthetic data.
    """

    shortened: int | None = EPOCHS
    full: Recipe | None = None
    folder: Path = Path()

    @classmethod
    def at(cls, name: str, folder: Path, **options: Any) -> "SmokeTask":
        """Returns the smoke test of a recipe by its name; see `RecipeTask.of`."""
        file = loading.file_of(name)
        full = loading.read_recipe(file)
        return cls(file, reduced(full, file), full=full, folder=folder, **options)

    def spec(self, text: str | None = None) -> Spec:
        """Returns the method, with synthetic scores."""
        scaled = self.scaled(self.given_method(text))
        return map_settings(
            scaled, lambda name, value: str(self._scores()) if name == "scores" else value
        )

    def scaled(self, spec: Spec) -> Spec:
        """Returns a method whose counts of epochs and steps shrink like those of the training."""
        assert self.full is not None
        steps = steps_of(self.settings) / steps_of(self.full)
        return scale_counts(spec, warmup_epochs=self.epochs / self.full.epochs, warmup_steps=steps)

    def find(self, folder: Path | None) -> Path | None:
        """Writes synthetic files, if the recipe reads files, and returns their folder.

        Raises:
            ValueError: A folder was given.
        """
        if folder is not None:
            raise ValueError(
                f"--data {folder}: with --smoke the data is made up; leave out one of the two"
            )
        write = {"folder": _write_images, "arrays": _write_arrays}.get(self.settings.data.kind)
        if write is not None:
            once_per_machine(lambda: write(self.settings, self.folder))
        return self.folder

    def load(self, folder: Path | None) -> datasets.TrainAndTest:
        """Returns the data sets."""
        if self.settings.data.kind != "task":
            return super().load(folder)
        return self.naming_file(
            lambda: datasets.from_task(self.settings, synthetic_data(self.settings))
        )

    def build(self, seed: int) -> Any:
        """Returns the network; if the recipe starts from another recipe, it gets the initial weights of that one."""
        source = self.settings.model.pretrained
        if source is None or self.weights is not None:
            return super().build(seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "pretrained.pt"
        first = SmokeTask.at(source, self.folder).build(seed)
        once_per_machine(lambda: torch.save(first.state_dict(), file))
        return replace(self, weights=file).build(seed)

    def _scores(self) -> Path:
        """Writes random scores and returns their file."""
        values = torch.rand(self.settings.data.samples, generator=_generator())
        file = self.folder / "scores.parquet"
        self.folder.mkdir(parents=True, exist_ok=True)
        once_per_machine(lambda: Scores(torch.arange(len(values)), values, "made up").save(file))
        return file


def steps_of(recipe: Recipe) -> int:
    """Returns the number of batches per epoch, which are what batch methods count as steps."""
    return math.ceil(recipe.data.samples / recipe.batch.size)


def reduced(recipe: Recipe, file: Path) -> Recipe:
    """Returns a recipe with the sizes of this module and the fields in its `smoke`, which have priority.

    The number of epochs does not change.

    Args:
        recipe: Recipe at full size.
        file: File of the recipe, used in error messages.

    Raises:
        ValueError: A field of `smoke` is wrong.
    """
    data: dict[str, Any] = {"samples": SAMPLES}
    shape = recipe.data.shape
    if shape is None or len(shape) == 3:
        data |= {"shape": None if shape is None else (shape[0], SMALL, SMALL)}
        data |= {"classes": CLASSES} if recipe.data.kind != "arrays" else {}
    small: dict[str, Any] = {"batch": {"workers": 1, "per_worker": BATCH_SIZE}, "data": data}
    if recipe.pictures is not None:
        small["pictures"] = _smaller(recipe.pictures.model_dump(exclude_none=True))
    if recipe.ema is not None:
        small["ema"] = {"steps": 2}
    return loading.validated(
        _merged(_merged(recipe.model_dump(), small), recipe.smoke), file, inside="smoke."
    )


def synthetic_data(recipe: Recipe) -> Data:
    """Returns samples with the shape in a recipe: images with classes, rows with a value, or tokens with the next tokens."""
    shape = recipe.data.shape
    classes = recipe.data.classes
    assert shape is not None
    generator = _generator()
    n = recipe.data.samples
    if len(shape) == 3:
        assert classes is not None
        train, test = (
            synthetic_images(count, shape, classes, generator) for count in (n, TEST_SAMPLES)
        )
        return Data(
            TensorDataset(train[0].float(), _partly_wrong(train[1], classes)),
            test[0].float(),
            test[1],
        )
    if classes is None:
        x = torch.randn(n + TEST_SAMPLES, *shape, generator=generator)
        y = x.mean(1, keepdim=True) + 0.1 * torch.randn(n + TEST_SAMPLES, 1, generator=generator)
    else:
        begin = torch.randint(min(classes, 50), (n + TEST_SAMPLES, 1), generator=generator)
        counted = (begin + torch.arange(shape[0] + 1)) % min(classes, 50)
        x = counted[:, :-1]
        y = counted[:, 1:]
    return Data(TensorDataset(x[:n], y[:n]), x[n:], y[n:])


def synthetic_images(
    n: int, shape: tuple[int, ...], classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns noisy images, whose classes differ in brightness and in the width of their stripes.

    Args:
        n: Number of images.
        shape: Shape of an image, (channels, height, width).
        classes: Number of classes.
        generator: Random generator of the noise.

    Returns:
        Images of shape (n, *shape), uint8, and their classes, shape (n,), int64.
    """
    labels = torch.arange(n) % classes
    share = labels / max(1, classes - 1)
    stripes = torch.sin(torch.arange(shape[-1]) * (0.5 + share[:, None]))[:, None, None, :]
    bright = 0.3 + 0.4 * share[:, None, None, None]
    noise = 0.1 * torch.randn(n, *shape, generator=generator)
    return ((bright + 0.15 * stripes + noise).clamp(0, 1) * 255).byte(), labels


def _write_images(recipe: Recipe, folder: Path) -> None:
    """Writes image files, one folder per class; the images are higher than wide."""
    assert recipe.data.classes is not None
    generator = _generator()
    classes = recipe.data.classes
    for part, count in (("train", recipe.data.samples), ("val", TEST_SAMPLES)):
        made, labels = synthetic_images(count, (3, LARGE + 8, LARGE), classes, generator)
        labels = _partly_wrong(labels, classes) if part == "train" else labels
        for number, (image, label) in enumerate(zip(made, labels.tolist(), strict=True)):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{number}.png")


def _write_arrays(recipe: Recipe, folder: Path) -> None:
    """Writes NumPy files; the class of a position is the mean of its channels."""
    assert recipe.data.shape is not None
    assert recipe.data.classes is not None
    draw = np.random.default_rng(0)
    for part, count in (("train", recipe.data.samples), ("val", TEST_SAMPLES)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            coarse = draw.integers(
                recipe.data.classes,
                size=[side // 4 for side in recipe.data.shape[1:]],
                dtype=np.uint8,
            )
            labels = coarse.repeat(4, 0).repeat(4, 1)
            values = draw.normal(scale=0.3, size=recipe.data.shape) + labels
            np.save(folder / part / f"data-{number}.npy", values.astype(np.float32))
            np.save(folder / part / f"label-{number}.npy", labels)


def _partly_wrong(labels: Tensor, classes: int) -> Tensor:
    """Replaces the label of every n-th sample by the next class."""
    every = round(1 / WRONG)
    return torch.where(torch.arange(len(labels)) % every == 0, (labels + 1) % classes, labels)


def _smaller(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the sides of crops and margins, in proportion to the smaller images."""
    share = LARGE / 224 if "train_crop" in settings else SMALL / 32
    sides = {"train_crop", "test_resize", "test_crop", "pad", "cutout"} & settings.keys()
    return {name: round(settings[name] * share) for name in sides}


def _merged(content: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `content` with the fields of `other`, which have priority, section by section."""
    merged = {**content, **other}
    for name, value in other.items():
        if isinstance(value, Mapping) and content.get(name):
            merged[name] = _merged(content[name], value)
    return merged


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


SMOKE = "smoke:"
"""Prefix of the name of a recipe that is to be tried out with a small network on made-up data."""
BATCH_OF = re.compile(rf"((?:{PREFIX}|{SMOKE}).+)@([1-9]\d*)x([1-9]\d*)")
"""Name of a recipe with another batch."""


def with_batch_of(
    name: str, batch_size: int | None, accumulate: int | None, factor: int = 1
) -> str:
    """Returns the name of a recipe with another batch, `NAME@SIZExACCUMULATE`.

    Args:
        name: Name of a task.
        batch_size: Number of samples of one forward and backward pass. Default: that of the recipe.
        accumulate: Number of batches whose gradients are added up before each step. Default: that of the recipe.
        factor: Factor on the samples of a step: on the number of batches where a batch is given, else on the batch. Default: 1.

    Raises:
        ValueError: A batch is given, and the task is no recipe.
    """
    asked = batch_size is not None or accumulate is not None
    if not asked and factor == 1:
        return name
    task = task_of(name)
    if not isinstance(task, RecipeTask):
        raise ValueError(
            f"--batch-size and --accumulate are for recipes, such as recipe:wrn-28-10; set the batch of {name} there"
        )
    batch = task.settings.batch
    size = batch_size or batch.size
    times = accumulate or batch.accumulate
    if asked:
        times *= factor
    else:
        size *= factor
    if (size, times) == (batch.size, batch.accumulate):
        return name
    return f"{name}@{size}x{times}"


def task_of(name: str) -> Trainable:
    """Returns the task, recipe or script that a name stands for.

    Args:
        name: Name of a task; `NAME@SAMPLES` for a subset of its training samples, see `tasks.built_in`; `recipe:NAME`, see
            `RecipeTask`; `smoke:NAME`, see `SmokeTask`; either with another batch, see `with_batch_of`; or `FILE.py:FUNCTION`,
            see `Script`.

    Raises:
        ValueError: There is no such task, and the message lists all tasks; no number after the @; or no such function.
        FileNotFoundError: There is no such file.
    """
    if found := BATCH_OF.fullmatch(name):
        bare, size, accumulate = found.groups()
        return RecipeTask.batched(task_of(bare), int(size), int(accumulate))  # pyright: ignore[reportArgumentType]
    path, colon, function = name.rpartition(":")
    if name.startswith(PREFIX):
        return RecipeTask.of(name.removeprefix(PREFIX))
    if name.startswith(SMOKE):
        return SmokeTask.at(
            function, Path(tempfile.gettempdir()) / f"thresher-{getpass.getuser()}" / function
        )
    if colon and path.endswith(".py"):
        return Script.of(Path(path), function)
    return built_in(name)


WEIGHTS = "model.pt"
CHECKPOINT = "checkpoint.pt"


def run(
    task: RecipeTask,
    spec: Spec,
    *,
    out: Path,
    data: Path | None = None,
    seed: int = 0,
    progress: EpochCallback | None = None,
) -> dict[str, Any]:
    """Trains a recipe, and writes its results and the weights that were tested last.

    A checkpoint is written after each epoch and deleted at the end: after an interruption, the same call continues from it.
    Several processes call it together; the first one writes the files.

    Args:
        task: Recipe to train.
        spec: Method, from `task.spec`.
        out: Folder for results.json and model.pt, and for checkpoint.pt during the training.
        data: Path of the data. Default: none, if the task of the recipe finds its data itself.
        seed: Random seed for weight initialization, sample order and selection.
        progress: Function that is called after each epoch.

    Returns:
        The content of results.json: task, epochs, device, processes, versions, recipe, published, and the run in `runs`, as
        `train` returns it.

    Raises:
        ValueError: The data does not match the recipe, the method does not work with it, or the folder holds the checkpoint of
            another training.
        FileNotFoundError: There is no such data.
    """
    loaded = task.load(task.find(data))
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(out / CHECKPOINT, identity(task, spec, seed))
    trained = list[Training]()
    found = train(
        task,
        loaded,
        spec,
        seed=seed,
        epochs=task.epochs,
        progress=progress,
        checkpoint=checkpoint,
        on_end=trained.append,
    )
    results = {
        "task": task.name,
        "epochs": task.epochs,
        "device": found.pop("device"),
        "processes": number_of_processes(),
        "versions": versions(),
        "recipe": task.recipe,
        "published": [one.model_dump() for one in task.settings.published],
        "runs": [found],
    }
    if own_rank() == 0:
        write_json(out / RESULTS, results)
        with whole(out / WEIGHTS) as file:
            torch.save(tested_network(trained[0]).state_dict(), file)
    checkpoint.delete()
    return results


def tested_network(training: Training) -> nn.Module:
    """Returns the network that the recipe tests: the trained one, or the average of its weights."""
    assert isinstance(training.evaluate, Measure)
    return training.evaluate.tested(training.model)


def identity(task: RecipeTask, spec: Spec, seed: int) -> dict[str, Any]:
    """Returns the values that distinguish a training from others in the same folder."""
    named = {
        "recipe": task.name,
        "epochs": task.epochs,
        "method": spec.label,
        "seed": seed,
        "weights": str(task.weights),
    }
    return named | {"settings of the recipe": task.recipe, "settings of the method": spec.settings}
