"""Notices gradients that a loop clears before an optimizer step uses them, whichever way it clears them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thresher.torch_internals import after_backward


class PendingGradients:
    """Tells whether the gradients of earlier backward passes still wait for a step.

    A loop that skips a batch clears its gradients by `optimizer.zero_grad`, `model.zero_grad`, or `p.grad = None`. All of them
    show in `.grad` when the next backward pass or step begins. Looking there costs a plain step one attribute, while hooks
    would have to wrap each of these functions.

    Args:
        parameters: Function that returns the parameters whose gradients are looked at.
        cleared: Function that is called when the gradients of all backward passes since the last step were cleared.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[Tensor]], cleared: Callable[[], None]
    ) -> None:
        self._parameters = parameters
        self._cleared = cleared
        self._probe: Tensor | None = None
        """A parameter that got a gradient; None if none is known."""
        self._noted = False
        self._seen: Tensor | None = None
        self._version = -1
        self.task = -1
        """Number of the autograd task that runs, or ran last."""
        self.stepped = 0
        """Number of backward passes of the run at the last step."""
        self.accumulates = True
        """Whether a step may have several backward passes; True until the first one has ended."""

    def begin_backward(self, backwards: int) -> None:
        """Looks, before a backward pass adds to gradients, whether those of earlier passes were cleared.

        Args:
            backwards: Number of earlier backward passes of the run.
        """
        self.look(backwards)
        after_backward(self._note)
        self.accumulates = backwards != self.stepped

    def look(self, backwards: int) -> None:
        """Looks whether the gradients of the backward passes since the last step were cleared."""
        if backwards != self.stepped and self._are_cleared(at_step=False):
            self._cleared()

    def begin_step(self) -> None:
        """Looks, before an optimizer step, whether it has gradients."""
        if self._are_cleared(at_step=True):
            self._cleared()

    def _note(self) -> None:
        """Remembers a gradient at the end of a backward pass: as long as nobody writes it, nothing was cleared."""
        if self._probe is None or self._probe.grad is None:
            self._probe = next(
                (parameter for parameter in self._parameters() if parameter.grad is not None), None
            )
        self._noted = True
        self._seen = None if self._probe is None else self._probe.grad
        self._version = -1 if self._seen is None else self._seen._version

    def _are_cleared(self, *, at_step: bool) -> bool:
        # No parameter got one: gradients are kept elsewhere than in `.grad`, as in the buffers of DeepSpeed.
        if self._noted and self._probe is None:
            return False
        grad = None if self._probe is None else self._probe.grad
        # At a step, gradients may have been clipped, so their values are not read.
        if grad is not None and (
            at_step or (grad is self._seen and grad._version == self._version)
        ):
            return False
        left = (parameter.grad for parameter in self._parameters() if parameter.grad is not None)
        return not any(at_step or _is_nonzero(grad) for grad in left)


def _is_nonzero(grad: Tensor) -> bool:
    # Waits for the device, but only if gradients were written between two backward passes of a step.
    local = getattr(grad, "to_local", lambda: grad)()
    return bool(torch.any(local))
