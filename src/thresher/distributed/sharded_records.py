"""Records in shards: each rank owns a block of ids, and sends rows of other samples to their owners once per epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.layout import ShardLayout, to_owners
from thresher.records import EPOCH, Column, Records
from thresher.shards import World

BLOCK = 2**16
"""Number of rows in one piece of memory."""


class WriteBuffer:
    """Buffer of recorded rows on the device, until they are sent; never waits for the device.

    Example:
        >>> buffer = WriteBuffer()
        >>> buffer.add({"id": torch.tensor([4, 2]), "loss": torch.tensor([0.5, 1.5])})
        >>> len(buffer), buffer.rows()["id"]
        (2, tensor([4, 2]))
    """

    def __init__(self) -> None:
        self._pieces: list[dict[str, Tensor]] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Appends a copy of rows.

        Args:
            rows: Values by field, each of shape (n,); the fields and their data types are those of the first call.
        """
        # Copied, because the loop may write into its tensors before the rows are sent.
        n, done = len(next(iter(rows.values()))), 0
        while done < n:
            place = self._rows % BLOCK
            if not place:
                self._pieces.append({name: values.new_empty(BLOCK) for name, values in rows.items()})
            part = min(n - done, BLOCK - place)
            for name, piece in self._pieces[-1].items():
                piece[place : place + part] = rows[name][done : done + part]
            done += part
            self._rows += part

    def rows(self) -> dict[str, Tensor]:
        """Returns all rows in the order of `add`; empty without rows."""
        if not self._pieces:
            return {}
        return {name: torch.cat([piece[name] for piece in self._pieces])[: self._rows] for name in self._pieces[0]}

    def clear(self) -> None:
        """Removes all rows."""
        self._pieces, self._rows = [], 0


PLACE = "#place"
"""Field of sent rows: the place of the sample in the block of its owner."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
"""Data types of fields, by their number in a message."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Received rows of one block, in the order of the sending ranks, and for each rank in the order of writing.

    Args:
        places: Places of the samples in the block, shape (k,), int64.
        ranks: Ranks that sent the rows, shape (k,), ascending.
        fields: Values by name, each of shape (k,), on the host.

    Example:
        Sample 5 was written by two ranks, twice by the first one:

        >>> arrivals = Arrivals(np.array([5, 2, 5, 5]), np.array([0, 0, 0, 1]), {})
        >>> arrivals.last, [turn.tolist() for turn in arrivals.turns]
        (array([1, 2]), [[1, 0], [2], [3]])
    """

    places: NDArray[np.int64]
    ranks: NDArray[np.int64]
    fields: Mapping[str, Tensor]

    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """Returns the rows in the order of places, the mask of the first row per place, and the start of each row's place."""
        order = np.argsort(self.places, kind="stable")
        places = self.places[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = places[1:] != places[:-1]
        starts = np.flatnonzero(first)
        return order, first, starts[np.cumsum(first) - 1]

    @property
    def last(self) -> NDArray[np.int64]:
        """One row per sample: the last row of the lowest rank that sent one."""
        # Padding makes a sample come twice, on one rank or on several: one of its values must stay.
        order, first, start = self._sorted()
        lowest = self.ranks[order] == self.ranks[order[start]]
        goes_on = np.zeros_like(lowest)
        goes_on[:-1] = lowest[1:] & ~first[1:]
        return order[lowest & ~goes_on]

    @property
    def turns(self) -> list[NDArray[np.int64]]:
        """All rows in groups with at most one row per sample: the first rows of the samples, the second rows, and so on."""
        # A merge function takes the old value of a sample and one new value: of several at once, all but one would be lost.
        order, _, start = self._sorted()
        turn = np.arange(len(order)) - start
        return [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]


def common_dtypes(rows: Mapping[str, Tensor], names: Sequence[str], world: World) -> dict[str, torch.dtype]:
    """Returns the common data types of fields; all ranks call it.

    Args:
        rows: Fields by name; empty if this rank has no rows.
        names: Names of the fields.
        world: The ranks.

    Returns:
        Data types by name, promoted over all ranks; bool if no rank has rows.
    """
    if not names:
        return {}
    # A rank without rows does not know the data types. Its 0 stands for bool, which any promotion leaves as it is.
    own = [DTYPES.index(rows[name].dtype) if rows else 0 for name in names]
    found = {}
    for name, numbers in zip(names, world.gather(np.array(own)).T.tolist(), strict=True):
        found[name] = DTYPES[numbers[0]]
        for number in numbers[1:]:
            found[name] = torch.promote_types(found[name], DTYPES[number])
    return found


def send_home(
    ids: NDArray[np.int64], rows: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], layout: ShardLayout, world: World
) -> Arrivals:
    """Sends rows to the ranks that own their samples; all ranks call it.

    A row takes 4 bytes for its place, and the bytes of its fields.

    Args:
        ids: Ids of the rows, shape (k,); a sample may have several rows.
        rows: Fields by name, each of shape (k,); may be empty if k is 0.
        dtypes: Data types of the sent fields, the same on all ranks.
        layout: Blocks of the ranks.
        world: The ranks.

    Returns:
        The rows that this rank received.
    """
    packed = np.empty(len(ids), dtype=[(PLACE, np.uint32), *((name, numpy_dtype(dtype)) for name, dtype in dtypes.items())])
    for name, values in rows.items():
        packed[name] = on_host_as_bits(values.to(dtypes[name]))
    order, ends = to_owners(ids, layout)
    packed[PLACE] = ids % layout.per
    arrived = world.exchange(np.split(packed[order], ends))
    every = np.concatenate(arrived)
    ranks = np.repeat(np.arange(world.size), [len(part) for part in arrived])
    fields = {name: from_bits(every[name], dtype) for name, dtype in dtypes.items()}
    return Arrivals(every[PLACE].astype(np.int64), ranks, fields)


def on_host_as_bits(tensor: Tensor) -> NDArray[Any]:
    """Returns a tensor as a NumPy array; bfloat16 becomes int16 with the same bits, because NumPy has no bfloat16.

    Args:
        tensor: Tensor of any data type, on any device.
    """
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy()


def from_bits(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Inverts `on_host_as_bits`.

    Args:
        values: The array.
        dtype: Data type of the tensor.
    """
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the NumPy data type that `on_host_as_bits` gives to a tensor.

    Args:
        dtype: Data type of the tensor.
    """
    return on_host_as_bits(torch.empty(0, dtype=dtype)).dtype


ID, FIRST, CERTAIN = "#id", "#first", "#certain"
"""Fields of buffered rows beside those of the columns."""


class ShardedRecords(Records):
    """Records of the block of ids that one rank owns; `write` takes ids of any rank.

    Written rows are buffered until all ranks call `sync`. If several ranks wrote a sample, columns with merge="last" take the
    last value of the lowest of these ranks. Columns with merge="sum" take the sum of all values. Merge functions are called
    once per value, one rank after the other.

    Args:
        columns: Declarations of the columns by name.
        layout: Blocks of the ranks.
        world: The ranks.
        device: Device of the columns and of the written values.

    Attributes:
        shard: Samples of the columns.

    Example:
        >>> from thresher.testing.threaded_world import on_ranks
        >>> def train(world):
        ...     layout = ShardLayout(n=10, size=2, unit=8)
        ...     records = ShardedRecords({"loss": Column(torch.float32)}, layout, world, torch.device("cpu"))
        ...     records.write(torch.tensor([9 - world.rank]), {"loss": torch.tensor([world.rank + 0.5])})
        ...     records.sync()
        ...     return records["loss"].tolist()
        >>> on_ranks(2, train)
        [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.5, 0.5]]
    """

    def __init__(self, columns: Mapping[str, Column], layout: ShardLayout, world: World, device: torch.device) -> None:
        shard = layout.shard(world)
        super().__init__(columns, len(shard), device)
        self.shard, self.layout = shard, layout
        self._device, self._write_buffer = device, WriteBuffer()
        self._sent = [name for name, signal in self.written.items() if signal != EPOCH]
        self._by_function = [name for name in self._sent if callable(self.columns[name].merge)]

    def write(
        self,
        ids: Tensor,
        values: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        *,
        first: bool | Tensor = True,
        certain: Tensor | None = None,
    ) -> None:
        """Buffers the signals of one batch until `sync`.

        Args:
            ids: Sample ids of any rank, shape (B,), int64, on the device of the records.
            values: Signals by name, each of shape (B,).
            before: Signals of the last write of the same rows, as in `Records.write`.
            first: Whether columns whose `merge` is a function are written, as in `Records.write`.
            certain: Mask of the rows to write, shape (B,) or (), bool; read by `sync`. Default: all rows.
        """
        # Masks are buffered with the rows: to leave rows out here would wait for the device in each step.
        rows = {ID: ids, CERTAIN: _for_each(True if certain is None else certain, ids)}
        if self._by_function:
            rows[FIRST] = _for_each(first, ids)
        for name in self._sent:
            signal, column = self.written[name], self.columns[name]
            new = values[signal] if callable(column.merge) else values[signal].to(column.dtype)
            # The owner adds up what it receives, and does not have the value of the last write: the difference is sent.
            rows[name] = new - before[signal].to(column.dtype) if before is not None and column.merge == "sum" else new
        self._write_buffer.add(rows)

    def sync(self) -> None:
        """Sends buffered rows to the ranks that own the samples, which store them; all ranks call it."""
        if (arrivals := self._arrivals()) is not None:
            self._store(arrivals)
            self._write_buffer.clear()

    def _arrivals(self) -> Arrivals | None:
        """Returns the rows of this block that all ranks have buffered; None if no rank has any."""
        # All ranks ask for the total, also those without rows: one that returned early would leave the others waiting.
        world, rows = self.shard.world, self._write_buffer.rows()
        if not world.total(len(self._write_buffer)):
            return None
        dtypes = {name: self.columns[name].dtype for name in self._sent} | common_dtypes(rows, self._by_function, world)
        if self._by_function:
            dtypes[FIRST] = torch.bool
        certain = rows[CERTAIN] if rows else torch.empty(0, dtype=torch.bool)
        ids = rows[ID][certain].cpu().numpy() if rows else np.empty(0, dtype=np.int64)
        sent = {name: rows[name][certain] for name in dtypes} if rows else {}
        return send_home(ids, sent, dtypes, self.layout, world)

    def _store(self, arrivals: Arrivals) -> None:
        """Merges received rows into the columns."""
        last, turns = [arrivals.last], arrivals.turns
        first = arrivals.fields[FIRST].numpy() if self._by_function else None
        for name, signal in self.written.items():
            merge, tensor = self.columns[name].merge, self[name]
            for chosen in last if merge == "last" else turns:
                if callable(merge) and first is not None:
                    chosen = chosen[first[chosen]]
                ids = torch.from_numpy(arrivals.places[chosen]).to(self._device)
                found = {} if signal == EPOCH else {signal: arrivals.fields[name][chosen].to(self._device)}
                new = self._new(signal, found, ids)
                if callable(merge):
                    self._merge(tensor, ids, new, merge, True)
                elif merge == "last":
                    tensor.scatter_(0, ids, new.to(tensor.dtype))
                else:
                    tensor.scatter_add_(0, ids, new.to(tensor.dtype))

    def gathered(self) -> dict[str, Tensor]:
        """Returns the columns of all samples; all ranks call it."""
        return {
            name: from_bits(self.shard.world.join(on_host_as_bits(column)), column.dtype).to(self._device)
            for name, column in self.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the columns of this block as after `sync`, without changing them; all ranks call it."""
        # Merged in a second object: a sync in mid-epoch would make the run that was saved differ from one that was not.
        arrivals, home = self._arrivals(), ShardedRecords(self.columns, self.layout, self.shard.world, self._device)
        home.load_state_dict(self)
        home.epoch = self.epoch
        if arrivals is not None:
            home._store(arrivals)
        return dict(home)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads saved columns of this block, and removes buffered rows."""
        super().load_state_dict(state)
        self._write_buffer.clear()


def _for_each(flag: bool | Tensor, ids: Tensor) -> Tensor:
    """Returns one flag per id."""
    if isinstance(flag, bool):
        return torch.full_like(ids, flag, dtype=torch.bool)
    return flag.to(ids.device).expand(len(ids))
