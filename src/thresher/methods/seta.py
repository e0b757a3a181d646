"""SeTa: a random part of the samples whose losses are in a window of groups, which moves from easy to hard and begins again.

"SeTa", CVPR 2025, arXiv:2503.13385. Read in the code and the abstract, not in the paper. The losses of all samples
are cut into G groups by k-means. A window of round(w * G) groups starts one group higher in each epoch; after the highest
group it starts at the lowest again. Samples outside the window are left out, and so is a random share r of those inside.
Nothing is re-weighted. In the last epochs there is no window ("partial annealing"): each of them leaves out a random share r of
all samples.

Where the code differs:
- It runs k-means on all losses, which takes longer than the rest of the choice. Here the losses are counted in bins whose width
  is at most 0.8 % of the loss. k-means runs on the bins, starting from groups with equal numbers of samples. Equal losses are
  in one group, and there are fewer groups if there are fewer different losses.
- It begins with equal scores. Here the first epoch keeps every sample, and later epochs keep every sample without a finite
  loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.methods._base import check_whole, check_within, full_plan
from thresher.methods._target import LEFT_OUT, Target, check_target
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import Mask, Values, chunks, draw_lots, ids_of, on_host, share

BINS = 2**16
"""Number of bins of losses: one for each value of the upper 16 bits of a float32."""
ROUNDS = 100
"""Largest number of rounds of k-means."""


def bins_of(loss: Values) -> NDArray[np.uint32]:
    """Returns the bin of each loss, an integer: sign, exponent and the first 7 bits of the mantissa of its float32."""
    return (loss.astype(np.float32, copy=False) + np.float32(0)).view(np.uint32) >> np.uint32(16)


def k_means(
    values: NDArray[np.float64], counts: NDArray[np.int64], groups: int
) -> NDArray[np.intp]:
    """Groups sorted numbers by k-means: each number belongs to the group with the nearest mean.

    Args:
        values: Different numbers, shape (m,), ascending, finite; m is 1 or more.
        counts: How often each of them occurs, shape (m,), above 0.
        groups: Largest number of groups, 1 or more.

    Returns:
        Group of each number, shape (m,), ascending from 0, without empty groups.

    Example:
        >>> k_means(np.array([0.1, 0.2, 0.9, 1.0, 5.0]), np.array([3, 1, 1, 1, 2]), groups=3).tolist()
        [0, 0, 1, 1, 2]
    """
    weight, mass = (np.concatenate([[0.0], np.cumsum(one)]) for one in (counts, counts * values))
    group = np.minimum(
        (weight[:-1] + weight[1:]) / 2 * min(groups, len(values)) / weight[-1], groups - 1
    ).astype(np.intp)
    for _ in range(ROUNDS):
        first = np.flatnonzero(np.diff(group, prepend=-1))
        ends = np.append(first, len(values))
        means = np.diff(mass[ends]) / np.diff(weight[ends])
        regrouped = np.searchsorted((means[:-1] + means[1:]) / 2, values, side="right")
        if np.array_equal(regrouped, group):
            break
        group = regrouped
    return np.unique(group, return_inverse=True)[1]


def loss_groups(loss: Values, groups: int) -> tuple[NDArray[np.int16], int]:
    """Returns the group of each sample, 0 for the smallest losses, and the number of groups.

    Args:
        loss: Last loss of each sample, shape (N,).
        groups: Largest number of groups, 1 or more.

    Returns:
        Groups, shape (N,), int16; -1 for a sample without a finite loss; and the number of groups, 0 if no sample has a finite
        loss.
    """
    counts = np.zeros(BINS, dtype=np.int64)
    for part in chunks(len(loss)):
        counts += np.bincount(bins_of(loss[part]), minlength=BINS)
    middles = (np.arange(BINS, dtype=np.uint32) << np.uint32(16) | np.uint32(1 << 15)).view(
        np.float32
    )
    there = np.flatnonzero((counts > 0) & np.isfinite(middles))
    group_of_bin = np.full(BINS, -1, dtype=np.int16)
    if len(there):
        there = there[np.argsort(middles[there])]
        group_of_bin[there] = k_means(middles[there].astype(np.float64), counts[there], groups)
    group = np.empty(len(loss), dtype=np.int16)
    for part in chunks(len(loss)):
        group[part] = group_of_bin[bins_of(loss[part])]
    return group, int(group_of_bin.max()) + 1


def in_window(group: NDArray[np.int16], groups: int, window: float, epoch: int) -> Mask:
    """Marks the samples whose groups are in the window of an epoch.

    Args:
        group: Group of each sample, shape (N,); -1 for none.
        groups: Number of groups, 0 or more.
        window: Share of the groups in the window, (0, 1].
        epoch: Number of the epoch.
    """
    width = max(1, round(window * groups))
    start = epoch % (max(1, groups) - min(width, max(1, groups)) + 1)
    return (group >= start) & (group < start + width)


@dataclass(frozen=True)
class SeTa:
    """Trains on a random part of the samples in a window of losses, which slides from small to large losses and begins again.

    Args:
        prune_fraction: Share pruned at random, r, [0, 1). Default and published: 0.1.
        groups: Number of groups of losses, G, 1 to 1000. Default and published: 5.
        window: Share of the groups in the window, w, (0, 1]: round(w * G) groups, at least one. Default and published: 0.9.
        delta: Share of the epochs that have a window, [0, 1]. Default 0.875, which is not taken from the paper.
        target: Share of the samples that the whole training run leaves out, [0, 0.9]. Samples outside the window are left out
            first (a random part, if there are too many), then random samples inside; in the last epochs random samples.
            `prune_fraction` then has no effect. Default None: the share that the window and `prune_fraction` give.

    Raises:
        ValueError: A setting is out of its range, or the epochs are too few for the target.

    Example:
        >>> import torch
        >>> from thresher import SeTa
        >>> records = {"loss": torch.tensor([0.1, 0.1, 0.2, 0.2, 3.0, 3.0])}
        >>> method = SeTa(prune_fraction=0.0, groups=3, window=0.67)
        >>> plan = method.plan_epoch(records, epoch=1, epochs=10, generator=torch.Generator().manual_seed(0))
        >>> plan.ids
        tensor([2, 3, 4, 5])
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="a random part of a sliding window of losses",
        paper="arXiv:2503.13385",
        rule="its last loss was outside the window of this epoch, or it was drawn with chance {prune_fraction}",
        biased="Yes, from epoch to epoch: towards small or large losses, depending on the position of the window. Over all "
        "positions of a wide window, samples of medium losses come most often. Nothing is re-weighted.",
        forwards="None.",
        claim="Up to 50 % less cost, and little loss of accuracy at 70 %.",
        differences=(
            "k-means runs on bins of the losses, whose width is at most 0.8 % of the loss, and starts from groups with equal "
            "numbers of samples; the code runs it on all losses, and starts from random groups.",
            "The first epoch keeps every sample.",
            "Samples without a finite loss are kept.",
        ),
        bytes_per_sample=4,
        caveat="With the published settings it leaves out the group of the largest losses every second "
        "epoch, and does not beat random samples if the few samples of large loss are those that must be learned.",
    )
    prune_fraction: float = 0.1
    groups: int = 5
    window: float = 0.9
    delta: float = 0.875
    target: float | None = None

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "prune_fraction")
        check_whole(self, "groups", most=1000)
        check_within(self, "(0, 1]", "window")
        check_within(self, "[0, 1]", "delta")
        check_target(self, self.target)

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes; with `target` also how often it was left out, 2."""
        return {
            "loss": Column(torch.float32, fill=NEVER_SEEN),
            **({} if self.target is None else LEFT_OUT),
        }

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with a random part of the samples in the window."""
        loss = on_host(records["loss"])
        n = len(loss)
        if self.target is None:
            target = None
        else:
            target = Target(self, self.target, 1, epochs, epochs)
        if epoch == 0:
            return full_plan(n)
        if epoch < share(self.delta, epochs):
            group, groups = loss_groups(loss, self.groups)
            inside = in_window(group, groups, self.window, epoch)
            outside = group >= 0
            outside &= ~inside
        else:
            inside = np.isfinite(loss)
            outside = np.zeros_like(inside)
        within = int(np.count_nonzero(inside))
        beyond = int(np.count_nonzero(outside))
        if target is None:
            pruned = beyond + within - share(1 - self.prune_fraction, within)
        else:
            pruned = min(target.due(records, epoch), within + beyond)
        pruned = min(pruned, n - 1)
        if pruned < beyond:
            kept = ~outside | draw_lots(beyond - pruned, generator, n, outside)
        else:
            kept = ~(inside | outside) | draw_lots(within + beyond - pruned, generator, n, inside)
        left_out = pruned / n
        plan = EpochPlan(
            ids_of(kept), facts={"scheduled_fraction": left_out, "actual_fraction": left_out}
        )
        if target is None:
            return plan
        return target.counted(plan, kept, records, epoch)
