"""The data of a recipe, read from where its files lie; what is wrong with them is told by file, and by field of the recipe."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from thresher.experiments.recipes import transforms
from thresher.experiments.recipes.schema import Recipe
from thresher.experiments.tasks.data.base import Data

ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}
"""Of pictures."""
LAYOUTS = {
    "folder": "{part}/ with a folder of pictures for each class",
    "arrays": "{part}/ with data-NAME.npy, shape (channels, height, width), and label-NAME.npy, shape (height, width)",
}


@dataclass(frozen=True)
class Sets:
    """What is trained and tested on: pairs of an input and a target."""

    train: Dataset[Any]
    test: Dataset[Any]


class Shown(Dataset[tuple[Tensor, Any]]):
    """Pictures as the network sees them, changed anew each time.

    Args:
        pictures: Files, or bytes of shape (N, 3, H, W).
        targets: Their classes.
        transform: Of a picture to an input.
        soft: Of a class to its target. Default: the class itself.

    Attributes:
        targets: The classes.
    """

    def __init__(
        self,
        pictures: Sequence[Path] | Tensor,
        targets: list[int],
        transform: transforms.Transform,
        soft: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.targets = targets
        self._pictures, self._transform, self._soft = pictures, transform, soft

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = self._pictures[index], self.targets[index]
        shown = opened(picture) if isinstance(picture, Path) else Image.fromarray(picture.permute(1, 2, 0).numpy())
        return self._transform(shown), target if self._soft is None else self._soft(target)


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and classes of every position, each in a file of NumPy's.

    Args:
        files: Of inputs and of targets.
        shape: Of an input.
        classes: Targets are 0 to one less.
    """

    def __init__(self, files: Sequence[tuple[Path, Path]], shape: tuple[int, ...], classes: int) -> None:
        self._files, self._shape, self._classes = files, shape, classes

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, labels_file = self._files[index]
        values, labels = _array(file, self._shape), _array(labels_file, self._shape[1:])
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= self._classes:
            raise ValueError(f"{labels_file}: classes are whole numbers from 0 to {self._classes - 1}; it has others")
        return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))


def opened(path: Path) -> Image.Image:
    """A picture in red, green and blue.

    Raises:
        ValueError: It is truncated, damaged, or no picture; the message names the file.
    """
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not a picture that can be read: {error}") from error


def find(recipe: Recipe, folder: Path | None) -> Path:
    """The folder of a recipe whose data is no task.

    Raises:
        FileNotFoundError: None was given, or it lacks a part.
    """
    wanted = "; ".join(LAYOUTS[recipe.data.kind].format(part=part) for part in _parts(recipe))
    if folder is None:
        raise FileNotFoundError(f"data: {recipe.data.name} is not there by itself: --data DIR with {wanted}")
    missing = [str(folder / part) for part in _parts(recipe) if not (folder / part).is_dir()]
    if missing:
        raise FileNotFoundError(f"data: no folder {' and no '.join(missing)}; --data DIR is a folder with {wanted}")
    return folder


def read(recipe: Recipe, folder: Path) -> Sets:
    """The data of a recipe in a folder that `find` found.

    Raises:
        ValueError: It is not as the recipe has it, or a file has no partner.
    """
    if recipe.data.kind == "arrays":
        assert recipe.data.classes is not None
        files = [_pairs(folder / part) for part in _parts(recipe)]
        train, test = (Arrays(found, recipe.data.shape or (), recipe.data.classes) for found in _parted(files, recipe))
        return Sets(train, test)
    found = [_classified(folder / part) for part in _parts(recipe)]
    for part, (classes, _) in zip(_parts(recipe), found, strict=True):
        if len(classes) != recipe.data.classes:
            raise ValueError(f"data.classes: {recipe.data.classes}, but {folder / part} has {len(classes)} folders of classes")
        if classes != found[0][0]:
            odd = min(set(classes) ^ set(found[0][0]))
            raise ValueError(f"data: {folder / 'train'} and {folder / part} have different classes: {odd!r} is in one of them")
    train, test = _parted([files for _, files in found], recipe)
    return shown(recipe, *zip(*train, strict=True), *zip(*test, strict=True))


def of_task(recipe: Recipe, data: Data) -> Sets:
    """Data that a task has read.

    Raises:
        ValueError: Its samples have another shape than the recipe's.
    """
    got = tuple(data.train.tensors[0].shape[1:])
    if got != recipe.data.shape:
        raise ValueError(f"data.shape: {recipe.data.shape}, but samples of the task {recipe.data.task} have shape {got}")
    if recipe.pictures is None:
        return Sets(data.train, TensorDataset(data.test_inputs, data.test_targets))
    train, test = as_bytes(data)
    return shown(recipe, train, data.train.tensors[1].tolist(), test, data.test_targets.tolist())


def as_bytes(data: Data) -> tuple[Tensor, Tensor]:
    """Normalised pictures as they were before: in every channel the least pixel was 0 and the largest 255.

    Returns:
        Those to train on and those to test on, shape (N, channels, H, W), uint8.
    """
    pixels = data.train.tensors[0]
    least, most = pixels.amin((0, 2, 3), keepdim=True), pixels.amax((0, 2, 3), keepdim=True)
    train, test = (((part - least) / (most - least) * 255).round().clamp(0, 255).byte() for part in (pixels, data.test_inputs))
    return train, test


def shown(recipe: Recipe, train: Any, targets: Iterable[int], test: Any, test_targets: Iterable[int]) -> Sets:
    """Pictures to train and to test on, transformed as a recipe has it."""
    assert recipe.pictures is not None
    settings, soft = recipe.pictures, _soft(recipe)
    if isinstance(train, Tensor) and settings.mean is None:
        std, mean = torch.std_mean(train.float() / 255, (0, 2, 3))
        settings = settings.model_copy(update={"mean": tuple(mean.tolist()), "std": tuple(std.tolist())})
    to_train, to_test = transforms.training(settings), transforms.testing(settings)
    return Sets(Shown(train, [*targets], to_train, soft), Shown(test, [*test_targets], to_test))


def _soft(recipe: Recipe) -> Callable[[int], Tensor] | None:
    """Classes to probabilities, some of which all classes share."""
    if not recipe.loss.soft_targets or recipe.data.classes is None:
        return None
    classes, share = recipe.data.classes, recipe.loss.label_smoothing
    rows = torch.eye(classes) * (1 - share) + share / classes
    return rows.__getitem__


def _parts(recipe: Recipe) -> tuple[str, ...]:
    return ("train", "val") if recipe.data.test_every is None else ("train",)


def _parted(found: list[list[Any]], recipe: Recipe) -> tuple[list[Any], list[Any]]:
    """Samples to train and to test on."""
    every = recipe.data.test_every
    if every is None:
        return found[0], found[1]
    [samples] = found
    return [one for place, one in enumerate(samples) if place % every != every - 1], samples[every - 1 :: every]


def _classified(folder: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """The classes, and all pictures with the number of theirs.

    Raises:
        ValueError: A class has no picture, or there is none.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, number) for number, name in enumerate(classes) for path in _pictures(folder / name)]
    if not files:
        raise ValueError(f"data: {folder} has no folder of pictures; it is to be {LAYOUTS['folder'].format(part=folder.name)}")
    return classes, files


def _pictures(folder: Path) -> Iterator[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not found:
        raise ValueError(f"data: {folder} has no picture that ends in {', '.join(sorted(ENDINGS))}")
    yield from found


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Inputs and targets by their common name.

    Raises:
        ValueError: There are none, or an input has no target.
    """
    pairs = [(path, path.with_name("label" + path.name.removeprefix("data"))) for path in sorted(folder.glob("data-*.npy"))]
    if not pairs:
        raise ValueError(f"data: {folder} has no data-NAME.npy; it is to be {LAYOUTS['arrays'].format(part=folder.name)}")
    for path, labels in pairs:
        if not labels.is_file():
            raise ValueError(f"data: {path} has no {labels.name} beside it")
    return pairs


def _array(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """What a file of NumPy's holds.

    Raises:
        ValueError: It is damaged, or of another shape; the message names it.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a file of NumPy's that can be read: {error}") from error
    if not isinstance(found, np.ndarray) or found.shape != shape:
        got = getattr(found, "shape", type(found).__name__)
        raise ValueError(f"{path}: shape {got}; by the recipe's data.shape it is {shape}")
    return found
