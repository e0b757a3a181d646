"""Criteria over the classes of one label: cross-entropy and negative log-likelihood."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.attribution.rows import Attribution, RowLayout
from thresher.losses import signals as reading
from thresher.losses.base import DeferredSignals, LossAndSignals, as_measured
from thresher.losses.reduced import ReducedCriterion
from thresher.records import NEVER_SEEN


class ClassCriterion(ReducedCriterion):
    """Adapter with class weights and an ignored index: base class of cross-entropy and negative log-likelihood."""

    kind: reading.OutputKind = "classes"
    function: Callable[..., Tensor]

    @property
    def ignore_index(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.ignore_index

    @property
    def _settings(self) -> dict[str, Any]:
        return {"ignore_index": self.own.ignore_index}

    @property
    def class_weights(self) -> bool:
        return self.own.weight is not None

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        return type(self).function(outputs, targets, self.own.weight, reduction="none", **self._settings)

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        return type(self).function(outputs, targets, reduction="none", **self._settings)

    def means(self, rows: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return super().means(rows, targets)
        rows = as_measured(rows)
        valid = targets.reshape(len(rows), -1) != self.ignore_index
        if rows.shape[1] == 1:
            return rows.where(valid, NEVER_SEEN).squeeze(1)
        count = valid.sum(1)
        return (rows.sum(1) / count).where(count > 0, NEVER_SEEN)

    def shares(self, rows: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return super().shares(rows, targets)
        indices = targets.reshape(len(rows), -1)
        valid = indices != self.ignore_index
        weight = self.own.weight
        counts = valid if weight is None else weight[indices.where(valid, 0)] * valid
        return counts.sum(1).to(rows.dtype)


_nll_loss: Any = torch._C._nn.nll_loss_nd  # pyright: ignore[reportAttributeAccessIssue]
"""What `F.nll_loss` calls, without the conversions of its arguments: (log_probs, targets, weight, reduction, ignore_index)."""

_cross_entropy: Any = torch._C._nn.cross_entropy_loss  # pyright: ignore[reportAttributeAccessIssue]
"""What `F.cross_entropy` calls: (outputs, targets, weight, reduction, ignore_index, label_smoothing)."""
_autocasts: Any = torch._C._is_any_autocast_enabled  # pyright: ignore[reportAttributeAccessIssue]
"""Whether autocast is enabled for any device."""


class NegativeLogLikelihood(ClassCriterion):
    """Adapter for negative log-likelihood: outputs are log-probabilities."""

    function = F.nll_loss

    def reduced(self, outputs: Any, targets: Any) -> Tensor:
        return F.nll_loss(outputs, targets, self.own.weight, ignore_index=self.own.ignore_index, reduction=self.reduction)

    def log_probs(self, outputs: Tensor) -> Tensor:
        return outputs.detach().float()


class CrossEntropy(ClassCriterion):
    """Adapter for cross-entropy, with label smoothing and with probabilities as targets."""

    function = F.cross_entropy

    def __init__(self, own: nn.CrossEntropyLoss) -> None:
        super().__init__(own)
        self._after_softmax = NegativeLogLikelihood(own)
        self._own_settings, self._own_buffers = own.__dict__, own._buffers

    @property
    def smoothing(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.label_smoothing

    @property
    def _settings(self) -> dict[str, Any]:
        return {"ignore_index": self.own.ignore_index, "label_smoothing": self.own.label_smoothing}

    def measure(
        self, outputs: Any, targets: Any, layout: RowLayout, *, weights: Tensor | None, wanted: set[str]
    ) -> LossAndSignals:
        """Computes one log-softmax for the scalar, the losses and the signals, where cross-entropy is the NLL of it."""
        if not self._is_likelihood(outputs, targets, wanted):
            return super().measure(outputs, targets, layout, weights=weights, wanted=wanted)
        return self._after_softmax.measure(F.log_softmax(outputs, 1), targets, layout, weights=weights, wanted=wanted)

    def _is_likelihood(self, outputs: Tensor, targets: Tensor, wanted: set[str]) -> bool:
        return (
            not self.own.label_smoothing
            and not any(self.hooks)
            and outputs.dim() > 1
            and not targets.dtype.is_floating_point
            and not (wanted and "batch_confidence" in wanted)
            and not torch.is_autocast_enabled(outputs.device.type)
        )

    def in_step(
        self,
        wanted: set[str],
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        weights_over_n: Tensor | None,
    ) -> "tuple[Tensor, dict[str, Tensor] | DeferredSignals]":
        """Spells out the most common case, one label per sample: it runs in every step, where each call costs."""
        own = self._own_settings
        common = own["reduction"] == "mean" and own["ignore_index"] < 0 and not own["label_smoothing"]
        if not common or self._own_buffers["weight"] is not None or targets.dim() != 1 or _autocasts() or any(self.hooks):
            return self.measure(outputs, targets, attribution.layout, weights=weights, wanted=wanted)
        if not wanted and attribution.all_count:
            if weights_over_n is not None and weights_over_n.dtype is outputs.dtype:
                losses = _cross_entropy(outputs, targets, None, 0, -100, 0.0)
                return losses.dot(weights_over_n), {"loss": losses.detach()}
            if weights is None:
                log_probs = torch.log_softmax(outputs, 1)
                losses = _nll_loss(log_probs.detach(), targets, None, 0, -100)
                return _nll_loss(log_probs, targets, None, 1, -100), {"loss": losses}
        # One label per sample without smoothing or autocast: what is left of `_is_likelihood`.
        likely = outputs.dim() > 1 and not targets.dtype.is_floating_point and reading.OF_A_BATCH.isdisjoint(wanted)
        if likely and weights is None and targets.shape[0] == attribution.layout.n:
            log_probs = torch.log_softmax(outputs, 1)
            value = _nll_loss(log_probs, targets, None, 1, own["ignore_index"])
            return value, DeferredSignals(log_probs.detach(), targets.clone(), self._after_softmax, wanted)
        return self.measure(outputs, targets, attribution.layout, weights=weights, wanted=wanted)
