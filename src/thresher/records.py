"""What is remembered of every sample between epochs: one column a signal, on the device of the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

NEVER_SEEN = float("-inf")
"""Fill of the `loss` column: not finite, so a sample that was never seen is never hidden and never scored."""


@dataclass(frozen=True)
class Column:
    """One remembered value a sample.

    Args:
        dtype: How it is stored.
        fill: Its value before the sample is first seen.
        signal: The signal written to it; the column's own name by default.
        merge: What a second value in the same epoch does (a padded duplicate, the same sample on another rank):
            "last" replaces the first, "sum" adds to it and starts every epoch from zero, as all-reducing codes do.
    """

    dtype: torch.dtype
    fill: float = 0.0
    signal: str | None = None
    merge: Literal["last", "sum"] = "last"


class Records(Mapping[str, Tensor]):
    """Mapping from a column's name to its live tensor of shape (N,).

    Args:
        columns: What to remember.
        n: Number of samples N.
        device: Where the columns live.
    """

    def __init__(self, columns: Mapping[str, Column], n: int, device: torch.device) -> None:
        self.columns = dict(columns)
        self._data = {
            name: torch.full((n,), column.fill, dtype=column.dtype, device=device) for name, column in self.columns.items()
        }
        self._targets = [
            (self._data[name], column.signal or name, column.merge == "last") for name, column in self.columns.items()
        ]

    def __getitem__(self, name: str) -> Tensor:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {tensor.dtype}" for name, tensor in self._data.items())
        return f"Records({inside}, {self.bytes_per_sample} B/sample)"

    @property
    def signals(self) -> set[str]:
        """The signals that fill the columns."""
        return {column.signal or name for name, column in self.columns.items()}

    @property
    def bytes_per_sample(self) -> int:
        """What one sample takes."""
        return sum(tensor.element_size() for tensor in self._data.values())

    def write(self, ids: Tensor, values: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None) -> None:
        """Scatter one batch of signals, one operation a column.

        Args:
            ids: Rows, shape (B,), int64, on the device of the records.
            values: Signal name to shape (B,).
            before: What the same write wrote last time, where it is being written again with a larger value.
        """
        for tensor, signal, replaces in self._targets:
            new = values[signal]
            if new.dtype is not tensor.dtype:
                new = new.to(tensor.dtype)
            if replaces:
                tensor.scatter_(0, ids, new)
            else:
                old = 0 if before is None else before[signal].to(tensor.dtype)
                tensor.scatter_add_(0, ids, new - old)

    def start_epoch(self) -> None:
        """Empty the columns that add up within an epoch."""
        for name, column in self.columns.items():
            if column.merge == "sum":
                self._data[name].zero_()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the columns."""
        return {name: tensor.clone() for name, tensor in self._data.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved columns; names and N were checked by the run."""
        for name, tensor in self._data.items():
            tensor.copy_(state[name])
