"""What is remembered of every sample between epochs: one column a signal, on the device of the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

NEVER_SEEN = float("-inf")
"""Fill of the `loss` column: not finite, so a sample that was never seen is never hidden and never scored."""


Merge = Callable[[Tensor, Tensor], Tensor]

EPOCH = "epoch"
"""The signal that a forward pass need not give: the number of the epoch in progress."""


@dataclass(frozen=True)
class Column:
    """One remembered value a sample.

    Args:
        dtype: How it is stored.
        fill: Its value before the sample is first seen.
        signal: The signal written to it; the column's own name by default. "epoch": when the sample was last seen.
        merge: What becomes of the old value. "last": the new one replaces it. "sum": a second value in the same epoch (a
            padded duplicate, the same sample on another rank) adds to the first, and every epoch starts from zero, as
            all-reducing codes do. "plan": no signal is written; plans say what to `remember`. A function of the stored values
            and the signal's, both (n,), that returns what to store: it is asked once a step for each sample.
    """

    dtype: torch.dtype
    fill: float = 0.0
    signal: str | None = None
    merge: Literal["last", "sum", "plan"] | Merge = "last"


class Records(Mapping[str, Tensor]):
    """Mapping from a column's name to its live tensor of shape (N,).

    Args:
        columns: What to remember.
        n: Number of samples N.
        device: Where the columns live.
    """

    def __init__(self, columns: Mapping[str, Column], n: int, device: torch.device) -> None:
        self.columns = dict(columns)
        self.epoch = 0
        """The epoch in progress, for columns of that signal."""
        self._data = {
            name: torch.full((n,), column.fill, dtype=column.dtype, device=device) for name, column in self.columns.items()
        }
        self.written = {name: column.signal or name for name, column in self.columns.items() if column.merge != "plan"}
        """Columns that signals are written to, and the signals."""
        self._targets = [(self._data[name], signal, self.columns[name].merge) for name, signal in self.written.items()]

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
        """The signals of a forward pass that fill the columns."""
        return {*self.written.values()} - {EPOCH}

    @property
    def bytes_per_sample(self) -> int:
        """What one sample takes."""
        return sum(tensor.element_size() for tensor in self._data.values())

    def write(
        self,
        ids: Tensor,
        values: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        *,
        first: bool | Tensor = True,
    ) -> None:
        """Scatter one batch of signals, one operation a column.

        Args:
            ids: Rows, shape (B,), int64, on the device of the records.
            values: Signal name to shape (B,).
            before: What the same write wrote last time, where it is being written again with a larger value.
            first: Whether a function that merges is to be asked: for all rows, none, or those of a mask (B,).
        """
        for tensor, signal, merge in self._targets:
            if callable(merge):
                self._merge(tensor, ids, self._new(signal, values, ids), merge, first)
                continue
            new = self._new(signal, values, ids)
            if new.dtype is not tensor.dtype:
                new = new.to(tensor.dtype)
            if merge == "last":
                tensor.scatter_(0, ids, new)
            else:
                old = 0 if before is None else before[signal].to(tensor.dtype)
                tensor.scatter_add_(0, ids, new - old)

    def _new(self, signal: str, values: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        if signal == EPOCH and signal not in values:
            return torch.full_like(ids, self.epoch)
        return values[signal]

    @staticmethod
    def _merge(tensor: Tensor, ids: Tensor, new: Tensor, merge: Merge, first: bool | Tensor) -> None:
        if first is False:
            return
        old = tensor.index_select(0, ids)
        merged = merge(old, new).to(tensor.dtype)
        tensor.scatter_(0, ids, merged if first is True else torch.where(first, merged, old))

    def remember(self, columns: Mapping[str, Tensor]) -> None:
        """Take over whole columns that a plan decided on.

        Raises:
            ValueError: A column that plans do not write, or of another shape or dtype.
        """
        for name, values in columns.items():
            column = self.columns.get(name)
            if column is None or column.merge != "plan":
                own = [known for known, of in self.columns.items() if of.merge == "plan"]
                raise ValueError(f"EpochPlan: `remember` has {name!r}; columns with merge='plan' are {own or 'none'}")
            if values.shape != self._data[name].shape or values.dtype != column.dtype:
                raise ValueError(
                    f"EpochPlan: `remember[{name!r}]` must be {column.dtype} of shape {tuple(self._data[name].shape)}, got "
                    f"{values.dtype} of shape {tuple(values.shape)}"
                )
        for name, values in columns.items():
            self._data[name].copy_(values)

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
