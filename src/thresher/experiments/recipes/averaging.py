"""The exponential moving average of a network's weights, which is tested instead of the network."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from thresher.experiments.recipes.schema import EmaSection


def decay_of(ema: EmaSection, batch: int, epochs: int) -> float:
    """Returns the weight of the old average at each update: 1 - (1 - decay) * batch * steps / epochs, as in torchvision.

    Args:
        ema: Section of the recipe.
        batch: Number of samples per step.
        epochs: Number of epochs of the training.
    """
    return 1 - min(1.0, (1 - ema.decay) * batch * ema.steps / epochs)


class WeightAverage:
    """The moving average of weights and buffers, updated after steps of the optimizer.

    Args:
        model: Network to average; it does not change.
        optimizer: Optimizer of the network.
        decay: Weight of the old average at each update, see `decay_of`.
        every: Number of steps between updates.
        copied: Number of steps, those of the warm-up, in which the average is a copy of the network.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, decay: float, every: int, copied: int) -> None:
        self._own, self._every, self._copied, self._steps = model, every, copied, 0
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def model(self) -> nn.Module:
        """The network with averaged weights; before the first update the network itself."""
        return self._averaged.module if self._averaged.n_averaged else self._own

    def state_dict(self) -> dict[str, Any]:
        """Returns the average and the number of steps."""
        return {"steps": self._steps, "averaged": self._averaged.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state."""
        self._steps = state_dict["steps"]
        self._averaged.load_state_dict(state_dict["averaged"])
        self._averaged.to(next(self._own.parameters()).device)

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        self._averaged.to(next(self._own.parameters()).device)
        if self._steps <= self._copied:
            self._averaged.n_averaged.zero_()
        self._averaged.update_parameters(self._own)
