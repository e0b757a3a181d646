"""Procedural contours for pretraining, and real images of the same size for fine-tuning.

The contours are closed curves, sums of two sinusoidal waves on a circle, drawn point by point in concentric orbits: a small
approximation of the Visual Atoms (arXiv:2303.01112) that Fractal-3K consists of. A class is a pair of frequencies with their
amplitudes and a number of orbits; its images are rotated, squeezed, shifted and made noisy at random.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from thresher.experiments.tasks.data import images
from thresher.experiments.tasks.data.base import Data, training_subset

CLASSES, TRAIN, TEST = 50, 100, 20
"""Number of classes, and of images per class for training and for testing."""
SIDE, POINTS = 32, 200
"""Side of an image in pixels, and number of points of an orbit."""
FREQUENCIES, ORBITS, AMPLITUDES = range(1, 13), range(1, 7), (0.1, 0.4)
"""Numbers of waves around the circle, numbers of concentric copies, and range of the amplitudes in radii."""
NOISE, TURN, SHIFT, SQUEEZE = 0.02, np.pi / 6, 1.5, 0.7
"""Standard deviation of the radius of a point, in radii; largest rotation, in radians; largest shift, in pixels; smallest ratio
of the axes."""
WHITE = 3
"""Number of points in a pixel from which the pixel is white."""
FASHION = 2000
"""Number of training samples of fashion-mnist for fine-tuning."""


@dataclass(frozen=True)
class Contour:
    """The curve that the images of a class have in common.

    Args:
        frequencies: Numbers of waves around the circle of the two sinusoids.
        amplitudes: Amplitudes of the two sinusoids, in radii.
        orbits: Number of concentric copies of the curve.
    """

    frequencies: tuple[int, int]
    amplitudes: tuple[float, float]
    orbits: int

    def draw(self, number: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Returns images of shape (number, SIDE, SIDE), from 0, black, to 1, white."""
        angle = np.linspace(0, 2 * np.pi, POINTS, endpoint=False)
        wave = 1 + sum(a * np.sin(f * angle) for f, a in zip(self.frequencies, self.amplitudes, strict=True))
        orbit = np.arange(1, self.orbits + 1)[:, None] / self.orbits / (1 + sum(self.amplitudes))
        radius = orbit * (wave + rng.normal(0, NOISE, (number, self.orbits, POINTS)))
        squeeze, turn, right, down = rng.uniform((SQUEEZE, -TURN, -SHIFT, -SHIFT), (1, TURN, SHIFT, SHIFT), (number, 4)).T
        oval = squeeze[:, None] * np.cos(angle) + 1j * np.sin(angle)
        turned = radius * (oval * np.exp(1j * turn)[:, None])[:, None]
        at = (SIDE / 2 - SHIFT) * turned + (SIDE / 2 + right + 1j * (SIDE / 2 + down))[:, None, None]
        column, row = (np.clip(axis, 0, SIDE - 1).astype(np.int64) for axis in (at.real, at.imag))
        pixel = (np.arange(number)[:, None, None] * SIDE + row) * SIDE + column
        points = np.bincount(pixel.ravel(), minlength=number * SIDE * SIDE).reshape(number, SIDE, SIDE)
        return (np.minimum(points, WHITE) / WHITE).astype(np.float32)


@dataclass(frozen=True)
class Pretraining(Data):
    """Samples for pretraining.

    Args:
        downstream: Samples of the same shape for fine-tuning afterwards.
    """

    downstream: Data


def contours(_: Path | None = None) -> Data:
    """Returns 50 classes of contours of 32x32 pixels, always the same, with 100 training and 20 test images per class."""
    rng = np.random.default_rng(0)
    drawn = np.stack([contour.draw(TRAIN + TEST, rng) for contour in random_contours(CLASSES, rng)])
    parts = {"train": drawn[:, :TRAIN], "test": drawn[:, TRAIN:]}
    labels = np.arange(CLASSES)
    return images.normalised(
        {name: (drawings.reshape(-1, SIDE, SIDE), labels.repeat(drawings.shape[1])) for name, drawings in parts.items()}
    )


def random_contours(number: int, rng: np.random.Generator) -> list[Contour]:
    """Returns contours of which no two have the same frequencies and number of orbits."""
    kinds = list(product(combinations(FREQUENCIES, 2), ORBITS))
    chosen = [kinds[place] for place in rng.permutation(len(kinds))[:number]]
    return [Contour(frequencies, tuple(rng.uniform(*AMPLITUDES, 2)), orbits) for frequencies, orbits in chosen]


def contours_and_digits(_: Path | None = None) -> Pretraining:
    """Returns contours, and the digits of scikit-learn enlarged to the same size."""
    return _with_downstream(images.digits(), lambda inputs: F.interpolate(inputs, (SIDE, SIDE), mode="bilinear"))


def contours_and_fashion(folder: Path | None = None) -> Pretraining:
    """Returns contours, and 2,000 training samples and all test samples of fashion-mnist with black margins.

    Raises:
        FileNotFoundError, ValueError: See `images.fashion_mnist`.
    """
    fashion = training_subset(images.fashion_mnist(folder), FASHION)
    black = float(fashion.test_inputs.min())
    return _with_downstream(fashion, lambda inputs: F.pad(inputs, (2, 2, 2, 2), value=black))


def _with_downstream(real: Data, fit: Callable[[Tensor], Tensor]) -> Pretraining:
    inputs, labels = real.train.tensors
    drawn = contours()
    fitted = Data(TensorDataset(fit(inputs), labels), fit(real.test_inputs), real.test_targets)
    return Pretraining(drawn.train, drawn.test_inputs, drawn.test_targets, fitted)
