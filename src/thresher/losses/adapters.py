"""Adapters of criteria. `adapt` picks one by the type of the loss module, or by the function of torch.nn.functional."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.attribution.rows import Attribution, RowLayout
from thresher.losses import signals as reading
from thresher.losses.base import (
    Criterion,
    DeferredSignals,
    LossAndSignals,
    as_measured,
    restore_random_states,
)
from thresher.records import NEVER_SEEN
from thresher.torch_internals import (
    any_autocast,
    cross_entropy,
    has_call_hooks,
    nll_loss,
    without_compiler,
)


class ReducedCriterion(Criterion):
    """Adapter for a loss module of torch.nn with reduction "mean", "sum" or, if the loop reduces the losses, "none".

    Such a loss draws no random numbers and keeps no state, so it can be called again for the losses by position. Settings are
    read in every call, because the loop may change them. Hooks are not called.
    """

    @property
    def reduction(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.original.reduction

    @property
    def keeps_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reduction == "none"

    def value(self, outputs: Any, targets: Any) -> Tensor:
        # `forward` rather than a call: hooks that are registered after `attach`, or for all modules, would run for the extra
        # calls, too.
        return self.original.forward(outputs, targets)

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        return self.value(outputs, targets), None

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        # Losses of torch.nn draw no random numbers, so there are no random states to restore.
        return self.positions(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        return None

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        # A second object over the user's own attributes: weights that are moved, cast or replaced later count at once,
        # and nobody sees another `reduction` in the user's module.
        unreduced = object.__new__(type(self.original))
        unreduced.__dict__ = {**self.original.__dict__, "reduction": "none"}
        return self._check_losses(unreduced.forward(outputs, targets), outputs, targets)

    def _check_losses(self, losses: Tensor, outputs: Any, targets: Any) -> Tensor:
        """Checks and returns the losses by position of a criterion without a reduction.

        Raises:
            ValueError: The losses mix samples, or were reduced anyway.
        """
        # Outputs (n, 1) and targets (n,) broadcast to n * n losses, more than either of them has entries.
        sizes = [tensor.numel() for tensor in (outputs, targets) if isinstance(tensor, Tensor)]
        if losses.numel() > max(sizes, default=losses.numel()):
            raise ValueError(
                f"criterion {self.original!r} broadcast its arguments to losses of shape {tuple(losses.shape)}, which mixes "
                "samples. Make the shapes of outputs and targets equal."
            )
        if not losses.dim():
            raise ValueError(
                f"criterion {self.original!r} returned a scalar although its reduction was set to 'none': its losses cannot be "
                "separated by sample. Pass a callable that returns one loss per sample, or use run.reduce."
            )
        return losses


class ClassCriterion(ReducedCriterion):
    """Adapter with class weights and an ignored index: base class of cross-entropy and negative log-likelihood."""

    kind: reading.OutputKind = "classes"
    function: Callable[..., Tensor]

    @property
    def ignore_index(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.original.ignore_index

    @property
    def _settings(self) -> dict[str, Any]:
        return {"ignore_index": self.original.ignore_index}

    @property
    def class_weights(self) -> bool:
        return self.original.weight is not None

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        return type(self).function(
            outputs, targets, self.original.weight, reduction="none", **self._settings
        )

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        return type(self).function(outputs, targets, reduction="none", **self._settings)

    def means(self, rows: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return super().means(rows, targets)
        rows = as_measured(rows)
        valid = targets.reshape(len(rows), -1) != self.ignore_index
        if rows.shape[1] == 1:
            # One label per sample, the most frequent case: the mean is the loss itself, so no sum and no division are needed.
            return rows.where(valid, NEVER_SEEN).squeeze(1)
        count = valid.sum(1)
        # 0 / 0 of a sample whose positions are all ignored must not look like a loss that has become NaN.
        return (rows.sum(1) / count).where(count > 0, NEVER_SEEN)

    def shares(self, rows: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return super().shares(rows, targets)
        indices = targets.reshape(len(rows), -1)
        valid = indices != self.ignore_index
        weight = self.original.weight
        # An ignored target such as -100 is no index of a weight: class 0 stands in for it, and counts 0 times.
        counts = valid if weight is None else weight[indices.where(valid, 0)] * valid
        return counts.sum(1).to(rows.dtype)


class NegativeLogLikelihood(ClassCriterion):
    """Adapter for negative log-likelihood: outputs are log-probabilities."""

    function = F.nll_loss

    def value(self, outputs: Any, targets: Any) -> Tensor:
        # Not the original's `forward`: behind the log-softmax of `CrossEntropy` the original is an nn.CrossEntropyLoss.
        weight = self.original.weight
        ignore_index = self.original.ignore_index
        return F.nll_loss(
            outputs, targets, weight, ignore_index=ignore_index, reduction=self.reduction
        )

    def log_probs(self, outputs: Tensor) -> Tensor:
        return outputs.detach().float()


class CrossEntropy(ClassCriterion):
    """Adapter for cross-entropy, with label smoothing and with probabilities as targets."""

    function = F.cross_entropy

    def __init__(self, original: nn.CrossEntropyLoss) -> None:
        super().__init__(original)
        self._after_softmax = NegativeLogLikelihood(original)
        # The dicts of the module itself, so that changed settings count at once. nn.Module finds the buffer `weight` by a
        # `__getattr__` in Python, too slow for `in_step`.
        self._settings_of_original = original.__dict__
        self._buffers_of_original = original._buffers

    @property
    def smoothing(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.original.label_smoothing

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "ignore_index": self.original.ignore_index,
            "label_smoothing": self.original.label_smoothing,
        }

    def measure(
        self,
        outputs: Any,
        targets: Any,
        layout: RowLayout,
        *,
        weights: Tensor | None,
        wanted: set[str],
    ) -> LossAndSignals:
        """Computes log-softmax once for scalar, losses and signals if cross-entropy is its negative log-likelihood."""
        if not self._is_likelihood(outputs, targets, wanted):
            return super().measure(outputs, targets, layout, weights=weights, wanted=wanted)
        return self._after_softmax.measure(
            F.log_softmax(outputs, 1), targets, layout, weights=weights, wanted=wanted
        )

    def _is_likelihood(self, outputs: Tensor, targets: Tensor, wanted: set[str]) -> bool:
        # A softmax over the batch needs the logits, so `batch_confidence` cannot be read after the log-softmax. Autocast picks
        # a dtype for each operation: log-softmax and NLL one after the other could give other bits than cross-entropy.
        return (
            not self.original.label_smoothing
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
        """Inlines the most common case, one label per sample, because every step runs it and each Python call costs time."""
        settings = self._settings_of_original
        common = (
            settings["reduction"] == "mean"
            and settings["ignore_index"] < 0
            and not settings["label_smoothing"]
        )
        if (
            not common
            or self._buffers_of_original["weight"] is not None
            or targets.dim() != 1
            or any_autocast()
        ):
            return self.measure(
                outputs, targets, attribution.layout, weights=weights, wanted=wanted
            )
        if not wanted and attribution.all_count:
            # `dot` takes equal dtypes only. To convert the weights would cost what the prepared ones save.
            if weights_over_n is not None and weights_over_n.dtype is outputs.dtype:
                # No target of this batch is ignored, so -100 stands in for any negative index that the user may have set.
                losses = cross_entropy(outputs, targets, None, 0, -100, 0.0)
                return losses.dot(weights_over_n), {"loss": losses.detach()}
            if weights is None:
                log_probs = torch.log_softmax(outputs, 1)
                # Two reductions of one log-softmax: only the mean has a gradient.
                losses = nll_loss(log_probs.detach(), targets, None, 0, -100)
                return nll_loss(log_probs, targets, None, 1, -100), {"loss": losses}
        # One label per sample without smoothing or autocast: what is left of `_is_likelihood`.
        likely = (
            outputs.dim() > 1
            and not targets.dtype.is_floating_point
            and reading.OF_A_BATCH.isdisjoint(wanted)
        )
        if likely and weights is None and targets.shape[0] == attribution.layout.n:
            log_probs = torch.log_softmax(outputs, 1)
            value = nll_loss(log_probs, targets, None, 1, settings["ignore_index"])
            # The signals are read some steps later. By then the loop may have written its targets in place.
            return value, DeferredSignals(
                log_probs.detach(), targets.clone(), self._after_softmax, wanted
            )
        return self.measure(outputs, targets, attribution.layout, weights=weights, wanted=wanted)


class ElementCriterion(ReducedCriterion):
    """Adapter for MSE, L1, SmoothL1 and Huber (plain values), BCE and BCE with logits (independent labels).

    Outputs and targets must have equal shapes.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        if isinstance(original, nn.BCELoss | nn.BCEWithLogitsLoss):
            self.kind = "labels"
        else:
            self.kind = "values"

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        # Before the call, because torch only warns about such shapes in MSE, L1 and Huber losses.
        if outputs.shape != targets.shape:
            raise ValueError(
                f"criterion {self.original!r}: outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)} would be broadcast against each other, which mixes samples. Make the shapes equal."
            )
        return super().positions(outputs, targets)

    def probs(self, outputs: Tensor) -> Tensor:
        if isinstance(self.original, nn.BCEWithLogitsLoss):
            return outputs.float().sigmoid()
        return outputs.float()


class Divergence(ElementCriterion):
    """Adapter for KLDiv: outputs are log-probabilities, targets a distribution.

    With reduction="batchmean", the loss of a sample is the sum over its entries. If it has several distributions, such as one
    per token, the sum is divided by their number.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.kind = "classes"

    @property
    def over_classes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reduction == "batchmean"

    def class_targets(self, targets: Tensor) -> Tensor:
        return targets.exp() if self.original.log_target else targets

    def log_probs(self, outputs: Tensor) -> Tensor:
        return outputs.float()

    def means(self, rows: Tensor, targets: Any) -> Tensor:
        return rows.sum(1) / self.shares(rows, targets)

    def shares(self, rows: Tensor, targets: Any) -> Tensor:
        # "batchmean" divides by rows, and a flattened sample has several of them.
        if self.reduction == "batchmean":
            positions = len(targets) // len(rows)
        else:
            positions = rows.shape[1]
        return rows.new_full(rows.shape[:1], positions)


class CallableCriterion(Criterion):
    """Adapter for a user's callable without a `reduction` that returns losses or their mean.

    If it returns a mean, the loss of a row is what it returns for this row alone. The mean of these losses must be its result
    for all rows. This is checked for each batch on the CPU, but only for the first batch on a device, where checks wait.
    """

    _compared = False
    """Whether the check of a batch has passed: the scalar was the mean of the losses of its rows."""

    def value(self, outputs: Any, targets: Any) -> Tensor:
        return self._call(outputs, targets).mean()

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        losses = self._call(outputs, targets)
        if losses.dim():
            return losses.mean(), losses
        with torch.no_grad():
            return losses, self._by_rows(outputs, targets, losses)

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        losses = self._call(outputs, targets)
        if losses.dim():
            return losses
        return self._by_rows(outputs, targets, losses)

    def _call(self, outputs: Any, targets: Any) -> Tensor:
        losses = (self.original.forward if isinstance(self.original, nn.Module) else self.original)(
            outputs, targets
        )
        if not isinstance(losses, Tensor):
            raise self._refusal(f"returned {type(losses).__name__}")
        return losses

    def _by_rows(self, outputs: Any, targets: Any, mean: Tensor) -> Tensor:
        """Returns the losses of single rows, shape (rows,), and checks that their mean is `mean`."""
        of_rows = all(isinstance(one, Tensor) and one.dim() for one in (outputs, targets)) and len(
            outputs
        ) == len(targets)
        try:
            # Inside the block, because a loss with other arguments gets the same message as one that fails for single rows.
            if not of_rows:
                raise ValueError(
                    "outputs and targets are not two tensors with the same number of rows"
                )
            with restore_random_states(outputs):
                losses = torch.vmap(
                    lambda row, target: self._call(row[None], target[None]), randomness="different"
                )(outputs, targets)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self._refusal(
                f"returned one number for all rows and fails for single rows ({error})"
            ) from error
        if mean.device.type == "cpu" or not self._compared:
            by_rows = losses.detach().mean()
            size = losses.detach().abs().mean()
            # float32 rounds to 1.2e-7 and sums of a batch to some 1e-6; bfloat16 rounds to 7.8e-3.
            rounding = 1e-4 if mean.dtype in (torch.float32, torch.float64) else 1e-2
            # Rounding grows with the size of the losses, while losses of both signs can cancel to a mean near 0. NaN is tested
            # by itself, because each comparison with it is false: a standard deviation of a single row is NaN, for example.
            if (
                losses.dim() != 1
                or (mean.detach() - by_rows).abs() > rounding * size
                or bool(by_rows.isnan() & ~mean.isnan())
            ):
                raise self._refusal(
                    f"returned one number, {float(mean):.4g}, but the mean of its values for single rows is {float(by_rows):.4g}"
                )
            self._compared = True
        return losses

    def _refusal(self, fault: str) -> ValueError:
        """Returns the error for a function that is no criterion.

        Args:
            fault: Predicate of the sentence about the function, such as "returned list".
        """
        return ValueError(
            f"criterion {self.original!r} {fault}: your function must return one loss per sample, shape (rows, ...), as with "
            "reduction='none', or their mean; loss modules of torch need no change. Or compute the losses in the loop and call "
            "run.reduce(losses, ids=run.ids)."
        )


class CustomCriterion(ReducedCriterion):
    """Adapter for a loss module of the user's own with a `reduction`; calls it once per step, as a loop without Thresher does.

    The losses by position come from a copy without a reduction, which draws the same random numbers. Parameters are not
    copied; buffers and other attributes are. On the first batch with weights, the scalar must be the mean of these losses, or
    their sum with reduction="sum".
    """

    _compared = False
    """Whether the check of a batch has passed: the scalar was the mean, or the sum, of the losses by position."""

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        # The copy runs first, because it needs the state of the module before the user's call, such as a running mean. Both
        # draw the same numbers of the global generators, which the user's call leaves as a loop without Thresher does.
        with torch.no_grad(), restore_random_states(outputs):
            positions = self._of_copy(outputs, targets)
        return self.value(outputs, targets), positions

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        with restore_random_states(outputs):
            return self._of_copy(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        # A copy, because the check calls the criterion again: a running mean of the user's module must not see these calls.
        copied = type(self)(self._copy())
        return Criterion.signals_alone(copied, outputs, targets, layout)

    def check_weights(self, outputs: Any, targets: Any) -> None:
        if self._compared or self.keeps_positions:
            return
        with torch.no_grad(), restore_random_states(outputs):
            # On a copy: the user's module is called once in this step, by `positions`, and does not notice an error here.
            value = self._copy().forward(outputs, targets)
        losses = self.plain_positions(outputs, targets).detach()
        # Rounding grows with the size of the losses, while losses of both signs can cancel to a scalar near 0.
        expected, size = (
            one.sum() if self.reduction == "sum" else one.mean() for one in (losses, losses.abs())
        )
        rounding = 1e-4 if value.dtype in (torch.float32, torch.float64) else 1e-2
        if value.numel() != 1 or (value - expected).abs() > rounding * size:
            raise ValueError(
                f"criterion {self.original!r} with reduction={self.reduction!r} does not return the "
                f"{'sum' if self.reduction == 'sum' else 'mean'} of its losses. The method weights samples, which is "
                "impossible inside this criterion. Compute the losses in the loop and call run.reduce(losses, ids=...), or set "
                "its reduction to 'none': run.criterion then returns the losses of single samples times their weights, and the "
                "loop reduces them."
            )
        self._compared = bool(0 < value.abs() < torch.inf)  # a loss of 0 or nan shows nothing

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        # In a step with weights this is the only call, so the user's module itself must draw and remember.
        reduction = self.original.reduction
        self.original.reduction = "none"
        try:
            losses = self.original.forward(outputs, targets)
        finally:
            self.original.reduction = reduction
        return self._check_losses(losses, outputs, targets)

    def _of_copy(self, outputs: Any, targets: Any) -> Tensor:
        unreduced = self._copy()
        unreduced.reduction = "none"
        return self._check_losses(unreduced.forward(outputs, targets), outputs, targets)

    def _copy(self) -> Any:
        criterion: nn.Module = self.original
        # A forward pass does not write parameters, so the copy shares them, however large they are.
        memo: dict[int, Any] = {id(one): one for one in criterion.parameters()}
        # deepcopy refuses generators. The copy draws what the user's call will draw, and leaves the user's generator as it is.
        memo |= {
            id(one): one.clone_state()
            for one in vars(criterion).values()
            if isinstance(one, torch.Generator)
        }
        try:
            return copy.deepcopy(criterion, memo)
        except Exception as error:
            raise ValueError(
                f"criterion {criterion!r} cannot be copied ({error}), but Thresher needs a copy to get the losses of single "
                "samples. Pass a callable that returns one loss per sample, or use run.reduce."
            ) from error


ADAPTERS: dict[type[nn.Module], Callable[[Any], Criterion]] = {
    nn.CrossEntropyLoss: CrossEntropy,
    nn.NLLLoss: NegativeLogLikelihood,
    nn.KLDivLoss: Divergence,
    nn.BCELoss: ElementCriterion,
    nn.BCEWithLogitsLoss: ElementCriterion,
    nn.MSELoss: ElementCriterion,
    nn.L1Loss: ElementCriterion,
    nn.SmoothL1Loss: ElementCriterion,
    nn.HuberLoss: ElementCriterion,
}
"""The adapter of each loss module; subclasses, which may have another `forward`, get the general adapter."""

MODULE_OF: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.kl_div: nn.KLDivLoss,
}
"""The loss module that computes the same as a function of torch.nn.functional with its default arguments."""

OTHER_MODULES = (
    nn.CTCLoss,
    nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss,
    nn.CosineEmbeddingLoss,
    nn.MarginRankingLoss,
    nn.GaussianNLLLoss,
    nn.AdaptiveLogSoftmaxWithLoss,
)
"""Losses with other arguments than outputs and targets."""

OTHER_FUNCTIONS = (
    F.ctc_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.cosine_embedding_loss,
    F.margin_ranking_loss,
    F.gaussian_nll_loss,
)
"""Functions with other arguments than outputs and targets."""


def adapt(criterion: Any) -> Criterion:
    """Returns the adapter that computes the losses of single samples with a criterion.

    Args:
        criterion: Loss module of torch.nn or its function in torch.nn.functional; or another module with a `reduction`; or a
            callable `(outputs, targets)` that returns losses, samples first, or their mean. The losses of a callable are
            averaged; those of a module with reduction="none" stay as they are, because the loop reduces them. Hooks of the
            criterion are not called, even if they are registered later.

    Returns:
        An adapter with the criterion's own result, the loss of each sample and other signals of each sample.

    Raises:
        TypeError: `criterion` is not callable.
        ValueError: It takes more than outputs and targets; it has hooks; or its `reduction` is not "mean", "sum" or "none"
            ("batchmean" is allowed for `nn.KLDivLoss`).

    Example:
        The mean over a batch is the user's own scalar; the signals are of single samples.

        >>> import torch
        >>> from thresher.attribution.rows import RowLayout
        >>> logits, labels = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
        >>> adapter = adapt(torch.nn.CrossEntropyLoss())
        >>> scalar, signals = adapter.measure(logits, labels, RowLayout(2), weights=None, wanted={"correct"})
        >>> round(scalar.item(), 3)
        1.127
        >>> [round(loss, 3) for loss in signals["loss"].tolist()], signals["correct"].tolist()
        ([0.127, 2.127], [True, False])
    """
    if not callable(criterion):
        raise TypeError(
            "`criterion` must be a loss module or a callable (outputs, targets) -> per-sample losses, "
            f"got {type(criterion).__name__}"
        )
    # Hooks can be on the wrapper of torch.compile and on the module inside, so both are checked.
    _check_hooks(criterion)
    criterion = without_compiler(criterion)
    _check_hooks(criterion)
    if criterion in OTHER_FUNCTIONS or isinstance(criterion, OTHER_MODULES):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise ValueError(
            f"`criterion` is {name}, which takes more than outputs and targets (lengths, or several inputs): "
            "run.criterion cannot call it. Pass criterion=None, compute the losses in the loop with reduction='none', and call "
            "run.reduce(losses, ids=run.ids)."
        )
    for function, module in MODULE_OF.items():
        # By identity, because a callable of the user's need not be hashable.
        if criterion is function:
            criterion = module()
    if not isinstance(criterion, nn.Module) or not hasattr(criterion, "reduction"):
        return CallableCriterion(criterion)
    allowed = ["mean", "sum", "none"] + ["batchmean"] * isinstance(criterion, nn.KLDivLoss)
    if criterion.reduction not in allowed:
        raise ValueError(
            f"`criterion` has reduction {criterion.reduction!r}; allowed are {', '.join(allowed)}"
        )
    # Other losses of torch.nn, such as PoissonNLLLoss, draw no random numbers and keep no state: no copy is needed.
    of_torch = type(criterion).__module__ == nn.MSELoss.__module__
    return ADAPTERS.get(type(criterion), ReducedCriterion if of_torch else CustomCriterion)(
        criterion
    )


def _check_hooks(criterion: Any) -> None:
    if isinstance(criterion, nn.Module) and has_call_hooks(criterion):
        raise ValueError(
            f"`criterion` {criterion!r} has hooks, and run.criterion does not call them: remove them, or pass criterion=None, "
            "compute the losses in the loop with reduction='none', and call run.reduce(losses, targets=...) with a tensor of "
            "the batch."
        )
