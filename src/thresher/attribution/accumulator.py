"""Collects the signals of the current optimizer step: which calls of the criterion count, and how their losses add up.

Signals of finished steps wait in a buffer. Those of many steps are then computed and written together.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thresher.attribution.cost_meter import Meter
from thresher.attribution.forward_passes import ForwardPass
from thresher.attribution.resolve import ROW_MAJOR
from thresher.attribution.rows import Attribution, YieldedBatch
from thresher.records import NEVER_SEEN, Column, Records
from thresher.torch_internals import next_node
from thresher.trees import leaves

CallIdentity = int | tuple[Any, ...]
"""Identity of the outputs and targets of one call; equal for two calls with the same objects."""


def identity_of(outputs: Any, targets: Any) -> CallIdentity | None:
    """Returns a value that is equal for two calls of the criterion with the same outputs and targets.

    It is None if an output has no autograd node. Reshaped outputs count as the same outputs.

    Args:
        outputs: First argument of the criterion, in any nesting.
        targets: Second argument of the criterion, in any nesting.
    """
    origins = tuple(_origin(leaf) for leaf in leaves(outputs))
    if not origins or None in origins:
        return None
    return origins, tuple(_place(leaf) for leaf in leaves(targets) if leaf.layout is torch.strided)


def _origin(tensor: Tensor) -> tuple[Any, ...] | None:
    # By autograd node and not by memory: outputs that the loop changed in place keep their memory, but are other outputs.
    # Reshapes are skipped: a loop often reshapes the outputs of the loss for a log, which must not count as a second loss.
    node = tensor.grad_fn
    number = tensor.output_nr
    while node is not None and node.name().split("Backward")[0] in ROW_MAJOR:
        node, number = node.next_functions[0]
    return None if node is None else (node._sequence_nr(), number, tuple(tensor.shape))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # A weak reference keeps the address of a storage from being used again.
    storage = StorageWeakRef(tensor.untyped_storage())
    # Targets count as other targets once the loop has overwritten them in place. Inference tensors have no version counter.
    version = -1 if tensor.is_inference() else tensor._version
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), version


def same_samples(one: Attribution, other: Attribution) -> bool:
    """Returns whether two losses are known to belong to the same samples; never waits for the device."""
    # Ids on a device are compared by object alone: comparing their values would wait for the device in each step.
    if one.key is not None and one.key == other.key:
        return True
    return one.ids is other.ids or (
        one.ids.is_cpu and other.ids.is_cpu and torch.equal(one.ids, other.ids)
    )


def add_up(first: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds the losses of two calls for the same samples; other signals are those of the first call that has a loss.

    A decoder that computes a loss per time step has no valid label for the short sequences in its last steps: the loss of such
    a sample is `NEVER_SEEN` in these calls, which are left out of its sum.

    Args:
        first: Signals of the earlier call, each of shape (n,).
        more: Signals of the later call.
    """
    empty = first["loss"] == NEVER_SEEN
    either = {
        name: torch.where(empty, more.get(name, value), value) for name, value in first.items()
    }
    both = ~empty & (more["loss"] != NEVER_SEEN)
    return {**either, "loss": torch.where(both, first["loss"] + more["loss"], either["loss"])}


class CreditedCall(NamedTuple):
    """A call of the criterion whose loss was assigned to its samples.

    Attributes:
        identity: Identity of the outputs and targets, to recognize the same call again; None if unknown.
        end: Sequence number of the first autograd node created after the loss.
        origin: Forward pass that returned the outputs; None if it was not looked up.
    """

    identity: CallIdentity | None
    end: int
    origin: ForwardPass | None


def credited_before(
    calls: Sequence[CreditedCall],
    outputs: Any,
    call: CallIdentity | None,
    batch: YieldedBatch | None,
    meter: Meter,
) -> bool | None:
    """Returns whether an earlier call for the same samples had the same outputs as a loss.

    Args:
        calls: The earlier calls; an identity that is a number stands for the outputs that `run.model` returned last.
        outputs: Outputs that the loss was computed from, in any nesting.
        call: Identity of outputs and targets.
        batch: Batch of the samples; None if unknown.
        meter: Meter that knows the forward passes of the run's model.

    Returns:
        True if an earlier call had these outputs; False if one had other outputs of the same forward pass; None otherwise.
    """
    if not isinstance(call, tuple) or batch is None:
        return None
    made = call[0]
    origin = meter.passes.origin(outputs)
    returned = meter.passes.pass_with(made[0][0]) is origin
    credit = None
    for one in calls:
        # In a plain loop, to save time, the forward pass of a loss was not looked up. Its outputs were the last that
        # `run.model` returned for the batch before the loss, so the number of the batch is enough to find the pass now.
        as_returned = one.origin is None and isinstance(one.identity, int)
        of = meter.passes.last_pass(batch.number, one.end) if as_returned else one.origin
        if isinstance(one.identity, tuple) and one.identity[0] == made:
            return True
        if of is not None and of is origin:
            credit = credit or (as_returned and returned)
    return credit


class Deferred(Protocol):
    """Signals that are computed later: computing them for many small batches together takes a fraction of the time."""

    @property
    def numel(self) -> int:
        """Number of values held until the signals are computed."""
        ...

    @property
    def form(self) -> int:
        """Number such as that of the classes: signals with equal numbers can be computed together."""
        ...

    def now(self) -> dict[str, Tensor]:
        """Returns the signals of each sample, shape (n,), by name."""
        ...

    def together(self, several: "Sequence[Any]") -> dict[str, Tensor]:
        """Returns the signals of the samples of several batches, one after the other."""
        ...


EntrySignals = dict[str, Tensor] | Deferred
"""Signals of some rows, shape (n,), by name; or signals that are computed later."""

MOST_WAITING = 2**15
"""Largest number of values that the buffer of finished steps holds before they are written."""

TRAINED = "trained"
"""Name of the column that counts how often each sample was trained on."""
COUNT_OF_TRAINED = {TRAINED: Column(torch.int32, merge="sum")}

MOST_UNCOUNTED = 2**16
"""Largest number of buffered ids of samples that were trained on."""

MOST_PENDING = 2**10
"""Largest number of entries of accumulated batches; older ones count as trained on before their step."""

OF_A_STEP = 2**9
"""Number of values that a step with computed signals counts for in the buffer, so that at most 64 such steps wait."""


class Entry:
    """Signals (such as losses) of some rows, assigned to their samples in the current step.

    Args:
        attribution: Samples of the rows.
        signals: Signals of the rows by name, or signals that are computed later.
        call: Identity of outputs and targets, so that the same loss is not added twice; None if unknown.
        rows: Indices of the rows that were trained on; None for all.
        backwards: Number of backward passes before this loss.
    """

    origin: ForwardPass | None = None
    """Forward pass of the outputs; None if it was not searched for, or not found."""
    more: tuple[CreditedCall, ...] = ()
    """Other calls of the criterion for the same rows."""
    # Weak references do not keep outputs alive, but keep their addresses from being reused by other outputs.
    sources: set[StorageWeakRef] | None = None
    """Storages of the outputs, by which `withdraw` finds the entry; None if it is certain which samples the rows are."""
    fresh: Tensor | None = None
    """Mask of the rows without an earlier loss in this step, shape (n,), bool; None for all."""
    confirmed = False
    dirty = True
    recorded = False
    """Whether its signals are in the records."""
    counted = False
    """Whether its samples were counted as trained on."""
    written: dict[str, Tensor] | None = None
    instead: tuple[list[ForwardPass | None], EntrySignals, Tensor | None] | None = None
    """What to write if no earlier forward pass of these rows takes part in the step after all.

    A tuple: the earlier passes, whose losses were added to this one; the signals of this loss alone; its trained rows.
    """

    def __init__(
        self,
        attribution: Attribution,
        signals: EntrySignals,
        call: CallIdentity | None,
        rows: Tensor | None,
        backwards: int,
    ) -> None:
        self.attribution = attribution
        self.key = attribution.key
        self.signals = signals
        self.call = call
        self.rows = rows
        self.backwards = backwards
        self.end = next_node()
        """Sequence number of the first autograd node created after this loss."""

    @property
    def trained(self) -> Tensor:
        """Ids of the rows that were trained on."""
        return self.attribution.ids if self.rows is None else self.attribution.ids[self.rows]

    @property
    def trained_once(self) -> Tensor:
        """1 for each of these rows, 0 if an earlier loss of the step counts the row, int32."""
        fresh = torch.ones_like(self.attribution.ids) if self.fresh is None else self.fresh
        return (fresh if self.rows is None else fresh[self.rows]).int()

    @property
    def calls(self) -> tuple[CreditedCall, ...]:
        """All calls of the criterion for these rows."""
        return CreditedCall(self.call, self.end, self.origin), *self.more

    def values(self) -> dict[str, Tensor]:
        """Returns the signals; deferred signals are computed now."""
        if not isinstance(self.signals, dict):
            self.signals = self.signals.now()
        return self.signals


def _storages(outputs: Any) -> set[StorageWeakRef]:
    return {
        StorageWeakRef(leaf.untyped_storage())
        for leaf in leaves(outputs)
        if leaf.layout is torch.strided
    }


class StepAccumulator:
    """Collects the signals of criterion calls, and writes them to the records.

    Args:
        records: Records that the signals are written to.
        meter: Counter of samples; here it gets those whose forward pass `run.model` did not count.
        trained: Records with the columns `COUNT_OF_TRAINED`; without columns if samples have no ids.
        count_steps: Whether each batch with a loss counts as a step, because attach got no optimizer that counts steps.
    """

    def __init__(
        self, records: Records, meter: Meter, trained: Records, *, count_steps: bool
    ) -> None:
        self._records = records
        self.meter = meter
        self._count_steps = count_steps
        self.ids_repeat = True
        """Whether a sample can come twice in an epoch, so that the order of writes matters."""
        self._open: list[Entry] = []
        self._pending: list[Entry] = []
        """Closed entries of the step in progress: batches of an accumulated group, whose gradients may still be cleared."""
        self._waiting: list[Entry] = []
        self.over: list[Entry] = []
        """Entries of the last step that had losses."""
        self._size = 0
        self.loop_is_over = False
        """Whether the loop over the loader has ended, so that no backward pass is expected any more."""
        self._lost: dict[ForwardPass, int] = {}
        """For each forward pass, the number of its backward passes that ran before gradients were last set to zero."""
        self.counts = trained
        self._uncounted_samples = 0
        self._trained: list[Tensor] = []
        self.doubts: list[Tensor] = []
        """Results of comparisons on the device, shape (), bool. They are read at the end of the epoch; all must be true."""

    def credit(
        self,
        attribution: Attribution,
        signals: EntrySignals,
        outputs: Any,
        untracked: Any = None,
        rows: Tensor | None = None,
        call: CallIdentity | None = None,
    ) -> None:
        """Adds the signals of some rows.

        A second call for the same rows in a step, such as that for an auxiliary head, adds to their loss. A call with outputs
        of a later forward pass replaces the loss if a backward pass ran in between, or if no backward pass reaches the earlier
        pass before the step. A further call with the same outputs and targets, as for a log, does nothing.

        Args:
            attribution: Samples of the rows.
            signals: Signals by name, or signals that are computed later.
            outputs: Outputs that the loss was computed from.
            untracked: The same outputs if the entry may be withdrawn; None if the model certainly returned them for these rows.
            rows: Indices of the rows that are trained on, shape (k,), int64; None for all.
            call: Identity of outputs and targets; None if unknown.
        """
        entry = Entry(attribution, signals, call, rows, self.meter.backwards)
        # The first loss of a step of a plain loop: there is nothing to compare it with.
        if untracked is None and not self._open:
            self._open.append(entry)
        elif untracked is None or call is None or not self._has_credited_call(call, attribution):
            self._credit_among_others(entry, outputs, untracked)

    def _credit_among_others(self, entry: Entry, outputs: Any, untracked: Any) -> None:
        """Adds an entry if the step has other entries, or if the entry may be withdrawn."""
        attribution = entry.attribution
        origin = None if untracked is None else self.meter.passes.origin(outputs)
        # Inputs that the loop has normalized or augmented are new tensors: only the loss shows the batch of that forward pass.
        if origin is not None and attribution.batch is not None:
            origin.batch = attribution.batch.number
            if attribution.layout.repeat != 1:
                origin.shapes = ()  # they count rows, and a sample has several rows
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
            # After an error in a backward pass, a loop clears its gradients and repeats the batch in parts.
            self.meter.look_at_gradients()
            others = [other for other in others if other.recorded or not self._has_cleared(other)]
        if others:
            origin = origin or self.meter.passes.origin(outputs)
            later = origin is None or all(origin.first >= other.end for other in others)
            again = later and all(entry.backwards > other.backwards for other in others)
            if later and not again:
                entry.instead = (
                    [self._pass_of(other) for other in others],
                    {**entry.values()},
                    entry.rows,
                )
            self._add_to(others, entry, again=again)
            # Heads of one forward pass share samples, which count once. The number stays on the device until the meter settles.
            if not later and entry.fresh is not None:
                new = entry.fresh.sum()
        if untracked is not None:
            self.meter.count(outputs, origin, new)
        self._open.append(entry)

    def _credit_again(
        self, same: Entry, more: Entry, outputs: Any, origin: ForwardPass | None, *, tracked: bool
    ) -> None:
        """Adds a further loss to the entry of the same rows, or replaces it after another backward and forward pass."""
        origin = origin or self.meter.passes.origin(outputs)
        later = origin is None or origin.first >= same.end
        if not later and tracked and same.call == more.call:
            return  # the tensor that the model returned last, and a target of the batch, once more
        if not tracked:
            self.meter.count(outputs, origin, more.attribution.layout.n if later else 0)
        # A new forward pass after a backward pass (SAM, PGD, LBFGS) takes the place of the first one. Without a backward pass
        # in between, both losses are trained on, and add up. Signals such as `correct` are those of the first loss.
        if later and more.backwards > same.backwards:
            same.signals = more.signals
            same.rows = more.rows
            same.instead = None
        else:
            if later:
                earlier = [] if same.instead is None else same.instead[0]
                same.instead = [*earlier, self._pass_of(same)], more.signals, more.rows
            same.signals = add_up(same.values(), more.values())
        if later:
            # Before the next line: `calls` is made of the fields that it overwrites.
            same.more = same.calls
            same.call = more.call
            same.end = more.end
            same.origin = origin
            same.backwards = more.backwards
        else:
            same.more += (CreditedCall(more.call, more.end, origin),)
        same.dirty = True

    def _pass_of(self, entry: Entry) -> ForwardPass | None:
        """Returns the latest forward pass of an entry; None if it is not known."""
        batch = entry.attribution.batch
        return entry.origin or (
            None if batch is None else self.meter.passes.last_pass(batch.number, entry.end)
        )

    def gradients_cleared(self) -> None:
        """Notes that gradients were cleared: backward passes so far have no part in the next step."""
        passes = map(self._pass_of, [*self._pending, *self._open])
        self._lost |= {one: one.backwards for one in passes if one is not None}

    def _takes_part(self, one: ForwardPass | None) -> bool:
        return one is None or one.backwards > self._lost.get(one, 0)

    def _has_cleared(self, entry: Entry) -> bool:
        """Whether the gradients of an entry were cleared; False if no backward pass of it was seen."""
        one = self._pass_of(entry)
        return one is not None and 0 < one.backwards <= self._lost.get(one, 0)

    def _was_skipped(self, entry: Entry) -> bool:
        """Whether the loop ended without a backward pass of an entry, or has cleared its gradients."""
        judges = self.loop_is_over and not self._count_steps and self.meter.backwards > 0
        return not self._takes_part(self._pass_of(entry)) if judges else self._has_cleared(entry)

    def _unstepped(self) -> list[Entry]:
        """Returns the entries of the step in progress that the loop trains on."""
        self.meter.look_at_gradients()
        return [entry for entry in [*self._pending, *self._open] if not self._was_skipped(entry)]

    def _trained_on(self, entries: list[Entry]) -> list[Entry]:
        """Returns the entries whose gradients are in the step; also those without a backward pass, if none is seen."""
        for entry in entries:
            # None of the earlier passes of these rows has gradients in the step: zero_grad came after them, or no backward pass
            # reached them. The rows get the signals of the last pass alone, and not the sum.
            if entry.instead is not None and not any(map(self._takes_part, entry.instead[0])):
                _, entry.signals, entry.rows = entry.instead
                entry.dirty = True
        left_out = [entry for entry in entries if not self._takes_part(self._pass_of(entry))]
        if len(left_out) == len(entries):
            left_out = [entry for entry in left_out if self._has_cleared(entry)]
        for entry in left_out:
            self._take_back(entry)
        self._lost.clear()
        return [entry for entry in entries if entry not in left_out]

    def _has_credited_call(self, call: CallIdentity, attribution: Attribution) -> bool:
        return any(
            call in (one.identity for one in entry.calls)
            and same_samples(entry.attribution, attribution)
            for entry in self._open
        )

    def _add_to(self, others: list[Entry], entry: Entry, *, again: bool) -> None:
        """Adds the losses of others to those of an entry for the samples in both; if `again`, keeps the losses of the entry."""
        # The others are written first: written after this entry, their smaller losses would replace the sums.
        self.flush()
        ids = entry.attribution.ids
        values = dict(entry.values())
        # The sort is stable: the last of equal ids belongs to the latest entry, which has the sum of those before it. Shared
        # rows are marked by a mask, because selecting them would wait for the device.
        every, order = torch.cat([other.attribution.ids for other in others]).sort(stable=True)
        place = torch.searchsorted(every, ids, right=True) - 1  # the latest of equal ones
        place.clamp_(min=0)
        seen = every.index_select(0, place) == ids
        earlier = {
            signal: torch.cat([other.values()[signal].to(new.dtype) for other in others])[
                order
            ].index_select(0, place)
            for signal, new in values.items()
            if signal == "loss" or signal in self._records.signals
        }
        # The records have the shared rows already: a column that adds up must get the difference to these values.
        entry.written = {
            signal: torch.where(seen, old, torch.zeros_like(old)) for signal, old in earlier.items()
        }
        if not again:
            values |= {
                name: torch.where(seen, both, values[name])
                for name, both in add_up(earlier, values).items()
            }
        entry.fresh = ~seen
        # Without keys, a further loss of these rows comes here again; `_credit_again` would change only one of the entries.
        entry.signals = values
        entry.key = None
        for other in others:
            other.key = None

    def has_credited(self, batch: YieldedBatch) -> bool:
        """Whether a loss was assigned to samples of this batch, in a finished step or in the current one."""
        return batch.credited or any(entry.attribution.batch is batch for entry in self._open)

    def withdraw(self, outputs: Any) -> None:
        """Removes the losses of these outputs from this step, because a later call was refused.

        Args:
            outputs: The outputs; None removes all losses of this step, because they came from another model.
        """
        if outputs is None:
            self._open = [entry for entry in self._open if entry.confirmed]
            self.meter.discard_foreign()
            return
        sources = _storages(outputs)
        self._open = [
            e for e in self._open if e.confirmed or e.sources is None or not e.sources & sources
        ]

    def _count(self, entry: Entry) -> None:
        entry.confirmed = True
        batch = entry.attribution.batch
        if batch is not None:
            batch.credited_rows += entry.attribution.layout.n
        if batch is not None and not batch.credited:
            batch.credited = True
            self.meter.credited += 1
            self.meter.cost.steps += self._count_steps

    def _take_back(self, entry: Entry) -> None:
        """Reverses the count of an entry whose gradients were not part of any optimizer step."""
        batch = entry.attribution.batch
        if entry.confirmed and batch is not None:
            batch.credited_rows -= entry.attribution.layout.n
            batch.credited = batch.credited_rows > 0
            self.meter.credited -= not batch.credited

    @property
    def open(self) -> tuple[Entry, ...]:
        """Entries of the step in progress."""
        return tuple(self._open)

    @property
    def in_step(self) -> bool:
        """Whether losses were assigned to samples since the last step."""
        return bool(self._open)

    @property
    def waits_for_step(self) -> bool:
        """Whether losses are recorded whose gradients are, or will be, part of an optimizer step that is still to come."""
        self.meter.look_at_gradients()
        passes = map(self._pass_of, [*self._pending, *self._open])
        return any(one is None or one not in self._lost or self._takes_part(one) for one in passes)

    def has_open(self, batch: YieldedBatch) -> bool:
        """Whether losses were assigned to samples of this batch since the last step."""
        return any(entry.attribution.batch is batch for entry in self._open)

    def end_step(self, alive: Collection[YieldedBatch] = ()) -> None:
        """Ends the step; later losses of the same rows replace its losses.

        Args:
            alive: Batches that are still in use: their entries stay open for later losses.
        """
        entries = self._open
        # A step without losses keeps the entries of the step before it, so that a log after it is still recognized.
        self.over = entries or self.over
        # A prefetcher asks for the next batch while further losses of this one can still come.
        self._open = [entry for entry in entries if entry.attribution.batch in alive]
        self._pending += [entry for entry in entries if entry.attribution.batch not in alive]
        if not alive:
            self.meter.step_over()
            self._pending = self._trained_on(self._pending)
        for entry in [*self._pending, *self._open]:
            if not entry.confirmed:
                self._count(entry)
        # Without an optimizer, no step shows that a batch was trained on: its loss does.
        most = MOST_PENDING if alive and not self._count_steps else 0
        over = max(0, len(self._pending) - most)
        for entry in self._pending[:over]:
            self._finish(entry)
        del self._pending[:over]

    def _finish(self, entry: Entry) -> None:
        """Counts the samples of an entry as trained on, and has its signals written."""
        if entry.dirty:
            self._waiting.append(entry)
            self._size += OF_A_STEP if isinstance(entry.signals, dict) else entry.signals.numel
        self._count_trained(entry)
        if self._size > MOST_WAITING:
            self._write_waiting()

    def next_batch(self, alive: Collection[YieldedBatch]) -> None:
        """Closes the entries of earlier batches that are no longer in use. Called when the next batch is yielded."""
        if self._open:
            self.end_step(alive)

    def _write_waiting(self) -> None:
        # If an id can come twice, steps are written one by one: in a joint write, an earlier loss could replace a later one.
        waiting = self._waiting
        self._waiting = []
        self._size = 0
        if waiting and not self.ids_repeat and _alike(waiting):
            ids = torch.cat([entry.attribution.ids for entry in waiting])
            self._records.write(ids, _together([entry.signals for entry in waiting]))
            return
        for entry in waiting:
            self._write(entry)

    def _write(self, entry: Entry) -> None:
        values = entry.values()
        certain = None
        # The flags are not read here, because that would wait for the device. A false one keeps these rows out of the records,
        # and raises an error at the end of the epoch.
        if entry.attribution.holds:
            certain = torch.stack(
                [flag.to(entry.attribution.ids.device) for flag in entry.attribution.holds]
            ).all()
            self.doubts.append(certain)
        self._records.write(
            entry.attribution.ids, values, entry.written, first=self._first(entry), certain=certain
        )
        # If the user reads the records in mid-step, the entry is written again: columns that add up then get the difference.
        entry.written = values
        entry.dirty = False
        entry.recorded = True

    @staticmethod
    def _first(entry: Entry) -> bool | Tensor:
        """Rows of an entry that were not yet written in this step."""
        if entry.recorded:
            return False
        return True if entry.fresh is None else entry.fresh

    def _count_trained(self, entry: Entry) -> None:
        if entry.counted:
            return
        entry.counted = True
        if entry.fresh is None:
            self._add_trained(entry.trained)
        else:
            self.counts.write(entry.trained, {TRAINED: entry.trained_once})

    def _add_trained(self, ids: Tensor) -> None:
        """Buffers ids of trained samples, to count many at once: the table of all samples does not fit in a cache."""
        self._trained.append(ids)
        self._uncounted_samples += len(ids)
        if self._uncounted_samples > MOST_UNCOUNTED:
            self.count_trained()

    def count_trained(self) -> None:
        """Counts the samples of the steps so far in `counts`."""
        if self._trained:
            ids = torch.cat(self._trained)
            self.counts.write(ids, {TRAINED: torch.ones_like(ids, dtype=torch.int32)})
        self._trained = []
        self._uncounted_samples = 0

    def trained(self, *, in_step: bool) -> Tensor:
        """Returns how often each sample was trained on, shape (N,), int32.

        Args:
            in_step: Whether the samples of the step in progress count, too, unless the loop has cleared their gradients.
        """
        self.count_trained()
        if not self.counts:
            return torch.empty(0, dtype=torch.int32)
        counts = self.counts[TRAINED]
        unstepped = [entry for entry in self._unstepped() if not entry.counted] if in_step else []
        for entry in unstepped:
            counts = counts.index_add(0, entry.trained, entry.trained_once)
        return counts

    def flush(self) -> None:
        """Writes all buffered signals to the records."""
        # Confirmed first, because the records do not forget: a loss that was written cannot be withdrawn. Finished steps come
        # before the open one: if a sample is in both, its later loss must stay.
        for entry in self._open:
            if not entry.confirmed:
                self._count(entry)
        self._write_waiting()
        for entry in self._unstepped():
            if entry.dirty:
                self._write(entry)
            if self._count_steps:
                self._count_trained(entry)

    def sync(self) -> None:
        """Writes all buffered signals, and sends recorded rows to the ranks that own them; all ranks call it."""
        self.settle()
        self.count_trained()
        self._records.sync()
        self.counts.sync()

    def settle(self) -> None:
        """Writes all buffered signals, and adds the counts that were kept on the device."""
        self.flush()
        self.meter.settle()


def _alike(entries: Sequence[Entry]) -> bool:
    """Whether entries can be written together: new ones with certain ids, each of another batch, with signals of one kind."""
    batches = {entry.attribution.batch for entry in entries}
    if len(batches) < len(entries) or any(
        e.written is not None or e.key is None or e.attribution.holds for e in entries
    ):
        return False
    first = entries[0].signals
    if isinstance(first, dict):
        return all(
            isinstance(entry.signals, dict) and entry.signals.keys() == first.keys()
            for entry in entries
        )
    return all(
        not isinstance(entry.signals, dict) and entry.signals.form == first.form
        for entry in entries
    )


def _together(signals: Sequence[EntrySignals]) -> dict[str, Tensor]:
    first = signals[0]
    if not isinstance(first, dict):
        return first.together(signals)
    known = [one for one in signals if isinstance(one, dict)]
    return {name: torch.cat([one[name] for one in known]) for name in first}


def _may_overlap(one: Attribution, other: Attribution) -> bool:
    if one.positions is None or other.positions is None:
        return True
    return one.batch is other.batch and not set(one.positions).isdisjoint(other.positions)
