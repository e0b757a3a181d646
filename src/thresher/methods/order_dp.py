"""OrderDP: draw a pool of samples at random, and train on the samples of the pool with the largest last losses.

"OrderDP", ICLR 2026, arXiv:2606.08574. Original code: github.com/shengze-xu/OrderDP (cifar/orderDP/orderDP.py). It is biased
towards large losses by design, but less than a choice of the largest losses of all samples: a sample in the pool is kept if
fewer than q larger losses are in it, where q is the number of samples to keep. Every epoch keeps exactly this number.

Where the code differs:
- All losses start at 3, so it depends on the scale of the losses what happens to samples that were not trained on yet. Here
  they come before all others, in random order.
- A sample whose loss is not finite is dropped or kept by the order of a sort; here it is kept.
- In several processes each one draws the same samples and trains on all of them; here each has its part.
- It has a setting for the share of the epochs that prune, which has no effect; here all epochs leave out the same share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from thresher.methods._base import check_keep
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import Mask, Values, draw_lots, ids_of, largest, on_host, share

NEW_SAMPLE = float(torch.finfo(torch.float32).max)
"""Loss of a sample that was never seen: the largest finite number, so the sample comes first and the share stays exact."""


def best_of_pool(loss: Values, k: int, pool: float, generator: torch.Generator) -> Mask:
    """Marks the `k` samples with the largest losses of a random pool.

    Args:
        loss: Last loss of each sample, shape (N,), float32; `NEW_SAMPLE` if it has none.
        k: Number of samples to mark; samples without a finite loss are marked first, and all of them.
        pool: Size of the pool as a share of the samples with a finite loss; the pool has at least `k` samples.
        generator: Random generator on the CPU.

    Returns:
        Bool mask (N,). Ties go to higher ids; among samples without a loss, chance decides.
    """
    usable = np.isfinite(loss)
    n = len(loss)
    known = int(np.count_nonzero(usable))
    k = min(max(0, k - (n - known)), known)
    inside = draw_lots(max(k, share(pool, known)), generator, n, usable)
    new = inside & (loss == np.float32(NEW_SAMPLE))
    news = int(np.count_nonzero(new))
    if news > k:
        return draw_lots(k, generator, n, new) | ~usable
    rest = largest(np.where(inside & ~new, loss, np.float32(np.nan)), k - news)
    return rest | new | ~usable


@dataclass(frozen=True)
class OrderDp:
    """Trains each epoch on the largest last losses of a new random pool: floor(keep * N) samples of floor(pool * N).

    Args:
        keep: Share kept, (0, 1], at most `pool`: floor(keep * N) samples, at least one, in every epoch. Default and published:
            0.3 (published for ImageNet with a pool of 0.8: 0.72).
        pool: Share of the samples in the pool, (0, 1]. 1 keeps the largest losses of all samples; a pool as large as `keep` is
            a random subset. Default and published: 0.8.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import OrderDp
        >>> records = {"loss": torch.arange(10.0)}
        >>> plan = OrderDp(pool=1.0).plan_epoch(records, epoch=1, epochs=5, generator=torch.Generator().manual_seed(0))
        >>> plan.ids, plan.facts["actual_fraction"]
        (tensor([7, 8, 9]), 0.7)
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = Card(
        summary="the largest losses of a random pool",
        paper="arXiv:2606.08574",
        rule="not drawn into the pool, or its last loss was not among the largest of the pool",
        biased="Yes, towards samples of large loss: nothing is re-weighted. The expected loss weighs a sample by the chance "
        "that its rank is kept.",
        forwards="None.",
        claim="Not known: read in the code and its README only.",
        differences=(
            "Samples that were not trained on yet come first; in the code they have a loss of 3.",
            "Samples whose loss is not finite are kept.",
            "Several processes train on different samples; in the code they all train on the same ones.",
        ),
        bytes_per_sample=4,
        missing=(
            "The weights 1 / gamma of the ranks, which are in the paper and commented out in the code: the smallest losses "
            "are never kept if the pool is larger than what is kept, so no weights can make it unbiased.",
        ),
    )
    keep: float = 0.3
    pool: float = 0.8

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if not 0 < self.pool <= 1 or self.keep > self.pool:
            raise ValueError(
                f"OrderDp: `pool` is a share of the samples, within (0, 1] and not below `keep`={self.keep}, got {self.pool}"
            )

    def columns(self) -> dict[str, Column]:
        """Returns what is stored for each sample: the last loss, 4 bytes per sample."""
        return {"loss": Column(torch.float32, fill=NEW_SAMPLE)}

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan with the samples of the largest losses in a new pool."""
        loss = on_host(records["loss"])
        mask = best_of_pool(loss, max(1, share(self.keep, len(loss))), self.pool, generator)
        facts = {
            "scheduled_fraction": 1 - self.keep,
            "actual_fraction": 1 - np.count_nonzero(mask) / len(mask),
        }
        return EpochPlan(ids_of(mask), facts=facts)
