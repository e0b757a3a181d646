"""Any criterion as losses of single samples, and back to the scalar it would have returned.

A sample's loss m is the mean over its valid positions; its share s is the sum of class weights over them, else their
number. Without plan weights the scalar is the user's own, exactly. With plan weights v it is sum(v s m) / sum(s), and
sum(v s m) / sum(v s) where the criterion has class weights.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.attribution.rows import Attribution, RowLayout
from thresher.losses import signals as reading


class Measured(NamedTuple):
    """The scalar for the loop, and the detached signals of each sample, shape (n,)."""

    value: Tensor
    signals: dict[str, Tensor]


class Criterion:
    """A callable `(outputs, targets) -> losses`, samples first; the base of all others.

    Args:
        own: What the user gave.
    """

    kind: reading.Kind = "unknown"
    reduction = "none"
    ignore_index: int | None = None
    smoothing = 0.0
    over_classes = True
    """Whether a position is all classes of one label, rather than a number of the outputs."""

    def __init__(self, own: Any) -> None:
        self.own = own

    @property
    def class_weights(self) -> bool:
        """Whether the criterion divides by the sum of class weights."""
        return False

    def value(self, outputs: Any, targets: Any) -> Tensor:
        """What the user's loop gets where nothing is weighted."""
        return self.positions(outputs, targets).mean()

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        """Losses by position, class weights included."""
        losses = self.own(outputs, targets)
        if not isinstance(losses, Tensor) or not losses.dim():
            got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"criterion {self.own!r} returned {got}: it must return one loss a sample, shape (rows, ...). Let it "
                "return losses before they are averaged, or average them yourself with run.reduce(losses, ids=...)."
            )
        return losses

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        """Losses by position, without class weights."""
        return self.positions(outputs, targets)

    def sums(self, rows: Tensor) -> Tensor:
        """Loss of a sample times its share, from its positions."""
        return rows.sum(1)

    def means(self, rows: Tensor, targets: Any) -> Tensor:
        """Loss of a sample, from its positions without class weights."""
        return rows.mean(1)

    def shares(self, rows: Tensor, targets: Any) -> Tensor:
        """What a sample counts for in the scalar."""
        return rows.new_full(rows.shape[:1], rows.shape[1])

    def measure(self, outputs: Any, targets: Any, group: RowLayout, *, weights: Tensor | None, wanted: set[str]) -> Measured:
        """The scalar for the loop and the signals of each sample.

        Args:
            outputs: What the model returned.
            targets: What it should have.
            group: How rows are samples.
            weights: Plan weights, shape (n,); None for none.
            wanted: Names of the signals besides the loss.
        """
        if weights is None:
            return Measured(self.value(outputs, targets), self.signals(outputs, targets, group, wanted))
        rows = group.rows(self.positions(outputs, targets))
        value = self._weighted(rows, targets, weights.to(rows.dtype))
        own = None if self.class_weights else rows.detach()
        return Measured(value, self.signals(outputs, targets, group, wanted, rows=own))

    def in_step(
        self,
        outputs: Any,
        targets: Any,
        credit: Attribution,
        *,
        weights: Tensor | None,
        weights_over_n: Tensor | None,
        wanted: set[str],
    ) -> "tuple[Tensor, dict[str, Tensor] | DeferredSignals]":
        """What `measure` answers, with signals that may be left to be read later, of several steps together.

        Args:
            outputs: See `measure`, like the others.
            targets: Likewise.
            credit: Whose they are.
            weights: See `measure`.
            weights_over_n: `weights / n`, where that was prepared.
            wanted: See `measure`.
        """
        return self.measure(outputs, targets, credit.group, weights=weights, wanted=wanted)

    @torch.no_grad()
    def signals(
        self,
        outputs: Any,
        targets: Any,
        group: RowLayout,
        wanted: set[str],
        *,
        rows: Tensor | None = None,
        all_count: bool = False,
    ) -> dict[str, Tensor]:
        """The signals of each sample, shape (n,), `loss` among them.

        Args:
            outputs: What the model returned.
            targets: What it should have.
            group: How rows are samples.
            wanted: Names of the signals besides the loss.
            rows: Losses by position without class weights, (n, positions), where they are known already.
            all_count: Whether it is known that no target is an ignored one.
        """
        if rows is None:
            rows = group.rows(self.plain_positions(outputs, targets))
        loss = rows.squeeze(1) if all_count and rows.shape[1] == 1 else self.means(rows, targets)
        return {"loss": loss, **self.read(outputs, targets, wanted, group.n)}

    def _weighted(self, rows: Tensor, targets: Any, weights: Tensor) -> Tensor:
        total = torch.dot(weights, self.sums(rows))
        if self.reduction == "sum":
            return total
        if self.reduction == "none":
            return total / rows.numel()
        shares = self.shares(rows.detach(), targets)
        return total / (torch.dot(weights, shares) if self.class_weights else shares.sum())

    def reads(self, outputs: Any, targets: Any) -> reading.Kind:
        """How outputs read in this call; shapes speak where the criterion does not."""
        if self.kind != "unknown" or not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
            return self.kind
        indices = not (targets.is_floating_point() or targets.is_complex())
        scores = outputs.dim() > 1 and outputs.shape[1] > 1 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
        return "classes" if indices and scores else "unknown"

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log-probabilities along dimension 1, from outputs that score classes."""
        return F.log_softmax(outputs.float(), 1)

    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities, from outputs that score independent labels."""
        return outputs.float()

    def read(self, outputs: Any, targets: Any, wanted: set[str], n: int) -> dict[str, Tensor]:
        """The wanted signals that outputs carry besides the loss.

        Raises:
            ValueError: They cannot be read off this criterion's outputs.
        """
        found: dict[str, Tensor] = {}
        if "batch_confidence" in wanted:
            found["batch_confidence"] = reading.batch_confidence(outputs, n=n)
        if "grad_norm" in wanted:
            found["grad_norm"] = self.errors(outputs, targets, RowLayout(n, None)).norm(dim=1)
        rest = wanted - {"grad_norm", "batch_confidence"}
        if not rest:
            return found
        kind = self.reads(outputs, targets)
        if kind == "classes":
            log_probs = self.log_probs(outputs)
            if rest & reading.ABOUT_CLASSES:
                valid = self.valid(targets)
                found |= reading.of_classes(log_probs, self.class_targets(targets), rest, n=n, valid=valid)
            if rest & {"correct", "confidence"}:
                # With one position a sample an ignored target that is no class equals no prediction: nothing to mask.
                one, index = targets.dim() == 1 and len(targets) == n, self.ignore_index
                ignore = None if one and index is not None and index < 0 else index
                found |= reading.classes(log_probs, targets, n=n, ignore_index=ignore)
            return found
        if kind == "labels" and not rest & reading.ABOUT_CLASSES:
            return reading.labels(self.probs(outputs), targets, n=n) | found
        raise ValueError(unreadable(self.own, rest))

    def class_targets(self, targets: Tensor) -> Tensor:
        """Indices, or probabilities of the classes."""
        return targets

    def label_errors(self, probs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of a label's loss with respect to what its probability was taken of."""
        weight, positive = (getattr(self.own, name, None) for name in ("weight", "pos_weight"))
        error = probs - targets if positive is None else probs * (1 + (positive - 1) * targets) - positive * targets
        return error if weight is None else error * weight

    def ignores_negatives_of(self, targets: Any) -> bool:
        """Whether targets are one label a sample, of which only negative ones are ignored."""
        return self.ignore_index is not None and self.ignore_index < 0 and isinstance(targets, Tensor) and targets.dim() == 1

    def valid(self, targets: Tensor) -> Tensor | None:
        """Positions that count, None where all do."""
        return None if self.ignore_index is None or targets.is_floating_point() else targets != self.ignore_index

    def errors(self, outputs: Any, targets: Any, group: RowLayout) -> Tensor:
        """The gradient of each sample's mean loss with respect to the model's outputs.

        Where outputs are probabilities or log-probabilities it is that with respect to what these were taken of.

        Args:
            outputs: What the model returned, a tensor.
            targets: What it should have.
            group: How rows are samples.

        Returns:
            Shape (n, outputs of a sample), float32, detached; p - y for a classifier. 0 where no position counts.

        Raises:
            ValueError: `outputs` is not a tensor, or the loss has no gradient.
        """
        if self.kind == "classes":
            targets, valid = self.class_targets(targets), self.valid(targets)
            error = group.rows(reading.class_errors(self.log_probs(outputs), targets, valid=valid, smoothing=self.smoothing))
            if valid is not None:
                return error / group.rows(valid).sum(1, keepdim=True).clamp(min=1)
            return error / (error.shape[1] // (outputs.shape[1] if self.over_classes else 1))
        if self.kind == "labels":
            error = group.rows(self.label_errors(self.probs(outputs), targets))
            return error / error.shape[1]
        return self._gradient(outputs, targets, group)

    def _gradient(self, outputs: Any, targets: Any, group: RowLayout) -> Tensor:
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise ValueError(unreadable(self.own, {"grad_norm"}))
        with torch.enable_grad():
            leaf = outputs.detach().float().requires_grad_()
            means = self.means(group.rows(self.plain_positions(leaf, targets)), targets)
            if not means.requires_grad:
                raise ValueError(unreadable(self.own, {"grad_norm"}))
            (gradient,) = torch.autograd.grad(means.sum(), leaf)
        return group.rows(gradient)


def unreadable(own: Any, wanted: set[str], way_around: str = "") -> str:
    """Why a method that needs some signals cannot work with a criterion, and what to do."""
    names = " and ".join(f"`{name}`" for name in sorted(wanted))
    return (
        f"{names} {'are' if len(wanted) > 1 else 'is'} not defined for criterion {own!r}. Pass attach(signals=function) with "
        f"function(outputs, targets) -> {{'{min(wanted)}': (n,) tensor, ...}}{way_around}."
    )


class ReducedCriterion(Criterion):
    """A module with a `reduction`: 'mean' over positions, 'sum', or 'none', whose losses are averaged."""

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.reduction = str(own.reduction)
        self._unreduced = copy.copy(own)
        self._unreduced.reduction = "none"

    def value(self, outputs: Any, targets: Any) -> Tensor:
        value = self.reduced(outputs, targets)
        return value.mean() if self.reduction == "none" else value

    def reduced(self, outputs: Any, targets: Any) -> Tensor:
        """The user's own call."""
        return self.own(outputs, targets)

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        losses = self._unreduced(outputs, targets)
        sizes = [tensor.numel() for tensor in (outputs, targets) if isinstance(tensor, Tensor)]
        if losses.numel() > max(sizes, default=losses.numel()):
            raise ValueError(
                f"criterion {self.own!r} broadcast its arguments to losses of shape {tuple(losses.shape)}, which mixes "
                "samples. Make the shapes of outputs and targets equal."
            )
        if not losses.dim():
            raise ValueError(
                f"criterion {self.own!r} returned a scalar although its reduction was set to 'none': its losses cannot be "
                "told apart by sample. Pass a callable that returns one loss a sample, or use run.reduce."
            )
        return losses


class DeferredSignals(NamedTuple):
    """Outputs whose signals are not computed yet; of many small batches together it takes a fraction of the time."""

    log_probs: Tensor
    targets: Tensor
    criterion: "Criterion"
    wanted: set[str]

    @property
    def numel(self) -> int:
        """Number of log-probabilities that are held until the signals are computed."""
        return self.log_probs.numel()

    @property
    def form(self) -> int:
        """Number of classes: signals of as many classes can be computed together."""
        return self.log_probs.shape[1]

    def now(self) -> dict[str, Tensor]:
        """The signals of each sample."""
        return self.criterion.signals(self.log_probs, self.targets, RowLayout(len(self.targets)), self.wanted)

    @staticmethod
    def together(several: "Sequence[DeferredSignals]") -> dict[str, Tensor]:
        """The signals of the samples of several batches, one after the other."""
        log_probs, targets = torch.cat([u.log_probs for u in several]), torch.cat([u.targets for u in several])
        return DeferredSignals(log_probs, targets, several[0].criterion, several[0].wanted).now()
