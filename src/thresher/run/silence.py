"""Epochs in which no loss was credited: the loop trains on, and the method that chooses by losses never learns one."""

import warnings
from collections.abc import Callable

from thresher.attribution.attributor import Attributor
from thresher.attribution.held import BATCHES_AHEAD
from thresher.cost import UNSEEN
from thresher.methods._on_subset import OnSubset
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
