"""One backward from ten forward: train on the part of a batch whose mean loss is as close as possible to the batch's.

"One Backward from Ten Forward, Subsampling for Large-Scale Deep Learning", arXiv:2104.13114.

The paper states the choice as a 0/1 program: of n losses choose b so that the difference of the means is least. Solving
it exactly for each batch costs more than it saves. Here evenly spaced quantiles of the losses are the start, and each of a
few rounds makes the one swap of a chosen and another row that brings the means closest. Every round is a few operations
on the device, and their number is fixed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._ranked import check_keep, in_id_order, plan_of
from thresher.methods.card import Card
from thresher.methods.contract import Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import share


def quantiles(finite: Tensor, n: int, k: int) -> Tensor:
    """`k` evenly spaced positions of `n` ascending losses, those from `finite` on being without a value and taken first.

    Args:
        finite: How many have a value, a scalar on the device.
        n: How many there are.
        k: How many to take, 1 to n.

    Returns:
        Shape (k,), int64, ascending.
    """
    slot = torch.arange(k, device=finite.device)
    among = (k - (n - finite)).clamp(min=0)
    middle = (2 * slot + 1) * finite // (2 * among).clamp(min=1)
    return torch.where(slot < among, middle, n - 1 - (slot - among)).sort().values


def best_swap(loss: Tensor, finite: Tensor, chosen: Tensor) -> Tensor:
    """The chosen positions after the swap that brings their mean closest to the mean of all, if one brings it closer.

    Args:
        loss: Ascending, shape (n,), 0 where it has no value.
        finite: Where it has one, bool, shape (n,); the others neither count nor move.
        chosen: Shape (k,), ascending. Ties go to the lowest of them, then to the lowest position that comes in.

    Returns:
        Shape (k,), ascending.
    """
    n, here, counts = len(loss), loss[chosen], finite[chosen]
    # Differences of the sums times both numbers: no division rounds.
    gap = counts.sum() * loss.sum() - finite.sum() * here.sum()
    change = finite.sum() * (loss - here[:, None])
    allowed = finite.index_fill(0, chosen, False) & counts[:, None]
    least, best = torch.where(allowed, (gap - change).abs(), math.inf).flatten().min(0)
    slot = torch.arange(len(chosen), device=chosen.device)
    moves = (slot == best // n) & (least < gap.abs())
    return torch.where(moves, best % n, chosen).sort().values


@dataclass(frozen=True)
class Obftf:
    """Keep floor(keep * n) samples of a batch, at least one, whose mean loss is close to that of the batch.

    Samples without a finite loss are kept before all others and take no part in either mean.

    Args:
        keep: Share kept of each batch, (0, 1]. Published: 0.1.
        swaps: Rounds of one swap each, 0 or more; 0 keeps the evenly spaced quantiles.

    Raises:
        ValueError: A setting out of range.
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    card: ClassVar[Card] = Card(
        summary="train on the part of a batch with the batch's mean loss",
        paper="arXiv:2104.13114",
        rule="not in the part of its batch whose mean loss is the batch's",
        biased="yes, but little: the mean loss is the batch's, the mean gradient need not be; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none where the training's own forward pass serves; the paper "
        "has the losses from inference that runs anyway (`Scoring(losses=...)`)",
        differences=("The paper solves a 0/1 program; here quantiles and a fixed number of swaps come close to its answer.",),
        caveat="it aims at the batch's mean loss with fewer rows, which random rows meet on average: what it gains is variance "
        "of the loss, which a gradient need not follow. On none of the planted problems (`thresher.testing`) does it beat "
        "random rows of the same cost, which are twice as many. Choosing takes about seven times as long as Big Loss: every "
        "swap looks at all pairs of rows",
    )
    keep: float = 0.1
    swaps: int = 8

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if not (isinstance(self.swaps, int) and not isinstance(self.swaps, bool) and self.swaps >= 0):
            raise ValueError(f"Obftf: `swaps` must be a whole number of 0 or more, got {self.swaps!r}")

    def init_state(self) -> State:
        """Nothing is remembered."""
        return {}

    def count(self, n: int) -> int | None:
        """A fixed share of each batch."""
        return max(1, share(self.keep, n))

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """The rows whose mean loss is close to the batch's."""
        by_id, ordered = in_id_order(signals)
        n, loss = len(by_id), ordered["loss"]
        if not n:
            return plan_of(by_id, n, self.keep), dict(state)
        order = torch.where(loss.isfinite(), loss, math.inf).argsort(stable=True)
        picked = order[self._chosen(loss[order], max(1, share(self.keep, n)))]
        return plan_of(by_id[picked].sort().values, n, self.keep), dict(state)

    def _chosen(self, loss: Tensor, k: int) -> Tensor:
        """Positions of ascending losses."""
        finite = loss.isfinite()
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        values = torch.where(finite, loss, 0).to(wide)
        chosen = quantiles(finite.sum(), len(loss), k)
        for _ in range(self.swaps):
            chosen = best_swap(values, finite, chosen)
        return chosen
