"""The user's model with an eye on it: what goes in names the rows of what comes out."""

from typing import Any

import torch
from torch import Tensor, nn

from thresher.attribution.tracker import RowTracker
from thresher.run.stopwatch import Stopwatch


class TrackedModel(nn.Module):
    """A thin callable around the user's model: same parameters, same `state_dict`, same attributes.

    Args:
        module: The user's model.
        witnesses: Told which rows the outputs belong to.
        stopwatch: Times the first training passes.
        device: Where the model is.
    """

    def __init__(self, module: nn.Module, witnesses: RowTracker, stopwatch: Stopwatch, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._witnesses = witnesses
        self._stopwatch = stopwatch
        self._device = device
        self.autocast: torch.dtype | None = None
        """Autocast dtype of the last training pass; None where there was no autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; with gradients enabled, remember which rows its outputs belong to."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        kind = self._device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        inputs = self._witnesses.look_inputs((args, kwargs))
        if self._stopwatch.running and self.module.training:
            outputs = self._stopwatch.forward(lambda: self.module(*args, **kwargs))
        else:
            outputs = self.module(*args, **kwargs)
        self._witnesses.remember_outputs(outputs, inputs)
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The user's model's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's own."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
