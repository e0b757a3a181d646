"""The way of a loss: from one call of the criterion, by the samples that it belongs to, to their records."""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.accumulator import CallIdentity, StepAccumulator, credited_before, identity_of, same_samples
from thresher.attribution.cost_meter import in_transform
from thresher.attribution.resolve import StatedIds, attribute, check_stated
from thresher.attribution.rows import Attribution, AttributionError, YieldedBatch
from thresher.attribution.tracker import RowTracker
from thresher.loading.collate_check import UnknownRows
from thresher.loading.trees import leaves
from thresher.timing import Timing

BATCHES_AHEAD = 2
"""Number of batches whose tensors are held for comparing values: the one in use and one that a prefetcher asked for."""
LABELS_AHEAD = 16
"""Number of batches before these whose labels are held until their loss is credited, for a deep prefetcher."""
IDS_AHEAD = 1024
"""Number of batches before these whose ids alone are held while they wait for their loss."""


class HeldBatches:
    """The batches that the loader yielded, as long as a loss of them can come.

    Args:
        accumulator: Knows the batches whose loss was credited.
    """

    def __init__(self, accumulator: StepAccumulator) -> None:
        self._accumulator = accumulator
        self.recent: list[YieldedBatch] = []
        """Batches last yielded, the latest at the end, with their tensors."""
        self._waiting: list[YieldedBatch] = []
        """Batches before the recent ones whose loss was not credited, with their labels alone."""
        self._older: deque[YieldedBatch] = deque(maxlen=IDS_AHEAD)
        self._newest = -1

    @property
    def latest(self) -> YieldedBatch | None:
        """The batch last yielded; None before the first."""
        return self.recent[-1] if self.recent else None

    @property
    def known(self) -> list[YieldedBatch]:
        """Batches whose ids are known, in the order in which they were yielded; first those of the step that were let go."""
        held = [*self._older, *self._waiting, *self.recent]
        in_step = {entry.attribution.batch for entry in self._accumulator.open}
        return [*(batch for batch in in_step if batch is not None and batch not in held), *held]

    def make_room(self) -> None:
        """Lets go of what is not needed when a further batch is on its way."""
        held = self.recent[1 - BATCHES_AHEAD :]
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
        if self._waiting:
            self._waiting[-1].forget_all_but_labels()
        self.recent = held

    def forget(self) -> None:
        """Lets go of all batches, which belong to another point of the training."""
        self.recent, self._waiting = [], []
        self._older.clear()

    def newest_trained(self, yielded: int) -> int | None:
        """Returns the number of the newest batch whose loss was credited; None where none of the latest was.

        Args:
            yielded: Number of batches that were yielded.
        """
        held = (*self._waiting, *self.recent)
        newest = next((one.number for one in reversed(held) if self._accumulator.has_credited(one)), self._newest)
        return None if newest < 0 or yielded - newest > LABELS_AHEAD + BATCHES_AHEAD else newest

    def stated(self, ids: Tensor, repeat: int | None, made_for: set[int], first_of_epoch: int) -> StatedIds:
        """Returns ids that the caller gives, with the batches that they can be of.

        Args:
            ids: Sample ids of the rows, shape (rows,), int64.
            repeat: Number of consecutive rows per id; None where the caller gave none.
            made_for: Numbers of the batches that the model computed the outputs for; empty where that is not known.
            first_of_epoch: Number of the first batch of this epoch.
        """
        known, in_step = self.known, {entry.attribution.batch for entry in self._accumulator.open}
        without = [batch for batch in known if not self._accumulator.has_credited(batch)]
        origins = [batch for batch in known if batch.number in made_for]
        return StatedIds(
            ids,
            repeat,
            recent=[*self._waiting, *self.recent],
            waiting=[b for b in known if not b.credited or b.asked_ids is not None or b in in_step or b is self.latest],
            passed_over=next((b for b in without if b.number >= first_of_epoch and b is not self.latest), None),
            made_for=origins if made_for else None,
            counted=next((batch for batch in without if batch.asked_ids is not None), self.latest),
            ids_repeat=self._accumulator.ids_repeat,
        )


AFTER_STEP = (
    "The loss is of a forward pass whose step is over: another loss of the same samples and the same pass was credited before "
    "the optimizer stepped, or before later batches were yielded. Nothing was recorded. Ways out: compute all losses of a "
    "forward pass before the optimizer steps; for a log, call the criterion under torch.no_grad()."
)
ANY_ID = 2**62
"""Upper limit of the ids of a stream, whose number of samples is not known."""

INSIDE_TRANSFORM = (
    "Cannot tell which samples this loss belongs to: run.criterion or run.reduce was called inside of a torch.func transform, "
    "such as vmap or grad. Compute the losses inside with a criterion of your own, return them from the transform (as with "
    "torch.func.grad_and_value), and pass them to run.reduce(losses, ids=run.ids) outside."
)


MeasureLoss = Callable[[Any, Any, Attribution, Tensor | None, Tensor | None], tuple[Any, ...]]
"""Computes the loss of rows, given outputs, targets, their samples, their weights in the plan, shape (n,), and `weights / n`.

Without weights, both are None. It returns the scalar for the loop; the signals of each sample, as `StepAccumulator.credit`
takes them; and, where only some rows are trained on, their numbers, shape (k,), int64.
"""


class Attributor:
    """Finds the samples that each loss belongs to, has it measured, and passes its signals on to the accumulator.

    Args:
        tracker: The tensors whose rows are known.
        accumulator: Takes the signals.
        samples: Number of samples of the dataset; 0 for a stream.
        device: Device of ids and weights.
        unknown_rows: Reason why the rows of batches are not their samples in order, as soon as it is known.
        timing: Books the time of the training.
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
        self._tracker, self._accumulator, self._untouched = tracker, accumulator, tracker.untouched
        self.meter = accumulator.meter
        """Counts the samples that go through the model."""
        self._ids_end, self._device, self.unknown_rows = samples or ANY_ID, device, unknown_rows
        self._trains_model = False
        """Whether a loss of the run's own model was credited, so that losses of other models are not the run's."""
        self._batches = HeldBatches(accumulator)
        self._yielded = self._first_of_epoch = 0
        self._passed = 0

    def credit(
        self, outputs: Any, targets: Any, ids: Tensor | None, measure: MeasureLoss, repeat: int | None = None
    ) -> Tensor | None:
        """Credits one loss to the samples that it belongs to.

        Args:
            outputs: First argument of the criterion, in any nesting.
            targets: Second argument of the criterion, in any nesting.
            ids: Ids of the rows as the caller gives them, shape (rows,), int64; None where the tensors name them.
            measure: Computes the loss once the samples are known.
            repeat: Number of consecutive rows per id; None where the caller gave none.

        Returns:
            The scalar for the loop, shape (); None where the loss is not trained on: its outputs are those of another model,
            while the loop trains the run's own, or of a step that is over.

        Raises:
            AttributionError: The samples cannot be told with certainty; nothing was recorded.
        """
        begin = perf_counter()
        attribution = self._untouched(outputs, targets) if ids is None and repeat is None else None
        if attribution is not None and (batch := attribution.batch) is not None:
            if not self._trains_model:
                self._begin_training()
            if batch.credited and self._was_stepped(outputs, identity_of(outputs, targets), attribution):
                return None
            measures = perf_counter()
            value, found, *rows = measure(outputs, targets, attribution, batch.weights, batch.weights_over_n)
            measured = perf_counter()
            self._accumulator.credit(attribution, found, outputs, None, rows[0] if rows else None, id(targets))
            self._timing.attribution_s += perf_counter() - measured + measures - begin
            return value
        attribution = self._resolve(outputs, targets, ids, repeat)
        batch = attribution.batch
        if batch is not None and self.meter.parameters is not None:
            if self.meter.is_of_own_model(outputs):
                if not self._trains_model:
                    self._begin_training()
            elif self._trains_model or self.meter.has_passed(batch.number):
                return None
        call = identity_of(outputs, targets)
        if self._was_stepped(outputs, call, attribution):
            return None
        weights, measures = self._weights_of(attribution), perf_counter()
        value, found, *rows = measure(outputs, targets, attribution, weights, None)
        measured = perf_counter()
        self._accumulator.credit(attribution, found, outputs, outputs, rows[0] if rows else None, call)
        if batch is not None:
            batch.meant = False
        self._timing.attribution_s += perf_counter() - measured + measures - begin
        return value

    def _was_stepped(self, outputs: Any, call: CallIdentity | None, attribution: Attribution) -> bool:
        """Whether a loss of these outputs was credited in a step that is over, so that another is but looked at."""
        batch, open_now = attribution.batch, self._accumulator.open
        over = [entry for entry in self._accumulator.over if entry.attribution.batch is batch and entry not in open_now]
        calls = [one for entry in over if same_samples(entry.attribution, attribution) for one in entry.calls]
        stepped = credited_before(calls, outputs, call, batch, self.meter) if calls else None
        if stepped is False:
            raise AttributionError(AFTER_STEP)
        return bool(stepped)

    def _begin_training(self) -> None:
        """Notes that the loop trains the run's own model, and forgets losses of another model in this step."""
        self._trains_model = True
        if self._accumulator.in_step:
            self._accumulator.withdraw(None)

    @property
    def trains_model(self) -> bool:
        """Whether a loss of the run's own model was credited."""
        return self._trains_model

    def _resolve(self, outputs: Any, targets: Any, ids: Tensor | None, repeat: int | None) -> Attribution:
        if in_transform():
            raise AttributionError(INSIDE_TRANSFORM)
        check_stated(ids, repeat, self._ids_end)
        try:
            made_for = set[int]() if ids is None else self.meter.batches_of(outputs)
            stated = None if ids is None else self._batches.stated(ids, repeat, made_for, self._first_of_epoch)
            found = attribute(self._tracker, outputs, targets, stated)
        except AttributionError:
            self._accumulator.withdraw(outputs)
            raise
        if found.batch is not None and found.key is not None and found.batch.number < self._passed:
            self._refuse_repeated(found.batch)
        return found

    def _refuse_repeated(self, batch: YieldedBatch) -> None:
        """Refuses a batch of an earlier pass that was trained on, which a loop that stores batches yields again and again."""
        if batch.credited_rows >= len(batch.ids) and not self._accumulator.has_open(batch):
            raise RuntimeError(
                "A batch of an earlier pass over run.loader is trained on again. itertools.cycle and other loops that store "
                "batches never begin the next epoch, so that nothing is selected again. Iterate run.loader once per epoch: "
                "`while True: for batch in run.loader: ...`. For a replay memory, compute the loss without `run`."
            )

    def ids_of(self, tensor: Tensor) -> Tensor:
        """Returns the ids of the samples that a tensor of a yielded batch shows, shape (n,), int64.

        Args:
            tensor: A tensor that the loader yielded or the model returned, or a part of it.

        Raises:
            AttributionError: The tensor is none of them, or does not show whole rows.
        """
        lookup = self._tracker.look(tensor)
        rows = lookup.rows or lookup.changed
        if rows is None:
            raise AttributionError(
                f"run.ids_of: `tensor` is {lookup.description}. Pass an input or a target as the loader yielded it, or a slice."
            )
        return rows.asked_ids()

    def _weights_of(self, attribution: Attribution) -> Tensor | None:
        """Returns the weights of some rows; None where all are 1."""
        batch = attribution.batch
        if batch is not None and batch.weights is not None and attribution.positions is not None:
            rows = attribution.positions
            return batch.weights[rows.start : rows.stop : rows.step]
        known = [one for one in (batch, *reversed(self._batches.known)) if one is not None and one.weights is not None]
        if not known:
            return None
        # The rows are found by the ids that the caller gave, first in the batch that these are of, as far as it is known.
        same = attribution.ids.unsqueeze(1) == torch.cat([one.ids for one in known])
        found = torch.cat([one.weights for one in known if one.weights is not None])[same.int().argmax(1)]
        return torch.where(same.any(1), found, 1.0)

    def begin_epoch(self, *, ids_repeat: bool) -> None:
        """Prepares for the batches of an epoch.

        Args:
            ids_repeat: Whether a sample can come twice in the epoch, so that the order of writing matters.
        """
        self._accumulator.ids_repeat = ids_repeat
        self._first_of_epoch = self._yielded

    def yielded(self, batch: Any, ids: Tensor, weights: Tensor | None) -> None:
        """Remembers the tensors of a batch that is on its way to the loop.

        Args:
            batch: The batch, in any nesting, on the device.
            ids: Ids of its rows, shape (n,), int64.
            weights: Weights of its rows, of the plan and of a batch method, shape (n,), float32; None where all are 1.
        """
        self._batches.make_room()
        ids = ids.to(self._device, non_blocking=True)
        self.meter.next_batch(len(ids))
        tensors = leaves(batch)
        record = YieldedBatch(ids, self._yielded, unknown=self.unknown_rows.reason, all_count=_none_ignored(tensors))
        if weights is not None:
            record.weights = weights.to(self._device, non_blocking=True)
            record.weights_over_n = record.weights / len(ids)
        self._batches.recent.append(record)
        self._tracker.remember_batch(record, tensors)
        self._yielded += 1

    @property
    def batches(self) -> int:
        """Number of batches that were yielded so far."""
        return self._yielded

    @property
    def ids(self) -> Tensor | None:
        """Ids of the batch last yielded, shape (B,), int64; None before the first."""
        latest = self._batches.latest
        return None if latest is None else latest.ids

    def write(self) -> None:
        """Writes the signals of all credited losses to the records."""
        self._accumulator.flush()

    @property
    def waits_for_credit(self) -> bool:
        """Whether the batch last yielded was not credited yet."""
        self._accumulator.flush()
        return not self.last_credited

    @property
    def newest_trained(self) -> int | None:
        """Number of the newest batch whose loss was credited; None where none was, or where losses name no batch."""
        return self._batches.newest_trained(self._yielded)

    @property
    def last_credited(self) -> bool:
        """Whether the batch last yielded was credited, as far as the steps that are over show."""
        latest = self._batches.latest
        return latest is None or latest.credited

    @property
    def runs_ahead(self) -> bool:
        """Whether the batch last yielded waits for its loss, or is of an earlier epoch; for the moment before the next one."""
        latest = self._batches.latest
        return latest is None or latest.number < self._first_of_epoch or not self._accumulator.has_credited(latest)

    def pass_over(self) -> None:
        """Notes that the loop has left its pass over the loader."""
        self._passed = self._yielded
        for batch in self._batches.recent:
            if batch.credited:
                batch.forget()

    def forget_batches(self) -> None:
        """Lets go of the batches, which belong to another point of the training."""
        self._batches.forget()


def _none_ignored(tensors: Sequence[Tensor]) -> bool:
    """Whether it is known without waiting for a device that no label of a batch is negative, as an ignored index is."""
    for leaf in tensors:
        is_labels = leaf.dim() == 1 and leaf.numel() and not leaf.is_floating_point()
        if is_labels and not (leaf.is_cpu and int(leaf.min()) >= 0):
            return False
    return True
