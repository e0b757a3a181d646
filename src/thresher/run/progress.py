"""Where a run is in its training: the epoch, the rows of it that were read, and the share of full training that is done.

`run.progress`, `ProgressLR`, `Run.pace`, the schedulers of frameworks and the schedules of batch methods read this share. It
counts the rows of the epoch itself, which may be fewer than in full training, or its batches if these are smaller.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from thresher.attribution.attributor import Attributor
from thresher.cost import Cost
from thresher.loading.batch_reader import Batches
from thresher.loading.loader import SelectedLoader

# This is the number of batches that `attributor.IDS_AHEAD` lets wait for their losses.
MARKS = 1024
"""Number of batches whose positions are held until their losses are computed."""


class Mark(NamedTuple):
    """Progress after a batch.

    Attributes:
        number: Number of the batch, counted from the start of the run.
        epoch: Number of its epoch.
        done: Rows or batches of the epoch that are over.
        of: Rows or batches of the whole epoch, 1 or more.
    """

    number: int
    epoch: int
    done: int
    of: int


class Progress:
    """The position of a run, and what full training would have computed up to it.

    Args:
        loader: Loader of the run.
        attributor: Attributor of the run.
        cost: Counts what full training would have computed.
        epochs: Number of epochs of the whole training run.
        seed: Random seed of the plans.
    """

    def __init__(
        self, loader: SelectedLoader, attributor: Attributor, cost: Cost, epochs: int, seed: int
    ) -> None:
        self._loader = loader
        self._attributor = attributor
        self._cost = cost
        self._epochs = epochs
        self.seed = seed
        self.epoch = 0
        """Number of the epoch in progress or, between epochs, of the one that comes next."""
        self.active = False
        """Whether an epoch has begun and was not ended."""
        self.resumed = False
        """Whether the next pass over the loader goes on with an interrupted epoch."""
        self.ran_out = True
        """Whether the loop has asked for a batch after the last one."""
        self.saved_left = False
        """Whether a state was saved after the loop had left the epoch by `break`."""
        self.rows = 0
        """Number of rows of the epoch that were read."""
        self._samples = 0
        """Number of samples that full training would have trained on in the epoch so far."""
        self._position_at_begin = False, 0, 0
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._mark_before = Mark(-1, 0, 0, 1)
        """Where training was when the pass began; its progress, until a batch of the pass is trained on."""
        self._first_batch = 0
        """Number of the first batch of the pass."""

    # Events

    def begin(self) -> bool:
        """Begins a loop over the loader, and returns whether it continues an interrupted epoch."""
        resumed = self.resumed
        if not resumed:
            self.rows = self._samples = 0
        # For `take_back`, after a pass without training.
        self._position_at_begin = resumed, self.rows, self._samples
        self.active = True
        self.resumed = False
        self.ran_out = False
        # Batches are counted by their pass: those of an earlier pass are over.
        self._mark_before = self._mark_of_trained()
        self._first_batch = self._attributor.batches
        return resumed

    def move(self, number: int, batches: Batches, *, last: bool) -> None:
        """Notes a batch before the loop gets it.

        Args:
            number: Number of the batch, counted from the start of the run.
            batches: Batches of the epoch that were read.
            last: Whether it is the last batch of the epoch.
        """
        # Only the difference is added: earlier samples are counted already, perhaps by the run that was saved.
        samples = batches.samples
        self._cost.full_forward += samples - self._samples
        self._cost.full_backward += samples - self._samples
        self._samples = samples
        self.rows = batches.rows
        # The last batch ends the epoch, even if rows are left out after it.
        done, of = (1, 1) if last else batches.progress
        self._marks.append(Mark(number, self.epoch, done, of))

    def end_pass(self) -> None:
        """Ends an epoch at the last batch, because the loop left it early or its length was unknown."""
        yielded = bool(self._marks) and self._marks[-1].epoch == self.epoch
        if yielded:
            last = self._marks.pop()
        else:
            last = Mark(self._attributor.batches, self.epoch, 0, 1)
        self._marks.append(last._replace(done=1, of=1))

    def finish(self) -> None:
        """Counts the rest of a complete epoch, in which full training would have consumed all samples."""
        # A stream may have been longer than its length.
        rest = max(0, self._loader.candidates - self._samples)
        self._cost.full_forward += rest
        self._cost.full_backward += rest

    def end(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.active = False
        self.rows = self._samples = 0

    def take_back(self) -> None:
        """Moves back to where the loop began, because nothing was trained."""
        while self._marks and self._marks[-1].number >= self._first_batch:
            self._marks.pop()
        self.active, self.rows, samples = self._position_at_begin
        self.resumed = self.active
        self._cost.full_forward += samples - self._samples
        self._cost.full_backward += samples - self._samples
        self._samples = samples

    # What the run reports

    @property
    def full_steps(self) -> int | None:
        """Number of batches of full training in all epochs; None if unknown."""
        order = self._loader.order
        return self._epochs * order.full_batches if order.candidates else None

    def steps(self, total: int) -> int:
        """Returns the number of steps that full training would have made by now.

        Args:
            total: Number of steps of full training.
        """
        # Rounded down: full training has made step i when i batches of rows are over, and not yet when a row is missing.
        _, epoch, done, of = self._mark_of_trained()
        return min((epoch * of + done) * total // (self._epochs * of), total)

    @property
    def batch(self) -> int:
        """Number of the batch that was trained on last, counted from the start of the run; -1 before the first."""
        return self._mark_of_trained().number

    @property
    def share(self) -> float:
        """Share of full training that is done after the last step, [0, 1]."""
        _, epoch, done, of = self._mark_of_trained()
        return min(1.0, (epoch * of + done) / (self._epochs * of))

    def _mark_of_trained(self) -> Mark:
        """Returns the mark of the batch that was trained on last, not of batches that a prefetcher has read ahead."""
        trained = self._attributor.newest_trained
        reached = (
            mark for mark in reversed(self._marks) if trained is None or mark.number <= trained
        )
        return next(reached, self._mark_before)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values."""
        mark = self._marks[-1] if self._marks else self._mark_before
        if mark.epoch != self.epoch:
            mark = Mark(-1, self.epoch, 0, 1)
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "active": self.active,
            "left": self.saved_left,
            "rows": self.rows,
            "samples": self._samples,
            "progress": mark[2:],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the position of a saved run."""
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self.active = self.resumed = state["active"]
        self.ran_out = state["ran_out"]
        self.saved_left = state["left"]
        self.rows = state["rows"]
        self._samples = state["samples"]
        self._marks.clear()
        self._mark_before = Mark(-1, self.epoch, *state["progress"])
