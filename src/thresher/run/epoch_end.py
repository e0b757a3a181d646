"""Decides when an epoch is over; docs/how-it-works.md has a table of all cases."""

import enum
import threading
from collections.abc import Callable
from typing import NamedTuple

from thresher.attribution.attributor import BATCHES_AHEAD, Attributor
from thresher.cost import UNSEEN
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, defines, requirements_of
from thresher.run.parts import Parts
from thresher.warning import warn


def plans_by_losses(method: EpochMethod | OnSubset) -> bool:
    """Returns whether a method chooses by losses that the loop computed."""
    recorded = any(column.merge != "plan" for column in method.columns().values())
    return recorded and requirements_of(method).records and not defines(method, "full_pass")


class Counts(NamedTuple):
    """What the loop has done since `attach`, or between two moments; see `Counts.of` and `Counts.since`.

    Attributes:
        batches: Batches that were yielded.
        credited: Batches with a loss.
        passed: Samples in forward passes.
        steps: Steps of the optimizer.
        evaluated: Forward passes without gradients.
    """

    batches: int
    credited: int
    passed: int
    steps: int
    evaluated: int

    @classmethod
    def of(cls, attributor: Attributor) -> "Counts":
        """Returns the counts so far."""
        meter = attributor.meter
        steps = meter.cost.steps
        return cls(attributor.batches, meter.credited, meter.of_loop(), steps, meter.evaluated)

    def since(self, then: "Counts") -> "Counts":
        """Returns the differences to earlier counts."""
        return Counts(*(new - old for new, old in zip(self, then, strict=True)))

    @property
    def trains(self) -> bool:
        """Whether there was a loss, a forward pass or a step.

        One of the three is enough: a loop may compute its losses itself, have no optimizer, or call another model.
        """
        return self.credited > 0 or self.passed > 0 or self.steps > 0


SILENT_STEPS = 10
"""Number of steps without a recorded loss before a warning."""


class SilentEpochs:
    """Warns after ten steps or an epoch without a recorded loss, and raises an error if the method needs losses.

    The error comes after the first epoch if it had ten steps, otherwise after the second.

    Args:
        attributor: Attributor of the run.
        who: Name of the method, for error messages.
        needed: Function that returns whether the method chooses by the losses of the loop.
    """

    def __init__(self, attributor: Attributor, who: str, needed: Callable[[], bool]) -> None:
        self._attributor = attributor
        self._meter = attributor.meter
        self._method_name = who
        self._needed = needed
        self._counts_at_begin: Counts | None = None
        self._silent_epochs = 0
        self._warned_in_steps = False
        self._way_out = WAY_OUT

    def begin(self) -> None:
        """Begins an epoch.

        Raises:
            RuntimeError: The method needs losses, and none was recorded in two epochs, or in one epoch of ten steps.
        """
        self._check_losses()
        # After a warning within an epoch, one silent epoch is enough; without, it takes two.
        if self._silent_epochs > (not self._warned_in_steps) and self._needed():
            epochs = f"{self._silent_epochs} epochs" if self._silent_epochs > 1 else "a whole epoch"
            raise RuntimeError(
                f"{self._method_name} chooses by the losses of samples, but got no loss in {epochs}. {self._way_out}"
            )
        self._counts_at_begin = self._counts_so_far()

    def step_over(self) -> None:
        """Notes a step of the optimizer."""
        steps = self._meter.cost.steps
        before = self._counts_at_begin
        if before is None or self._warned_in_steps or steps - before.steps != SILENT_STEPS:
            return
        if self._meter.credited == before.credited and self._meter.of_loop() > before.passed:
            self._warn(f"run.criterion or run.reduce got no loss in {SILENT_STEPS} steps")
            self._warned_in_steps = True

    def begin_again(self, *, steps_are_seen: bool) -> None:
        """Forgets a loop that only looked at some batches: its epoch begins again.

        Args:
            steps_are_seen: Whether a training step would have been noticed. If not, only a loop that took one batch is
                forgotten.
        """
        if self._counts_at_begin is not None:
            # Looking at the first batch, as for a plot, is no silent epoch.
            done = self._counts_so_far().since(self._counts_at_begin)
            if (done.batches <= 1 or steps_are_seen) and not (done.passed or done.steps):
                self._counts_at_begin = None

    def end(self, *, complete: bool) -> None:
        """Ends an epoch. Losses may still come if the loop has not trained on all batches yet."""
        # An epoch that was left early may have been left before its first loss.
        if not complete:
            self._counts_at_begin = None
        elif self._counts_at_begin is not None:
            done = self._counts_so_far().since(self._counts_at_begin)
            # In a shorter epoch, a prefetcher may have read all batches before the first loss.
            if done.batches > BATCHES_AHEAD and (done.passed or done.steps or done.evaluated):
                self._check_losses()

    def _counts_so_far(self) -> Counts:
        self._attributor.write()
        return Counts.of(self._attributor)

    def _check_losses(self) -> None:
        if self._counts_at_begin is None:
            return
        done = self._counts_so_far().since(self._counts_at_begin)
        self._counts_at_begin = None
        # A pass without a batch, as over an empty shard, says nothing about losses.
        if done.credited or not done.batches:
            self._silent_epochs = 0
            self._warned_in_steps = False
            return
        self._silent_epochs += 1
        # Neither losses nor forward passes of the run were seen: what the loop computes is unknown, and so is its cost.
        if not done.passed:
            self._meter.make_unknown(WITHOUT_GRADIENTS if done.evaluated else UNSEEN)
        if done.evaluated and not done.passed:
            self._way_out = ENABLE_GRADIENTS
        if (
            self._silent_epochs == 1
            and not self._warned_in_steps
            and (done.passed or done.steps or done.evaluated or self._needed())
        ):
            self._warn(
                f"run.criterion or run.reduce got no loss in an epoch{'' if done.passed else ', and run.cost is unknown'}"
            )

    def _warn(self, problem: str) -> None:
        warn(
            f"{self._method_name}: {problem}. {self._way_out} Without losses, run.trained counts only samples that run.model gets in the "
            "tensors that run.loader yielded."
        )


WAY_OUT = (
    "Call run.criterion(outputs, targets) in the loop instead of your own criterion; if the model computes its own loss, "
    "pass the losses per sample to run.reduce(losses, targets=...)."
)
ENABLE_GRADIENTS = (
    "The loop calls run.model without gradients, where run.criterion records nothing. To train with forward passes only, call "
    "run.criterion(run.model(inputs), targets) under torch.enable_grad() once per batch, in the forward pass whose losses the "
    "method should use."
)
WITHOUT_GRADIENTS = (
    "the loop trains without gradients, so its passes look like those of an evaluation"
)


class Pass(enum.Enum):
    """State of the loop over the loader."""

    NONE = enum.auto()
    """No loop is running, or its epoch was ended."""
    RUNNING = enum.auto()
    """Further batches are to come."""
    ALL_YIELDED = enum.auto()
    """The last batch was yielded, and the loop still has the iterator."""
    LEFT = enum.auto()
    """The iterator was deleted before the last batch."""
    OVER = enum.auto()
    """All batches were yielded, and the iterator was deleted or exhausted."""


AFTER = {
    (Pass.RUNNING, "last batch"): Pass.ALL_YIELDED,
    (Pass.RUNNING, "gone"): Pass.LEFT,
    (Pass.ALL_YIELDED, "batch"): Pass.RUNNING,
    (Pass.ALL_YIELDED, "gone"): Pass.OVER,
    (Pass.RUNNING, "exhausted"): Pass.OVER,
    (Pass.ALL_YIELDED, "exhausted"): Pass.OVER,
}
"""The state after an event, by (state, event); any other event leaves the state as it is."""


class EpochEnd:
    """Follows one loop over the loader, from the first batch to the step after the last batch, and ends the epoch.

    Args:
        parts: Parts of the run.
        close: Function that ends the epoch, given whether it is complete.
        single_process: Whether only one process trains. Several processes end an epoch together, when the loop ends or steps,
            but not when one of them reads results.
    """

    def __init__(
        self, parts: Parts, close: Callable[[bool], None], *, single_process: bool
    ) -> None:
        self._attributor = parts.attributor
        self._accumulator = parts.accumulator
        self._close_epoch = close
        self._single_process = single_process
        self._steps_are_seen = parts.given.optimizer is not None
        self.state = Pass.NONE
        self._is_closing = False
        self._prefetches = False
        """Whether the batch before the last one had no loss yet when the loop got the last batch, as with a prefetcher."""
        self._counts_at_begin = Counts.of(self._attributor)
        self._thread = threading.get_ident()

    @property
    def _done(self) -> Counts:
        """What the loop has done in this epoch."""
        return Counts.of(self._attributor).since(self._counts_at_begin)

    def begin(self) -> None:
        """Begins an epoch, or the rest of an interrupted epoch."""
        self._note_thread()
        self._accumulator.loop_is_over = False
        self.state = Pass.RUNNING
        self._counts_at_begin = Counts.of(self._attributor)

    def forget(self) -> None:
        """Forgets the loop: its epoch was ended, or a saved state was loaded."""
        self.state = Pass.NONE

    def on_batch(self, *, last: bool) -> None:
        """Notes a batch, and whether it is the last batch of the epoch."""
        # A stream may go on after the batch that is the last one by its length.
        self.state = AFTER.get((self.state, "last batch" if last else "batch"), self.state)
        if last:
            self._prefetches = self._attributor.runs_ahead
        self._note_thread()

    def on_loop_exit(self, *, exhausted: bool) -> None:
        """Notes that the loop over the loader has ended. If it took all batches and made its last step, the epoch ends now.

        Args:
            exhausted: Whether the loop took all batches. Otherwise Python deleted the iterator, possibly in the middle of other
                code, so nothing is computed.
        """
        self.state = AFTER.get((self.state, "exhausted" if exhausted else "gone"), self.state)
        self._accumulator.loop_is_over = True
        # Losses of the pass may still wait to be written; whether its last step is over shows in them.
        if exhausted:
            self._accumulator.flush()
            self._end(complete=True, at_once=self._last_step_done)
        # Once the last batch has its loss, the prefetcher has caught up.
        self._prefetches = self._prefetches and not self._attributor.last_credited
        # From here on, a new loss of a batch of this pass that was trained on is an error: the loop stores its batches.
        self._attributor.pass_over()

    def step_over(self) -> None:
        """Notes that the optimizer stepped.

        Raises:
            RuntimeError: The optimizer stepped in another thread than the thread that iterates over the loader.
        """
        self._check_thread()
        # In several processes all of them step together, so that all end the epoch here; a read is of one process alone.
        if not self._single_process:
            self._end(complete=True, at_once=self._last_step_done)

    def read(self) -> None:
        """Ends an epoch whose last batch was trained on, because the loop reads results; in one process only.

        The last group of accumulated batches may have no step. With a prefetcher, the step is still to come.
        """
        if self.state is not Pass.OVER:
            return
        # Without an optimizer, only its loss shows that the last batch was trained on, and the loss may wait to be confirmed.
        self._accumulator.flush()
        # A prefetcher asks for the end of the pass before the last batches are trained on.
        if self._prefetches:
            done = self._last_step_done
        else:
            done = self._attributor.last_credited or self._done.credited <= 0
        if self._single_process and done and self._thread == threading.get_ident():
            self._end(complete=True)

    def finish(self, *, leaves: bool) -> bool:
        """Ends the epoch before a new loop, a save or `detach`, and returns whether no epoch is in progress afterwards.

        Args:
            leaves: Whether the loop is known to have ended, even if a variable still holds its iterator.
        """
        # Read before the state changes: an epoch that was left early is over as well, and is not complete.
        complete = self.state in (Pass.ALL_YIELDED, Pass.OVER)
        # The loop still holds the iterator, or has left early.
        if leaves and self.state is not Pass.NONE and self.trained:
            self.state = Pass.OVER
        self._end(complete=complete)
        return self.state is Pass.NONE

    def _end(self, *, complete: bool, at_once: bool = True) -> None:
        """Ends an epoch that is over; the passes that this takes may ask the run for its plan or its records."""
        # The end runs passes over the loader, which report here again.
        if self._is_closing or not (at_once and self.due):
            return
        self._check_thread()
        self._is_closing = True
        try:
            self._close_epoch(complete)
        finally:
            self._is_closing = False

    @property
    def due(self) -> bool:
        """Whether the epoch is over but not ended yet, which happens when results are needed; True for one without batches."""
        return self.state is Pass.OVER and (not self._done.batches or self.trained)

    @property
    def trained(self) -> bool:
        """Whether the loop trained in the epoch: it had a loss, a step, or a forward pass with gradients."""
        self._accumulator.flush()
        return self._done.trains

    @property
    def evaluates(self) -> bool:
        """Whether the loop did not train in the epoch, and called the model without gradients."""
        return self._done.evaluated > 0 and not self.trained

    @property
    def _last_step_done(self) -> bool:
        """Whether the batch yielded last has its loss, and the optimizer stepped since, if it steps at all.

        Also True if no loss of this pass was recorded, because then none is expected.
        """
        done = self._done
        if not done.batches or done.credited <= 0:
            return True
        # Accumulated gradients: the last batch has its loss, and its step is still to come. Without any step in the
        # pass, the loop makes none.
        waits = self._steps_are_seen and done.steps > 0 and self._accumulator.in_step
        return self._attributor.last_credited and not waits

    def _note_thread(self) -> None:
        """Notes the thread that iterates over the loader; it must not change if no optimizer shows which thread trains."""
        if self._steps_are_seen:
            self._thread = threading.get_ident()
        else:
            self._check_thread()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        if here == self._thread:
            return
        # A thread that has ended, as of a notebook cell or of a trainer that was stopped, no longer counts.
        if self._thread not in {thread.ident for thread in threading.enumerate()}:
            self._thread = here
            return
        raise RuntimeError(
            "The loop trains in one thread and iterates over run.loader in another. Selection runs the model between batches "
            "and epochs, which must not happen during a training step. Do both in one thread; to load in the background, use "
            "DataLoader(num_workers=...). If attach gets no optimizer=, call it in that thread, too."
        )
