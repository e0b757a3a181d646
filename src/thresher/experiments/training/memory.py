"""How much memory a step of training takes."""

import os
import threading
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class StepMemory:
    """Measures how much memory a step takes at its peak, above what was held before it, on a CPU or a CUDA device.

    On a CPU, torch's profiler notes each allocation, which takes some milliseconds; on CUDA, the allocator has a counter.

    Args:
        device: Device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak: int | None = None
        if device.type == "cpu" and _can_profile():
            _start_profiler()

    def of(self, step: Callable[[], bool]) -> bool:
        """Calls a step, measures it, and returns what it returned: whether there was a batch to train on.

        Args:
            step: The step.
        """
        measured = {"cpu": _on_host, "cuda": _on_cuda}.get(self._device.type)
        if measured is None or (measured is _on_host and not _can_profile()):
            return step()
        trained, peak = measured(step, self._device)
        if trained:
            self._peak = peak
        return trained

    def take(self) -> int | None:
        """Returns the peak of the step that was measured since the last call, in bytes; None where there was none."""
        peak, self._peak = self._peak, None
        return peak


@cache
def _start_profiler() -> None:
    """Lets torch set up its profiler, which takes about a second in each process, so that no step takes that time."""
    _on_host(lambda: True, torch.device("cpu"))


def _can_profile() -> bool:
    """Returns whether torch can note allocations: in the first thread of a process only, and one profiler at a time.

    In several processes it would write to the standard error stream of each.
    """
    first = threading.current_thread() is threading.main_thread() and not torch.distributed.is_initialized()
    return first and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def _on_cuda(step: Callable[[], bool], device: torch.device) -> tuple[bool, int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return step(), torch.cuda.max_memory_allocated(device) - before


def _on_host(step: Callable[[], bool], _: torch.device) -> tuple[bool, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch would write to the standard error stream that it measures
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        trained = step()
    results: Any = noted.profiler and noted.profiler.kineto_results
    found = sorted((one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]")
    return trained, max(accumulate((size for _, size in found), initial=0))
