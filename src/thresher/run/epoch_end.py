"""When an epoch is over: its last batch was yielded, and the loop has left the pass over the loader."""

import threading

from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.cost import Cost


class EpochEnd:
    """Follows one pass over the loader, from its first batch to the step after its last one.

    Loops end an epoch in several ways: the loader runs out, a counter stops at `len(run.loader)`, or there is a `break` at the
    last batch. A prefetcher asks for the last batch before the steps of earlier ones. So the last batch is known when it is
    yielded, and what belongs to the end of an epoch runs when it is needed next, after the step.

    Args:
        attributor: Attributor of the run.
        accumulator: Accumulator of the run.
        cost: Cost of the run.
        steps_are_seen: Whether there is an optimizer whose steps the run sees.
    """

    def __init__(self, attributor: Attributor, accumulator: StepAccumulator, cost: Cost, *, steps_are_seen: bool) -> None:
        self._attributor, self._accumulator, self._cost = attributor, accumulator, cost
        self._steps_are_seen = steps_are_seen
        self.over = False
        """Whether the batch that was yielded last is the last one of the epoch."""
        self.left = True
        """Whether the loop has left the pass."""
        self._exhausted = False
        self._before = 0, 0, 0
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Begins a pass over an epoch, or over the rest of one."""
        self.check_thread(own_steps=self._steps_are_seen)
        self.over = self.left = self._exhausted = False
        self._before = self._attributor.batches, self._accumulator.credited, self._cost.steps

    def resume(self) -> None:
        """Takes the place of a saved run, in which no pass is under way."""
        self.over, self.left, self._exhausted = False, True, False

    def yielded(self, *, last: bool) -> None:
        """Notes a batch of the pass."""
        self.over = last
        self.check_thread(own_steps=self._steps_are_seen)

    def leave(self, *, exhausted: bool) -> None:
        """Notes that the loop has left the pass."""
        self.left, self.over, self._exhausted = True, self.over or exhausted, exhausted
        self._attributor.pass_over()

    @property
    def counts(self) -> bool:
        """Whether something was trained in the pass; a look at a batch before the training is no epoch."""
        batches, credited, steps = self._before
        self._accumulator.flush()
        if self._accumulator.credited > credited or self._cost.steps > steps:
            return True
        return self.over and (self._exhausted or self._attributor.batches > batches + 1)

    @property
    def due(self) -> bool:
        """Whether the epoch is over and the loop has left it."""
        return self.over and self.left and self.counts

    @property
    def last_step_done(self) -> bool:
        """Whether the loss of the batch yielded last was credited, and the optimizer stepped since, if it steps at all."""
        batches, _, steps = self._before
        if self._attributor.batches == batches:
            return True
        waits = self._steps_are_seen and self._cost.steps > steps and self._accumulator.in_step
        return self._attributor.last_credited and not waits

    def check_thread(self, *, own_steps: bool = False) -> None:
        """Notes the thread in which the loader is iterated, or refuses another one beside it.

        Args:
            own_steps: Whether the steps show by themselves in which thread the loop trains.

        Raises:
            RuntimeError: The run is used in another thread than the one that iterates the loader.
        """
        here = threading.get_ident()
        if here == self._thread:
            return
        if own_steps or self._thread not in {thread.ident for thread in threading.enumerate()}:
            self._thread = here
            return
        raise RuntimeError(
            "The loop trains in another thread than the one that iterates run.loader. Selection runs the model between batches "
            "and epochs, which must not happen beside a training step. Iterate run.loader in the thread that trains; to load "
            "in the background, use DataLoader(num_workers=...). Without an optimizer, call attach in the thread that trains."
        )

    @property
    def in_other_thread(self) -> bool:
        """Whether this is not the thread that iterates the loader."""
        return threading.get_ident() != self._thread
