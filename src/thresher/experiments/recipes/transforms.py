"""What is done to pictures before the network sees them: torchvision's transforms, and timm's RandAugment."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from thresher.experiments.recipes.schema import Pictures
from thresher.experiments.tasks.vision import optional

Transform = Callable[[Image.Image], Tensor]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's channels."""
LARGEST = 9.99
"""Magnitude of RandAugment: at 10 timm posterises to 0 bits, which Pillow refuses."""


def training(settings: Pictures) -> Transform:
    """For pictures to train on, all that is drawn coming from torch's random numbers."""
    vision = optional("torchvision.transforms")
    steps: list[Any] = []
    if settings.train_crop is not None:
        steps.append(vision.RandomResizedCrop(settings.train_crop, interpolation=_interpolation(settings)))
    if settings.pad:
        steps.append(PaddedCrop(settings.pad))
    steps += [vision.RandomHorizontalFlip(settings.flip)] * bool(settings.flip)
    steps += [vision.RandomVerticalFlip(settings.vertical_flip)] * bool(settings.vertical_flip)
    if settings.auto_augment is not None:
        steps.append(_auto_augment(settings))
    steps += _to_numbers(settings)
    if settings.cutout:
        steps.append(Cutout(settings.cutout))
    if settings.erasing:
        steps.append(vision.RandomErasing(settings.erasing, value="random" if settings.erase_with == "noise" else 0))
    return vision.Compose(steps)


def testing(settings: Pictures) -> Transform:
    """For pictures to test on: the middle, always the same."""
    vision = optional("torchvision.transforms")
    steps: list[Any] = []
    if settings.test_resize is not None:
        steps.append(vision.Resize(settings.test_resize, interpolation=_interpolation(settings)))
    if settings.test_crop is not None:
        steps.append(vision.CenterCrop(settings.test_crop))
    return vision.Compose([*steps, *_to_numbers(settings)])


class PaddedCrop:
    """A random part of the size of the picture, of the picture with black around it.

    Args:
        pad: Pixels of black on each side.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, picture: Image.Image) -> Image.Image:
        """Draws two numbers."""
        across, down = torch.randint(-self._pad, self._pad + 1, (2,)).tolist()
        return picture.crop((across, down, across + picture.width, down + picture.height))


class Cutout:
    """Sets a square around a random pixel to the mean; what would lie outside is cut off (arXiv:1708.04552).

    Args:
        side: Of the square.
    """

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, picture: Tensor) -> Tensor:
        """Shape (channels, H, W), changed in place."""
        y, x = (int(torch.randint(size, ())) - self._side // 2 for size in picture.shape[1:])
        picture[:, max(0, y) : max(0, y + self._side), max(0, x) : max(0, x + self._side)] = 0
        return picture


class Seeded:
    """A transform that draws from the global states of Python and NumPy, seeded by torch; both are put back.

    Args:
        transform: It.
    """

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        self._transform = transform

    def __call__(self, picture: Image.Image) -> Image.Image:
        """Draws one number of torch's."""
        seed = int(torch.randint(2**31, ()))
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            return self._transform(picture)
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def _auto_augment(settings: Pictures) -> Callable[[Image.Image], Image.Image]:
    policy = settings.auto_augment or ""
    if policy == "ta_wide":
        return optional("torchvision.transforms").TrivialAugmentWide(interpolation=_interpolation(settings))
    grey = tuple(round(255 * value) for value in settings.mean or MEAN)
    given = {"img_mean": grey, "interpolation": getattr(Image.Resampling, settings.interpolation.upper())}
    return Seeded(optional("timm.data").rand_augment_transform(policy, given | {"magnitude_max": LARGEST}))


def _interpolation(settings: Pictures) -> Any:
    return optional("torchvision.transforms").InterpolationMode(settings.interpolation)


def _to_numbers(settings: Pictures) -> list[Any]:
    """To float32 of shape (channels, H, W), normalised."""
    vision = optional("torchvision.transforms")
    return [vision.ToTensor(), vision.Normalize(settings.mean or MEAN, settings.std or STD)]
