"""Handles one call of the criterion: finds the samples of the loss, has the loss computed, and records its signals."""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.accumulator import (
    CallIdentity,
    StepAccumulator,
    identity_of,
    same_samples,
)
from thresher.attribution.resolve import StatedIds, attribute, check_stated
from thresher.attribution.rows import Attribution, AttributionError, YieldedBatch
from thresher.attribution.tracker import RowTracker
from thresher.loading.collate_check import UnknownRows
from thresher.timing import Timing
from thresher.torch_internals import innermost_transform
from thresher.trees import leaves

BATCHES_AHEAD = 2
"""Number of batches whose tensors are held to compare values: the batch in use and one that a prefetcher asked for."""
LABELS_AHEAD = 16
"""Number of older batches whose labels are held until their loss is computed, for a prefetcher that is far ahead."""
IDS_AHEAD = 1024
"""Number of still older batches without a loss that keep only their ids."""


class HeldBatches:
    """Holds the yielded batches whose loss can still come.

    Args:
        accumulator: Knows which batches have a loss.
    """

    def __init__(self, accumulator: StepAccumulator) -> None:
        self._accumulator = accumulator
        self.recent: list[YieldedBatch] = []
        """Batches last yielded, the latest at the end, with their tensors."""
        self._waiting: list[YieldedBatch] = []
        """Older batches without a loss, which keep only their labels."""
        self._older: deque[YieldedBatch] = deque(maxlen=IDS_AHEAD)
        self._newest = -1

    @property
    def latest(self) -> YieldedBatch | None:
        """The batch last yielded; None before the first."""
        return self.recent[-1] if self.recent else None

    @property
    def known(self) -> list[YieldedBatch]:
        """Batches whose ids are known, in the order of the loader; released batches of the open step come first."""
        held = [*self._older, *self._waiting, *self.recent]
        in_step = {entry.attribution.batch for entry in self._accumulator.open}
        return [*(batch for batch in in_step if batch is not None and batch not in held), *held]

    def make_room(self) -> None:
        """Releases tensors that are no longer needed, before the next batch is yielded."""
        # Inputs can be large. A batch with a loss releases all its tensors. A batch without a loss, which may have been skipped
        # or prefetched, first releases its inputs, then its labels, and last its ids.
        held = self.recent[1 - BATCHES_AHEAD :]
        # First, because this marks the batches of ended entries as `credited`, and the loop below releases such batches.
        self._accumulator.next_batch(set(held))
        waiting: list[YieldedBatch] = []
        for old in (*self._waiting, *self.recent):
            if old.credited:
                self._newest = max(self._newest, old.number)
                if old.tensors:
                    old.forget()
            elif old not in held:
                waiting.append(old)
        self._waiting = waiting
        for old in self._waiting[:-LABELS_AHEAD]:
            old.forget()
            self._older.append(old)
        self._waiting = self._waiting[-LABELS_AHEAD:]
        # At most one batch is new in the list; those before it gave up their inputs when they were new.
        if self._waiting:
            self._waiting[-1].forget_all_but_labels()
        self.recent = held

    def forget(self) -> None:
        """Releases all batches, because training continues from another point."""
        self.recent = []
        self._waiting = []
        self._older.clear()

    def newest_trained(self, yielded: int) -> int | None:
        """Returns the number of the newest batch with a loss; None if none of the latest batches has one.

        Args:
            yielded: Number of yielded batches.
        """
        held = (*self._waiting, *self.recent)
        newest = next(
            (batch.number for batch in reversed(held) if self._accumulator.has_credited(batch)),
            self._newest,
        )
        if newest < 0 or yielded - newest > LABELS_AHEAD + BATCHES_AHEAD:
            return None
        return newest

    def stated(
        self, ids: Tensor, repeat: int | None, made_for: set[int], first_of_epoch: int
    ) -> StatedIds:
        """Returns the ids that the caller gives, with the batches that they can belong to.

        Args:
            ids: Sample ids of the rows, shape (rows,), int64.
            repeat: Number of consecutive rows per id; None if the caller did not pass it.
            made_for: Numbers of the batches that the model computed the outputs for; empty if unknown.
            first_of_epoch: Number of the first batch of this epoch.
        """
        known = self.known
        in_step = {entry.attribution.batch for entry in self._accumulator.open}
        without = [batch for batch in known if not self._accumulator.has_credited(batch)]
        # A released batch can be in `made_for`, but not in `known`. So an empty list means that no held batch can be right.
        origins = [batch for batch in known if batch.number in made_for]
        return StatedIds(
            ids,
            repeat,
            recent=[*self._waiting, *self.recent],
            # Besides batches without a loss, three kinds may get a further one: a batch whose ids the loop asked for, one with
            # a loss in the step in progress (an auxiliary head, a second pass), and the latest batch.
            waiting=[
                b
                for b in known
                if not b.credited or b.returned_ids is not None or b in in_step or b is self.latest
            ],
            passed_over=next(
                (b for b in without if b.number >= first_of_epoch and b is not self.latest), None
            ),
            made_for=origins if made_for else None,
            counted=next(
                (batch for batch in without if batch.returned_ids is not None), self.latest
            ),
            ids_repeat=self._accumulator.ids_repeat,
        )


ANY_ID = 2**62
"""Upper limit of the ids of a stream, whose number of samples is not known."""

INSIDE_TRANSFORM = (
    "Cannot tell which samples this loss belongs to: run.criterion or run.reduce was called inside of a torch.func transform, "
    "such as vmap or grad. Compute the losses inside with a criterion of your own, return them from the transform (as with "
    "torch.func.grad_and_value), and pass them to run.reduce(losses, ids=run.ids) outside."
)


MeasureLoss = Callable[[Any, Any, Attribution, Tensor | None, Tensor | None], tuple[Any, ...]]
"""Function that computes a loss from outputs, targets, their samples, plan weights, shape (n,), and `weights / n`.

Weights are None if all are 1; `weights / n` is also None if it was not computed before. The function returns the scalar loss
for the loop, and the signals of each sample for `StepAccumulator.credit`. If only some rows are trained on, it also returns
their indices, shape (k,), int64.
"""


class Attributor:
    """Finds the samples of each loss, has the loss measured, and passes the signals to the accumulator.

    Args:
        tracker: Tensors with known rows.
        accumulator: Takes the signals.
        samples: Number of samples of the dataset; 0 for a stream.
        device: Device of ids and weights.
        unknown_rows: Its `reason` is set if the rows of a batch turn out not to be its samples in order.
        timing: Records how the time of the run is spent.
    """

    def __init__(
        self,
        tracker: RowTracker,
        accumulator: StepAccumulator,
        *,
        samples: int,
        device: torch.device,
        unknown_rows: UnknownRows,
        timing: Timing,
    ) -> None:
        self._timing = timing
        self._tracker = tracker
        self._accumulator = accumulator
        self._untouched = tracker.untouched
        self.meter = accumulator.meter
        """Counts the samples that go through the model."""
        self._ids_end = samples or ANY_ID
        self._device = device
        self.unknown_rows = unknown_rows
        self.trains_model = False
        """Whether a loss of the run's own model was recorded; losses of other models are then ignored."""
        self._batches = HeldBatches(accumulator)
        self._yielded = self._first_of_epoch = 0
        self._passed = 0

    def credit(
        self,
        outputs: Any,
        targets: Any,
        ids: Tensor | None,
        measure: MeasureLoss,
        repeat: int | None = None,
    ) -> Tensor | None:
        """Assigns one loss to its samples, and returns the scalar to train on.

        Args:
            outputs: First argument of the criterion, in any nesting.
            targets: Second argument of the criterion, in any nesting.
            ids: Sample ids of the rows that the caller passed, shape (rows,), int64; None to find them by the tensors.
            measure: Computes the loss once the samples are known.
            repeat: Number of consecutive rows per id; None if the caller did not pass it.

        Returns:
            The loss for the loop, shape (). None if nothing is trained on: the outputs come from another model than the
            run's own, or from a step that is over.

        Raises:
            AttributionError: It is unknown which samples the losses belong to; nothing was recorded.
        """
        # Every step of a plain loop takes the first branch. With a small model the time of each call counts, so it makes few.
        begin = perf_counter()
        if ids is None and repeat is None:
            attribution = self._untouched(outputs, targets)
        else:
            attribution = None
        if attribution is not None and (batch := attribution.batch) is not None:
            if not self.trains_model:
                self._begin_training()
            if batch.credited and self._was_stepped(
                outputs, identity_of(outputs, targets), attribution
            ):
                return None
            measures = perf_counter()
            # The clock stops while the criterion runs, because the loop would have paid for it anyway.
            value, signals, *rows = measure(
                outputs, targets, attribution, batch.weights, batch.weights_over_n
            )
            measured = perf_counter()
            # `id` is enough: the batch holds its targets, so no other object can get the same number.
            self._accumulator.credit(
                attribution, signals, value, outputs, None, rows[0] if rows else None, id(targets)
            )
            self._timing.attribution_s += perf_counter() - measured + measures - begin
            return value
        outputs = _with_rows(outputs)
        targets = _with_rows(targets)
        attribution = self._resolve(outputs, targets, ids, repeat)
        batch = attribution.batch
        # The loss of a teacher or a moving average must not count. If it comes before the first loss of the run's own model,
        # it is accepted here, and withdrawn later. If the loop never calls the run's own model, every loss counts.
        if batch is not None and self.meter.passes.parameters is not None:
            if self.meter.passes.is_of_own_model(outputs):
                if not self.trains_model:
                    self._begin_training()
            elif self.trains_model or self.meter.passes.has_passed(batch.number):
                return None
        call = identity_of(outputs, targets)
        if self._was_stepped(outputs, call, attribution):
            return None
        weights = self._weights_of(attribution)
        measures = perf_counter()
        value, signals, *rows = measure(outputs, targets, attribution, weights, None)
        measured = perf_counter()
        self._accumulator.credit(
            attribution, signals, value, outputs, outputs, rows[0] if rows else None, call
        )
        if batch is not None:
            # A call of run.ids_of shows for one loss which batch the caller chose. For the next loss with `run.ids` this is
            # uncertain again if another batch waits for its loss.
            batch.chosen_by_caller = False
        self._timing.attribution_s += perf_counter() - measured + measures - begin
        return value

    def _was_stepped(
        self, outputs: Any, call: CallIdentity | None, attribution: Attribution
    ) -> bool:
        """Whether an earlier step had a loss of these outputs. Then this loss is only computed, and not recorded."""
        batch = attribution.batch
        open_now = self._accumulator.open
        # An entry of a prefetched batch can be in the last step and in the current one: its further losses still count.
        over = [
            entry
            for entry in self._accumulator.over
            if entry.attribution.batch is batch
            and entry not in open_now
            and same_samples(entry.attribution, attribution)
        ]
        if batch is None or not isinstance(call, tuple) or not over:
            return False
        passes = self.meter.passes
        origin = passes.origin(outputs)
        for earlier_call in (earlier_call for entry in over for earlier_call in entry.calls):
            # In a plain loop, to save time, the forward pass of a loss was not looked up. Its outputs were the last that
            # `run.model` returned for the batch before the loss, so the number of the batch is enough to find the pass now.
            made_by = earlier_call.origin or passes.last_pass(batch.number, earlier_call.end)
            if earlier_call.identity == call or (origin is not None and made_by is origin):
                if origin is not None:
                    origin.is_over = True
                return True
        return False

    def _begin_training(self) -> None:
        """Notes that the loop trains the run's own model, and withdraws losses of another model in this step."""
        self.trains_model = True
        # These losses came before it was known that the loop trains the run's own model, such as those of a teacher.
        if self._accumulator.in_step:
            self._accumulator.withdraw(None)

    def _resolve(
        self, outputs: Any, targets: Any, ids: Tensor | None, repeat: int | None
    ) -> Attribution:
        if innermost_transform() is not None:
            raise AttributionError(INSIDE_TRANSFORM)
        # Before tensors are looked up, so that wrong arguments withdraw nothing.
        check_stated(ids, repeat, self._ids_end)
        try:
            made_for = set[int]() if ids is None else self.meter.passes.batches_of(outputs)
            if ids is None:
                stated = None
            else:
                stated = self._batches.stated(ids, repeat, made_for, self._first_of_epoch)
            attribution = attribute(self._tracker, outputs, targets, stated)
        except AttributionError:
            # An earlier loss of these outputs, such as the first term of mixup, was assigned to the wrong samples as well.
            self._accumulator.withdraw(outputs)
            raise
        if (
            attribution.batch is not None
            and attribution.key is not None
            and attribution.batch.number < self._passed
        ):
            self._refuse_repeated(attribution.batch)
        return attribution

    def _refuse_repeated(self, batch: YieldedBatch) -> None:
        """Raises an error if a batch of an earlier pass is trained on again, as `itertools.cycle` does."""
        # Rows are counted, not batches: with a prefetcher, the remaining micro-batches of a batch, and further losses of the
        # current step, may come after the pass.
        if batch.credited_rows >= len(batch.ids) and not self._accumulator.has_open(batch):
            raise RuntimeError(
                "A batch of an earlier epoch of run.loader is trained on again. itertools.cycle and other loops that store "
                "batches never begin the next epoch, so no samples are chosen again. Iterate over run.loader once per epoch: "
                "`while True: for batch in run.loader: ...`. For a replay memory, compute the loss without `run`."
            )

    def ids_of(self, tensor: Tensor) -> Tensor:
        """Returns the ids of the samples in a tensor of a yielded batch, shape (n,), int64.

        Args:
            tensor: A tensor that the loader yielded or the model returned, or a part of it.

        Raises:
            AttributionError: The run does not know the tensor, or the tensor has only parts of rows, such as some columns.
        """
        # A batch that the loop has normalized in place counts here: the loop itself says that the rows are still its samples.
        lookup = self._tracker.look(tensor)
        rows = lookup.rows or lookup.changed
        if rows is None:
            raise AttributionError(
                f"run.ids_of: `tensor` is {lookup.description}. Pass an input or a target as the loader yielded it, or a slice."
            )
        return rows.hand_out_ids()

    def _weights_of(self, attribution: Attribution) -> Tensor | None:
        """Returns the weights of some rows; None if all are 1."""
        batch = attribution.batch
        rows = attribution.positions
        if batch is not None and rows is not None:
            # Known rows slice the weights; ids need a search.
            weights = batch.weights
            if weights is None:
                return None
            return weights[rows.start : rows.stop : rows.step]
        held = [
            held_batch
            for held_batch in (batch, *reversed(self._batches.known))
            if held_batch is not None
        ]
        if all(held_batch.weights is None for held_batch in held):
            return None
        # Weights are looked up by id. The batch of the ids comes first, because argmax takes the first match. Batches without
        # weights count, too: a batch of the epoch before may have other weights for the same samples.
        same = attribution.ids.unsqueeze(1) == torch.cat([held_batch.ids for held_batch in held])
        weights = torch.cat(
            [
                torch.ones_like(held_batch.ids)
                if held_batch.weights is None
                else held_batch.weights
                for held_batch in held
            ]
        )[same.int().argmax(1)]
        return torch.where(same.any(1), weights, 1.0)

    def samples_come_first(self) -> None:
        """Assumes from now on that samples are along the first dimension of every tensor, as in the batches of Trainer."""
        self._tracker.sample_dimension = None

    def begin_epoch(self, *, ids_repeat: bool) -> None:
        """Prepares for the batches of an epoch.

        Args:
            ids_repeat: Whether a sample can come twice in the epoch, so that the order of writes matters.
        """
        self._accumulator.ids_repeat = ids_repeat
        self._first_of_epoch = self._yielded

    def pass_on(self, inputs: Any, outputs: Any) -> None:
        """Remembers that tensors which the loop computed, outside of the model, belong to the samples of others.

        Args:
            inputs: Tensors with known samples, in any nesting.
            outputs: Tensors computed from them, row by row.
        """
        self._tracker.remember_outputs(outputs, self._tracker.look_inputs(inputs))

    def yielded(self, batch: Any, ids: Tensor, weights: Tensor | None) -> None:
        """Remembers the tensors of a batch that the loader is about to yield.

        Args:
            batch: The batch, in any nesting, on the device.
            ids: Ids of its rows, shape (n,), int64.
            weights: Weights of the rows from the plan and from a batch method, shape (n,), float32; None if all are 1.
        """
        self._batches.make_room()
        # A copy: a view would keep the order of the whole epoch in memory while the next one is planned.
        ids = ids.to(self._device, non_blocking=True, copy=True)
        self.meter.next_batch(len(ids))
        tensors = leaves(batch)
        record = YieldedBatch(
            ids, self._yielded, unknown=self.unknown_rows.reason, all_count=_none_ignored(tensors)
        )
        if weights is not None:
            record.weights = weights.to(self._device, non_blocking=True)
            record.weights_over_n = record.weights / len(ids)
        self._batches.recent.append(record)
        self._tracker.remember_batch(record, tensors)
        self._yielded += 1

    @property
    def batches(self) -> int:
        """Number of batches yielded so far."""
        return self._yielded

    @property
    def ids(self) -> Tensor | None:
        """Ids of the batch last yielded, shape (B,), int64; None before the first."""
        latest = self._batches.latest
        return None if latest is None else latest.ids

    def write(self) -> None:
        """Writes the signals of all losses so far to the records."""
        self._accumulator.flush()

    @property
    def waits_for_credit(self) -> bool:
        """Whether the batch last yielded has no loss yet; writes buffered signals first."""
        self._accumulator.flush()
        return not self.last_credited

    @property
    def newest_trained(self) -> int | None:
        """Number of the newest batch with a loss; None if none of the latest batches has one."""
        return self._batches.newest_trained(self._yielded)

    @property
    def last_credited(self) -> bool:
        """Whether the batch last yielded has a loss that can no longer be withdrawn; True before the first batch."""
        latest = self._batches.latest
        return latest is None or latest.credited

    @property
    def runs_ahead(self) -> bool:
        """Whether the batch last yielded has no loss yet, or belongs to an earlier epoch; read before the next batch."""
        latest = self._batches.latest
        return (
            latest is None
            or latest.number < self._first_of_epoch
            or not self._accumulator.has_credited(latest)
        )

    def pass_over(self) -> None:
        """Notes that the loop has ended its pass over the loader."""
        self._passed = self._yielded
        # Batches without a loss keep their tensors: the loop may still compute it after the pass, as a prefetcher does.
        for batch in self._batches.recent:
            if batch.credited:
                batch.forget()

    def forget_batches(self) -> None:
        """Releases all batches, because training continues from another point."""
        self._batches.forget()


def _with_rows(value: Any) -> Any:
    # `squeeze()` takes the dimension of a batch of one row, such as the last one of an epoch.
    if isinstance(value, Tensor) and not value.dim():
        return value.view(1)
    return value


def _none_ignored(tensors: Sequence[Tensor]) -> bool:
    """Whether no label of a batch is negative, as an ignored index is; False if labels are on a device, to avoid waiting."""
    for leaf in tensors:
        # The criterion leaves out ignored labels, -100 by default. A 1-D integer tensor may be labels, and one on a device is
        # not read, because that would wait for it.
        is_labels = leaf.dim() == 1 and leaf.numel() and not leaf.is_floating_point()
        if is_labels and not (leaf.is_cpu and int(leaf.min()) >= 0):
            return False
    return True
