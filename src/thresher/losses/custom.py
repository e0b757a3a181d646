"""Modules with a reduction that are not torch's own: they may draw random numbers, and change with every call."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from thresher.attribution.rows import RowLayout
from thresher.losses.base import Criterion, ReducedCriterion, replayed


class CustomCriterion(ReducedCriterion):
    """Adapter that calls the user's module once in each step, as the loop without it does.

    The losses by position come from a copy without a reduction, with the random numbers of that call. Parameters are not
    copied; buffers and other attributes are.
    """

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad(), replayed(outputs):
            positions = self._of_copy(outputs, targets)
        return self.value(outputs, targets), positions

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        with replayed(outputs):
            return self._of_copy(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        copied = type(self)(self._copy())
        return Criterion.signals_alone(copied, outputs, targets, layout)

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        reduction = self.own.reduction
        self.own.reduction = "none"
        try:
            losses = self.own(outputs, targets)
        finally:
            self.own.reduction = reduction
        return self._checked(losses, outputs, targets)

    def _of_copy(self, outputs: Any, targets: Any) -> Tensor:
        unreduced = self._copy()
        unreduced.reduction = "none"
        return self._checked(unreduced(outputs, targets), outputs, targets)

    def _copy(self) -> Any:
        own: nn.Module = self.own
        kept: list[Any] = [*own.parameters(), *(one for one in vars(own).values() if isinstance(one, torch.Generator))]
        try:
            return copy.deepcopy(own, {id(one): one for one in kept})
        except Exception as error:
            raise ValueError(
                f"criterion {own!r} cannot be copied ({error}), which is needed for the losses of single samples without a "
                "second call of it. Pass a callable that returns one loss per sample, or use run.reduce."
            ) from error
