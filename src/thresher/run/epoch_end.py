"""When an epoch is over: its last batch was yielded, and the loop has left the pass over the loader."""

import threading
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.attributor import BATCHES_AHEAD, Attributor
from thresher.cost import UNSEEN, Cost
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, requirements_of


def plans_by_losses(method: EpochMethod | OnSubset) -> bool:
    """Returns whether the plans of a method depend on what the losses of the loop recorded."""
    requires = requirements_of(method)
    recorded = any(column.merge != "plan" for column in method.columns().values())
    return recorded and requires.records and not requires.full_pass


class SilentEpochs:
    """Warns after the first epoch without a credited loss, and refuses to go on after the second where losses are needed.

    Args:
        attributor: Attributor of the run.
        who: Name of the method, for messages.
        needed: Function that returns whether the method chooses by the losses of the loop.
    """

    def __init__(self, attributor: Attributor, who: str, needed: Callable[[], bool]) -> None:
        self._attributor, self._meter, self._who, self._needed = attributor, attributor.meter, who, needed
        self._since: tuple[int, ...] | None = None
        self._silent = 0
        self._way_out = WAY_OUT

    def begin(self) -> None:
        """Begins an epoch.

        Raises:
            RuntimeError: No loss was credited in two epochs, and the method needs them.
        """
        self._judge()
        if self._silent > 1 and self._needed():
            raise RuntimeError(
                f"{self._who} chooses by the losses of samples, and no loss was credited in {self._silent} epochs. "
                f"{self._way_out}"
            )
        self._since = self._seen()

    def begin_again(self, *, steps_are_seen: bool) -> None:
        """Forgets an epoch that begins once more, since the pass before was only a look at some batches.

        Args:
            steps_are_seen: Whether a training of the batches would have shown; without steps, only one batch is a look.
        """
        if self._since is not None:
            batches, _, passed, steps, _ = (new - old for new, old in zip(self._seen(), self._since, strict=True))
            if (batches <= 1 or steps_are_seen) and not (passed or steps):
                self._since = None

    def end(self, *, complete: bool) -> None:
        """Ends an epoch. Its losses may still come, where the loop did not train on its batches yet."""
        if not complete:
            self._since = None
        elif self._since is not None:
            batches, _, passed, steps, evaluated = (new - old for new, old in zip(self._seen(), self._since, strict=True))
            if batches > BATCHES_AHEAD and (passed or steps or evaluated):
                self._judge()

    def _seen(self) -> tuple[int, ...]:
        self._attributor.write()
        meter = self._meter
        return self._attributor.batches, meter.credited, meter.of_loop(), meter.cost.steps, meter.evaluated

    def _judge(self) -> None:
        if self._since is None:
            return
        before, now = self._since, self._seen()
        self._since = None
        batches, credited, passed, steps, evaluated = (new - old for new, old in zip(now, before, strict=True))
        if credited or not batches:
            self._silent = 0
            return
        self._silent += 1
        if not passed:
            self._meter.make_unknown(WITHOUT_GRADIENTS if evaluated else UNSEEN)
        if evaluated and not passed:
            self._way_out = ENABLE_GRADIENTS
        if self._silent == 1 and (passed or steps or evaluated or self._needed()):
            cost = "" if passed else ", and run.cost is unknown"
            warnings.warn(f"{self._who}: no loss was credited in a whole epoch{cost}. {self._way_out}", stacklevel=6)


WAY_OUT = (
    "Call run.criterion(outputs, targets) in the loop instead of your own criterion; where the model computes its own loss, "
    "pass the losses per sample to run.reduce(losses, targets=...)."
)
ENABLE_GRADIENTS = (
    "The loop calls run.model without gradients, where run.criterion records nothing. In a training with forward passes only, "
    "call run.criterion(run.model(inputs), targets) under torch.enable_grad() once per batch, in the forward pass whose losses "
    "the method is to learn."
)
WITHOUT_GRADIENTS = "the loop trains without gradients, so that its passes cannot be told from those of an evaluation"


class ParameterValues:
    """Two values of each parameter, at the time when this object was made.

    The values are compared, and not the versions: an evaluation may exchange parameters for averaged ones and put them back.

    Args:
        parameters: Function that returns the parameters; None where there is no model.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]] | None) -> None:
        some = [] if parameters is None else [one for one in parameters() if not is_lazy(one) and one.numel()]
        self._held = [(one, _values(one).clone()) for one in some if one.layout is torch.strided]

    def changed(self) -> bool:
        """Returns whether a value is another one now; this waits for the device."""
        return any(not torch.equal(_values(one).to(then.device), then) for one, then in self._held)


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    for _ in range(tensor.dim() - 1):
        tensor = tensor[0]
    return tensor[:: max(1, len(tensor) - 1)] if tensor.dim() else tensor


class EpochEnd:
    """Follows one pass over the loader, from its first batch to the step after its last one, and ends the epoch.

    Loops end an epoch in several ways: the loader runs out, a counter stops at `len(run.loader)`, or there is a `break` at the
    last batch. A prefetcher asks for the last batch before the steps of earlier ones. So the last batch is known when it is
    yielded, and what belongs to the end of an epoch runs when it is needed next, after the step.

    Args:
        attributor: Attributor of the run.
        accumulator: Accumulator of the run.
        cost: Cost of the run.
        close: Function that ends the epoch, given whether it is complete.
        rest: Function that is called when the last step of the pass is over.
        steps_are_seen: Whether there is an optimizer whose steps the run sees.
        alone: Whether one process trains. Several end an epoch together, where the loop leaves the pass or steps, and not
            where one of them reads a result.
    """

    def __init__(
        self,
        attributor: Attributor,
        accumulator: StepAccumulator,
        cost: Cost,
        close: Callable[[bool], None],
        rest: Callable[[], None],
        *,
        steps_are_seen: bool,
        alone: bool = True,
    ) -> None:
        self._alone = alone
        self._attributor, self._accumulator, self._cost = attributor, accumulator, cost
        self._close_epoch, self._rest, self._steps_are_seen = close, rest, steps_are_seen
        self._over, self._left, self._ended, self._asks_on = False, True, False, True
        self._exhausted = self._closing = self._ahead = False
        self._before = 0, 0, 0
        self._seen, self._without_gradients, self._values = (0, 0), False, ParameterValues(None)
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Begins a pass over an epoch, or over the rest of one."""
        self._note_thread()
        self._over = self._left = self._exhausted = self._ended = False
        self._before = self._attributor.batches, self._accumulator.credited, self._cost.steps
        meter = self._attributor.meter
        self._seen, self._without_gradients = (meter.of_loop(), meter.evaluated), not torch.is_grad_enabled()
        self._values = ParameterValues(meter.parameters)

    def forget(self) -> None:
        """Forgets the pass, since a saved run takes its place."""
        self._over, self._left, self._exhausted, self._ended = False, True, False, True

    def yielded(self, *, last: bool, asks_on: bool) -> None:
        """Notes a batch of the pass, whether it is the last one, and whether the loop is known to ask for a further one."""
        self._over, self._asks_on = last, asks_on
        if last:
            self._ahead = self._attributor.runs_ahead
        self._note_thread()

    def leave(self, *, exhausted: bool) -> None:
        """Notes that the loop has left the pass; where its last step is over, an exhausted epoch ends at once.

        Args:
            exhausted: Whether all batches were asked for; else the iterator is gone, which can happen at any time, so that no
                work is done.
        """
        if self._ended:
            self._attributor.pass_over()
            return
        self._left, self._over, self._exhausted = True, self._over or exhausted, self._exhausted or exhausted
        if exhausted:
            self._accumulator.flush()
            self.if_due(after_last_step=True)
        elif self._last_step_done:
            self._rest()
        self._ahead = self._ahead and not self._attributor.last_credited
        self._attributor.pass_over()

    def step_over(self) -> None:
        """Notes that the optimizer stepped.

        Raises:
            RuntimeError: It stepped in another thread than the one that iterates the loader.
        """
        self._check_thread()
        if self._left and self._last_step_done:
            self._rest()
        if not self._alone:
            self.if_due(after_last_step=True)

    @property
    def due(self) -> bool:
        """Whether the epoch is over, so that it ends as soon as that is needed.

        The loop has left the pass, or got the last batch from `next` and stepped: it may keep the iterator and never ask again.
        """
        return self._over and (self._left or (not self._asks_on and self._stepped_since_last)) and self._counts

    @property
    def may_be_left(self) -> bool:
        """Whether the last batch was yielded to a loop that may keep the iterator and never ask again."""
        return self._over and not self._asks_on

    @property
    def left(self) -> bool:
        """Whether the loop has left a pass that is not ended, so that only another one can follow."""
        return self._left and not self._ended

    @property
    def evaluates(self) -> bool:
        """Whether nothing was trained in the pass, and it began without gradients, or the model was called so in each batch.

        A training with forward passes only shows in the parameters.
        """
        (batches, credited, steps), (passed, evaluated), meter = self._before, self._seen, self._attributor.meter
        trained = self._accumulator.in_step or self._accumulator.credited > credited or self._cost.steps > steps
        without = self._without_gradients or meter.evaluated - evaluated >= self._attributor.batches - batches > 0
        return without and not trained and meter.of_loop() == passed and not self._values.changed()

    @property
    def credits(self) -> bool:
        """Whether the pass is over and not ended, and losses of it were credited."""
        return self._over and self._accumulator.credited > self._before[1]

    @property
    def goes_on(self) -> bool:
        """Whether the loop asked for batches before it trained on those before, as a prefetcher does, and has the last ones."""
        return self._ahead and self.credits

    def if_due(self, *, after_last_step: bool = False, reads: bool = False) -> None:
        """Ends the epoch if its batches have all been yielded and the loop has left it.

        Args:
            after_last_step: Whether to wait for the step of the last batch, which a prefetcher takes later.
            reads: Whether the loop asks for results, so that only a prefetcher can have a step to take: a last group of an
                accumulation that stays unfinished has none.

        Raises:
            RuntimeError: Another thread trains.
        """
        if self._closing or not self.due or (reads and not self._alone):
            return
        done = self._last_step_done or self._trains_without_credit or (reads and not self._ahead)
        if after_last_step and not (done and self._thread == threading.get_ident()):
            return
        self._check_thread()
        self._close(complete=True)

    def before_next(self, consumed: int) -> None:
        """Ends the epoch in progress before the next pass, unless nothing was trained in it: then that begins it again.

        Args:
            consumed: Number of ids of the epoch's order that were consumed.
        """
        if not consumed and not self._over:
            return
        if self._counts:
            self._close(complete=self._over)
            return
        self._cost.full_forward -= consumed
        self._cost.full_backward -= consumed

    def _close(self, *, complete: bool) -> None:
        """Ends the epoch; the passes that this takes may ask the run for its plan or its records."""
        self._closing = True
        try:
            self._close_epoch(complete)
        finally:
            self._closing = False

    @property
    def _counts(self) -> bool:
        """Whether something was trained in the pass; a look at a batch before the training is no epoch."""
        batches, credited, steps = self._before
        self._accumulator.flush()
        if self._accumulator.credited > credited or self._cost.steps > steps:
            return True
        return self._over and not self.evaluates and (self._exhausted or self._attributor.batches > batches + 1)

    @property
    def _last_step_done(self) -> bool:
        """Whether the loss of the batch yielded last was credited, and the optimizer stepped since, if it steps at all."""
        batches, _, steps = self._before
        if self._attributor.batches == batches:
            return True
        waits = self._steps_are_seen and self._cost.steps > steps and self._accumulator.in_step
        return self._attributor.last_credited and not waits

    @property
    def _stepped_since_last(self) -> bool:
        """Whether it is certain that the step of the batch yielded last is over; without an optimizer, its backward pass."""
        if self._steps_are_seen:
            stepped = self._cost.steps > self._before[2] and not self._accumulator.in_step
        else:
            self._accumulator.flush()
            stepped = self._attributor.meter.reached >= self._attributor.meter.yielded
        return stepped and self._attributor.last_credited

    @property
    def _trains_without_credit(self) -> bool:
        """Whether the loop trained in the pass and no loss was credited, so that no prefetcher will credit the last batch."""
        _, credited, steps = self._before
        if self._accumulator.credited > credited:
            return False
        return self._cost.steps > steps or self._attributor.meter.of_loop() > self._seen[0] or self._values.changed()

    def _note_thread(self) -> None:
        """Notes the thread that iterates the loader; without steps that show the one that trains, it must not change."""
        if self._steps_are_seen:
            self._thread = threading.get_ident()
        else:
            self._check_thread()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        if here == self._thread:
            return
        if self._thread not in {thread.ident for thread in threading.enumerate()}:
            self._thread = here
            return
        raise RuntimeError(
            "The loop trains in another thread than the one that iterates run.loader. Selection runs the model between batches "
            "and epochs, which must not happen beside a training step. Iterate run.loader in the thread that trains; to load "
            "in the background, use DataLoader(num_workers=...). Without an optimizer, call attach in the thread that trains."
        )
