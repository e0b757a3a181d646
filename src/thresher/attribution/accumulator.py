"""The signals of the optimizer step in progress: which calls of the criterion count, and what they add up to.

Steps that are over wait until there are enough of them to be computed and written together.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thresher.attribution.cost_meter import ForwardPass, Meter, next_node
from thresher.attribution.resolve import ROW_MAJOR
from thresher.attribution.rows import Attribution, YieldedBatch
from thresher.loading.trees import leaves
from thresher.records import Column, Records

CallIdentity = int | tuple[Any, ...]
"""Identity of the outputs and targets of one call; equal for two calls with the very same ones."""


def identity_of(outputs: Any, targets: Any) -> CallIdentity | None:
    """Returns the identity of one call of the criterion; None where an output has no autograd node.

    Outputs that were only reshaped since are the same ones.

    Args:
        outputs: First argument of the criterion, in any nesting.
        targets: Second argument of the criterion, in any nesting.
    """
    made = tuple(_origin(leaf) for leaf in leaves(outputs))
    if not made or None in made:
        return None
    return made, tuple(_place(leaf) for leaf in leaves(targets) if leaf.layout is torch.strided)


def _origin(tensor: Tensor) -> tuple[Any, ...] | None:
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name().split("Backward")[0] in ROW_MAJOR:
        node, number = node.next_functions[0]
    return None if node is None else (node._sequence_nr(), number, tuple(tensor.shape))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # A weak reference keeps the address of a storage from being used again.
    storage = StorageWeakRef(tensor.untyped_storage())
    version = -1 if tensor.is_inference() else tensor._version
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), version


def same_samples(one: Attribution, other: Attribution) -> bool:
    """Returns whether two losses are known to belong to the same samples, without waiting for a device."""
    if one.key is not None and one.key == other.key:
        return True
    return one.ids is other.ids or (one.ids.is_cpu and other.ids.is_cpu and torch.equal(one.ids, other.ids))


class CreditedCall(NamedTuple):
    """A call of the criterion that was credited.

    Attributes:
        identity: Identity of outputs and targets; None where it is not known.
        made: Number of the autograd node that was next after the loss.
        origin: Forward pass that the outputs came from; None where it was not searched.
    """

    identity: CallIdentity | None
    made: int
    origin: ForwardPass | None


def credited_before(
    calls: Sequence[CreditedCall], outputs: Any, call: CallIdentity | None, batch: YieldedBatch | None, meter: Meter
) -> bool | None:
    """Looks for the outputs of a loss among those of earlier calls for the same samples.

    Args:
        calls: The earlier calls; where the identity is a number, the outputs were what `run.model` returned last.
        outputs: Outputs that the loss is made of, in any nesting.
        call: Identity of outputs and targets.
        batch: Batch of the samples.
        meter: Meter that knows the forward passes of the run's model.

    Returns:
        True where one was of these outputs; False where one was only of the same forward pass; None where none was.
    """
    if not isinstance(call, tuple) or batch is None:
        return None
    made, origin = call[0], meter.origin(outputs)
    returned = meter.pass_with(made[0][0]) is origin
    found = None
    for one in calls:
        as_returned = one.origin is None and isinstance(one.identity, int)
        of = meter.last_pass(batch.number, one.made) if as_returned else one.origin
        if isinstance(one.identity, tuple) and one.identity[0] == made:
            return True
        if of is not None and of is origin:
            found = found or (as_returned and returned)
    return found


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

TRAINED = "trained"
"""Column of the number of times that each sample was trained on."""
COUNT_OF_TRAINED = {TRAINED: Column(torch.int32, merge="sum")}

MOST_UNCOUNTED = 2**16
"""Number of samples that wait to be counted as trained."""

OF_A_STEP = 2**9
"""Size of a step whose signals are computed already, so that no more than 64 wait."""


class Entry:
    """Signals of some rows, credited in the step in progress. Defaults are the class's: each step makes an entry.

    Args:
        attribution: The samples that the rows are.
        found: Their signals.
        call: Identity of outputs and targets, by which the same loss is not added twice; None where it is not known.
        rows: Numbers of the rows that were trained on; None for all.
        backwards: Number of backward passes before this loss.
    """

    origin: ForwardPass | None = None
    """Forward pass that the outputs came from; None where it was not searched."""
    more: tuple[CreditedCall, ...] = ()
    """Other calls for the same rows that the signals were, or are, of."""
    sources: set[StorageWeakRef] | None = None
    """Storages of the outputs, where only the targets name the rows; held weakly, so that no other gets the address."""
    fresh: Tensor | None = None
    """Mask of the rows that no other call of this step had, shape (n,), bool; None for all."""
    confirmed = False
    dirty = True
    counted = False
    """Whether its samples were counted as trained."""
    written: dict[str, Tensor] | None = None

    def __init__(
        self, attribution: Attribution, found: Found, call: CallIdentity | None, rows: Tensor | None, backwards: int
    ) -> None:
        self.attribution, self.key = attribution, attribution.key
        self.found, self.call, self.rows, self.backwards = found, call, rows, backwards
        self.made = next_node()
        """Number of the autograd node that is next after this loss."""

    @property
    def trained(self) -> Tensor:
        """Ids of the rows that were trained on."""
        return self.attribution.ids if self.rows is None else self.attribution.ids[self.rows]

    @property
    def calls(self) -> tuple[CreditedCall, ...]:
        """All calls of the criterion for these rows."""
        return CreditedCall(self.call, self.made, self.origin), *self.more

    def values(self) -> dict[str, Tensor]:
        """Returns the signals, which are computed now if they were not before."""
        if not isinstance(self.found, dict):
            self.found = self.found.now()
        return self.found


def _storages(outputs: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in leaves(outputs) if leaf.layout is torch.strided}


class StepAccumulator:
    """Collects the signals of criterion calls, and writes them to the records.

    Args:
        records: Records that the signals are written to.
        meter: Counter of the samples whose forward pass the model did not count; a sample counts once per forward pass,
            however many calls there were.
        trained: Number of times each sample was trained on, records with the columns `COUNT_OF_TRAINED`; without columns where
            samples have no ids.
        count_steps: Whether each credited batch counts as a step, where there is no optimizer to count them.
    """

    def __init__(self, records: Records, meter: Meter, trained: Records, *, count_steps: bool) -> None:
        self._records, self.meter, self._count_steps = records, meter, count_steps
        self.ids_repeat = True
        """Whether samples can come twice in an epoch, so that the order of writing matters."""
        self._open: list[Entry] = []
        self._waiting: list[Entry] = []
        self.over: list[Entry] = []
        """What was credited in the step before."""
        self._size = 0
        self.counts, self._uncounted_samples = trained, 0
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
        call: CallIdentity | None = None,
    ) -> None:
        """Adds the signals of some rows.

        A second call for the same rows in a step adds to their loss, as of an auxiliary head; a call with outputs of a later
        forward pass replaces it, where a backward pass ran in between. A call with the very same outputs and targets, as for a
        log, changes nothing.

        Args:
            attribution: The samples that the rows are.
            found: Signals by name, or what they are computed from later.
            outputs: Outputs that the loss is made of.
            untracked: The same outputs, by which the signals can be withdrawn; None where it is certain that the model
                returned them for these rows.
            rows: Numbers of the rows that are trained on, shape (k,), int64; None for all.
            call: Identity of outputs and targets; None where it is not known.
        """
        entry = Entry(attribution, found, call, rows, self.meter.backwards)
        if untracked is None and not self._open:
            self._open.append(entry)
        elif untracked is None or call is None or not self._has_credited_call(call, attribution):
            self._credit_beside(entry, outputs, untracked)

    def _credit_beside(self, entry: Entry, outputs: Any, untracked: Any) -> None:
        """Adds an entry where it takes more than that: there are others in the step, or its rows may be withdrawn."""
        attribution = entry.attribution
        origin = None if untracked is None else self.meter.origin(outputs)
        if origin is not None and attribution.batch is not None:
            origin.batch = attribution.batch.number
            if attribution.layout.repeat != 1:
                origin.shapes = ()  # of rows, of which a sample has several
        entry.origin = origin
        for same in self._open:
            if same.key is not None and same.key == entry.key:
                self._credit_again(same, entry, outputs, origin, tracked=untracked is None)
                return
        if untracked is not None:
            entry.sources = _storages(untracked)
        new: int | Tensor = attribution.layout.n
        others = [other for other in self._open if _may_overlap(other.attribution, attribution)]
        if others:
            origin = origin or self.meter.origin(outputs)
            later = origin is None or all(origin.first >= other.made for other in others)
            self._add_to(others, entry, again=later and all(entry.backwards > other.backwards for other in others))
            if not later and entry.fresh is not None:
                new = entry.fresh.sum()
        if untracked is not None:
            self.meter.count(outputs, origin, new)
        self._open.append(entry)

    def _credit_again(self, same: Entry, more: Entry, outputs: Any, origin: ForwardPass | None, *, tracked: bool) -> None:
        """Adds a further loss of the rows of an entry, or puts it in its place after another backward and forward pass."""
        origin = origin or self.meter.origin(outputs)
        later = origin is None or origin.first >= same.made
        if not later and tracked and same.call == more.call:
            return  # the tensor that the model returned last, and a target of the batch, once more
        if not tracked:
            self.meter.count(outputs, origin, more.attribution.layout.n if later else 0)
        if later and more.backwards > same.backwards:
            same.found, same.rows = more.found, more.rows
        else:
            same.found = {**same.values(), "loss": same.values()["loss"] + more.values()["loss"]}
        if later:
            same.more = same.calls
            same.call, same.made, same.origin, same.backwards = more.call, more.made, origin, more.backwards
        else:
            same.more += (CreditedCall(more.call, more.made, origin),)
        same.dirty = True

    def _has_credited_call(self, call: CallIdentity, attribution: Attribution) -> bool:
        return any(
            call in (one.identity for one in entry.calls) and same_samples(entry.attribution, attribution)
            for entry in self._open
        )

    def _add_to(self, others: list[Entry], entry: Entry, *, again: bool) -> None:
        """Takes rows of which other calls of this step had some: adds to the losses of these, and sets the others.

        Args:
            others: Entries that may have some of the rows.
            entry: Entry of the new call.
            again: Whether its outputs are of a later forward pass, so that it replaces the losses instead.
        """
        self.flush()
        ids, values = entry.attribution.ids, dict(entry.values())
        every, order = torch.cat([other.attribution.ids for other in others]).sort(stable=True)
        place = torch.searchsorted(every, ids, right=True) - 1  # the latest of equal ones
        place.clamp_(min=0)
        seen = every.index_select(0, place) == ids
        entry.written = {}
        for signal in self._records.signals & values.keys():
            new = values[signal]
            old = torch.cat([other.values()[signal].to(new.dtype) for other in others])[order].index_select(0, place)
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
        """Forgets what was credited for these outputs in this step, since a later call showed that rows were mixed.

        Args:
            outputs: The outputs; None for all that was credited in this step, which turned out to be another model's.
        """
        if outputs is None:
            self._open = [entry for entry in self._open if entry.confirmed]
            self.meter.discard_foreign()
            return
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

    def end_step(self, alive: Collection[YieldedBatch] = ()) -> None:
        """Ends the step; further losses of the same rows replace those before.

        Args:
            alive: Batches whose step goes on.
        """
        entries, self._open = self._open, []
        self.over = entries or self.over
        for entry in entries:
            if not entry.confirmed:
                self._count(entry)
            if alive and entry.attribution.batch in alive:
                self._open.append(entry)
            elif entry.dirty:
                self._waiting.append(entry)
                self._size += OF_A_STEP if isinstance(entry.found, dict) else entry.found.numel
        if self._size > MOST_WAITING:
            self._write_waiting()

    def next_batch(self, alive: Collection[YieldedBatch]) -> None:
        """Closes the entries of batches that are no longer in use, since the next batch was yielded."""
        if self._open:
            self.end_step(alive)

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting and not self.ids_repeat and _alike(waiting):
            ids = torch.cat([entry.attribution.ids for entry in waiting])
            self._records.write(ids, _together([entry.found for entry in waiting]))
            some = any(entry.rows is not None for entry in waiting)
            self._add_trained(torch.cat([entry.trained for entry in waiting]) if some else ids)
            return
        for entry in waiting:
            self._write(entry)

    def _write(self, entry: Entry) -> None:
        values, certain = entry.values(), None
        if entry.attribution.holds:
            certain = torch.stack([flag.to(entry.attribution.ids.device) for flag in entry.attribution.holds]).all()
            self.doubts.append(certain)
        self._records.write(entry.attribution.ids, values, entry.written, first=self._first(entry), certain=certain)
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

    def _count_trained(self, entry: Entry) -> None:
        ids, fresh, rows = entry.trained, entry.fresh, entry.rows
        if fresh is None:
            self._add_trained(ids)
        else:
            self.counts.write(ids, {TRAINED: fresh if rows is None else fresh[rows]})

    def _add_trained(self, ids: Tensor) -> None:
        """Counts samples that were trained on, many at a time, since a table of all samples is far from the processor."""
        self._trained.append(ids)
        self._uncounted_samples += len(ids)
        if self._uncounted_samples > MOST_UNCOUNTED:
            self.count_trained()

    def count_trained(self) -> Tensor:
        """Returns how often each sample was trained on, up to what was written; shape (N,)."""
        if self._trained:
            ids = torch.cat(self._trained)
            self.counts.write(ids, {TRAINED: torch.ones_like(ids, dtype=torch.int32)})
        self._trained, self._uncounted_samples = [], 0
        return self.counts[TRAINED] if self.counts else torch.empty(0, dtype=torch.int32)

    def flush(self) -> None:
        """Writes everything."""
        self._confirm()
        self._write_waiting()
        for entry in self._open:
            if entry.dirty:
                self._write(entry)

    def sync(self) -> None:
        """Writes everything, and stores what other processes have recorded of the samples whose records are held here."""
        self.settle()
        self.count_trained()
        self._records.sync()
        self.counts.sync()

    def settle(self) -> None:
        """Writes everything, and adds the numbers that the device counted."""
        self.flush()
        self.meter.settle()


def _alike(entries: Sequence[Entry]) -> bool:
    """Whether entries can be written together: new, certain, of different batches and of one form."""
    batches = {entry.attribution.batch for entry in entries}
    if len(batches) < len(entries) or any(e.written is not None or e.key is None or e.attribution.holds for e in entries):
        return False
    first = entries[0].found
    if isinstance(first, dict):
        return all(isinstance(entry.found, dict) and entry.found.keys() == first.keys() for entry in entries)
    return all(not isinstance(entry.found, dict) and entry.found.form == first.form for entry in entries)


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
