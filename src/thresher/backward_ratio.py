"""The ratio of backward time to forward time, measured in the first steps of training."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from thresher.cost import Cost
from thresher.torch_internals import after_backward


class Stopwatch:
    """Measures the ratio of backward time to forward time in the first steps, without waiting for the device.

    On the CPU it reads the process time. On CUDA it records events, and reads their times only in `ratio`.

    Args:
        device: Device of the model.
    """

    WARM_UP = 2
    STEPS = 12

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[list[Any]] = []
        self._shares: dict[int, float] = {}
        self.running = True
        """Whether more steps are to be measured."""

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forward(self, call: Callable[[], Any]) -> Any:
        """Runs a forward pass of the training loop, stores when it began and ended, and returns its outputs."""
        begin = self._now()
        result = call()
        self._pairs.append([begin, self._now()])
        self.running = len(self._pairs) < self.WARM_UP + self.STEPS
        return result

    def watch(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """Stores when the backward pass of `loss` will begin and end.

        Args:
            loss: Loss of the last forward pass.
            share: Share of the rows of this forward pass that the backward pass runs on. Default: 1.
        """
        if not self._pairs or len(self._pairs[-1]) != 2 or not loss.requires_grad:
            return
        pair = self._pairs[-1]
        self._shares[id(pair)] = share

        def started(_: torch.Tensor) -> None:
            if len(pair) == 2:
                pair.append(self._now())
                after_backward(lambda: pair.append(self._now()))

        loss.register_hook(started)

    def ratio(self) -> float | None:
        """Returns the median of backward time over forward time; None before three steps were measured."""
        ratios = []
        for pair in self._pairs[self.WARM_UP :]:
            if len(pair) != 4:
                continue
            if self._device.type == "cuda":
                if not pair[3].query():
                    continue
                forward = pair[0].elapsed_time(pair[1])
                backward = pair[2].elapsed_time(pair[3])
            else:
                forward = pair[1] - pair[0]
                backward = pair[3] - pair[2]
            share = self._shares.get(id(pair), 1.0)
            if forward > 0 and share > 0:
                ratios.append(backward / forward / share)
        return statistics.median(ratios) if len(ratios) >= 3 else None

    def update(self, cost: Cost) -> None:
        """Stores the measured ratio in `cost.backward_to_forward`; keeps the earlier value as long as none is measured."""
        cost.backward_to_forward = self.ratio() or cost.backward_to_forward
