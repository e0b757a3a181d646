"""Procedural contours to pretrain on, and real pictures of the same size to fine-tune on.

Closed curves, sums of two sinusoidal waves on a circle, drawn point by point in concentric orbits: an approximation, in small,
of the Visual Atoms (arXiv:2303.01112) that Fractal-3K consists of. A class is a pair of frequencies with their amplitudes and
a number of orbits; its pictures are turned, squeezed, shifted and shaken at random.
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
from thresher.experiments.tasks.data.base import Data, part

CLASSES, TRAIN, TEST = 50, 100, 20
"""Classes, and pictures of each for training and for testing."""
SIDE, POINTS = 32, 200
"""Pixels of a picture's side, and points of an orbit."""
FREQUENCIES, ORBITS, AMPLITUDES = range(1, 13), range(1, 7), (0.1, 0.4)
"""Waves around the circle, concentric copies, and bounds of the amplitudes in radii."""
SHAKE, TURN, SHIFT, SQUEEZE = 0.02, np.pi / 6, 1.5, 0.7
"""Standard deviation of a point's radius, in radii; largest turn; largest shift, in pixels; least ratio of the axes."""
WHITE = 3
"""Points in a pixel from which it is white."""
FASHION = 2000
"""Training samples of fashion-mnist that a network is fine-tuned on."""


@dataclass(frozen=True)
class Contour:
    """What the pictures of a class have in common.

    Args:
        frequencies: Waves around the circle, of each of the two sinusoids.
        amplitudes: Of each, in radii.
        orbits: Concentric copies of the curve.
    """

    frequencies: tuple[int, int]
    amplitudes: tuple[float, float]
    orbits: int

    def draw(self, number: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """So many pictures, shape (number, SIDE, SIDE), from 0, black, to 1."""
        angle = np.linspace(0, 2 * np.pi, POINTS, endpoint=False)
        wave = 1 + sum(a * np.sin(f * angle) for f, a in zip(self.frequencies, self.amplitudes, strict=True))
        orbit = np.arange(1, self.orbits + 1)[:, None] / self.orbits / (1 + sum(self.amplitudes))
        radius = orbit * (wave + rng.normal(0, SHAKE, (number, self.orbits, POINTS)))
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
    """Samples to pretrain on.

    Args:
        downstream: Samples of the same shape, to fine-tune on afterwards.
    """

    downstream: Data


def contours(_: Path | None = None) -> Data:
    """50 classes of contours of 32x32 pixels, 100 pictures each for training and 20 for testing; the same every time."""
    rng = np.random.default_rng(0)
    drawn = np.stack([contour.draw(TRAIN + TEST, rng) for contour in shapes(CLASSES, rng)])
    parts = {"train": drawn[:, :TRAIN], "test": drawn[:, TRAIN:]}
    labels = np.arange(CLASSES)
    return images.normalised(
        {name: (pictures.reshape(-1, SIDE, SIDE), labels.repeat(pictures.shape[1])) for name, pictures in parts.items()}
    )


def shapes(number: int, rng: np.random.Generator) -> list[Contour]:
    """So many contours, no two with the same frequencies and orbits."""
    kinds = list(product(combinations(FREQUENCIES, 2), ORBITS))
    chosen = [kinds[place] for place in rng.permutation(len(kinds))[:number]]
    return [Contour(frequencies, tuple(rng.uniform(*AMPLITUDES, 2)), orbits) for frequencies, orbits in chosen]


def contours_and_digits(_: Path | None = None) -> Pretraining:
    """Contours, and scikit-learn's digits enlarged to their size."""
    return _before(images.digits(), lambda pictures: F.interpolate(pictures, (SIDE, SIDE), mode="bilinear"))


def contours_and_fashion(folder: Path | None = None) -> Pretraining:
    """Contours, and 2,000 training samples of fashion-mnist beside all of its test set, with black margins.

    Raises:
        FileNotFoundError, ValueError: See `images.fashion_mnist`.
    """
    fashion = part(images.fashion_mnist(folder), FASHION)
    black = float(fashion.test_inputs.min())
    return _before(fashion, lambda pictures: F.pad(pictures, (2, 2, 2, 2), value=black))


def _before(real: Data, fit: Callable[[Tensor], Tensor]) -> Pretraining:
    pictures, labels = real.train.tensors
    drawn = contours()
    fitted = Data(TensorDataset(fit(pictures), labels), fit(real.test_inputs), real.test_targets)
    return Pretraining(drawn.train, drawn.test_inputs, drawn.test_targets, fitted)
