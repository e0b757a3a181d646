"""BLS: InfoBatch with a score that needs no losses of single samples, a moving mean of the losses of whole batches.

"Batch Loss Score", CVPR 2026, arXiv:2604.04681. Original code: github.com/mrazhou/BLS. The score of a sample is an exponential
mean of the mean losses of the batches that it was in. It contains almost no information about the sample itself. So this method
is a control, too: what InfoBatch gains over it comes from the losses of single samples.

If a criterion returns one number per batch, `run.reduce(loss.expand(len(batch)), ids=run.ids)` assigns it to all samples of the
batch. The number is then multiplied by the mean of their weights, as in the code.

Differences from the code: a score starts with the first batch of a sample, not at 0. If the losses of single samples are known,
each is multiplied by its own weight.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from thresher.methods._base import check_within
from thresher.methods.contract import Card
from thresher.methods.infobatch import InfoBatch
from thresher.records import NEVER_SEEN, Column


def moving_mean(old: Tensor, new: Tensor, alpha: float) -> Tensor:
    """Updates exponential moving means with new values.

    Args:
        old: Means so far, shape (n,); not finite if there is no value yet.
        new: New values, shape (n,).
        alpha: Weight of the old mean, [0, 1).

    Example:
        >>> moving_mean(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, 3.0]), alpha=0.75).tolist()
        [1.5, 3.0]
    """
    return torch.where(old.isfinite(), alpha * old + (1 - alpha) * new, new)


@dataclass(frozen=True)
class Bls(InfoBatch):
    """Skips a random part of the samples whose batches had low losses, and raises the weights of the rest of these samples.

    Args:
        prune_fraction: Share pruned of the samples below the threshold, r, [0, 1). Default and published: 0.5.
        delta: Share of the epochs that prune, [0, 1]. Default and published: 0.875.
        threshold: Threshold of the score: "mean" (default and published), or a quantile within (0, 1).
        rescale: Weight of the remaining samples below the threshold, "mass" (default) or "ratio", as in `InfoBatch`.
        target: Share of the samples that the whole training run leaves out, as in `InfoBatch`. Default None.
        alpha: Weight of the old score in the new score, [0, 1). Default 0.9, as in the code; in the paper 0.7.

    Raises:
        ValueError: A setting is out of its range, settings contradict each other, or the epochs are too few for the target.

    Example:
        >>> import torch
        >>> from thresher import Bls
        >>> records = {"score": torch.tensor([0.4, 0.6, 0.4, 0.6])}
        >>> plan = Bls().plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> len(plan.ids), sorted(plan.weights.tolist())
        (3, [1.0, 1.0, 2.0])
    """

    card: ClassVar[Card] = Card(
        summary="InfoBatch by the mean losses of whole batches",
        paper="arXiv:2604.04681",
        rule="pruned: the losses of its batches were below the {threshold}, and it was drawn with chance {prune_fraction}",
        biased="No: the expected weighted sum of the losses over an epoch is that of all data.",
        forwards="None.",
        claim="Works without losses of single samples; its numbers are not known: read in the code only.",
        differences=(
            "A score starts with the mean loss of the first batch that a sample was in; in the code it starts at 0.",
            "If the losses of single samples are known, each of them is multiplied by its own weight; the code multiplies "
            "the scalar of a batch by the mean of its weights.",
            "The weight is the number of samples below the threshold divided by the number of them kept, as in InfoBatch.",
            "Samples that were not seen yet are kept.",
        ),
        bytes_per_sample=4,
        caveat="The score tells little about a single sample, because all samples of a batch share its loss. It is meant for "
        "training without losses of single samples, and as a control.",
        missing=("SeTa by these scores.",),
    )
    alpha: float = 0.9
    _column: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, 1)", "alpha")

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the score, 4 bytes; with `target` also how often it was left out, 2."""
        merge = partial(moving_mean, alpha=self.alpha)
        return super().columns() | {
            "score": Column(torch.float32, fill=NEVER_SEEN, signal="batch_loss", merge=merge)
        }
