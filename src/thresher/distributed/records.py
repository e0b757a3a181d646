"""Records in shards: each rank holds those of its block of ids; what it writes of other samples travels once per epoch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.distributed.homecoming import Arrivals, common_dtypes, from_bits, on_host_as_bits, send_home
from thresher.distributed.layout import ShardLayout
from thresher.distributed.outbox import Outbox
from thresher.records import EPOCH, Column, Records
from thresher.shards import Shard, ShardColumns, World

ID, FIRST, CERTAIN = "#id", "#first", "#certain"
"""Fields of the rows that wait, beside those of the columns."""

MOST_GATHERED = 2**29
"""Number of bytes of records that are gathered on each rank for a method that does not plan over shards: 512 MiB."""


class ShardedRecords(Records):
    """Records of the block of ids that one rank holds; `write` takes ids of any rank.

    What is written waits until `come_home` is called on all ranks. A sample that several ranks have written then has the last
    value of the lowest of these ranks in columns with merge="last", and the sum of all values in columns with merge="sum";
    functions are called once per value, for one rank after the other.

    Args:
        columns: Declarations of the columns by name.
        layout: Blocks of the ranks.
        world: The ranks.
        device: Device of the columns, and of what is written.

    Attributes:
        shard: Samples that the columns are for.

    Example:
        >>> from thresher.distributed.threads import on_ranks
        >>> def train(world):
        ...     layout = ShardLayout(n=10, size=2, unit=8)
        ...     records = ShardedRecords({"loss": Column(torch.float32)}, layout, world, torch.device("cpu"))
        ...     records.write(torch.tensor([9 - world.rank]), {"loss": torch.tensor([world.rank + 0.5])})
        ...     records.come_home()
        ...     return records["loss"].tolist()
        >>> on_ranks(2, train)
        [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.5, 0.5]]
    """

    def __init__(self, columns: Mapping[str, Column], layout: ShardLayout, world: World, device: torch.device) -> None:
        shard = layout.shard(world)
        super().__init__(columns, len(shard), device)
        self.shard, self.layout = shard, layout
        self._device, self._outbox = device, Outbox()
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
        """Notes the signals of one batch until `come_home`.

        Args:
            ids: Sample ids, shape (B,), int64, on the device of the records; those of other ranks, too.
            values: Signals by name, each of shape (B,).
            before: Signals of the last write of the same rows, as in `Records.write`.
            first: Whether columns whose `merge` is a function are written, as in `Records.write`.
            certain: Marks of the rows that are written at all, of shape (B,) or (), bool; they are looked at when the rows
                travel. Default: all.
        """
        rows = {ID: ids, CERTAIN: _for_each(True if certain is None else certain, ids)}
        if self._by_function:
            rows[FIRST] = _for_each(first, ids)
        for name in self._sent:
            signal, column = self.written[name], self.columns[name]
            new = values[signal] if callable(column.merge) else values[signal].to(column.dtype)
            rows[name] = new - before[signal].to(column.dtype) if before is not None and column.merge == "sum" else new
        self._outbox.add(rows)

    def come_home(self) -> None:
        """Sends what was written to the ranks that hold the samples, and stores it there; all ranks call it."""
        if (arrivals := self._arrivals()) is not None:
            self._store(arrivals)
            self._outbox.clear()

    def _arrivals(self) -> Arrivals | None:
        """Returns what all ranks have written of the samples of this block; None where no rank has written."""
        world, rows = self.shard.world, self._outbox.rows()
        if not world.total(len(self._outbox)):
            return None
        dtypes = {name: self.columns[name].dtype for name in self._sent} | common_dtypes(rows, self._by_function, world)
        if self._by_function:
            dtypes[FIRST] = torch.bool
        certain = rows[CERTAIN] if rows else torch.empty(0, dtype=torch.bool)
        ids = rows[ID][certain].cpu().numpy() if rows else np.empty(0, dtype=np.int64)
        sent = {name: rows[name][certain] for name in dtypes} if rows else {}
        return send_home(ids, sent, dtypes, self.layout, world)

    def _store(self, arrivals: Arrivals) -> None:
        """Stores rows of this block."""
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

    def gathered(self, who: str, way_out: str = "") -> ShardColumns:
        """Returns the columns of all samples, for a method that does not plan over shards; all ranks call it.

        Args:
            who: Name of the method, used in the message.
            way_out: End of the message: settings with which the method would plan over shards.

        Raises:
            ValueError: The columns are too large to be held by every rank; all ranks raise it.
        """
        size = self.shard.n * self.bytes_per_sample
        if size > MOST_GATHERED:
            raise ValueError(
                f"{who} plans from the records of all samples, and every process would have to hold them: "
                f"{size / 2**20:,.0f} MiB, of at most {MOST_GATHERED / 2**20:,.0f}. Use a method that plans over shards, as "
                f"Requirements(sharded=True) declares{way_out}."
            )
        columns = {
            name: from_bits(self.shard.world.join(on_host_as_bits(column)), column.dtype).to(self._device)
            for name, column in self.items()
        }
        return ShardColumns(columns, Shard.whole(self.shard.n))

    def state_dict(self) -> dict[str, Any]:
        """Returns the columns of this block as they were if everything had come home, which it has not; all ranks call it."""
        arrivals, home = self._arrivals(), ShardedRecords(self.columns, self.layout, self.shard.world, self._device)
        home.load_state_dict(self)
        home.epoch = self.epoch
        if arrivals is not None:
            home._store(arrivals)
        return dict(home)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies saved columns of this block into these, and forgets what has not come home."""
        super().load_state_dict(state)
        self._outbox.clear()


def _for_each(flag: bool | Tensor, ids: Tensor) -> Tensor:
    """Returns a flag for each of the ids."""
    if isinstance(flag, bool):
        return torch.full_like(ids, flag, dtype=torch.bool)
    return flag.to(ids.device).expand(len(ids))
