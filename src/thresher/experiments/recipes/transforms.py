"""Transforms and augmentation of images, with torchvision and with RandAugment of timm."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from thresher.experiments.recipes.schema import ImageSection
from thresher.experiments.tasks.vision import optional

Transform = Callable[[Image.Image], Tensor]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the channels of ImageNet."""
MAX_MAGNITUDE = 9.99
"""Largest magnitude of RandAugment: at 10, timm posterises to 0 bits, which Pillow refuses."""


def train_transform(settings: ImageSection) -> Transform:
    """Returns the transform of training images; all its randomness comes from the random generator of torch."""
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
    steps += _to_tensor(settings)
    if settings.cutout:
        steps.append(Cutout(settings.cutout))
    if settings.erasing:
        steps.append(vision.RandomErasing(settings.erasing, value="random" if settings.erase_with == "noise" else 0))
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
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
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
        return optional("torchvision.transforms").TrivialAugmentWide(interpolation=_interpolation(settings))
    grey = tuple(round(255 * value) for value in settings.mean or MEAN)
    given = {"img_mean": grey, "interpolation": getattr(Image.Resampling, settings.interpolation.upper())}
    return SeededTransform(optional("timm.data").rand_augment_transform(policy, given | {"magnitude_max": MAX_MAGNITUDE}))


def _interpolation(settings: ImageSection) -> Any:
    return optional("torchvision.transforms").InterpolationMode(settings.interpolation)


def _to_tensor(settings: ImageSection) -> list[Any]:
    """Returns the steps from an image to a normalised tensor of shape (channels, H, W), float32."""
    vision = optional("torchvision.transforms")
    return [vision.ToTensor(), vision.Normalize(settings.mean or MEAN, settings.std or STD)]
