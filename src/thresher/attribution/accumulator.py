"""The signals of the optimizer step in progress: added up where a criterion is called twice for the same rows, written once.

Steps that are over wait until there are enough of them to be computed and written together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thresher.attribution.calls import Call, same_samples
from thresher.attribution.meter import Meter, next_node
from thresher.attribution.rows import Attribution, YieldedBatch
from thresher.loading.trees import leaves
from thresher.records import EPOCH, Records


class Deferred(Protocol):
    """Signals that are not computed yet; for many small batches together that takes a fraction of the time."""

    @property
    def numel(self) -> int:
        """Number of values that are held until the signals are computed."""
        ...

    @property
    def form(self) -> int:
        """Number that is equal for signals which can be computed together."""
        ...

    def now(self) -> dict[str, Tensor]:
        """Returns the signals of each sample, shape (n,), by name."""
        ...

    def together(self, several: "Sequence[Any]") -> dict[str, Tensor]:
        """Returns the signals of the samples of several batches, one after the other."""
        ...


Found = dict[str, Tensor] | Deferred
"""Signals of some rows, shape (n,), by name; or what they are computed from later."""

MOST_WAITING = 2**15
"""Number of values that are held of steps that are over and not yet written."""

MOST_UNCOUNTED = 2**16
"""Number of samples that wait to be counted as trained."""

OF_A_STEP = 2**10
"""Size of a step whose signals are computed already, so that no more than 32 wait."""


@dataclass(eq=False, slots=True)
class Entry:
    """Signals of some rows, credited in the step in progress."""

    attribution: Attribution
    key: tuple[int, int, int, int] | None
    found: Found
    sources: set[int] | None
    """Storages of the outputs, where only the targets name the rows."""
    made: int
    """Number of the autograd node that is next after this loss."""
    rows: Tensor | None = None
    """Numbers of the rows that were trained on; None for all."""
    call: Call | None = None
    """Identity of its outputs and targets, by which the same loss is not added twice; None where it is not known."""
    fresh: Tensor | None = None
    """Mask of the rows that no other call of this step had, shape (n,), bool; None for all."""
    confirmed: bool = False
    dirty: bool = True
    counted: bool = False
    """Whether its samples were counted as trained."""
    written: dict[str, Tensor] | None = None

    @property
    def trained(self) -> Tensor:
        """Ids of the rows that were trained on."""
        return self.attribution.ids if self.rows is None else self.attribution.ids[self.rows]

    @property
    def size(self) -> int:
        """Size among the steps that wait, in values."""
        return OF_A_STEP if isinstance(self.found, dict) else self.found.numel

    def values(self) -> dict[str, Tensor]:
        """Returns the signals, which are computed now if they were not before."""
        if not isinstance(self.found, dict):
            self.found = self.found.now()
        return self.found


def _storages(outputs: Any) -> set[int]:
    if isinstance(outputs, Tensor) and outputs.layout is torch.strided:
        return {outputs.untyped_storage()._cdata}
    return {leaf.untyped_storage()._cdata for leaf in leaves(outputs) if leaf.layout is torch.strided}


class StepAccumulator:
    """Collects the signals of criterion calls, and writes them to the records.

    Args:
        records: Records that the signals are written to.
        meter: Counter of the samples whose forward pass the model did not count; a sample counts once per forward pass,
            however many calls there were.
        trained: Number of times each sample was trained on, shape (N,), an integer dtype; empty where samples have no ids.
        count_steps: Whether each credited batch counts as a step, where there is no optimizer to count them.
    """

    def __init__(self, records: Records, meter: Meter, trained: Tensor, *, count_steps: bool) -> None:
        self._records, self.meter, self._count_steps = records, meter, count_steps
        self.ids_repeat = True
        """Whether samples can come twice in an epoch, so that the order of writing matters."""
        self._open: list[Entry] = []
        self._waiting: list[Entry] = []
        self._size = 0
        self._table, self._uncounted_samples = trained, 0
        self._trained: list[Tensor] = []
        self.doubts: list[Tensor] = []
        """Flags of comparisons on the device, which must be true when the epoch ends."""

    def credit(
        self,
        attribution: Attribution,
        found: Found,
        outputs: Any,
        untracked: Any = None,
        rows: Tensor | None = None,
        call: Call | None = None,
    ) -> None:
        """Adds the signals of some rows.

        A second call for the same rows in a step adds to their loss, as of an auxiliary head; a call with outputs of a later
        forward pass replaces it. A call with the very same outputs and targets, as for a log, changes nothing.

        Args:
            attribution: The samples that the rows are.
            found: Signals by name, or what they are computed from later.
            outputs: Outputs that the loss is made of.
            untracked: The same outputs, by which the signals can be withdrawn; None where it is certain that the model
                returned them for these rows.
            rows: Numbers of the rows that are trained on, shape (k,), int64; None for all.
            call: Identity of outputs and targets; None where it is not known.
        """
        if untracked is not None and call is not None and self._has_credited_call(call, attribution):
            return
        origin = None if untracked is None else self.meter.origin(outputs)
        if origin is not None and attribution.batch is not None:
            origin.batch = attribution.batch.number
        for same in self._open:
            if same.key is not None and same.key == attribution.key:
                origin = origin or self.meter.origin(outputs)
                again = origin is None or origin.first >= same.made
                if not again and untracked is None and same.call == call:
                    return  # the tensor that the model returned last, and a target of the batch, once more
                if untracked is not None:
                    self.meter.count(outputs, origin, attribution.layout.n if again else 0)
                if again:
                    same.found, same.rows, same.made = found, rows, next_node()
                    same.call = call
                else:
                    more = found if isinstance(found, dict) else found.now()
                    same.found = {**same.values(), "loss": same.values()["loss"] + more["loss"]}
                same.dirty = True
                return
        sources = None if untracked is None else _storages(untracked)
        entry = Entry(attribution, attribution.key, found, sources, next_node(), rows, call)
        new: int | Tensor = attribution.layout.n
        if self._open:
            others = [other for other in self._open if _may_overlap(other.attribution, attribution)]
            if others:
                origin = origin or self.meter.origin(outputs)
                again = origin is None or all(origin.first >= other.made for other in others)
                self._add_to(others, entry, again=again)
                if not again and entry.fresh is not None:
                    new = entry.fresh.sum()
        if untracked is not None:
            self.meter.count(outputs, origin, new)
        self._open.append(entry)

    def _has_credited_call(self, call: Call, attribution: Attribution) -> bool:
        return any(one.call == call and same_samples(one.attribution, attribution) for one in self._open)

    def _add_to(self, others: list[Entry], entry: Entry, *, again: bool) -> None:
        """Takes rows of which other calls of this step had some: adds to the losses of these, and sets the others.

        Args:
            others: Entries that may have some of the rows.
            entry: Entry of the new call.
            again: Whether its outputs are of a later forward pass, so that it replaces the losses instead.
        """
        self.flush()
        ids, values = entry.attribution.ids, dict(entry.values())
        seen = torch.isin(ids, torch.cat([other.attribution.ids for other in others]))
        entry.written = {}
        for name, signal in self._records.written.items():
            if callable(self._records.columns[name].merge) or signal not in values:
                continue
            new = values[signal]
            old = self._records[name].index_select(0, ids).to(new.dtype)
            if not again:
                values[signal] = torch.where(seen, old + new if signal == "loss" else old, new)
            entry.written[signal] = torch.where(seen, old, torch.zeros_like(old))
        entry.fresh = ~seen
        entry.found, entry.key = values, None
        for other in others:
            other.key = None

    def has_credited(self, batch: YieldedBatch) -> bool:
        """Whether a loss of a batch was credited, be it in the step in progress."""
        return batch.credited or any(entry.attribution.batch is batch for entry in self._open)

    def withdraw(self, outputs: Any) -> None:
        """Forgets what was credited for these outputs in this step, since a later call showed that rows were mixed."""
        sources = _storages(outputs)
        self._open = [e for e in self._open if e.confirmed or e.sources is None or not e.sources & sources]

    def _confirm(self) -> None:
        """Counts the open entries, which will not be withdrawn any more."""
        for entry in self._open:
            if not entry.confirmed:
                self._count(entry)

    def _count(self, entry: Entry) -> None:
        entry.confirmed = True
        batch = entry.attribution.batch
        if batch is not None:
            batch.credited_rows += entry.attribution.layout.n
        if batch is not None and not batch.credited:
            batch.credited = True
            self.meter.credited += 1
            self.meter.cost.steps += self._count_steps

    @property
    def credited(self) -> int:
        """Number of batches of which a loss was credited."""
        return self.meter.credited

    @property
    def open(self) -> tuple[Entry, ...]:
        """What was credited in the step in progress."""
        return tuple(self._open)

    @property
    def in_step(self) -> bool:
        """Whether losses were credited since the last step."""
        return bool(self._open)

    def has_open(self, batch: YieldedBatch) -> bool:
        """Whether losses of a batch were credited since the last step."""
        return any(entry.attribution.batch is batch for entry in self._open)

    def end_step(self) -> None:
        """Ends the step; further losses of the same rows replace those before."""
        for entry in self._open:
            if not entry.confirmed:
                self._count(entry)
            if entry.dirty:
                self._waiting.append(entry)
                self._size += entry.size
        self._open = []
        if self._size > MOST_WAITING:
            self._write_waiting()

    def next_batch(self, alive: set[YieldedBatch]) -> None:
        """Closes the entries of batches that are no longer in use, since the next batch was yielded."""
        if not self._open:
            return
        self._confirm()
        for entry in self._open:
            if entry.dirty and entry.attribution.batch not in alive:
                self._waiting.append(entry)
                self._size += entry.size
        self._open = [entry for entry in self._open if entry.attribution.batch in alive]
        if self._size > MOST_WAITING:
            self._write_waiting()

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting and not self.ids_repeat and _alike(waiting):
            ids = torch.cat([entry.attribution.ids for entry in waiting])
            self._records.write(ids, _together([entry.found for entry in waiting]))
            self._count_trained(*waiting)
            return
        for entry in waiting:
            self._write(entry)

    def _write(self, entry: Entry) -> None:
        values, first = entry.values(), self._first(entry)
        if entry.attribution.holds:
            values, first = self._where_certain(entry, first)
        self._records.write(entry.attribution.ids, values, entry.written, first=first)
        entry.written, entry.dirty = values, False
        if not entry.counted:
            entry.counted = True
            self._count_trained(entry)

    @staticmethod
    def _first(entry: Entry) -> bool | Tensor:
        """Rows of an entry that have not been written in this step."""
        if entry.counted:
            return False
        return True if entry.fresh is None else entry.fresh

    def _count_trained(self, *entries: Entry) -> None:
        """Counts samples that were trained on, many at a time, since a table of all samples is far from the processor."""
        for entry in entries:
            ids, fresh, rows = entry.trained, entry.fresh, entry.rows
            if fresh is None:
                self._trained.append(ids)
            elif len(self._table):
                self._table.index_add_(0, ids, (fresh if rows is None else fresh[rows]).to(self._table.dtype))
            self._uncounted_samples += len(ids)
        if self._uncounted_samples > MOST_UNCOUNTED:
            self.count_trained()

    def count_trained(self) -> Tensor:
        """Returns how often each sample was trained on, up to what was written; shape (N,)."""
        if self._trained and len(self._table):
            ids = torch.cat(self._trained)
            self._table.index_add_(0, ids, torch.ones_like(ids, dtype=self._table.dtype))
        self._trained, self._uncounted_samples = [], 0
        return self._table

    def _where_certain(self, entry: Entry, first: bool | Tensor) -> tuple[dict[str, Tensor], bool | Tensor]:
        """Returns the values to write while the device still compares, and the rows that are written for the first time."""
        ids = entry.attribution.ids
        certain = torch.stack([flag.to(ids.device) for flag in entry.attribution.holds]).all()
        self.doubts.append(certain)
        values = dict(entry.values())
        for name, signal in self._records.written.items():
            if callable(self._records.columns[name].merge):
                continue
            old = self._records[name].index_select(0, ids)
            if signal == EPOCH:
                values[EPOCH] = torch.full_like(ids, self._records.epoch)
            values[signal] = torch.where(certain, values[signal].to(old.dtype), old)
        return values, first if first is False else certain.expand(len(ids)) & first

    def flush(self) -> None:
        """Writes everything."""
        self._confirm()
        self._write_waiting()
        for entry in self._open:
            if entry.dirty:
                self._write(entry)

    def settle(self) -> None:
        """Writes everything, and adds the numbers that the device counted."""
        self.flush()
        self.meter.settle()


def _alike(entries: Sequence[Entry]) -> bool:
    """Whether entries can be written together: new, certain, of different batches and of one form."""
    form, batches = _form(entries[0]), set()
    for entry in entries:
        if entry.written is not None or entry.key is None or entry.attribution.holds or _form(entry) != form:
            return False
        batches.add(entry.attribution.batch)
    return len(batches) == len(entries)


def _form(entry: Entry) -> int | tuple[str, ...]:
    """Returns a value that is equal for entries whose tensors can be joined."""
    return tuple(entry.found) if isinstance(entry.found, dict) else entry.found.form


def _together(found: Sequence[Found]) -> dict[str, Tensor]:
    first = found[0]
    if not isinstance(first, dict):
        return first.together(found)
    known = [one for one in found if isinstance(one, dict)]
    return {name: torch.cat([one[name] for one in known]) for name in first}


def _may_overlap(one: Attribution, other: Attribution) -> bool:
    if one.positions is None or other.positions is None:
        return True
    return one.batch is other.batch and not set(one.positions).isdisjoint(other.positions)
