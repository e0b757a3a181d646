"""The credits of the step in progress: added up where a criterion is called twice for the same rows, written once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thresher.attribution import Batch, Credit
from thresher.cost import Cost
from thresher.records import Records
from thresher.trees import leaves


@dataclass(eq=False, slots=True)
class Entry:
    """Signals of some rows, credited in this step."""

    credit: Credit
    key: tuple[int, int, int, int] | None
    values: dict[str, Tensor]
    sources: set[int]
    new: int | Tensor
    written: dict[str, Tensor] | None = None
    dirty: bool = True


def _storages(outputs: Any) -> set[int]:
    if isinstance(outputs, Tensor) and outputs.layout is torch.strided:
        return {outputs.untyped_storage()._cdata}
    return {leaf.untyped_storage()._cdata for leaf in leaves(outputs) if leaf.layout is torch.strided}


class Ledger:
    """Collects what criterion calls say about samples and writes it to the records.

    Args:
        records: Where signals go.
        cost: Where samples are counted, once a step however many calls there were.
        count_steps: Count a step for each credited batch, where no optimizer tells.
    """

    def __init__(self, records: Records, cost: Cost, *, count_steps: bool) -> None:
        self._records, self._cost, self._count_steps = records, cost, count_steps
        self._entries: list[Entry] = []
        self._uncounted: list[Tensor] = []
        self.doubts: list[Tensor] = []
        """Device flags of value comparisons, to be true when the epoch ends."""

    def credit(self, credit: Credit, values: dict[str, Tensor], outputs: Any) -> None:
        """Take the signals of some rows; a second call for the same rows in a step adds to their loss."""
        for same in self._entries:
            if same.key is not None and same.key == credit.key:
                same.values = {**same.values, "loss": same.values["loss"] + values["loss"]}
                same.sources |= _storages(outputs)
                same.dirty = True
                return
        entry = Entry(credit, credit.key, values, _storages(outputs), credit.group.n)
        if self._entries:
            others = [other for other in self._entries if _may_overlap(other.credit, credit)]
            if others:
                self._add_to(others, entry)
        self._entries.append(entry)

    def _add_to(self, others: list[Entry], entry: Entry) -> None:
        """Rows that are partly known from other calls of this step: add where they are, set where they are not."""
        self.flush()
        ids = entry.credit.ids
        seen = torch.isin(ids, torch.cat([other.credit.ids for other in others]))
        entry.written = {}
        for name, column in self._records.columns.items():
            signal = column.signal or name
            new = entry.values[signal]
            old = self._records[name].index_select(0, ids).to(new.dtype)
            entry.values[signal] = torch.where(seen, old + new if signal == "loss" else old, new)
            entry.written[signal] = torch.where(seen, old, torch.zeros_like(old))
        entry.new = (~seen).sum()
        entry.key = None
        for other in others:
            other.key = None

    def withdraw(self, outputs: Any) -> None:
        """Forget what was credited for these outputs and not written yet: a later call showed that rows were mixed."""
        sources = _storages(outputs)
        self._entries = [e for e in self._entries if not (e.dirty and e.written is None and e.sources & sources)]

    def flush(self) -> None:
        """Write what is new."""
        for entry in self._entries:
            if not entry.dirty:
                continue
            ids, values = entry.credit.ids, entry.values
            if entry.credit.holds:
                values = self._where_certain(entry)
            self._records.write(ids, values, entry.written)
            entry.written, entry.dirty = entry.values, False
            self._count(entry)

    def _where_certain(self, entry: Entry) -> dict[str, Tensor]:
        """Values to write while the device still compares: the old ones where the comparison fails."""
        certain = torch.stack([flag.to(entry.credit.ids.device) for flag in entry.credit.holds]).all()
        self.doubts.append(certain)
        values = dict(entry.values)
        for name, column in self._records.columns.items():
            signal = column.signal or name
            old = self._records[name].index_select(0, entry.credit.ids)
            values[signal] = torch.where(certain, entry.values[signal].to(old.dtype), old)
        return values

    def _count(self, entry: Entry) -> None:
        new, entry.new = entry.new, 0
        if isinstance(new, Tensor):
            self._uncounted.append(new)
        else:
            self._cost.forward += new
            self._cost.backward += new
        batch = entry.credit.batch
        if batch is not None and not batch.credited:
            batch.credited = True
            self._cost.steps += self._count_steps

    def settle(self) -> None:
        """Write what is new and count what the device counted."""
        self.flush()
        for count in self._uncounted:
            self._cost.forward += int(count)
            self._cost.backward += int(count)
        self._uncounted.clear()

    def end_step(self) -> None:
        """The optimizer stepped: further losses of the same rows replace."""
        self.flush()
        self._entries.clear()

    def next_batch(self, alive: set[Batch]) -> None:
        """A batch was yielded: write, and forget rows of batches that are gone."""
        self.flush()
        self._entries = [e for e in self._entries if e.credit.batch in alive]


def _may_overlap(one: Credit, other: Credit) -> bool:
    if one.positions is None or other.positions is None:
        return True
    return one.batch is other.batch and not set(one.positions).isdisjoint(other.positions)
