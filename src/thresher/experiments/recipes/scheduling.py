"""The learning rate of a recipe, as a function of the share of training that is done."""

import math
from dataclasses import dataclass

from thresher.experiments.recipes.schema import Schedule

ALMOST = 1e-9
"""Added to a number of epochs before it is rounded down."""


@dataclass(frozen=True)
class Factor:
    """Factor on the largest learning rate.

    Epochs are those of the recipe: a training of fewer goes through the same schedule faster.

    Args:
        schedule: Of the recipe.
        epochs: Of the recipe.
    """

    schedule: Schedule
    epochs: int

    def __call__(self, progress: float) -> float:
        """The factor where a share of training, [0, 1], is done."""
        epoch, warmup = progress * self.epochs, self.schedule.warmup_epochs
        if epoch < warmup:
            return self.schedule.warmup_from + (1 - self.schedule.warmup_from) * epoch / warmup
        whole = math.floor(epoch + ALMOST)
        match self.schedule.decay:
            case "step":
                return self._stepped(epoch + ALMOST)
            case "cosine":
                return self._cosine(whole / self.epochs)
            case "cosine_after_warmup":
                return self._cosine((whole - warmup) / (self.epochs - warmup))
            case "cosine_iter":
                return self._cosine(progress)
            case "none":
                return 1.0

    def _stepped(self, epoch: float) -> float:
        """Times `rate` for each step so far."""
        every, rate = self.schedule.every, self.schedule.rate or 1.0
        if every is not None:
            return rate ** math.floor(epoch / every)
        return rate ** sum(epoch >= boundary for boundary in self.schedule.epochs)

    def _cosine(self, done: float) -> float:
        """From 1 to `floor`."""
        floor = self.schedule.floor
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
