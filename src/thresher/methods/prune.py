"""Pruning: before training, keep a part of the dataset by a score of each sample, and train on that part only.

Paul et al., "Deep Learning on a Data Diet", NeurIPS 2021, arXiv:2107.07075, keep the hardest samples by EL2N or GraNd; Sorscher
et al., arXiv:2206.14486, keep the easiest if data is scarce. Scores are in `thresher.scores`. Original code:
github.com/mansheej/data_diet. The method is biased by design: nothing is re-weighted.

With a batch method after it, this is Diet Selective-Backprop: `attach([Prune(scores), SelectiveBackprop(keep=2 / 3)], ...)`
trains on half of the data at a time; see `keep_in_batch` for the shares. Where the code differs:
- It sorts without a rule for ties; here the order is by (score, id), as everywhere in Thresher.
- Its window begins a number of samples above the smallest score; here it ends a share of the samples below the largest.
- It trains for the same number of steps for every `keep`, which saves no time; here the number of epochs stays the same, with
  fewer steps.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thresher.methods._base import (
    check_choices,
    check_keep,
    check_within,
    checked_scores,
    is_number,
    loaded,
)
from thresher.methods.contract import Card, Requirements
from thresher.score_table import Scores
from thresher.selection import Values, ids_of, on_host, share

Which = Literal["hard", "easy", "window"]
Ids = NDArray[np.int64]


def ranked(values: Values, which: Which, *, drop: int = 0) -> Ids:
    """Returns the samples in the order in which they are kept: samples without a finite score first, then by (score, id).

    Args:
        values: Scores, shape (n,), larger for harder samples.
        which: Order: "hard" puts the largest scores first, "easy" the smallest; "window" puts the largest first, except the
            `drop` largest, which come last, the smallest of them first.
        drop: Number of largest finite scores that come last, with "window" only. Default 0.

    Returns:
        Ids, shape (n,), int64.
    """
    known = np.isfinite(values)
    unknown = np.flatnonzero(~known)
    ids = np.flatnonzero(known)
    ascending = ids[np.argsort(values[known], kind="stable")]
    if which == "easy":
        return np.concatenate([unknown, ascending])
    hardest = ascending[::-1]
    drop = drop if which == "window" else 0
    return np.concatenate([unknown, hardest[drop:], hardest[:drop][::-1]])


def floors(order: Ids, labels: NDArray[np.int64], floor: float) -> Ids:
    """Returns the samples that must be kept because each class keeps at least a share `floor` of its samples.

    Args:
        order: Ids in the order in which they are kept, shape (n,).
        labels: Class of each id, shape (n,); below 0 for a sample without a class.
        floor: Least share of each class, [0, 1]: of n samples, all but floor((1 - floor) * n) are kept.

    Returns:
        Ids in the same order, int64.
    """
    of_classes = order[labels[order] >= 0]
    by_class = of_classes[np.argsort(labels[of_classes], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    needed = [
        begin + np.arange(n - share(1 - floor, n))
        for begin, n in zip(starts, counts.tolist(), strict=True)
    ]
    wanted = np.zeros(len(order), dtype=np.bool_)
    wanted[by_class[np.concatenate([np.empty(0, dtype=np.int64), *needed])]] = True
    return order[wanted[order]]


def keep_in_batch(before_fraction: float = 0.25, total_fraction: float = 0.5) -> float:
    """Returns the `keep` for a batch method after pruning, such that a given share of all data is skipped in total.

    Args:
        before_fraction: Share of the data that is pruned before training, [0, 1). Default 0.25.
        total_fraction: Share of the full data that is left out of each epoch in total, [before_fraction, 1). Default 0.5.

    Returns:
        (1 - total_fraction) / (1 - before_fraction), within (0, 1].

    Raises:
        ValueError: A share is out of its range.

    Example:
        >>> from thresher import keep_in_batch
        >>> round(keep_in_batch(before_fraction=0.25, total_fraction=0.5), 3)
        0.667
    """
    if not 0 <= before_fraction < 1:
        raise ValueError(
            f"keep_in_batch: `before_fraction` is the share to remove, within [0, 1), got {before_fraction}"
        )
    if not before_fraction <= total_fraction < 1:
        raise ValueError(
            f"keep_in_batch: `total_fraction` includes `before_fraction`, within [{before_fraction}, 1), got {total_fraction}"
        )
    return (1 - total_fraction) / (1 - before_fraction)


@dataclass(frozen=True)
class Prune:
    """Keeps floor(keep * N) of the N samples for the whole training run, at least one, by a score of each sample.

    Samples without a finite score are kept before all others.

    Args:
        scores: Scores of the samples, larger for harder samples: a `thresher.scores.Scores`, or the path of its Parquet file.
        keep: Share kept, (0, 1]. Default 0.75, as published before Selective-Backprop; published alone: 0.5 on CIFAR-10.
        which: Samples that are kept: "hard" (default and published) for the largest scores, "easy" for the smallest, "window"
            for the largest after the `offset` largest, which may be mislabeled.
        offset: Share of the samples that are left out as too hard, those with the largest scores, [0, 1 - keep]; with "window"
            only. Default 0.
        per_class_floor: Least share of each class that is kept, [0, 1], in the same order within the class. If the classes
            require it, more samples than `keep` are kept. The scores must have labels. Default 0.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> import torch
        >>> from thresher import Prune
        >>> from thresher.score_table import Scores
        >>> scores = Scores(torch.arange(4), torch.tensor([0.1, 0.9, 0.5, 0.2], dtype=torch.float64))
        >>> Prune(scores, keep=0.5).kept(4)
        tensor([1, 2])
    """

    card: ClassVar[Card] = Card(
        summary="keep a part of the dataset by a score",
        paper="arXiv:2107.07075",
        rule="pruned before training, by its score",
        biased="yes, by design: towards hard samples (with which='easy' towards easy samples); nothing is re-weighted",
        forwards="none in training; before training, the passes for the scores and for the models that the scores need: "
        "models * (epochs + 1) times N for EL2N",
        claim="CIFAR-10 with half of the data pruned by EL2N: slightly more accurate than all data with as many steps",
        differences=(
            "The code sorts without a rule for ties; here the order is by (score, id).",
            "The code's offset counts samples from the smallest score; `offset` is a share counted from the largest.",
            "Samples without a finite score are kept first.",
            "The code trains for a fixed number of steps for every `keep`; here it is a fixed number of epochs.",
        ),
        caveat="scores of K models of e epochs cost more than a run of E epochs saves, unless K * e < (1 - keep) * E or "
        "several runs use them. Equal scores, as most numbers of forgetting events are, are ordered by id: if the dataset is "
        "sorted by class, use `per_class_floor`, or whole classes are lost",
    )
    stage: ClassVar[Literal["before"]] = "before"
    requires: ClassVar[Requirements] = Requirements()
    scores: Scores | str
    keep: float = 0.75
    which: Which = "hard"
    offset: float = 0.0
    per_class_floor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", checked_scores(self, "scores", self.scores))
        check_keep(self, self.keep)
        check_choices(self)
        if not (is_number(self.offset) and 0 <= self.offset <= 1 - self.keep + 1e-9):
            raise ValueError(
                f"Prune: `offset` is the share to remove, within [0, 1 - keep], got {self.offset!r} with keep={self.keep}"
            )
        if self.offset and self.which != "window":
            raise ValueError(
                f"Prune: `offset` is for which='window' only, got {self.offset} with which={self.which!r}"
            )
        check_within(self, "[0, 1]", "per_class_floor")
        if isinstance(self.scores, Scores):
            self._check_labels(self.scores)

    @property
    def table(self) -> Scores:
        """The scores; if `scores` is a path, they are read from the file."""
        return loaded(self.scores)

    @property
    def cost(self) -> tuple[int, int]:
        """Numbers of samples that went through forward and backward passes to compute the scores."""
        table = self.table
        return table.forward, table.backward

    def kept(self, n: int) -> Tensor:
        """Returns the ids of the samples to train on.

        Args:
            n: Number of samples of the dataset.

        Returns:
            Ids, ascending, shape (max(1, floor(keep * n)),), int64; more where `per_class_floor` requires it.

        Raises:
            ValueError: The scores belong to another number of samples, or lack the labels that `per_class_floor` needs.
        """
        table = self.table
        self._check_labels(table)
        count = max(1, share(self.keep, n))
        values = on_host(table.dense(n))
        too_hard = min(share(self.offset, n), int(np.count_nonzero(np.isfinite(values))), n - count)
        order = ranked(values, self.which, drop=too_hard)
        if self.per_class_floor and table.labels is not None:
            labels = np.full(n, -1, dtype=np.int64)
            _, labels[table.ids.numpy()] = np.unique(table.labels.numpy(), return_inverse=True)
            first = floors(order, labels, self.per_class_floor)
            order = np.concatenate([first, order[~np.isin(order, first)]])
            count = max(count, len(first))
        mask = np.zeros(n, dtype=np.bool_)
        mask[order[:count]] = True
        return ids_of(mask)

    def _check_labels(self, table: Scores) -> None:
        if self.per_class_floor and table.labels is None:
            raise ValueError(
                "Prune: `per_class_floor` needs the classes of the samples, and the scores have no labels: score a dataset "
                "whose targets are classes, or give Scores(labels=...)"
            )
