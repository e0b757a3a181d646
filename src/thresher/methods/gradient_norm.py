"""Gradient Norm: train on the samples of each batch with the largest gradients of the last layer.

A base selector of AdaSelection, arXiv:2306.10728, after the importance of arXiv:1803.00942, but without drawing and without
its weights. Biased towards samples that move the model most; nothing is re-weighted.

The norm is that of the gradient of a sample's loss with respect to the model's outputs, ||p - y|| for cross-entropy, which
bounds that of all parameters up to a constant and costs no backward pass. So it works for language models too, where the
paper could not take it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.methods._ranked import KeepLargest
from thresher.methods.card import Card
from thresher.methods.contract import Requirements


@dataclass(frozen=True)
class GradientNorm(KeepLargest):
    """Keep the floor(keep * n) largest gradient norms of each batch, at least one; of equal norms the higher id.

    A sample without a finite norm is kept before all others.

    Args:
        keep: Share kept of each batch, (0, 1]. Published: 0.1 to 0.5.

    Raises:
        ValueError: `keep` outside (0, 1].
    """

    requires: ClassVar[Requirements] = Requirements(signals=("grad_norm",))
    card: ClassVar[Card] = Card(
        summary="train on the batch's largest last-layer gradients",
        paper="arXiv:2306.10728",
        rule="its gradient norm was not among the largest of its batch",
        biased="towards samples of large gradient, wrong labels among them; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves",
        claim="CIFAR-10 91.97 % where full training has 92.57 %, mean over keep = 0.1 to 0.5 (AdaSelection, table 4)",
        caveat="in the same table it falls behind random selection on noisy data: SVHN 67.14 % against 93.32 %, a toy "
        "regression's error 24.13 against 12.37",
        missing=("Norms of the gradient of all parameters; the bound of the last layer takes their place.",),
    )

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """The norm of the gradient with respect to the outputs."""
        return signals["grad_norm"]
