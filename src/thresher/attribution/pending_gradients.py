"""Notices gradients that a loop clears before an optimizer step uses them, whichever way it clears them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class PendingGradients:
    """Tells whether the gradients of earlier backward passes still wait for a step.

    A loop that skips a batch clears its gradients by `optimizer.zero_grad`, `model.zero_grad`, or `p.grad = None`. All of them
    show in `.grad` when the next backward pass or step begins. Looking there costs a plain step one attribute, while hooks
    would have to wrap each of these functions.

    Args:
        parameters: Function that returns the parameters whose gradients are looked at.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._probe: Tensor | None = None
        """A parameter that got a gradient; None if none is known."""
        self._noted = False
        self._seen: Tensor | None = None
        self._version = -1

    def note(self) -> None:
        """Remembers a gradient at the end of a backward pass: as long as nobody writes it, nothing was cleared."""
        if self._probe is None or self._probe.grad is None:
            self._probe = next((one for one in self._parameters() if one.grad is not None), None)
        self._noted = True
        self._seen = None if self._probe is None else self._probe.grad
        self._version = -1 if self._seen is None else self._seen._version

    def were_cleared(self, *, at_step: bool) -> bool:
        """Returns whether all gradients of earlier backward passes were cleared.

        Args:
            at_step: Whether a step begins. Gradients may have been clipped since, so their values are not read.
        """
        # No parameter got one: gradients are kept elsewhere than in `.grad`, as in the buffers of DeepSpeed.
        if self._noted and self._probe is None:
            return False
        grad = None if self._probe is None else self._probe.grad
        if grad is not None and (at_step or (grad is self._seen and grad._version == self._version)):
            return False
        left = (one.grad for one in self._parameters() if one.grad is not None)
        return not any(at_step or self._is_nonzero(grad) for grad in left)

    @staticmethod
    def _is_nonzero(grad: Tensor) -> bool:
        # Waits for the device, but only if gradients were written between two backward passes of a step.
        local = getattr(grad, "to_local", lambda: grad)()
        return bool(torch.any(local))
