"""Pretraining on contours, as a small substitute for Fractal-3K, and its value for real images.

The contours are closed curves, sums of two sinusoidal waves on a circle, drawn point by point in concentric orbits: a small
approximation of the Visual Atoms (arXiv:2303.01112) that Fractal-3K consists of. A class is a pair of frequencies with their
amplitudes and a number of orbits; its images are rotated, squeezed, shifted and made noisy at random.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from thresher_lab.tasks import images
from thresher_lab.tasks.base import (
    Data,
    Task,
    accuracy,
    evaluation_batches,
    training_subset,
    without_folder,
)
from thresher_lab.tasks.networks import VisionTransformer
from thresher_lab.training.trainable import Training

CLASSES = 50
TRAIN = 100
TEST = 20
"""Number of classes, and of images per class for training and for testing."""
SIDE = 32
POINTS = 200
"""Side of an image in pixels, and number of points of an orbit."""
FREQUENCIES = range(1, 13)
ORBITS = range(1, 7)
AMPLITUDES = (0.1, 0.4)
"""Numbers of waves around the circle, numbers of concentric copies, and range of the amplitudes in radii."""
NOISE = 0.02
TURN = np.pi / 6
SHIFT = 1.5
SQUEEZE = 0.7
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
        wave = 1 + sum(
            a * np.sin(f * angle) for f, a in zip(self.frequencies, self.amplitudes, strict=True)
        )
        orbit = np.arange(1, self.orbits + 1)[:, None] / self.orbits / (1 + sum(self.amplitudes))
        radius = orbit * (wave + rng.normal(0, NOISE, (number, self.orbits, POINTS)))
        squeeze, turn, right, down = rng.uniform(
            (SQUEEZE, -TURN, -SHIFT, -SHIFT), (1, TURN, SHIFT, SHIFT), (number, 4)
        ).T
        oval = squeeze[:, None] * np.cos(angle) + 1j * np.sin(angle)
        turned = radius * (oval * np.exp(1j * turn)[:, None])[:, None]
        at = (SIDE / 2 - SHIFT) * turned + (SIDE / 2 + right + 1j * (SIDE / 2 + down))[
            :, None, None
        ]
        column, row = (np.clip(axis, 0, SIDE - 1).astype(np.int64) for axis in (at.real, at.imag))
        pixel = (np.arange(number)[:, None, None] * SIDE + row) * SIDE + column
        points = np.bincount(pixel.ravel(), minlength=number * SIDE * SIDE).reshape(
            number, SIDE, SIDE
        )
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
    return images.normalized(
        {
            name: (drawings.reshape(-1, SIDE, SIDE), labels.repeat(drawings.shape[1]))
            for name, drawings in parts.items()
        }
    )


def random_contours(number: int, rng: np.random.Generator) -> list[Contour]:
    """Returns contours of which no two have the same frequencies and number of orbits."""
    kinds = list(product(combinations(FREQUENCIES, 2), ORBITS))
    chosen = [kinds[place] for place in rng.permutation(len(kinds))[:number]]
    return [
        Contour(frequencies, tuple(rng.uniform(*AMPLITUDES, 2)), orbits)
        for frequencies, orbits in chosen
    ]


def contours_and_digits(_: Path | None = None) -> Pretraining:
    """Returns contours, and the digits of scikit-learn enlarged to the same size."""
    return _with_downstream(
        images.digits(), lambda inputs: F.interpolate(inputs, (SIDE, SIDE), mode="bilinear")
    )


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


@dataclass(frozen=True)
class FineTuning:
    """Settings of fine-tuning on all samples in every epoch, with AdamW.

    Args:
        epochs: Number of epochs.
        lr: Largest learning rate; it rises in the first fifth and falls as a cosine.
        batch_size: Number of samples per batch.
        weight_decay: Weight decay of AdamW.
    """

    epochs: int = 10
    lr: float = 1e-3
    batch_size: int = 32
    weight_decay: float = 0.05

    def tune(self, model: nn.Module, samples: TensorDataset, seed: int) -> nn.Module:
        """Trains a copy of the model with a new head; the model itself does not change.

        Args:
            model: Network with an `nn.Linear` as `head`, on any device.
            samples: Dataset of inputs and class labels, shape (N,), int64.
            seed: Random seed of the new head and of the order of the samples.

        Returns:
            The copy, with one output per class.

        Raises:
            TypeError: The model has no `head` that is an `nn.Linear`.
        """
        tuned = with_new_head(model, int(samples.tensors[1].max()) + 1, seed).train()
        device = next(tuned.parameters()).device
        loader = DataLoader(
            samples, self.batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        optimizer = AdamW(tuned.parameters(), self.lr, weight_decay=self.weight_decay)
        steps = self.epochs * len(loader)
        schedule = OneCycleLR(optimizer, self.lr, steps, pct_start=0.2, cycle_momentum=False)
        for _ in range(self.epochs):
            for x, y in loader:
                F.cross_entropy(tuned(x.to(device)), y.to(device)).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return tuned


def with_new_head(model: nn.Module, classes: int, seed: int) -> nn.Module:
    """Returns a copy of a model with a new, untrained linear layer as `head`; the global random state does not change.

    Raises:
        TypeError: The model has no `head` that is an `nn.Linear`.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"fine-tuning replaces `head`, an nn.Linear, of the model; {type(model).__name__} has {type(head).__name__} there"
        )
    tuned = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tuned.head = nn.Linear(head.in_features, classes).to(head.weight.device)
    return tuned


@dataclass(frozen=True)
class Transfer(Task):
    """Pretraining that is judged by the accuracy after fine-tuning on other samples, from which no method selects.

    Args:
        tuning: Settings of the fine-tuning.
    """

    tuning: FineTuning = field(default_factory=partial(FineTuning, lr=3e-3))

    def training(self, data: Any, seed: int) -> Training:
        """Returns new objects for one run, whose metric is the test accuracy after fine-tuning."""
        downstream = partial(self.downstream, data=data.downstream, seed=seed)
        return replace(super().training(data, seed), downstream=downstream)

    def downstream(self, model: nn.Module, data: Data, seed: int) -> float:
        """Returns the test accuracy of a copy of the model that is fine-tuned on the data."""
        return accuracy(self.tuning.tune(model, data.train, seed), evaluation_batches(data))

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training and of fine-tuning."""
        return super().recipe | {
            f"tuning_{name}": value for name, value in asdict(self.tuning).items()
        }


CONTOUR_SETTINGS: dict[str, Any] = {
    "network": partial(VisionTransformer, SIDE, classes=CLASSES),
    "lr": 2e-3,
    "batch_size": 64,
    "weight_decay": 0.05,
    "optimize": "adamw",
}

CONTOUR_TASKS = (
    Task(
        "contours", partial(without_folder, "contours", lambda: None), contours, **CONTOUR_SETTINGS
    ),
    Transfer(
        "contours-digits",
        partial(without_folder, "contours-digits", lambda: None),
        contours_and_digits,
        **CONTOUR_SETTINGS,
    ),
    Transfer(
        "contours-fashion", images.find_fashion_mnist, contours_and_fashion, **CONTOUR_SETTINGS
    ),
)
