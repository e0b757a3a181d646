"""The adapter for a criterion: found by the type of the module, or by the function of torch.nn.functional."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from thresher.losses.base import Criterion
from thresher.losses.classification import CrossEntropy, NegativeLogLikelihood
from thresher.losses.custom import CustomCriterion
from thresher.losses.elementwise import Divergence, ElementCriterion
from thresher.losses.reduced import ReducedCriterion

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
    """Returns the per-sample form of a criterion.

    Args:
        criterion: Loss module of torch.nn or its function in torch.nn.functional; or another module with a `reduction`; or a
            callable `(outputs, targets) -> losses` whose first dimension is the samples'. The losses of a callable are
            averaged; those of a module with reduction="none" stay as they are, because the loop reduces them.

    Returns:
        An adapter with the criterion's own result, the loss of each sample and other signals of each sample.

    Raises:
        TypeError: `criterion` is not callable.
        ValueError: It takes more than outputs and targets; or its `reduction` is not "mean", "sum" or "none" ("batchmean" is
            allowed for `nn.KLDivLoss`).

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
    criterion = getattr(criterion, "_orig_mod", criterion)  # of torch.compile, whose settings are those of the module inside
    if criterion in OTHER_FUNCTIONS or isinstance(criterion, OTHER_MODULES):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise ValueError(
            f"`criterion` is {name}, which takes more than outputs and targets (lengths, or several inputs), so that "
            "run.criterion cannot call it. Pass criterion=None, compute the losses in the loop with reduction='none', and call "
            "run.reduce(losses, targets=...) with a tensor of the batch."
        )
    for function, module in MODULE_OF.items():
        if criterion is function:
            criterion = module()
    if not isinstance(criterion, nn.Module) or not hasattr(criterion, "reduction"):
        return Criterion(criterion)
    allowed = ["mean", "sum", "none"] + ["batchmean"] * isinstance(criterion, nn.KLDivLoss)
    if criterion.reduction not in allowed:
        raise ValueError(f"`criterion` has reduction {criterion.reduction!r}; allowed are {', '.join(allowed)}")
    of_torch = type(criterion).__module__ == nn.MSELoss.__module__
    return ADAPTERS.get(type(criterion), ReducedCriterion if of_torch else CustomCriterion)(criterion)
