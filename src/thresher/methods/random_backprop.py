"""Random-Backprop: train on a random part of every batch, the baseline of Selective-Backprop with the same number of rows.

It has no paper of its own: it is the ablation "Random" of arXiv:1910.00762 and a baseline of Diet Selective-Backprop. It needs
no losses, so rows that are left out go through neither the forward nor the backward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thresher.methods._base import KeepShare
from thresher.methods.contract import Card, Requirements
from thresher.selection import chosen, ids_of


@dataclass(frozen=True)
class RandomBackprop(KeepShare):
    """Trains on a uniformly random part of each batch.

    The part is unbiased without weights, and the learning rate does not change.

    Args:
        keep: Share kept of each batch, (0, 1]: floor(keep * n) rows, at least one. Default 0.5.

    Raises:
        ValueError: `keep` is outside (0, 1].

    Example:
        >>> import torch
        >>> from thresher import RandomBackprop
        >>> signals = {"id": torch.arange(8)}
        >>> plan, state = RandomBackprop(0.25).plan_batch(signals, {}, step=0, generator=torch.Generator().manual_seed(0))
        >>> len(plan.rows)
        2
    """

    requires: ClassVar[Requirements] = Requirements()
    card: ClassVar[Card] = Card(
        summary="train on a random part of the batch",
        rule="not drawn in its batch",
        biased="no: every row is kept equally often",
        forwards="none: the rows left out are not even forwarded",
        caveat="it is the random selection with which the other methods are compared",
    )
    keep: float = 0.5

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the positions of a new random part of the batch, shape (k,), int64."""
        ids = signals["id"]
        return ids_of(chosen(len(ids), k, generator)).to(ids.device, non_blocking=True)
