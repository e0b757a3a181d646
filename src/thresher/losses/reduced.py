"""Losses of torch.nn, which have a `reduction`."""

from typing import Any

from torch import Tensor

from thresher.attribution.rows import RowLayout
from thresher.losses.base import Criterion, LossAndSignals
from thresher.losses.hooks import call_with_hooks, call_without_hooks, hooks_of


class ReducedCriterion(Criterion):
    """Adapter for a loss of torch.nn: "mean" over positions, "sum", or "none", whose losses the loop reduces itself.

    Such a loss draws no random numbers and remembers nothing, so that it may be called again for the losses by position.
    Settings and hooks are read in every call: the loop may change them.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.hooks = hooks_of(own)

    @property
    def reduction(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.reduction

    @property
    def keeps_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reduction == "none"

    def value(self, outputs: Any, targets: Any) -> Tensor:
        if any(self.hooks):
            return call_with_hooks(self.own, outputs, targets, self.reduced)
        return self.reduced(outputs, targets)

    def reduced(self, outputs: Any, targets: Any) -> Tensor:
        """Returns what the user's criterion returns, without its hooks."""
        return call_without_hooks(self.own, outputs, targets)

    def measure(
        self, outputs: Any, targets: Any, layout: RowLayout, *, weights: Tensor | None, wanted: set[str]
    ) -> LossAndSignals:
        if not any(self.hooks):
            return super().measure(outputs, targets, layout, weights=weights, wanted=wanted)
        found: dict[str, Tensor] = {}

        def compute(outputs: Any, targets: Any) -> Tensor:
            measured = super(ReducedCriterion, self).measure(outputs, targets, layout, weights=weights, wanted=wanted)
            found.update(measured.signals)
            return measured.value

        return LossAndSignals(call_with_hooks(self.own, outputs, targets, compute), found)

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        return self.reduced(outputs, targets), None

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        return self.positions(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        return None

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        unreduced = object.__new__(type(self.own))
        unreduced.__dict__ = {**self.own.__dict__, "reduction": "none"}
        return self._checked(call_without_hooks(unreduced, outputs, targets), outputs, targets)

    def _checked(self, losses: Tensor, outputs: Any, targets: Any) -> Tensor:
        """Returns losses by position that the criterion gave without a reduction.

        Raises:
            ValueError: They mix samples, or were reduced all the same.
        """
        sizes = [tensor.numel() for tensor in (outputs, targets) if isinstance(tensor, Tensor)]
        if losses.numel() > max(sizes, default=losses.numel()):
            raise ValueError(
                f"criterion {self.own!r} broadcast its arguments to losses of shape {tuple(losses.shape)}, which mixes "
                "samples. Make the shapes of outputs and targets equal."
            )
        if not losses.dim():
            raise ValueError(
                f"criterion {self.own!r} returned a scalar although its reduction was set to 'none': its losses cannot be "
                "separated by sample. Pass a callable that returns one loss per sample, or use run.reduce."
            )
        return losses
