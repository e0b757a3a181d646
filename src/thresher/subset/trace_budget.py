"""Limit of a trace, in operations, memory and seconds: a model that passes it is not traced."""

import re
import time
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

from thresher.subset.graphs import Unsupported

MOST_OPERATIONS = 1_000_000
"""Largest number of calls of PyTorch's functions while a model is traced and its graphs are examined. BERT with 24 layers needs
215,000, FalconH1 with 2 layers 45,000, and an LSTM with 2 layers and 7 positions 26,000."""
MOST_SECONDS = 120.0
"""Longest time of tracing a model and examining its graphs, in CPU time of its thread: a busy machine does not count."""
MEMORY_SHARE = 0.5
"""Largest growth of the process while a model is traced, as a share of the memory that is available before."""
CALLS_BETWEEN_LOOKS = 500
"""Number of calls of PyTorch's functions after which the memory is read again."""


class OverBudget(Unsupported):
    """Tracing a module takes too long, or too much memory."""


class Budget(TorchFunctionMode):
    """Counts the calls of PyTorch's functions in its blocks, and ends a block that passes the limit by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self._end = time.thread_time() + MOST_SECONDS
        self._operations = 0
        self._most_memory = _kibibytes("self/status", "VmRSS") + MEMORY_SHARE * _kibibytes(
            "meminfo", "MemAvailable"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function.

        Raises:
            OverBudget: The limit is passed.
        """
        self._operations += 1
        if self._operations > MOST_OPERATIONS or time.thread_time() > self._end:
            raise OverBudget(
                f"tracing it takes more than {MOST_SECONDS:g} s or {MOST_OPERATIONS} calls of PyTorch, as for a long loop in its "
                "forward"
            )
        due = self._operations % CALLS_BETWEEN_LOOKS == 0
        if due and _kibibytes("self/status", "VmRSS") > self._most_memory:
            raise OverBudget(
                f"tracing it takes more than {MEMORY_SHARE:.0%} of the available memory"
            )
        return func(*args, **(kwargs or {}))


def _kibibytes(file: str, name: str) -> int:
    """Returns an amount of memory that Linux gives in a file; 0 on other systems, where memory has no limit."""
    path = Path("/proc", file)
    amount = re.search(rf"{name}:\s+(\d+)", path.read_text() if path.exists() else "")
    return int(amount[1]) if amount else 0
