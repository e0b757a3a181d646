"""GREATS: train on rows of a batch whose gradients point along the gradient of a validation batch, not along one another.

Wang et al., "GREATS: Online Selection of High-Quality Data for LLM Training in Every Iteration", NeurIPS 2024. Official code:
github.com/Jiachen-T-Wang/GREATS. It is biased towards the validation data by design: nothing is re-weighted.

A step on row i lowers the loss of the validation batch by about lr <g_i, g_val>. If the step also includes row j, it lowers it
by lr^2 <g_i, g_j> less (with the identity matrix in place of the Hessian of that loss). Rows are chosen one after another, each
time the row that lowers the loss most. Where the official code differs:
- Its inner products are over the layers that are fine-tuned, by "ghost" products in a backward pass. Here they are over the
  last layer, whose gradients a forward pass gives: <e_i, e_j> <h_i, h_j> for errors e and inputs h of the layer.
- It takes the learning rate of the optimizer; here it is a setting.
- It draws two validation samples for each step, and it scores in train mode, with dropout. Here `Scoring(validation=...)`
  returns the validation batch of a step, and the scoring pass runs in eval mode.
- Of equally good rows it takes the first; here it is the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thresher.methods._base import KeepShare, check_within
from thresher.methods.contract import Card, Requirements


def picked_by_utility(alignment: Tensor, products: Tensor, k: int, lr: float) -> Tensor:
    """Chooses rows one after another, by their alignment minus what earlier rows already give.

    Args:
        alignment: Inner product of each row's gradient with the gradient of the validation batch, shape (n,); a row whose
            product is not finite is chosen before all others.
        products: Inner products of the gradients of the rows, shape (n, n); those that are not finite count as 0.
        k: Number of rows, 1 to n.
        lr: Factor on the inner products with rows chosen earlier, 0 or more.

    Returns:
        Positions in the order of the choice, shape (k,), int64; of equally good rows, that with the highest position.

    Example:
        >>> alike = torch.zeros(4, 4)
        >>> alike[0, 1] = alike[1, 0] = 2.5
        >>> picked_by_utility(torch.tensor([3.0, 2.9, 1.0, 0.5]), alike, k=2, lr=1.0)
        tensor([0, 2])
    """
    place = torch.arange(len(alignment), device=alignment.device)
    worth = torch.where(alignment.isfinite(), alignment, torch.inf)
    chosen = []
    for _ in range(k):
        pick = torch.where(worth == worth.amax(), place, -1).amax(0, keepdim=True)
        overlap = products.index_select(0, pick).squeeze(0)
        worth = worth - lr * torch.where(overlap.isfinite(), overlap, 0)
        worth = worth.clamp(min=torch.finfo(worth.dtype).min).index_fill(0, pick, -torch.inf)
        chosen.append(pick)
    return torch.cat(chosen)


@dataclass(frozen=True)
class Greats(KeepShare):
    """Trains on the floor(keep * n) rows of each batch, at least one, that lower the loss of a validation batch most.

    Rows whose gradient is not finite are kept before all others. The validation batch comes from
    `attach(forward_passes=Scoring(validation=...))`; its forward pass with each candidate batch counts in the cost.

    Args:
        keep: Share kept of each batch, (0, 1]. Default and published: 0.5.
        lr: Factor on the penalty for rows that are similar to rows chosen earlier, 0 or more; the learning rate in the paper. 0
            chooses by the inner product with the validation gradient alone. Default 0.1.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> from thresher import Greats
        >>> method = Greats(keep=0.5)
        >>> signals = {"id": torch.arange(2), "error": torch.ones(2, 1), "feature": torch.ones(2, 1)}
        >>> signals["alignment"] = torch.tensor([0.2, 0.9])
        >>> method.plan_batch(signals, {}, step=0, generator=torch.Generator())[0].rows
        tensor([1])
    """

    requires: ClassVar[Requirements] = Requirements(signals=("alignment", "error", "feature"))
    card: ClassVar[Card] = Card(
        summary="rows whose gradients help a validation batch, and differ",
        paper="NeurIPS 2024: GREATS",
        rule="its gradient added little for the validation batch to those of the chosen rows",
        biased="yes, by design: towards what lowers the loss of the validation batch; nothing is re-weighted",
        forwards="every sample of a batch and, for each batch, the validation batch, to choose by",
        claim="faster convergence and better generalization in the training of language models (the abstract has no number)",
        differences=(
            "Inner products are over the last layer; in the code they are over all layers that are fine-tuned.",
            "The learning rate in the utility is a setting, not that of the optimizer.",
            "The code draws two validation samples for each step; here the function given to `Scoring` decides.",
            "The code scores in train mode; here the scoring pass is in eval mode.",
            "Of equally good rows the code takes the first; here it is the last.",
            "Rows whose gradient is not finite are kept first.",
        ),
        caveat="it is as good as its validation batch, which costs a forward pass of all of its rows in every step: on the "
        "planted problems, with 64 validation rows like the training data, it is no better than random rows of the same cost, "
        "and on most of them worse. The choice takes about eight times as long as that of Big Loss, because rows are chosen "
        "one after another",
    )
    keep: float = 0.5
    lr: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "lr")

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the rows chosen one after another; nothing waits for the device."""
        wide = torch.float32 if signals["id"].device.type == "mps" else torch.float64
        alignment, error, feature = (signals[name].to(wide) for name in self.requires.signals)
        error = error.flatten(1)
        finite = error.isfinite().all(1) & feature.isfinite().all(1)
        products = (error @ error.T) * (feature @ feature.T)
        return picked_by_utility(torch.where(finite, alignment, torch.nan), products, k, self.lr)
