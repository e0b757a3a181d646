"""Limit of a trace, in operations and in seconds: a model that passes it is not traced."""

import time
from typing import Any

from torch.overrides import TorchFunctionMode

from thresher.subset.graphs import Unsupported

MOST_OPERATIONS = 1_000_000
"""Largest number of calls of PyTorch's functions while a model is traced and its graphs are examined; about 130 for each
operation of a forward."""
MOST_SECONDS = 60.0
"""Longest time of tracing a model and examining its graphs, in seconds."""


class OverBudget(Unsupported):
    """Tracing a module takes too long."""


class Budget(TorchFunctionMode):
    """Counts the calls of PyTorch's functions in its blocks, and ends a block that passes the limit by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self._end = time.monotonic() + MOST_SECONDS
        self._operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function.

        Raises:
            OverBudget: The limit is passed.
        """
        self._operations += 1
        if self._operations > MOST_OPERATIONS or time.monotonic() > self._end:
            raise OverBudget(
                f"tracing it takes more than {MOST_SECONDS:g} s or {MOST_OPERATIONS} calls of PyTorch, as for a long loop in its "
                "forward"
            )
        return func(*args, **(kwargs or {}))
