"""The learning rate of a recipe as a function of the share of training that is done."""

import math
from dataclasses import dataclass

from thresher.experiments.recipes.schema import ScheduleSection

EPOCH_TOLERANCE = 1e-9
"""Number that is added to a number of epochs before it is rounded down."""


@dataclass(frozen=True)
class LearningRateFactor:
    """The factor on the largest learning rate.

    Epochs are those of the recipe: a training with fewer epochs goes through the same schedule faster.

    Args:
        schedule: Section of the recipe.
        epochs: Number of epochs of the recipe.
    """

    schedule: ScheduleSection
    epochs: int

    def __call__(self, progress: float) -> float:
        """Returns the factor when a share of training, [0, 1], is done."""
        epoch, warmup = progress * self.epochs, self.schedule.warmup_epochs
        if epoch < warmup:
            return self.schedule.warmup_from + (1 - self.schedule.warmup_from) * epoch / warmup
        whole = math.floor(epoch + EPOCH_TOLERANCE)
        match self.schedule.decay:
            case "step":
                return self._stepped(epoch + EPOCH_TOLERANCE)
            case "cosine":
                return self._cosine(whole / self.epochs)
            case "cosine_after_warmup":
                return self._cosine((whole - warmup) / (self.epochs - warmup))
            case "cosine_iter":
                return self._cosine(progress)
            case "none":
                return 1.0

    def _stepped(self, epoch: float) -> float:
        """Returns `rate` to the power of the number of steps so far."""
        every, rate = self.schedule.every, self.schedule.rate or 1.0
        if every is not None:
            return rate ** math.floor(epoch / every)
        return rate ** sum(epoch >= boundary for boundary in self.schedule.epochs)

    def _cosine(self, done: float) -> float:
        """Returns the factor of a cosine from 1 to `floor`."""
        floor = self.schedule.floor
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
