"""Records of a run in several processes: rank 0 stores them, and all ranks send it their new values once per epoch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.world import World
from thresher.records import EPOCH, Column, Records

BLOCK = 2**16
"""Smallest number of rows in one block of memory, and largest number of rows that are sent together."""


class WriteBuffer:
    """Buffer of recorded rows on the device, until they are sent; never waits for the device.

    Example:
        >>> buffer = WriteBuffer()
        >>> buffer.add({"id": torch.tensor([4, 2]), "loss": torch.tensor([0.5, 1.5])})
        >>> len(buffer), [rows["id"] for rows in buffer.pieces()]
        (2, [tensor([4, 2])])
    """

    def __init__(self) -> None:
        self._blocks: list[dict[str, Tensor]] = []
        self._rows = self._left = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Appends a copy of rows.

        Args:
            rows: Values by field, each of shape (n,); the fields and data types must be the same in every call.
        """
        # Copied, because the loop may write into its tensors before the rows are sent.
        n = len(next(iter(rows.values())))
        done = 0
        while done < n:
            if not self._left:
                # The memory of large blocks is returned to the system when they are cleared; the memory of many small ones is
                # not.
                self._left = max(BLOCK, self._rows // 8)
                self._blocks.append(
                    {name: values.new_empty(self._left) for name, values in rows.items()}
                )
            part = min(n - done, self._left)
            for name, block in self._blocks[-1].items():
                place = len(block) - self._left
                block[place : place + part] = rows[name][done : done + part]
            done = done + part
            self._rows = self._rows + part
            self._left = self._left - part

    def pieces(self) -> Iterator[dict[str, Tensor]]:
        """Yields the rows in the order of `add`, up to `BLOCK` at a time."""
        for block in self._blocks:
            size = len(next(iter(block.values()))) - (
                self._left if block is self._blocks[-1] else 0
            )
            for begin in range(0, size, BLOCK):
                yield {
                    name: values[begin : min(size, begin + BLOCK)] for name, values in block.items()
                }

    def clear(self) -> None:
        """Removes all rows."""
        self._blocks = []
        self._rows = 0
        self._left = 0


ID = "#id"
FIRST = "#first"
"""Fields of buffered rows in addition to the fields of the columns."""


class GatheredRecords(Records):
    """Records that rank 0 keeps; other ranks have columns without values.

    Written rows are buffered until all ranks call `sync`. Rank 0 then writes the rows of the last rank first, and its own last.
    So if several ranks wrote the same sample, columns with merge="last" keep the last value of the lowest of these ranks.

    Args:
        columns: Declarations of the columns by name.
        n: Number of samples.
        world: The ranks.
        device: Device of the columns and of the written values.
        sent: Data types, by column, in which values are buffered and sent. Default: the data types of the columns.

    Example:
        >>> from thresher.distributed.world import ALONE
        >>> records = GatheredRecords({"loss": Column(torch.float32)}, 3, ALONE, torch.device("cpu"))
        >>> records.write(torch.tensor([2, 0, 2]), {"loss": torch.tensor([0.5, 1.5, 2.5])})
        >>> before = records["loss"].tolist()
        >>> records.sync()
        >>> before, records["loss"].tolist()
        ([0.0, 0.0, 0.0], [1.5, 0.0, 2.5])
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        n: int,
        world: World,
        device: torch.device,
        sent: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(columns, n if world.is_first else 0, device)
        self._world = world
        self._device = device
        self._write_buffer = WriteBuffer()
        # A rank buffers its rows of a whole epoch, so the size of an id matters.
        self._id_dtype = torch.int32 if n < 2**31 else torch.int64
        self._fields = [name for name, signal in self.written.items() if signal != EPOCH]
        self._by_function = any(callable(self.columns[name].merge) for name in self._fields)
        self._sent = dict(sent or {})

    def write(
        self,
        ids: Tensor,
        values: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        *,
        first: bool | Tensor = True,
        certain: Tensor | None = None,
    ) -> None:
        """Buffers the signals of one batch until `sync`; takes the arguments of `Records.write`."""
        # Rows that do not count get the id -1, because removing them here would wait for the device in each step.
        rows = {ID: (ids if certain is None else torch.where(certain, ids, -1)).to(self._id_dtype)}
        if self._by_function:
            rows[FIRST] = torch.as_tensor(first, device=ids.device).expand(len(ids))
        for name in self._fields:
            signal = self.written[name]
            column = self.columns[name]
            if callable(column.merge):
                new = values[signal]
            else:
                new = values[signal].to(self._sent.get(name, column.dtype))
            # Rank 0 adds up what it receives, so if rows are written again with another value, the difference is sent.
            rows[name] = (
                new - before[signal].to(column.dtype)
                if before is not None and column.merge == "sum"
                else new
            )
        self._write_buffer.add(rows)

    def sync(self) -> None:
        """Writes what all ranks have buffered to the columns of rank 0. All ranks must call it."""
        self._collect(self)
        self._write_buffer.clear()

    def _collect(self, columns: Mapping[str, Tensor]) -> None:
        """Writes what all ranks have buffered to columns of rank 0."""
        # Cloned, because a pickle of a slice contains the whole tensor.
        pieces = (
            {name: values.clone().cpu() for name, values in piece.items()}
            for piece in self._write_buffer.pieces()
        )
        for piece in self._world.to_first(pieces):
            certain = (piece[ID] >= 0).nonzero().flatten()
            for turn in _turns(piece[ID][certain].numpy()):
                chosen = certain[turn]
                self._store(
                    columns,
                    {name: values[chosen].to(self._device) for name, values in piece.items()},
                )

    def _store(self, columns: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Writes rows to columns; no two rows may have the same sample."""
        ids = rows[ID].long()
        for name, signal in self.written.items():
            merge = self.columns[name].merge
            column = columns[name]
            new = torch.full_like(ids, self.epoch) if signal == EPOCH else rows[name]
            if callable(merge):
                self._merge(column, ids, new, merge, rows.get(FIRST, True))
            elif merge == "last":
                column.scatter_(0, ids, new.to(column.dtype))
            else:
                column.scatter_add_(0, ids, new.to(column.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the columns with the buffered rows added. Changes nothing; all ranks must call it."""
        # Copies, because with a sync in mid-epoch, a run that is saved would differ from a run that is not.
        columns = {name: column.clone() for name, column in self.items()}
        self._collect(columns)
        return columns

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads saved columns, and removes buffered rows."""
        super().load_state_dict(state)
        self._write_buffer.clear()


def _turns(ids: NDArray[Any]) -> Iterator[Tensor]:
    """Splits ids into groups without duplicates, and yields the positions of each group.

    The first group has the first occurrence of each id, the second group the second occurrences, and so on.

    Args:
        ids: Ids, shape (k,).
    """
    ascending = np.sort(ids)
    if (ascending[1:] != ascending[:-1]).all():
        yield torch.arange(len(ids))
        return
    # A merge function takes the old value of a sample and one new value: of several at once, all but one would be lost.
    order = np.argsort(ids, kind="stable")
    first = np.append(True, ascending[1:] != ascending[:-1])
    turn = np.arange(len(order)) - np.flatnonzero(first)[np.cumsum(first) - 1]
    for number in range(int(turn.max()) + 1):
        yield torch.from_numpy(order[turn == number])
