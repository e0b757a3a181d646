"""The values that a run stores from epoch to epoch: columns with one value per sample, on the device of the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

NEVER_SEEN = float("-inf")
"""Value of the `loss` column before a sample is first seen. It is not finite, so the sample is never hidden or scored."""

Merge = Callable[[Tensor, Tensor], Tensor]
"""Function of the stored values and the new values, both of shape (n,), that returns the values to store."""

EPOCH = "epoch"
"""Name of the signal that needs no forward pass: the number of the epoch in progress."""


@dataclass(frozen=True)
class Column:
    """Declares one value that a run stores for each sample from epoch to epoch.

    Args:
        dtype: Data type of the stored values.
        fill: Value before the sample is first seen; default 0.
        signal: Name of the signal that is written to the column; default: the name of the column. With "epoch" the column
            stores the epoch in which the sample was last seen.
        merge: Rule for a new value. "last": it replaces the old one. "sum": every epoch starts from zero, and a second value in
            the same epoch (from a padded duplicate, or the same sample on another rank) is added to the first, as in official
            code that all-reduces losses. "plan": no signal is written; `EpochPlan.remember` gives the values. A function: it
            gets the stored and the new values of the n samples of a step, both of shape (n,), and returns the values to store.
            Each sample is passed to it at most once per step.
        optional: Text that says what the method does without the signal, as the end of a sentence, such as "draws uniformly";
            `attach` warns with it if the criterion does not define the signal. Default None: the method needs the signal.

    Example:
        The largest loss that each sample has had so far:

        >>> worst = Column(torch.float32, signal="loss", merge=torch.maximum)
        >>> records = Records({"worst": worst}, n=3, device=torch.device("cpu"))
        >>> for loss in (2.0, 5.0, 1.0):
        ...     records.write(torch.tensor([1]), {"loss": torch.tensor([loss])})
        >>> records["worst"].tolist()
        [0.0, 5.0, 0.0]
    """

    dtype: torch.dtype
    fill: float = 0.0
    signal: str | None = None
    merge: Literal["last", "sum", "plan"] | Merge = "last"
    optional: str | None = None


class Records(Mapping[str, Tensor]):
    """Values stored for each sample: a mapping from column names to tensors of shape (N,), which change as training goes on.

    Args:
        columns: Declarations of the columns by name.
        n: Number of samples N.
        device: Device of the columns.

    Attributes:
        columns: Declarations of the columns by name.
        n: Number of samples N; 0 if another process stores the records.
        epoch: Number of the epoch in progress, which columns with the signal "epoch" store.
        written: Names of the columns that a signal is written to, each with the name of the signal.

    Example:
        >>> records = Records({"loss": Column(torch.float32, fill=NEVER_SEEN)}, n=4, device=torch.device("cpu"))
        >>> records.write(torch.tensor([2, 0]), {"loss": torch.tensor([0.5, 1.5])})
        >>> records["loss"].tolist()
        [1.5, -inf, 0.5, -inf]
        >>> records
        Records(loss: torch.float32, 4 B/sample)
    """

    def __init__(self, columns: Mapping[str, Column], n: int, device: torch.device) -> None:
        self.columns = dict(columns)
        self.n = n
        self.epoch = 0
        # MPS has no float64.
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._data = {
            name: torch.full(
                (n,),
                column.fill,
                dtype=wide if column.dtype is torch.float64 else column.dtype,
                device=device,
            )
            for name, column in self.columns.items()
        }
        self.written = {
            name: column.signal or name
            for name, column in self.columns.items()
            if column.merge != "plan"
        }
        self._targets = [
            (self._data[name], signal, self.columns[name].merge)
            for name, signal in self.written.items()
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
        """Names of the signals of a forward pass that are written to the columns."""
        return {*self.written.values()} - {EPOCH}

    @property
    def bytes_per_sample(self) -> int:
        """Memory that the columns take per sample, in bytes."""
        return sum(tensor.element_size() for tensor in self._data.values())

    def write(
        self,
        ids: Tensor,
        values: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        *,
        first: bool | Tensor = True,
        certain: Tensor | None = None,
    ) -> None:
        """Writes the signals of one batch, with one scatter per column.

        Samples whose loss is `NEVER_SEEN` keep their record: a short text without a masked token, or a tile without a valid
        pixel, has no loss.

        Args:
            ids: Sample ids, shape (B,), int64, on the device of the records.
            values: Signals by name, each of shape (B,).
            before: If the same rows are written a second time in a step, the values of the first time; columns with merge="sum"
                then add only the difference. None for a first write.
            first: For which rows to write columns whose `merge` is a function: True for all, False for none, or a mask of shape
                (B,).
            certain: Mask of the rows that are written at all, shape (B,) or (), bool, on the device. Default: all rows.
        """
        labeled = values["loss"] != NEVER_SEEN if "loss" in values else None
        if labeled is not None and not (labeled.is_cpu and bool(labeled.all())):
            labeled = labeled.to(ids.device)
            certain = labeled if certain is None else certain & labeled
        if certain is not None:
            first = first if first is False else certain.expand(len(ids)) & first
        for tensor, signal, merge in self._targets:
            if callable(merge):
                self._merge(tensor, ids, self._new(signal, values, ids), merge, first)
                continue
            new = self._new(signal, values, ids)
            if new.dtype is not tensor.dtype:
                new = new.to(tensor.dtype)
            if merge == "last":
                tensor.scatter_(
                    0,
                    ids,
                    new
                    if certain is None
                    else torch.where(certain, new, tensor.index_select(0, ids)),
                )
            else:
                old = 0 if before is None else before[signal].to(tensor.dtype)
                tensor.scatter_add_(
                    0, ids, new - old if certain is None else torch.where(certain, new - old, 0)
                )

    def _new(self, signal: str, values: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        if signal == EPOCH and signal not in values:
            return torch.full_like(ids, self.epoch)
        read = values[signal]
        # If `attach` did not know the device of the model, the losses may be on another device than the records.
        return read if read.device == ids.device else read.to(ids.device)

    @staticmethod
    def _merge(
        tensor: Tensor, ids: Tensor, new: Tensor, merge: Merge, first: bool | Tensor
    ) -> None:
        if first is False:
            return
        old = tensor.index_select(0, ids)
        merged = merge(old, new).to(tensor.dtype)
        tensor.scatter_(0, ids, merged if first is True else torch.where(first, merged, old))

    def remember(self, columns: Mapping[str, Tensor]) -> None:
        """Replaces columns by the values in `EpochPlan.remember`.

        Args:
            columns: Values by the name of the column, each of shape (N,) and of the dtype of the column.

        Raises:
            ValueError: A column does not have merge="plan", or its values have another shape or dtype.
        """
        for name, values in columns.items():
            column = self.columns.get(name)
            if column is None or column.merge != "plan":
                planned = [known for known, one in self.columns.items() if one.merge == "plan"]
                raise ValueError(
                    f"EpochPlan: `remember` has {name!r}; columns with merge='plan' are {planned or 'none'}"
                )
            if values.shape != self._data[name].shape or values.dtype != column.dtype:
                raise ValueError(
                    f"EpochPlan: `remember[{name!r}]` must be {column.dtype} of shape {tuple(self._data[name].shape)}, got "
                    f"{values.dtype} of shape {tuple(values.shape)}"
                )
        for name, values in columns.items():
            self._data[name].copy_(values)

    def sync(self) -> None:
        """Sends written values to the process that stores the records. Does nothing if this process stores them itself."""

    def start_epoch(self) -> None:
        """Sets columns with merge="sum" to zero: they add up values within one epoch."""
        for name, column in self.columns.items():
            if column.merge == "sum":
                self._data[name].zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the columns by name."""
        return {name: tensor.clone() for name, tensor in self._data.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies saved columns into these; the run has checked their names and lengths."""
        for name, tensor in self._data.items():
            tensor.copy_(state[name])
