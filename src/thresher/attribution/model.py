"""The user's model, tracked: its inputs name the rows of its outputs."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thresher.attribution.meter import Meter, sequence
from thresher.attribution.tracker import RowTracker


class ForwardTimer(Protocol):
    """Times forward passes of the training."""

    running: bool
    """Whether more passes are to be timed."""

    def forward(self, call: Callable[[], Any]) -> Any:
        """Runs a forward pass, notes its time, and returns its result."""
        ...


class TrackedModel(nn.Module):
    """A thin callable around the user's model: same parameters, same `state_dict`, same attributes.

    Args:
        module: The user's model.
        tracker: Remembers which rows the outputs belong to.
        timer: Times the first training passes.
        device: Device of the model.
        meter: Counter of the samples of forward and backward passes.
    """

    def __init__(self, module: nn.Module, tracker: RowTracker, timer: ForwardTimer, device: torch.device, meter: Meter) -> None:
        super().__init__()
        self.module = module
        self._tracker = tracker
        self._timer = timer
        self._meter = meter
        self._device = device
        self.autocast: torch.dtype | None = None
        """Autocast dtype of the last training pass; None where there was no autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; with gradients enabled, remembers which rows its outputs belong to."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        kind = self._device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        inputs, first = self._tracker.look_inputs((args, kwargs)), sequence()
        if self._timer.running and self.module.training:
            outputs = self._timer.forward(lambda: self.module(*args, **kwargs))
        else:
            outputs = self.module(*args, **kwargs)
        self._tracker.remember_outputs(outputs, inputs)
        if inputs.rows is not None and not inputs.refuse:
            self._meter.passed(outputs, inputs.rows.n, first)
        elif self.module.training:
            self._meter.passed(outputs, None, first)
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns the `state_dict` of the user's model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a `state_dict` of the user's model."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
