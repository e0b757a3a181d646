"""Pretraining on contours, as a small substitute for Fractal-3K, and its value for real images; see `data.contours`."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from thresher.experiments.tasks.base import Task, evaluation_batches, without_folder
from thresher.experiments.tasks.data import contours, images
from thresher.experiments.tasks.data.base import Data
from thresher.experiments.tasks.metrics import accuracy
from thresher.experiments.tasks.networks.vision_transformer import VisionTransformer
from thresher.experiments.tasks.transfer import FineTuning
from thresher.experiments.training.trainable import Training


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
        return super().recipe | {f"tuning_{name}": value for name, value in asdict(self.tuning).items()}


CONTOUR_SETTINGS: dict[str, Any] = {
    "network": partial(VisionTransformer, contours.SIDE, classes=contours.CLASSES),
    "lr": 2e-3,
    "batch_size": 64,
    "weight_decay": 0.05,
    "optimise": "adamw",
}

CONTOUR_TASKS = (
    Task("contours", partial(without_folder, "contours", lambda: None), contours.contours, **CONTOUR_SETTINGS),
    Transfer(
        "contours-digits",
        partial(without_folder, "contours-digits", lambda: None),
        contours.contours_and_digits,
        **CONTOUR_SETTINGS,
    ),
    Transfer("contours-fashion", images.find_fashion_mnist, contours.contours_and_fashion, **CONTOUR_SETTINGS),
)
