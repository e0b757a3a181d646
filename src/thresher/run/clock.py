"""The clock of a run: which share of full training is done after the last step.

`run.progress`, `ProgressLR`, `Run.pace`, the schedulers of frameworks and the schedules of batch methods all read it. It counts
the steps of the epoch itself: after step i of n, i / n of the epoch is over, even if the steps are fewer or smaller than in
full training.
"""

from collections import deque
from typing import NamedTuple

from thresher.attribution.attributor import Attributor
from thresher.loading.epoch_order import EpochScale, OrderPlace
from thresher.loading.loader import SelectedLoader

# As many batches as `attributor.IDS_AHEAD` lets wait for their losses.
PLACES = 1024
"""Number of batches whose positions are held until their losses are computed."""


class BatchPlace(NamedTuple):
    """Position of a batch in training.

    Attributes:
        number: Number of the batch, counted from the start of the run.
        epoch: Number of its epoch.
        done: Units of the epoch (steps, rows or ids of the sampler) that are over after the batch.
        of: Units of the whole epoch, 1 or more.
    """

    number: int
    epoch: int
    done: int
    of: int


class RunClock:
    """Progress of training: up to the last batch that was trained on, not up to batches that a prefetcher has already read.

    Args:
        loader: Loader of the run.
        attributor: Attributor of the run.
        epochs: Number of epochs of the whole training run.
    """

    def __init__(self, loader: SelectedLoader, attributor: Attributor, epochs: int) -> None:
        self._loader = loader
        self._attributor = attributor
        self._epochs = epochs
        self._places: deque[BatchPlace] = deque(maxlen=PLACES)
        self._before = BatchPlace(-1, 0, 0, 1)
        self._first = 0
        self._scale = EpochScale()

    def begin_pass(self, scale: EpochScale) -> None:
        """Begins an epoch; `scale` is its size."""
        self._before = self._reached()
        self._first = self._attributor.batches
        self._scale = scale

    def take_back_pass(self) -> None:
        """Forgets the batches of an epoch in which nothing was trained."""
        while self._places and self._places[-1].number >= self._first:
            self._places.pop()

    def on_batch(self, number: int, epoch: int, place: OrderPlace, *, last: bool) -> int:
        """Notes a batch before the loop gets it, and returns how many samples of full training are done after it.

        Args:
            number: Number of the batch, counted from the start of the run.
            epoch: Number of its epoch.
            place: Position in the order of the epoch after the batch.
            last: Whether it is the last batch of the epoch.
        """
        # Rows left out at the end of an epoch do not leave it unfinished.
        units = self._scale.at(place)
        self._places.append(BatchPlace(number, epoch, *((1, 1) if last else units)))
        return self._scale.samples_at(place, units)

    def end_epoch(self, epoch: int) -> None:
        """Ends an epoch at the last batch, because the loop left it early or its length was unknown."""
        yielded = bool(self._places) and self._places[-1].epoch == epoch
        last = self._places.pop() if yielded else BatchPlace(self._attributor.batches, epoch, 0, 1)
        self._places.append(last._replace(done=1, of=1))

    def resume(self, epoch: int, place: OrderPlace, scale: EpochScale) -> int:
        """Resumes at the position of a saved run, and returns how many samples of full training its epoch has done."""
        self._places.clear()
        units = scale.at(place)
        self._before = BatchPlace(-1, epoch, *units)
        return scale.samples_at(place, units)

    @property
    def full_steps(self) -> int:
        """Number of batches of full training in all epochs; 0 if unknown."""
        # Rounded up, because the last batch of an epoch may be smaller; `candidates` has no rows that are dropped.
        return self._epochs * -(-self._loader.candidates // self._loader.batch_sampler.batch_size)

    def steps(self, total: int) -> int:
        """Returns the number of steps that full training would have made by now.

        Args:
            total: Number of steps of full training.
        """
        # Rounded down: full training has made step i when i batches of rows are over, and not yet when a row is missing.
        epoch, done, of = self._reached()[1:]
        return min((epoch * of + done) * total // (self._epochs * of), total)

    @property
    def batch(self) -> int:
        """Number of the batch that was trained on last, counted from the start of the run; -1 before the first."""
        return self._reached().number

    @property
    def progress(self) -> float:
        """Share of full training that is done after the last step, [0, 1]."""
        epoch, done, of = self._reached()[1:]
        return min(1.0, (epoch * of + done) / (self._epochs * of))

    def _reached(self) -> BatchPlace:
        """Returns the place of the batch that was trained on last."""
        trained = self._attributor.newest_trained
        known = (
            place for place in reversed(self._places) if trained is None or place.number <= trained
        )
        return next(known, self._before)
