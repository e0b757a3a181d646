"""CCS: prune before training, but keep samples from every stratum of a score. The kept samples then cover the dataset.

Zheng et al., "Coverage-centric Coreset Selection for High Pruning Rates", ICLR 2023, arXiv:2210.15809. Official code:
github.com/haizhongzheng/Coverage-centric-coreset-selection. The hardest samples, which may have wrong labels, are dropped
first. The range of the remaining scores is cut into strata (intervals) of equal width. The number of samples to keep is divided
among the strata, beginning with the stratum that has the fewest samples: each gets an equal part of what is left, but at most
its own samples. Within a stratum, samples are drawn uniformly. It is biased: nothing is re-weighted.

The score of the paper is the area under the margin, which is smallest for the hardest samples. Scores in Thresher, among them
`thresher.scores.aum`, are larger for harder samples. Where the code differs:
- The upper end of its range is the largest score times 1.0001, which is below the largest score if that is negative. Here the
  largest score belongs to the last stratum.
- It drops the samples with the smallest area under the margin, even if another score defines the strata. Here one score does
  both.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng
from thresher.methods._base import check_keep, check_whole, checked_scores, is_number, loaded
from thresher.methods.contract import Card, Requirements
from thresher.score_table import Scores
from thresher.selection import Values, ids_of, on_host, share


def strata_of(values: Values, strata: int) -> NDArray[np.int64]:
    """Divides the range of the scores into strata of equal width, and returns the stratum of each score, int64, from 0.

    Args:
        values: Scores, shape (n,), finite, n >= 1.
        strata: Number of strata, 1 or more.

    Example:
        >>> strata_of(np.array([0.0, 0.4, 0.6, 1.0]), 2).tolist()
        [0, 0, 1, 1]
    """
    low = float(values.min())
    high = float(values.max())
    if not high > low:
        return np.zeros(len(values), dtype=np.int64)
    place = (values.astype(np.float64) / 2 - low / 2) / (
        high / 2 - low / 2
    )  # halves, because the difference of two floats may overflow
    return np.minimum((place * strata).astype(np.int64), strata - 1)


def stratum_budgets(sizes: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Divides a budget among strata: from the smallest stratum up, each gets an equal part of what is left, or all its samples.

    Args:
        sizes: Numbers of samples of the strata, shape (s,).
        budget: Number of samples that are kept, at most the sum of the sizes.

    Example:
        >>> stratum_budgets(np.array([10, 1, 10]), 9).tolist()
        [4, 1, 4]
    """
    found = np.zeros_like(sizes)
    left = budget
    order = np.argsort(sizes, kind="stable")
    for number, stratum in enumerate(order.tolist()):
        found[stratum] = min(int(sizes[stratum]), left // (len(sizes) - number))
        left -= int(found[stratum])
    return found


@dataclass(frozen=True)
class Ccs:
    """Keeps floor(keep * N) of the N samples for the whole training run, at least one, from all strata of a score.

    Samples without a finite score are kept before all others; they count towards the share.

    Args:
        scores: Scores of the samples, larger for harder samples: a `thresher.scores.Scores`, or the path of its Parquet file.
        keep: Share kept, (0, 1]. Default 0.3; published: 0.1 to 0.7.
        drop_hardest: Share of the samples with the largest scores that are dropped first, [0, 1 - keep]. Default 0; published:
            0.3 with keep=0.1 on CIFAR-10 and ImageNet, 0.2 with keep=0.2 on ImageNet.
        strata: Number of strata, 1 or more. Default and published: 50.
        seed: Random seed of the draws, 0 or more. Default 0.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Ccs
        >>> scores = Scores(torch.arange(6), torch.tensor([0.0, 0.1, 0.1, 0.1, 1.0, 9.0]))
        >>> Ccs(scores, keep=0.34, drop_hardest=0.17, strata=2).kept(6)[-1]
        tensor(4)
    """

    card: ClassVar[Card] = Card(
        summary="prune, but keep a share of every stratum of a score",
        paper="arXiv:2210.15809",
        rule="pruned before training: not drawn in its stratum of the score",
        biased="yes, by design: rare scores are kept more often than frequent ones, and the hardest samples never; nothing is "
        "re-weighted",
        forwards="none in training; before training, passes for scores and for the models that the scores need: a whole "
        "training for the area under the margin",
        claim="CIFAR-10 with 90 % pruned: accuracy 7.04 points above random pruning, and at least 19.56 points above keeping "
        "the hardest samples",
        differences=(
            "The code's last stratum ends at 1.0001 times the largest score; here it ends at the largest score.",
            "The code drops the hardest samples by the area under the margin, even with another score; here by the score "
            "itself.",
            "Samples without a finite score are kept first.",
        ),
        caveat="scores that need a whole training run cost more than pruning saves, unless several runs use them",
    )
    stage: ClassVar[Literal["before"]] = "before"
    requires: ClassVar[Requirements] = Requirements()
    scores: Scores | str
    keep: float = 0.3
    drop_hardest: float = 0.0
    strata: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", checked_scores(self, "scores", self.scores))
        check_keep(self, self.keep)
        dropped = self.drop_hardest
        if not (is_number(dropped) and 0 <= dropped <= 1 - self.keep + 1e-9):
            raise ValueError(
                f"Ccs: `drop_hardest` is the share to remove, within [0, 1 - keep], got {dropped!r} with keep={self.keep}"
            )
        check_whole(self, "strata")
        check_whole(self, "seed", least=0, most=2**63 - 1)

    @property
    def cost(self) -> tuple[int, int]:
        """Numbers of samples that went through forward and backward passes to compute the scores."""
        table = loaded(self.scores)
        return table.forward, table.backward

    def kept(self, n: int) -> Tensor:
        """Returns the ids of the samples to train on.

        Args:
            n: Number of samples of the dataset.

        Returns:
            Ids, ascending, shape (max(1, floor(keep * n)),), int64.

        Raises:
            ValueError: The scores belong to another number of samples.
        """
        values = on_host(loaded(self.scores).dense(n))
        count = max(1, share(self.keep, n))
        mask = np.zeros(n, dtype=np.bool_)
        unknown = np.flatnonzero(~np.isfinite(values))[:count]
        mask[unknown] = True
        known = np.flatnonzero(np.isfinite(values))
        known = known[np.argsort(values[known], kind="stable")]
        left = count - len(unknown)
        known = known[: max(left, len(known) - share(self.drop_hardest, n))]
        if left:
            number = strata_of(values[known], self.strata)
            parts = stratum_budgets(np.bincount(number, minlength=self.strata), left)
            lots = rng.lots(self.seed, known)
            by_lot = np.lexsort((lots, number))
            place = np.arange(len(known)) - np.searchsorted(number[by_lot], number[by_lot])
            mask[known[by_lot[place < parts[number[by_lot]]]]] = True
        return ids_of(mask)
