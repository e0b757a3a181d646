"""The data sets of a recipe, read from files, and the transforms of their images."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from thresher_lab.recipes.schema import ImageSection, Recipe
from thresher_lab.tasks.base import Data
from thresher_lab.tasks.vision import optional

Transform = Callable[[Image.Image], Tensor]

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of the channels of ImageNet."""
MAX_MAGNITUDE = 9.99
"""Largest magnitude of RandAugment: at 10, timm posterises to 0 bits, which Pillow refuses."""


def train_transform(settings: ImageSection) -> Transform:
    """Returns the transform of training images; all its randomness comes from the random generator of torch."""
    vision = optional("torchvision.transforms")
    steps: list[Any] = []
    if settings.train_crop is not None:
        steps.append(
            vision.RandomResizedCrop(settings.train_crop, interpolation=_interpolation(settings))
        )
    if settings.pad:
        steps.append(PaddedCrop(settings.pad))
    steps += [vision.RandomHorizontalFlip(settings.flip)] * bool(settings.flip)
    steps += [vision.RandomVerticalFlip(settings.vertical_flip)] * bool(settings.vertical_flip)
    if settings.auto_augment is not None:
        steps.append(_auto_augment(settings))
    steps += _to_tensor(settings)
    if settings.cutout:
        steps.append(Cutout(settings.cutout))
    if settings.erasing:
        steps.append(
            vision.RandomErasing(
                settings.erasing, value="random" if settings.erase_with == "noise" else 0
            )
        )
    return vision.Compose(steps)


def test_transform(settings: ImageSection) -> Transform:
    """Returns the transform of test images, which takes the middle of the image and draws nothing."""
    vision = optional("torchvision.transforms")
    steps: list[Any] = []
    if settings.test_resize is not None:
        steps.append(vision.Resize(settings.test_resize, interpolation=_interpolation(settings)))
    if settings.test_crop is not None:
        steps.append(vision.CenterCrop(settings.test_crop))
    return vision.Compose([*steps, *_to_tensor(settings)])


class PaddedCrop:
    """A random crop, of the size of the image, from the image with a black margin.

    Args:
        pad: Width of the margin in pixels.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, image: Image.Image) -> Image.Image:
        """Returns the crop; draws two random numbers."""
        across, down = torch.randint(-self._pad, self._pad + 1, (2,)).tolist()
        return image.crop((across, down, across + image.width, down + image.height))


class Cutout:
    """Sets a square around a random pixel to the mean; parts outside the image are cut off (arXiv:1708.04552).

    Args:
        side: Side of the square in pixels.
    """

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, image: Tensor) -> Tensor:
        """Changes an image of shape (channels, H, W) in place and returns it."""
        y, x = (int(torch.randint(size, ())) - self._side // 2 for size in image.shape[1:])
        image[:, max(0, y) : max(0, y + self._side), max(0, x) : max(0, x + self._side)] = 0
        return image


class SeededTransform:
    """A transform that uses the global random states of Python and NumPy, here seeded by torch; both states are restored.

    Args:
        transform: Transform of an image.
    """

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        self._transform = transform

    def __call__(self, image: Image.Image) -> Image.Image:
        """Returns the transformed image; draws one random number of torch."""
        seed = int(torch.randint(2**31, ()))
        of_python = random.getstate()
        of_numpy = np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            return self._transform(image)
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def _auto_augment(settings: ImageSection) -> Callable[[Image.Image], Image.Image]:
    policy = settings.auto_augment or ""
    if policy == "ta_wide":
        return optional("torchvision.transforms").TrivialAugmentWide(
            interpolation=_interpolation(settings)
        )
    gray = tuple(round(255 * value) for value in settings.mean or MEAN)
    options = {
        "img_mean": gray,
        "interpolation": getattr(Image.Resampling, settings.interpolation.upper()),
    }
    return SeededTransform(
        optional("timm.data").rand_augment_transform(
            policy, options | {"magnitude_max": MAX_MAGNITUDE}
        )
    )


def _interpolation(settings: ImageSection) -> Any:
    return optional("torchvision.transforms").InterpolationMode(settings.interpolation)


def _to_tensor(settings: ImageSection) -> list[Any]:
    """Returns the steps from an image to a normalized tensor of shape (channels, H, W), float32."""
    vision = optional("torchvision.transforms")
    return [vision.ToTensor(), vision.Normalize(settings.mean or MEAN, settings.std or STD)]


LAYOUTS = {
    "folder": "{part}/ with a folder of images for each class",
    "arrays": "{part}/ with data-NAME.npy, shape (channels, height, width), and label-NAME.npy, shape (height, width)",
}


@dataclass(frozen=True)
class TrainAndTest:
    """The training samples and the test samples, pairs of an input and a target.

    Args:
        train: Training samples.
        test: Test samples.
    """

    train: Dataset[Any]
    test: Dataset[Any]


class ImageDataset(Dataset[tuple[Tensor, Any]]):
    """Images as inputs of the network, transformed again at each access.

    Args:
        images: Files, or pixels of shape (N, 3, H, W), uint8.
        targets: Classes of the images.
        transform: Transform from an image to an input.
        soft: Function from a class to its target. Default: the target is the class itself.

    Attributes:
        targets: Classes of the images.
    """

    def __init__(
        self,
        images: Sequence[Path] | Tensor,
        targets: list[int],
        transform: Transform,
        soft: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.targets = targets
        self._images = images
        self._transform = transform
        self._soft = soft

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        stored = self._images[index]
        target = self.targets[index]
        if isinstance(stored, Path):
            image = open_image(stored)
        else:
            image = Image.fromarray(stored.permute(1, 2, 0).numpy())
        return self._transform(image), target if self._soft is None else self._soft(target)


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Inputs, and one class per position; each input and each target is a NumPy file.

    Args:
        files: Files of the inputs and of their targets.
        shape: Shape of an input.
        classes: Number of classes; targets are 0 to `classes` - 1.
    """

    def __init__(
        self, files: Sequence[tuple[Path, Path]], shape: tuple[int, ...], classes: int
    ) -> None:
        self._files = files
        self._shape = shape
        self._classes = classes

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, labels_file = self._files[index]
        values = _read_array(file, self._shape)
        labels = _read_array(labels_file, self._shape[1:])
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= self._classes:
            raise ValueError(
                f"{labels_file}: classes are whole numbers from 0 to {self._classes - 1}; it has others"
            )
        return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(
            labels.astype(np.int64)
        )


def open_image(path: Path) -> Image.Image:
    """Reads an image in red, green and blue.

    Raises:
        ValueError: The file is truncated, damaged, or not an image; the message names the file.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not an image that can be read: {error}") from error


def find_folder(recipe: Recipe, folder: Path | None) -> Path:
    """Returns the folder of the data of a recipe that has no task.

    Raises:
        FileNotFoundError: No folder was given, or a subfolder is missing.
    """
    wanted = "; ".join(LAYOUTS[recipe.data.kind].format(part=part) for part in _subfolders(recipe))
    if folder is None:
        raise FileNotFoundError(
            f"data: {recipe.data.name} is not there by itself: --data DIR with {wanted}"
        )
    missing = [str(folder / part) for part in _subfolders(recipe) if not (folder / part).is_dir()]
    if missing:
        raise FileNotFoundError(
            f"data: no folder {' and no '.join(missing)}; --data DIR is a folder with {wanted}"
        )
    return folder


def read_folder(recipe: Recipe, folder: Path) -> TrainAndTest:
    """Reads the data of a recipe from a folder.

    Raises:
        ValueError: The data does not match the recipe, or an input has no target.
    """
    if recipe.data.kind == "arrays":
        assert recipe.data.classes is not None
        files = [_pairs(folder / part) for part in _subfolders(recipe)]
        train, test = (
            ArrayDataset(found, recipe.data.shape or (), recipe.data.classes)
            for found in _split_off_test(files, recipe)
        )
        return TrainAndTest(train, test)
    found = [_images_by_class(folder / part) for part in _subfolders(recipe)]
    for part, (classes, _) in zip(_subfolders(recipe), found, strict=True):
        if len(classes) != recipe.data.classes:
            raise ValueError(
                f"data.classes: {recipe.data.classes}, but {folder / part} has {len(classes)} folders of classes"
            )
        if classes != found[0][0]:
            odd = min(set(classes) ^ set(found[0][0]))
            raise ValueError(
                f"data: {folder / 'train'} and {folder / part} have different classes: {odd!r} is in one of them"
            )
    train, test = _split_off_test([files for _, files in found], recipe)
    return image_datasets(recipe, *zip(*train, strict=True), *zip(*test, strict=True))


def from_task(recipe: Recipe, data: Data) -> TrainAndTest:
    """Returns the data sets of a recipe, from data that a task has read.

    Raises:
        ValueError: The samples have another shape than `data.shape` of the recipe.
    """
    got = tuple(data.train.tensors[0].shape[1:])
    if got != recipe.data.shape:
        raise ValueError(
            f"data.shape: {recipe.data.shape}, but samples of the task {recipe.data.task} have shape {got}"
        )
    if recipe.pictures is None:
        return TrainAndTest(data.train, TensorDataset(data.test_inputs, data.test_targets))
    train, test = as_bytes(data)
    return image_datasets(
        recipe, train, data.train.tensors[1].tolist(), test, data.test_targets.tolist()
    )


def as_bytes(data: Data) -> tuple[Tensor, Tensor]:
    """Undoes the normalization of images whose smallest pixel was 0 and whose largest was 255 in every channel.

    Returns:
        Training images and test images, shape (N, channels, H, W), uint8.
    """
    pixels = data.train.tensors[0]
    least = pixels.amin((0, 2, 3), keepdim=True)
    most = pixels.amax((0, 2, 3), keepdim=True)
    train, test = (
        ((part - least) / (most - least) * 255).round().clamp(0, 255).byte()
        for part in (pixels, data.test_inputs)
    )
    return train, test


def image_datasets(
    recipe: Recipe, train: Any, targets: Iterable[int], test: Any, test_targets: Iterable[int]
) -> TrainAndTest:
    """Returns training and test images with the transforms of a recipe."""
    assert recipe.pictures is not None
    settings = recipe.pictures
    soft = _soft(recipe)
    if isinstance(train, Tensor) and settings.mean is None:
        std, mean = torch.std_mean(train.float() / 255, (0, 2, 3))
        settings = settings.model_copy(
            update={"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
        )
    to_train = train_transform(settings)
    to_test = test_transform(settings)
    return TrainAndTest(
        ImageDataset(train, [*targets], to_train, soft),
        ImageDataset(test, [*test_targets], to_test),
    )


def _soft(recipe: Recipe) -> Callable[[int], Tensor] | None:
    """Returns the function from a class to smoothed probabilities; None if targets are classes."""
    if not recipe.loss.soft_targets or recipe.data.classes is None:
        return None
    classes = recipe.data.classes
    share = recipe.loss.label_smoothing
    rows = torch.eye(classes) * (1 - share) + share / classes
    return rows.__getitem__


def _subfolders(recipe: Recipe) -> tuple[str, ...]:
    return ("train", "val") if recipe.data.test_every is None else ("train",)


def _split_off_test(found: list[list[Any]], recipe: Recipe) -> tuple[list[Any], list[Any]]:
    """Returns the training samples and the test samples."""
    every = recipe.data.test_every
    if every is None:
        return found[0], found[1]
    [samples] = found
    return [one for place, one in enumerate(samples) if place % every != every - 1], samples[
        every - 1 :: every
    ]


def _images_by_class(folder: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Returns the names of the classes, and all images with the number of their class.

    Raises:
        ValueError: A class has no image, or there is no class.
    """
    try:
        found = optional("torchvision.datasets").ImageFolder(folder)
    except FileNotFoundError as error:
        raise ValueError(
            f"data: {error}; it is to be {LAYOUTS['folder'].format(part=folder.name)}"
        ) from error
    return found.classes, [(Path(path), number) for path, number in found.samples]


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Returns pairs of an input file and the target file with the same name.

    Raises:
        ValueError: There are no inputs, or an input has no target.
    """
    pairs = [
        (path, path.with_name("label" + path.name.removeprefix("data")))
        for path in sorted(folder.glob("data-*.npy"))
    ]
    if not pairs:
        raise ValueError(
            f"data: {folder} has no data-NAME.npy; it is to be {LAYOUTS['arrays'].format(part=folder.name)}"
        )
    for path, labels in pairs:
        if not labels.is_file():
            raise ValueError(f"data: {path} has no {labels.name} beside it")
    return pairs


def _read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Reads the array in a NumPy file.

    Raises:
        ValueError: The file is damaged, or has another shape; the message names it.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a NumPy file that can be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.shape != shape:
        got = getattr(array, "shape", type(array).__name__)
        raise ValueError(f"{path}: shape {got}; data.shape of the recipe is {shape}")
    return array
