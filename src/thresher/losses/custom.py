"""Modules with a reduction that are not torch's own: they may draw random numbers, and change with every call."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from thresher.attribution.rows import RowLayout
from thresher.losses.base import Criterion, replayed
from thresher.losses.hooks import call_without_hooks, own_hooks
from thresher.losses.normaliser import is_multiple, weighted_like
from thresher.losses.reduced import ReducedCriterion


class CustomCriterion(ReducedCriterion):
    """Adapter that calls the user's module once in each step, as the loop without it does.

    The losses by position come from a copy without a reduction, with the random numbers of that call. Parameters are not
    copied; buffers and other attributes are. Where samples are weighted, the scalar without weights comes from a copy, too: it
    shows by which number the criterion divides.
    """

    _divides = False
    """Whether it was seen that the scalar is the sum of the losses, divided by a number that the outputs do not change."""

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad(), replayed(outputs):
            positions = self._of_copy(outputs, targets)
        return self.reduced(outputs, targets), positions

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        with replayed(outputs):
            return self._of_copy(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        copied = type(self)(self._copy())
        return Criterion.signals_alone(copied, outputs, targets, layout)

    def unweighted(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        if self.keeps_positions:
            return None
        if not self._divides:
            self._check_division(outputs, targets)
        with torch.no_grad(), replayed(outputs):
            return call_without_hooks(self._copy(), outputs, targets)

    def _weighted(self, rows: Tensor, targets: Any, weights: Tensor, unweighted: Tensor | None) -> Tensor:
        assert unweighted is not None
        return weighted_like(unweighted, rows, weights, usual=rows.numel() if self.reduction == "mean" else 1)

    def _check_division(self, outputs: Any, targets: Any) -> None:
        """Compares once how the scalar and the losses by position change with the outputs.

        Raises:
            ValueError: The scalar is not a multiple of the sum of the losses, so that it has no form with weights.
        """

        def scalar(outputs: Any) -> Tensor:
            with replayed(outputs):
                return call_without_hooks(self._copy(), outputs, targets)

        def total(outputs: Any) -> Tensor:
            with replayed(outputs):
                return self._of_copy(outputs, targets).sum()

        found = is_multiple(scalar, total, outputs)
        if found is False:
            raise ValueError(
                f"criterion {self.own!r} with reduction={self.reduction!r} does not return the sum of its losses divided by a "
                "number that the targets decide, so that the losses of single samples cannot be weighted within it, as the "
                "method asks. Set its reduction to 'none': run.criterion then returns the losses of single samples, times "
                "their weights, which the loop reduces itself. Or compute the losses in the loop and call "
                "run.reduce(losses, ids=...)."
            )
        self._divides = found is True

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        reduction = self.own.reduction
        self.own.reduction = "none"
        try:
            losses = call_without_hooks(self.own, outputs, targets)
        finally:
            self.own.reduction = reduction
        return self._checked(losses, outputs, targets)

    def _of_copy(self, outputs: Any, targets: Any) -> Tensor:
        unreduced = self._copy()
        unreduced.reduction = "none"
        return self._checked(call_without_hooks(unreduced, outputs, targets), outputs, targets)

    def _copy(self) -> Any:
        own: nn.Module = self.own
        kept: list[Any] = [*own.parameters(), *(one for one in vars(own).values() if isinstance(one, torch.Generator))]
        memo: dict[int, Any] = {id(one): one for one in kept}
        memo |= {id(hooks): OrderedDict() for hooks in own_hooks(own)}
        try:
            return copy.deepcopy(own, memo)
        except Exception as error:
            raise ValueError(
                f"criterion {own!r} cannot be copied ({error}), which is needed for the losses of single samples without a "
                "second call of it. Pass a callable that returns one loss per sample, or use run.reduce."
            ) from error
