"""The batches that wait for their loss: what is held of each of them, and which of them the ids of a caller can be of."""

from collections import deque

from torch import Tensor

from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.resolve import StatedIds
from thresher.attribution.rows import YieldedBatch

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
        for old in (*self._waiting, *self.recent):
            if old.credited:
                old.forget()
                self._newest = max(self._newest, old.number)
        self._waiting = [old for old in (*self._waiting, *self.recent) if not old.credited and old not in held]
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
