"""Criteria over single numbers of the outputs: distances, binary cross-entropy and the Kullback-Leibler divergence."""

from typing import Any

from torch import Tensor, nn

from thresher.losses.reduced import ReducedCriterion


class ElementCriterion(ReducedCriterion):
    """Adapter for MSE, L1, SmoothL1 and Huber (plain values), BCE and BCE with logits (independent labels).

    Outputs and targets must have equal shapes.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.kind = "labels" if isinstance(own, nn.BCELoss | nn.BCEWithLogitsLoss) else "values"

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        if outputs.shape != targets.shape:
            raise ValueError(
                f"criterion {self.own!r}: outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)} would be broadcast against each other, which mixes samples. Make the shapes equal."
            )
        return super().positions(outputs, targets)

    def probs(self, outputs: Tensor) -> Tensor:
        return outputs.float().sigmoid() if isinstance(self.own, nn.BCEWithLogitsLoss) else outputs.float()


class Divergence(ElementCriterion):
    """Adapter for KLDiv: outputs are log-probabilities, targets a distribution.

    With reduction="batchmean" the loss of a sample is the sum over its positions.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.kind = "classes"

    @property
    def over_classes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reduction == "batchmean"

    def class_targets(self, targets: Tensor) -> Tensor:
        return targets.exp() if self.own.log_target else targets

    def log_probs(self, outputs: Tensor) -> Tensor:
        return outputs.float()

    def means(self, rows: Tensor, targets: Any) -> Tensor:
        return rows.sum(1) / self.shares(rows, targets)

    def shares(self, rows: Tensor, targets: Any) -> Tensor:
        positions = len(targets) // len(rows) if self.reduction == "batchmean" else rows.shape[1]
        return rows.new_full(rows.shape[:1], positions)
