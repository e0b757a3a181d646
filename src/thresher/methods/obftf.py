"""One Backward from Ten Forward: train on a part of each batch whose mean loss is close to that of the whole batch.

"One Backward from Ten Forward, Subsampling for Large-Scale Deep Learning", arXiv:2104.13114.

The paper states the choice as a 0/1 program: choose b of n losses with the least difference of the means. An exact
solution for each batch costs more than it saves. Here the choice starts from evenly spaced quantiles of the losses, and each
of a few rounds makes the one swap of a chosen row and another row that brings the means closest. A round is a few operations
on the device, and the number of rounds is fixed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thresher.methods._base import KeepShare, check_whole
from thresher.methods.contract import Card, Requirements


def quantiles(finite: Tensor, n: int, k: int) -> Tensor:
    """Returns `k` evenly spaced positions among `n` sorted losses; losses that are not finite come last and are taken first.

    Args:
        finite: Number of finite losses, a scalar tensor on the device.
        n: Number of losses.
        k: Number of positions, 1 to n.

    Returns:
        Positions, shape (k,), int64, ascending.
    """
    slot = torch.arange(k, device=finite.device)
    among = (k - (n - finite)).clamp(min=0)
    middle = (2 * slot + 1) * finite // (2 * among).clamp(min=1)
    return torch.where(slot < among, middle, n - 1 - (slot - among)).sort().values


def best_swap(loss: Tensor, finite: Tensor, chosen: Tensor) -> Tensor:
    """Swaps one chosen position for another so that the means come as close as possible; changes nothing if no swap helps.

    Of equally good swaps, the one with the lowest chosen position, then with the lowest new position, is made.

    Args:
        loss: Losses, ascending, shape (n,), with 0 in place of losses that are not finite.
        finite: Mask of the finite losses, bool, shape (n,); the others neither count nor move.
        chosen: Chosen positions, ascending, shape (k,), int64.

    Returns:
        Chosen positions after the swap, ascending, shape (k,), int64.
    """
    n = len(loss)
    here = loss[chosen]
    counts = finite[chosen]
    # The gap is the difference of the sums times both numbers, because a division would round.
    gap = counts.sum() * loss.sum() - finite.sum() * here.sum()
    change = finite.sum() * (loss - here[:, None])
    allowed = finite.index_fill(0, chosen, False) & counts[:, None]
    least, best = torch.where(allowed, (gap - change).abs(), math.inf).flatten().min(0)
    slot = torch.arange(len(chosen), device=chosen.device)
    moves = (slot == best // n) & (least < gap.abs())
    return torch.where(moves, best % n, chosen).sort().values


@dataclass(frozen=True)
class Obftf(KeepShare):
    """Trains on floor(keep * n) samples of each batch whose mean loss is close to the mean of the batch; at least one.

    Samples without a finite loss are kept before all others and count in neither mean.

    Args:
        keep: Share kept of each batch, (0, 1]. Default and published: 0.1.
        swaps: Number of swaps that improve the choice, 0 or more; 0 keeps the evenly spaced quantiles. Default 8.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Obftf
        >>> signals = {"id": torch.arange(4), "loss": torch.tensor([1.0, 2.0, 4.0, 5.0])}
        >>> plan, state = Obftf(keep=0.5).plan_batch(signals, {}, step=0, generator=torch.Generator())
        >>> signals["loss"][plan.rows].mean()
        tensor(3.)
    """

    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    card: ClassVar[Card] = Card(
        summary="train on the part of a batch with the batch's mean loss",
        paper="arXiv:2104.13114",
        rule="not in the chosen part of its batch, whose mean loss is close to that of the batch",
        biased="yes, but little: the mean loss is close to that of the batch, the mean gradient need not be; nothing is "
        "re-weighted",
        forwards="every sample of a batch, to choose by; none if the loop's own forward pass is enough; the paper "
        "takes the losses from inference that runs anyway (`Scoring(losses=...)`)",
        differences=(
            "The paper solves a 0/1 program; here quantiles and a fixed number of swaps come close to its solution.",
        ),
        caveat="random rows have the mean loss of the batch on average, too: the gain is only less variance of the loss, "
        "which the gradient need not follow. On none of the planted problems (`thresher.testing`) does it beat random rows "
        "of the same cost, which are twice as many. The choice takes about seven times as long as that of Big Loss, because "
        "every swap compares all pairs of rows",
    )
    keep: float = 0.1
    swaps: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "swaps", least=0)

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the positions of rows whose mean loss is close to the mean loss of the batch, shape (k,), int64."""
        loss = signals["loss"]
        order = torch.where(loss.isfinite(), loss, math.inf).argsort(stable=True)
        return order[self._chosen(loss[order], k)]

    def _chosen(self, loss: Tensor, k: int) -> Tensor:
        """Returns the chosen positions among ascending losses."""
        finite = loss.isfinite()
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        values = torch.where(finite, loss, 0).to(wide)
        chosen = quantiles(finite.sum(), len(loss), k)
        for _ in range(self.swaps):
            chosen = best_swap(values, finite, chosen)
        return chosen
