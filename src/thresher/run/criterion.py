"""`run.criterion`: computes the user's criterion, and records the loss of each sample."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thresher.backward_ratio import Stopwatch
from thresher.losses.base import Criterion
from thresher.run.timeline import Timeline


def _call(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)


uncompiled: Any = torch.compiler.disable(_call)
"""Calls a function outside of the graph of a compiled step."""


class CreditedCriterion(nn.Module):
    """The user's criterion, with the same value and gradient, that also weights and records the losses of samples.

    It is a module, so that it can take the place of the criterion of a task or a model. It has the parameters and buffers of
    the user's module under their names. A criterion with reduction="none" gives the losses before they are averaged, each times
    the weight of its sample, and the loop reduces them as without a run: `run.criterion(outputs, targets).mean()`. Under
    `torch.no_grad()` it is the plain criterion and records nothing. `copy.deepcopy` and `pickle` give the user's criterion.

    Args:
        criterion: The user's criterion; None if the loop computes its losses.
        adapter: Its adapter, which computes its value; None if there is no criterion.
        timeline: Timeline of the run, which has its selection.
        credit: `Attributor.credit`.
        stopwatch: The stopwatch of the run.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> import thresher
        >>> criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
        >>> run = thresher.attach(thresher.FullData(), loader=DataLoader([0, 1]), criterion=criterion, epochs=1)
        >>> list(run.criterion.state_dict()) == list(criterion.state_dict())
        True
    """

    def __init__(
        self,
        criterion: Any,
        adapter: Criterion | None,
        timeline: Timeline,
        credit: Callable[..., Tensor | None],
        stopwatch: Stopwatch,
    ) -> None:
        super().__init__()
        # In a tuple, so that nn.Module does not register it as a submodule, which would change the names of its parameters.
        self._user_criterion = (criterion,)
        self._adapter = adapter
        self._timeline = timeline
        self._credit = credit
        self._stopwatch = stopwatch
        if isinstance(criterion, nn.Module):
            # The same dictionaries: a task that moves to a device takes class weights along, and checkpoints keep their names.
            self._parameters = criterion._parameters
            self._buffers = criterion._buffers
            self._modules = criterion._modules
            self._non_persistent_buffers_set = criterion._non_persistent_buffers_set

    def forward(
        self,
        outputs: Any,
        targets: Any,
        *others: Any,
        ids: Tensor | None = None,
        repeat: int | None = None,
    ) -> Tensor:
        """Computes the loss.

        Args:
            outputs: Outputs of `run.model`.
            targets: Targets from the batch that `run.loader` yielded; slices and views are fine.
            others: Not allowed. If a loss needs more than outputs and targets, compute it in the loop and call `run.reduce`.
            ids: Positions of the rows in the loader's dataset, shape (rows,), int64, if tensors were indexed or mixed; see
                `run.ids` and `run.ids_of`. Default: found from the tensors that `run.loader` yielded.
            repeat: Number of consecutive rows per id, for flattened tensors, with `ids`. Default: the number found from the
                tensors, or 1.

        Returns:
            Scalar loss, shape (). For a module with reduction="none", the unreduced losses, as the criterion returns them. If a
            function, or a module without a `reduction`, returns unreduced losses, they are averaged.

        Raises:
            AttributionError: Thresher cannot tell which samples the rows belong to. Nothing was recorded.
            TypeError: There are more arguments than outputs and targets.
            ValueError: Losses have no sample dimension, no criterion was attached, or `repeat` is given without `ids`; or the
                criterion has reduction="none" and the method keeps only some rows of the loop's own forward pass.
        """
        # In a compiled step, attribution would see only the compiler's placeholders for the tensors.
        if torch.compiler.is_compiling():
            return uncompiled(self.forward, outputs, targets, *others, ids=ids, repeat=repeat)
        if others:
            raise TypeError(
                f"run.criterion takes outputs and targets, but got {len(others)} more: pass ids= by name. For a loss with more "
                "arguments, pass attach(criterion=None), compute the losses of the samples in the loop, and use "
                "run.reduce(losses, outputs=outputs)."
            )
        if self._adapter is None:
            raise ValueError(
                "run.criterion: attach was given criterion=None; use run.reduce, or pass a criterion"
            )
        # An evaluation, or a log of the validation loss: nothing is trained on, so nothing is recorded.
        if not torch.is_grad_enabled():
            return self._adapter.value(outputs, targets)
        # The selection is looked up in every call: with forward_passes="auto" it may be another one from the second epoch on.
        value = self._credit(outputs, targets, ids, self._timeline.selection.loss, repeat)
        if value is None:
            return self._adapter.value(outputs, targets)
        return self.watch(value, outputs)

    def watch(self, value: Tensor, outputs: Any) -> Tensor:
        """Returns a recorded loss, whose backward pass is then timed, and which may be compared with that of an extra pass.

        Args:
            value: The loss, shape ().
            outputs: Outputs that it was computed from.
        """
        if self._stopwatch.running:
            self._timeline.selection.watch(value)
        if self._timeline.comparison.pending:
            self._timeline.comparison.credited(value, outputs)
        return value

    def train(self, mode: bool = True) -> "CreditedCriterion":
        """Sets the mode of the user's criterion, too, so that `eval` of the task reaches it.

        Args:
            mode: Whether it is the mode of training. Default: True.
        """
        if isinstance(self._user_criterion[0], nn.Module):
            self._user_criterion[0].train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        """Returns the user's criterion."""
        return repr(self._user_criterion[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickles as `(criterion,)[0]`, the user's criterion, also where this library is not installed.
        return operator.getitem, (self._user_criterion, 0)
