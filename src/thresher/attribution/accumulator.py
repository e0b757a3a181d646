"""Collects the signals of the current optimizer step: which calls of the criterion count, and how their losses add up.

Signals of finished steps wait in a buffer. Those of many steps are then computed and written together.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thresher.attribution.cost_meter import Meter
from thresher.attribution.forward_passes import KEY, ForwardPass
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
    if node is None:
        return None
    return (node._sequence_nr(), number, tuple(tensor.shape))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # A weak reference keeps the address of a storage from being used again.
    storage = StorageWeakRef(tensor.untyped_storage())
    # Targets count as other targets once the loop has overwritten them in place. Inference tensors have no version counter.
    version = -1 if tensor.is_inference() else tensor._version
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), version


def same_samples(first: Attribution, other: Attribution) -> bool:
    """Returns whether two losses are known to belong to the same samples; never waits for the device."""
    # Ids on a device are compared by object alone: comparing their values would wait for the device in each step.
    if first.key is not None and first.key == other.key:
        return True
    return first.ids is other.ids or (
        first.ids.is_cpu and other.ids.is_cpu and torch.equal(first.ids, other.ids)
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


class LossCall:
    """A call of the criterion or of `run.reduce`, and the hook that runs when a backward pass reaches its loss.

    Args:
        meter: Counts the samples of the passes.
        identity: Identity of the outputs and targets, to recognize the same call again; None if unknown.
        signals: Signals of the rows by name, or signals that are computed later.
        rows: Indices of the rows that are trained on; None for all.

    Attributes:
        backwards: Number of backward passes before the call.
        end: Sequence number of the first autograd node created after the loss.
        origin: Forward pass that returned the outputs; None if it was not looked up.
        begins: Whether the outputs are of a later forward pass than those of the calls before it for the same rows.
        reached: Number of backward passes that reached the loss.
        lost: Number of those whose gradients were cleared before a step.
    """

    __slots__ = (
        "backwards", "begins", "end", "identity", "lost", "meter", "origin", "reached", "rows", "signals",
    )  # fmt: skip
    # torch warns when a tensor with a hook is pickled, unless the hook has this attribute.
    __torch_unserializable__ = True

    def __init__(
        self,
        meter: Meter,
        identity: CallIdentity | None,
        signals: EntrySignals,
        rows: Tensor | None,
    ) -> None:
        self.meter = meter
        self.identity = identity
        self.signals = signals
        self.rows = rows
        self.backwards = meter.backwards
        self.end = next_node()
        self.origin: ForwardPass | None = None
        self.begins = True
        self.reached = self.lost = 0

    def __call__(self, _: Any) -> None:
        """Counts a backward pass."""
        # First, because it may find that the gradients of the passes before this one were cleared.
        self.meter.backward_begins()
        self.reached += 1

    def watch(self, value: Tensor) -> None:
        """Counts the backward passes that reach a loss from now on."""
        if not value.requires_grad:
            return
        node = value.grad_fn
        if value._backward_hooks is None and node is not None:
            # The same as `register_hook`, which takes four times as long: it would be a share of a small step.
            value._backward_hooks = OrderedDict(((KEY, self),))
            node._register_hook_dict(value)
        else:
            value.register_hook(self)

    @property
    def is_trained(self) -> bool:
        """Whether a backward pass reached the loss, and its gradients were not cleared."""
        return self.reached > self.lost

    def values(self) -> dict[str, Tensor]:
        """Returns the signals; deferred signals are computed now."""
        if not isinstance(self.signals, dict):
            self.signals = self.signals.now()
        return self.signals


def sum_of_step(calls: Sequence[LossCall]) -> tuple[EntrySignals, Tensor | None, LossCall]:
    """Returns the signals of some calls for the same rows, the rows that they train on, and the first call of the last pass.

    The losses of several heads or forward passes add up. A forward pass after a backward pass (SAM, PGD, LBFGS) takes the place
    of the one before it.
    """
    first, *later = calls
    signals = first.signals
    rows = first.rows
    for call in later:
        if call.begins and call.backwards > first.backwards:
            signals = call.signals
            rows = call.rows
        else:
            earlier = signals if isinstance(signals, dict) else signals.now()
            signals = add_up(earlier, call.values())
        if call.begins:
            first = call
    return signals, rows, first


class Entry:
    """The calls of the criterion for some rows in the current step, and the signals that they add up to.

    Args:
        attribution: Samples of the rows.
        call: The first call.
    """

    # Weak references do not keep outputs alive, but keep their addresses from being reused by other outputs.
    sources: set[StorageWeakRef] | None = None
    """Storages of the outputs, by which `withdraw` finds the entry; None if it is certain which samples the rows are."""
    overlaps = False
    """Whether another entry of the step may have some of the samples."""
    counted_before: Tensor | None = None
    """Mask of the rows whose samples an earlier entry of the step counts, shape (n,), bool; None for none."""
    written_before: Tensor | None = None
    """Mask of the rows that an earlier entry of the step has written, shape (n,), bool; None for none."""
    confirmed = False
    dirty = True
    recorded = False
    """Whether its signals are in the records."""
    counted = False
    """Whether its samples were counted as trained on."""
    written: dict[str, Tensor] | None = None

    def __init__(self, attribution: Attribution, call: LossCall) -> None:
        self.attribution = attribution
        self.key = attribution.key
        self.calls = [call]
        self.signals = call.signals
        self.rows = call.rows
        self.first = call
        """First call of the last forward pass."""
        self._summed: Sequence[LossCall] = self.calls[:]

    @property
    def end(self) -> int:
        """Sequence number of the first autograd node created after the first loss of the last forward pass."""
        return next((call for call in reversed(self.calls) if call.begins), self.calls[0]).end

    @property
    def trained(self) -> Tensor:
        """Ids of the rows that were trained on."""
        if self.rows is None:
            return self.attribution.ids
        return self.attribution.ids[self.rows]

    @property
    def trained_once(self) -> Tensor:
        """1 for each of these rows, 0 if an earlier entry of the step counts the row, int32."""
        if self.counted_before is None:
            return torch.ones_like(self.trained, dtype=torch.int32)
        fresh = ~self.counted_before
        return (fresh if self.rows is None else fresh[self.rows]).int()

    @property
    def is_reached(self) -> bool:
        """Whether a backward pass reached one of the losses, even if its gradients were cleared."""
        return any(call.reached for call in self.calls)

    @property
    def is_trained(self) -> bool:
        """Whether a backward pass reached one of the losses, and its gradients were not cleared."""
        return any(call.is_trained for call in self.calls)

    def add_up(self, *, final: bool) -> None:
        """Updates the signals: the sum of the losses that backward passes reached.

        Args:
            final: Whether no further backward pass is expected. If none came, the last loss counts alone, else all of them.
        """
        # A loss that no backward pass reaches was computed for a log, or belongs to a forward pass that was given up.
        calls = [call for call in self.calls if call.is_trained]
        calls = calls or (self.calls[-1:] if final else self.calls)
        if calls != self._summed or self.overlaps:
            self.signals, self.rows, self.first = sum_of_step(calls)
            self._summed = calls[:]
            self.dirty = True

    def values(self) -> dict[str, Tensor]:
        """Returns the signals; deferred signals are computed now."""
        if not isinstance(self.signals, dict):
            self.signals = self.signals.now()
        return self.signals


def _find(ids: Tensor, others: Sequence[Entry]) -> tuple[Tensor, Tensor]:
    """Returns which ids other entries have, shape (n,), bool, and the place of each among the rows of these, shape (n,)."""
    # The sort is stable: the last of equal ids belongs to the latest entry, which has the sum of those before it. Shared rows
    # are marked by a mask, because selecting them would wait for the device.
    every, order = torch.cat([other.attribution.ids for other in others]).sort(stable=True)
    place = torch.searchsorted(every, ids, right=True) - 1  # the latest of equal ones
    place.clamp_(min=0)
    return every.index_select(0, place) == ids, order.index_select(0, place)


def _add_earlier(entry: Entry, others: Sequence[Entry], given_up: Sequence[Entry]) -> None:
    """Adds the losses of earlier entries to those of an entry, for the samples in both.

    Args:
        entry: The entry.
        others: Earlier entries whose gradients are in the step.
        given_up: Earlier entries whose gradients are not, but whose signals are in the records already.
    """
    values = dict(entry.values())
    if not entry.recorded:
        # The records will have the shared rows already: a column that adds up must get the difference to these values.
        entry.written_before, entry.written = _signals_of([*given_up, *others], entry)
        entry.written = {
            signal: torch.where(entry.written_before, old, torch.zeros_like(old))
            for signal, old in entry.written.items()
        }
    if others:
        shared, earlier = _signals_of(others, entry)
        entry.counted_before = shared
        made_again = entry.first.begins and all(
            entry.first.backwards > other.first.backwards for other in others
        )
        if not made_again:
            values |= {
                name: torch.where(shared, both, values[name])
                for name, both in add_up(earlier, values).items()
            }
    entry.signals = values


def _signals_of(others: Sequence[Entry], entry: Entry) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns which samples of an entry others have, shape (n,), bool, and their signals there, arbitrary for the rest."""
    shared, place = _find(entry.attribution.ids, others)
    signals = {
        signal: torch.cat([other.values()[signal].to(new.dtype) for other in others]).index_select(
            0, place
        )
        for signal, new in entry.values().items()
        if all(signal in other.values() for other in others)
    }
    return shared, signals


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
        value: Tensor,
        outputs: Any,
        untracked: Any = None,
        rows: Tensor | None = None,
        identity: CallIdentity | None = None,
    ) -> None:
        """Adds the signals of some rows.

        A second call for the same rows in a step, such as that for an auxiliary head, adds to their loss. A call with outputs
        of a later forward pass replaces the loss if a backward pass ran in between. A call whose loss no backward pass reaches,
        as for a log, changes nothing.

        Args:
            attribution: Samples of the rows.
            signals: Signals by name, or signals that are computed later.
            value: Loss that the loop trains on, if it does.
            outputs: Outputs that the loss was computed from.
            untracked: The same outputs if the entry may be withdrawn; None if the model certainly returned them for these rows.
            rows: Indices of the rows that are trained on, shape (k,), int64; None for all.
            identity: Identity of outputs and targets; None if unknown.
        """
        # The first loss of a step of a plain loop: there is nothing to compare it with.
        if untracked is None and not self._open:
            call = LossCall(self.meter, identity, signals, rows)
            self._open.append(Entry(attribution, call))
        elif (same := self._credited_call(identity, attribution)) is not None:
            call = same
        else:
            call = LossCall(self.meter, identity, signals, rows)
            call = self._credit_among_others(Entry(attribution, call), call, outputs, untracked)
        call.watch(value)

    def _credited_call(
        self, identity: CallIdentity | None, attribution: Attribution
    ) -> LossCall | None:
        """Returns an earlier call of this step with the same outputs and targets; None if there is none."""
        # A number stands for the tensor that the model returned last. It identifies a call of the same rows alone.
        if not isinstance(identity, tuple):
            return None
        return next(
            (
                call
                for entry in self._open
                for call in entry.calls
                if call.identity == identity and same_samples(entry.attribution, attribution)
            ),
            None,
        )

    def _credit_among_others(
        self, entry: Entry, call: LossCall, outputs: Any, untracked: Any
    ) -> LossCall:
        """Adds a call if the step has other entries, or if the call may be withdrawn; returns the call that has its loss."""
        attribution = entry.attribution
        call.origin = None if untracked is None else self.meter.passes.origin(outputs)
        # Inputs that the loop has normalized or augmented are new tensors: only the loss shows the batch of that forward pass.
        if call.origin is not None and attribution.batch is not None:
            call.origin.batch = attribution.batch.number
        others = [other for other in self._open if _may_overlap(other.attribution, attribution)]
        same = next(
            (other for other in others if other.key is not None and other.key == entry.key), None
        )
        new: int | Tensor = attribution.layout.n
        if others:
            earlier = others if same is None else [same]
            call.origin = call.origin or self.meter.passes.origin(outputs)
            call.begins = call.origin is None or all(
                call.origin.first >= other.end for other in earlier
            )
            # Heads of one forward pass share samples, which count once. The number stays on the device until the meter settles.
            if not call.begins:
                if same is not None:
                    new = 0
                else:
                    new = (~_find(attribution.ids, earlier)[0]).sum()
        if same is not None and untracked is None and not call.begins:
            # The tensor that the model returned last, and a target of the batch, once more.
            again = next(
                (
                    earlier_call
                    for earlier_call in same.calls
                    if earlier_call.identity == call.identity
                ),
                None,
            )
            if again is not None:
                return again
        if untracked is not None:
            self.meter.count(outputs, call.origin, new, attribution.layout)
        if same is not None:
            same.calls.append(call)
            return call
        if untracked is not None:
            entry.sources = _storages(untracked)
        for other in others:
            entry.overlaps = True
            # Without keys, a further loss of these rows becomes an entry of its own, which comes after both.
            other.key = entry.key = None
        self._open.append(entry)
        return call

    def _pass_of(self, entry: Entry) -> ForwardPass | None:
        """Returns the latest forward pass of an entry; None if it is not known."""
        batch = entry.attribution.batch
        return entry.calls[-1].origin or (
            None if batch is None else self.meter.passes.last_pass(batch.number, entry.end)
        )

    def gradients_cleared(self) -> None:
        """Notes that gradients were cleared: backward passes so far have no part in the next step."""
        for entry in (*self._pending, *self._open):
            for call in entry.calls:
                call.lost = call.reached
            forward_pass = self._pass_of(entry)
            if forward_pass is not None:
                self._lost[forward_pass] = forward_pass.backwards
        self.meter.reached_passes = []

    def _takes_part(self, entry: Entry) -> bool:
        """Whether the gradients of an entry are in the step; True, too, if its forward pass is not known."""
        if entry.is_reached:
            return entry.is_trained
        # A loop that records a loss and trains on one of its own: its backward pass reaches the outputs.
        forward_pass = self._pass_of(entry)
        return forward_pass is None or forward_pass.backwards > self._lost.get(forward_pass, 0)

    def _has_cleared(self, entry: Entry) -> bool:
        """Whether the gradients of an entry were cleared; False if no backward pass of it was seen."""
        if entry.is_reached:
            return not entry.is_trained
        forward_pass = self._pass_of(entry)
        return forward_pass is not None and 0 < forward_pass.backwards <= self._lost.get(
            forward_pass, 0
        )

    @property
    def _sees_backward(self) -> bool:
        """Whether backward passes were seen in this training, also before it was interrupted."""
        return self.meter.cost.backward > 0

    def _was_skipped(self, entry: Entry) -> bool:
        """Whether the loop ended without a backward pass of an entry, or has cleared its gradients."""
        judges = self.loop_is_over and not self._count_steps and self._sees_backward
        if judges:
            return not self._takes_part(entry)
        return self._has_cleared(entry)

    def _unstepped(self) -> list[Entry]:
        """Returns the entries of the step in progress that the loop trains on."""
        self.meter.look_at_gradients()
        return [entry for entry in [*self._pending, *self._open] if not self._was_skipped(entry)]

    def _trained_on(self, entries: list[Entry]) -> list[Entry]:
        """Returns the entries whose gradients are in the step; also those without a backward pass, if none is seen."""
        left_out = [entry for entry in entries if not self._takes_part(entry)]
        if len(left_out) == len(entries):
            left_out = [entry for entry in left_out if self._has_cleared(entry)]
        reached = [entry for entry in entries if entry.is_reached]
        left_out += [
            entry
            for entry in entries
            if entry not in left_out
            and not entry.is_reached
            and any(_may_overlap(entry.attribution, other.attribution) for other in reached)
        ]
        for entry in left_out:
            self._take_back(entry)
        return [entry for entry in entries if entry not in left_out]

    @staticmethod
    def _add_up(entries: Sequence[Entry], given_up: Sequence[Entry] = (), *, final: bool) -> None:
        """Computes the signals of entries, in the order of their calls; `given_up` are others that may have been written."""
        for number, entry in enumerate(entries):
            entry.add_up(final=final)
            if entry.overlaps:
                attribution = entry.attribution
                others = [
                    other
                    for other in entries[:number]
                    if _may_overlap(other.attribution, attribution)
                ]
                ghosts = [
                    other
                    for other in given_up
                    if other.recorded and _may_overlap(other.attribution, attribution)
                ]
                if others or ghosts:
                    _add_earlier(entry, others, ghosts)

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
        return not all(map(self._has_cleared, [*self._pending, *self._open]))

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
            if len(self.meter.reached_passes) > len(self._pending):
                self._count_without_loss()
            self.meter.step_over()
            if not _are_plain(self._pending):
                trained = self._trained_on(self._pending)
                given_up = [entry for entry in self._pending if entry not in trained]
                self._add_up(trained, given_up, final=self._sees_backward)
                self._pending = trained
            self._lost.clear()
        for entry in [*self._pending, *self._open]:
            if not entry.confirmed:
                self._count(entry)
        # Without an optimizer, no step shows that a batch was trained on: its loss does.
        most = MOST_PENDING if alive and not self._count_steps else 0
        over = max(0, len(self._pending) - most)
        if alive:
            self._add_up(self._pending[:over], final=self._sees_backward)
        for entry in self._pending[:over]:
            self._finish(entry)
        del self._pending[:over]

    def _count_without_loss(self) -> None:
        """Counts the samples of forward passes that a step trains on without a recorded loss, as of a model that returns it."""
        credited = {entry.attribution.batch for entry in self._pending}
        passes = self.meter.reached_passes
        samples = [
            forward_pass.samples for forward_pass in passes if forward_pass.samples is not None
        ]
        for rows in {rows.key: rows for rows in samples if rows.batch not in credited}.values():
            self._add_trained(rows.ids)

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
            values = _together([entry.signals for entry in waiting])
            self._records.write(ids, values)
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
        before = entry.written
        first: bool | Tensor = True
        if entry.recorded and before is not None:
            # Rows without a label were not written: a later call in the step may be the first that has their loss.
            first = before["loss"] == NEVER_SEEN
            before = {name: old.masked_fill(first, 0) for name, old in before.items()}
        elif entry.written_before is not None:
            first = ~entry.written_before
        self._records.write(entry.attribution.ids, values, before, first=first, certain=certain)
        # If the user reads the records in mid-step, the entry is written again: columns that add up then get the difference.
        entry.written = values
        entry.dirty = False
        entry.recorded = True

    def _count_trained(self, entry: Entry) -> None:
        if entry.counted:
            return
        entry.counted = True
        if entry.counted_before is None:
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
            in_step: Whether the samples of the step in progress count, too. They do not if the loop has cleared their gradients
                or, after steps, has ended without one.
        """
        self.count_trained()
        if not self.counts:
            return torch.empty(0, dtype=torch.int32)
        counts = self.counts[TRAINED]
        left = self.loop_is_over and self.meter.cost.steps > 0 and not self._count_steps
        entries = [] if left or not in_step else self._unstepped()
        for entry in entries:
            if not entry.counted:
                counts = counts.index_add(0, entry.trained, entry.trained_once)
        return counts

    def flush(self) -> None:
        """Writes the signals of finished steps to the records, and those of the step in progress if no step will write them."""
        # Confirmed first, because the records do not forget: a loss that was written cannot be withdrawn. Finished steps come
        # before the open one: if a sample is in both, its later loss must stay.
        for entry in self._open:
            if not entry.confirmed:
                self._count(entry)
        self._write_waiting()
        # Signals that are in the records cannot be taken back if the loop gives the step up: reading must not change a training.
        if not (self._count_steps or self.loop_is_over or self.meter.cost.steps == 0):
            return
        entries = self._unstepped()
        given_up = [entry for entry in [*self._pending, *self._open] if entry not in entries]
        self._add_up(entries, given_up, final=self.loop_is_over and self._sees_backward)
        for entry in entries:
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
    known = [computed for computed in signals if isinstance(computed, dict)]
    return {name: torch.cat([computed[name] for computed in known]) for name in first}


def _are_plain(entries: Sequence[Entry]) -> bool:
    """Returns whether each entry has one loss, which a backward pass reached, and no other entry has its samples."""
    for entry in entries:
        call = entry.first
        if len(entry.calls) > 1 or entry.overlaps or call.reached <= call.lost:
            return False
    return True


def _may_overlap(first: Attribution, other: Attribution) -> bool:
    if first.positions is None or other.positions is None:
        return True
    return first.batch is other.batch and not set(first.positions).isdisjoint(other.positions)
