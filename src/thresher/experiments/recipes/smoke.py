"""A recipe made small enough for a minute on one core: the same path through the same code, on data that is made up."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from thresher.experiments.recipes import loading, sets
from thresher.experiments.recipes.schema import Recipe
from thresher.experiments.recipes.task import RecipeTask, changed, scaled
from thresher.experiments.tasks.data.base import Data
from thresher.experiments.training.specs import Spec
from thresher.scores import Scores

EPOCHS, BATCH, SAMPLES, TESTED, CLASSES = 8, 16, 128, 32, 3
LARGE, SMALL = 64, 16
"""Sides of pictures: of those that the recipe crops from larger ones, and of others."""
WRONG = 0.1
"""Share of the training pictures that are in a wrong class: hidden samples are moved back where the network doubts them."""


@dataclass(frozen=True)
class SmokeTask(RecipeTask):
    """A recipe with reduced sizes.

    Args:
        full: As it was.
        folder: Where what is made up goes.
    """

    shortened: int | None = EPOCHS
    full: Recipe | None = None
    folder: Path = Path()

    @classmethod
    def at(cls, name: str, folder: Path, **options: Any) -> "SmokeTask":
        """A recipe by its name; see `RecipeTask.of`."""
        file = loading.file_of(name)
        full = loading.read(file)
        return cls(file, reduced(full, file), full=full, folder=folder, **options)

    def spec(self, text: str | None = None) -> Spec:
        """The method; counts of epochs and steps shrink as those of the training have, and scores are made up."""
        assert self.full is not None
        steps = steps_of(self.settings) / steps_of(self.full)
        found = scaled(self.given_method(text), warmup_epochs=self.epochs / self.full.epochs, warmup_steps=steps)
        return changed(found, lambda name, value: str(self._scores()) if name == "scores" else value)

    def find(self, folder: Path | None) -> Path | None:
        """Where the data is made.

        Raises:
            ValueError: A folder was given.
        """
        if folder is not None:
            raise ValueError(f"--data {folder}: with --smoke the data is made up; leave out one of the two")
        if self.settings.data.kind == "folder":
            _write_pictures(self.settings, self.folder)
        elif self.settings.data.kind == "arrays":
            _write_arrays(self.settings, self.folder)
        return self.folder

    def load(self, folder: Path | None) -> sets.Sets:
        """The data."""
        if self.settings.data.kind != "task":
            return super().load(folder)
        return self.telling(lambda: sets.of_task(self.settings, made_up(self.settings)))

    def build(self, seed: int) -> Any:
        """See `RecipeTask.build`; weights to start from are those that the other recipe begins with."""
        source = self.settings.model.pretrained
        if source is None or self.weights is not None:
            return super().build(seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "pretrained.pt"
        torch.save(SmokeTask.at(source, self.folder).build(seed).state_dict(), file)
        return replace(self, weights=file).build(seed)

    def _scores(self) -> Path:
        """A file of random scores."""
        values = torch.rand(self.settings.data.samples, generator=_generator())
        file = self.folder / "scores.parquet"
        self.folder.mkdir(parents=True, exist_ok=True)
        Scores(torch.arange(len(values)), values, "made up").save(file)
        return file


def steps_of(recipe: Recipe) -> int:
    """Of an epoch."""
    return math.ceil(recipe.data.samples / recipe.batch.size)


def reduced(recipe: Recipe, file: Path) -> Recipe:
    """A recipe with the fields of its `smoke`, and the sizes of this module where that says nothing; its epochs stay.

    Raises:
        ValueError: A field of `smoke` is wrong.
    """
    data: dict[str, Any] = {"samples": SAMPLES}
    shape = recipe.data.shape
    if shape is None or len(shape) == 3:
        data |= {"shape": None if shape is None else (shape[0], SMALL, SMALL)}
        data |= {"classes": CLASSES} if recipe.data.kind != "arrays" else {}
    small: dict[str, Any] = {"batch": {"workers": 1, "per_worker": BATCH}, "data": data}
    if recipe.pictures is not None:
        small["pictures"] = _smaller(recipe.pictures.model_dump(exclude_none=True))
    if recipe.ema is not None:
        small["ema"] = {"steps": 2}
    return loading.checked(_merged(_merged(recipe.model_dump(), small), recipe.smoke), file, inside="smoke.")


def made_up(recipe: Recipe) -> Data:
    """Samples of the shape that a recipe has: pictures of classes, values to be predicted, or tokens to be continued."""
    shape, classes = recipe.data.shape, recipe.data.classes
    assert shape is not None
    generator, n = _generator(), recipe.data.samples
    if len(shape) == 3:
        assert classes is not None
        train, test = (pictures(count, shape, classes, generator) for count in (n, TESTED))
        return Data(TensorDataset(train[0].float(), _partly_wrong(train[1], classes)), test[0].float(), test[1])
    if classes is None:
        x = torch.randn(n + TESTED, *shape, generator=generator)
        y = x.mean(1, keepdim=True) + 0.1 * torch.randn(n + TESTED, 1, generator=generator)
    else:
        begin = torch.randint(min(classes, 50), (n + TESTED, 1), generator=generator)
        counted = (begin + torch.arange(shape[0] + 1)) % min(classes, 50)
        x, y = counted[:, :-1], counted[:, 1:]
    return Data(TensorDataset(x[:n], y[:n]), x[n:], y[n:])


def pictures(n: int, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Classes that differ in brightness and in the width of their stripes, under noise.

    Returns:
        Pictures of shape (n, *shape), uint8, and their classes, shape (n,), int64.
    """
    labels = torch.arange(n) % classes
    share = labels / max(1, classes - 1)
    stripes = torch.sin(torch.arange(shape[-1]) * (0.5 + share[:, None]))[:, None, None, :]
    bright = 0.3 + 0.4 * share[:, None, None, None]
    noise = 0.1 * torch.randn(n, *shape, generator=generator)
    return ((bright + 0.15 * stripes + noise).clamp(0, 1) * 255).byte(), labels


def _write_pictures(recipe: Recipe, folder: Path) -> None:
    """Files of pictures, a folder each class; higher than wide."""
    assert recipe.data.classes is not None
    generator, classes = _generator(), recipe.data.classes
    for part, count in (("train", recipe.data.samples), ("val", TESTED)):
        made, labels = pictures(count, (3, LARGE + 8, LARGE), classes, generator)
        labels = _partly_wrong(labels, classes) if part == "train" else labels
        for number, (picture, label) in enumerate(zip(made, labels.tolist(), strict=True)):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(place / f"{number}.png")


def _write_arrays(recipe: Recipe, folder: Path) -> None:
    """Files of NumPy's; the class of a position is the mean of its channels."""
    assert recipe.data.shape is not None
    assert recipe.data.classes is not None
    draw = np.random.default_rng(0)
    for part, count in (("train", recipe.data.samples), ("val", TESTED)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            coarse = draw.integers(recipe.data.classes, size=[side // 4 for side in recipe.data.shape[1:]], dtype=np.uint8)
            labels = coarse.repeat(4, 0).repeat(4, 1)
            values = draw.normal(scale=0.3, size=recipe.data.shape) + labels
            np.save(folder / part / f"data-{number}.npy", values.astype(np.float32))
            np.save(folder / part / f"label-{number}.npy", labels)


def _partly_wrong(labels: Tensor, classes: int) -> Tensor:
    """Every so-manieth one class further."""
    every = round(1 / WRONG)
    return torch.where(torch.arange(len(labels)) % every == 0, (labels + 1) % classes, labels)


def _smaller(settings: dict[str, Any]) -> dict[str, Any]:
    """Sides of pictures, as the pictures shrink."""
    share = LARGE / 224 if "train_crop" in settings else SMALL / 32
    sides = {"train_crop", "test_resize", "test_crop", "pad", "cutout"} & settings.keys()
    return {name: round(settings[name] * share) for name in sides}


def _merged(content: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What `other` says, and all else of `content`."""
    parts = {name: value for name, value in other.items() if isinstance(value, Mapping) and content.get(name)}
    return {**content, **other, **{name: _merged(content[name], value) for name, value in parts.items()}}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
