"""Checks at the ends of epochs that the optimizer's steps and its learning rates are what the run takes them for."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thresher.run.learning_rate import StepHooks

CHANGES = 2
"""Number of changes of the learning rate within an epoch from which on a schedule counts steps."""


class StepChecks:
    """Warns, once for each cause, where steps were not seen, not scaled, or fewer than a schedule was made for.

    Args:
        hooks: Hooks of the optimizer.
        optimizer: Name of the type of the optimizer, for messages.
        elsewhere: Parameters of the model that need gradients and that the optimizer does not update.
    """

    def __init__(self, hooks: StepHooks, optimizer: str, elsewhere: Sequence[Tensor]) -> None:
        self._hooks, self._optimizer, self._elsewhere = hooks, optimizer, elsewhere
        self.by_progress = False
        """Whether the loop has read `run.progress` in this epoch: its schedule may follow that."""
        self.paced = False
        """Whether a schedule follows the training, by `run.pace` or as `ProgressLR`."""
        self._whole = False
        self._versions = self._batches = 0
        self._said: set[str] = set()

    def begin_epoch(self, batches: int, *, resumed: bool) -> None:
        """Begins an epoch after so many batches; of a resumed one those before are not known."""
        self._hooks.begin_epoch()
        self._batches = batches
        self._whole, self.by_progress = not resumed, False
        self._versions = self._version()

    def _version(self) -> int:
        return sum(parameter._version for parameter in self._elsewhere)

    def end_epoch(self, epoch: int, batches: int, full: int) -> None:
        """Checks an epoch that was complete.

        Args:
            epoch: Number of the epoch.
            batches: Number of batches since the run began.
            full: Number of batches of an epoch over all samples.
        """
        batches -= self._batches
        if not self._whole or self.by_progress or self.paced or batches >= full or self._hooks.changes < CHANGES:
            return
        self._warn(
            "schedule",
            f"The learning rate changes within the epoch, and epoch {epoch} had {batches} batches, where an epoch over all "
            f"samples has {full}. A schedule over a fixed number of steps, such as OneCycleLR with epochs * len(loader) steps, "
            "does not come to its end then, and its learning rates are wrong. Use scheduler = run.pace(scheduler), or "
            "thresher.ProgressLR(optimizer, run, fn), which follow the progress of the training. A schedule made for exactly "
            "this number of batches is right.",
        )

    def check_steps(self, epoch: int, steps: int, backward: int, scale: float) -> None:
        """Checks the steps of an epoch that is over.

        Args:
            epoch: Number of the epoch.
            steps: Number of steps of the optimizer that were seen.
            backward: Number of samples whose losses were credited.
            scale: Factor on the learning rate that the plan of the epoch asked for.
        """
        if backward and not steps:
            unscaled = "" if scale == 1 else f" The learning rate was not multiplied by {scale:.3g}, as the method asks."
            self._warn(
                "steps",
                f"In epoch {epoch} the losses of {backward} samples were credited, and the attached {self._optimizer} made no "
                f"step.{unscaled} Give attach the optimizer whose step() the loop calls; after a change of the optimizer call "
                "run.detach() and attach again.",
            )
        elif scale != 1 and self._version() != self._versions:
            self._warn(
                "elsewhere",
                f"Parameters of the model that the attached {self._optimizer} does not have were updated in epoch {epoch}, for "
                f"which the method asks for a learning rate multiplied by {scale:.3g}: only steps of the attached optimizer "
                "are scaled. Use one optimizer with several parameter groups.",
            )

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            warnings.warn(f"{message} This warning is given once.", stacklevel=6)


def parameters_elsewhere(model: Any, hooks: StepHooks) -> list[Tensor]:
    """Returns the parameters of a model that need gradients and that no part of an optimizer has."""
    own = {id(one) for part in hooks.parts for group in part.param_groups for one in group["params"]}
    return [one for one in ([] if model is None else model.parameters()) if one.requires_grad and id(one) not in own]
