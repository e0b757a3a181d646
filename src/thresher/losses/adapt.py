"""Any criterion as losses of single samples, and back to the scalar it would have returned.

A sample's loss m is the mean over its valid positions; its share s is the sum of class weights over them, else their
number. Without plan weights the scalar is the user's own, exactly. With plan weights v it is sum(v s m) / sum(s), and
sum(v s m) / sum(v s) where the criterion has class weights.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from thresher.losses.base import Criterion, ReducedCriterion
from thresher.losses.classification import CrossEntropy, NegativeLogLikelihood
from thresher.losses.elementwise import Divergence, ElementCriterion

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

FUNCTIONS: dict[Any, type[nn.Module]] = {
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


def adapt(criterion: Any) -> Criterion:
    """The per-sample form of a criterion.

    Args:
        criterion: A loss of torch.nn or its function in torch.nn.functional; another module with a `reduction`; or a
            callable `(outputs, targets) -> losses` whose first dimension is the samples', which is averaged. A module
            with reduction='none' is such a callable.

    Raises:
        TypeError: Not callable.
        ValueError: A `reduction` that is not 'mean', 'sum' or 'none' ('batchmean' for KLDiv).
    """
    if not callable(criterion):
        raise TypeError(
            "`criterion` must be a loss module or a callable (outputs, targets) -> per-sample losses, "
            f"got {type(criterion).__name__}"
        )
    for function, module in FUNCTIONS.items():
        if criterion is function:
            criterion = module()
    if not isinstance(criterion, nn.Module) or not hasattr(criterion, "reduction"):
        return Criterion(criterion)
    allowed = ["mean", "sum", "none"] + ["batchmean"] * isinstance(criterion, nn.KLDivLoss)
    if criterion.reduction not in allowed:
        raise ValueError(f"`criterion` has reduction {criterion.reduction!r}; allowed are {', '.join(allowed)}")
    return ADAPTERS.get(type(criterion), ReducedCriterion)(criterion)
