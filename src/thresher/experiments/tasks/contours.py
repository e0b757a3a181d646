"""Pretraining on contours, in the place of Fractal-3K's, and what it is worth for real pictures; see `data.contours`."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from thresher.experiments.tasks.base import EVALUATION_BATCH, Task, accuracy, without_folder
from thresher.experiments.tasks.data import contours, images
from thresher.experiments.tasks.data.base import Data
from thresher.experiments.tasks.networks.vision_transformer import VisionTransformer
from thresher.experiments.tasks.transfer import FineTuning
from thresher.experiments.training.base import Training


@dataclass(frozen=True)
class Transfer(Task):
    """Pretraining that is judged by what comes after it: plain fine-tuning on other samples, which no method selects from.

    Args:
        tuning: How the pretrained network is fine-tuned.
    """

    tuning: FineTuning = field(default_factory=partial(FineTuning, lr=3e-3))

    def training(self, data: Any, seed: int) -> Training:
        """What one run pretrains, and the accuracy of its network on the other test set once it is fine-tuned."""
        downstream = partial(self.downstream, data=data.downstream, seed=seed)
        return replace(super().training(data, seed), downstream=downstream)

    def downstream(self, model: nn.Module, data: Data, seed: int) -> float:
        """Test accuracy after fine-tuning a copy of the model."""
        tuned = self.tuning.tune(model, data.train, seed)
        batches = zip(data.test_inputs.split(EVALUATION_BATCH), data.test_targets.split(EVALUATION_BATCH), strict=True)
        return accuracy(tuned, list(batches))

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training and of fine-tuning."""
        return super().recipe | {f"tuning_{name}": value for name, value in asdict(self.tuning).items()}


RECIPE: dict[str, Any] = {
    "network": partial(VisionTransformer, contours.SIDE, classes=contours.CLASSES),
    "lr": 2e-3,
    "batch_size": 64,
    "weight_decay": 0.05,
    "optimise": "adamw",
}

TASKS = (
    Task("contours", partial(without_folder, "contours", lambda: None), contours.contours, **RECIPE),
    Transfer(
        "contours-digits", partial(without_folder, "contours-digits", lambda: None), contours.contours_and_digits, **RECIPE
    ),
    Transfer("contours-fashion", images.find_fashion_mnist, contours.contours_and_fashion, **RECIPE),
)
