"""Samples of a run that stand out: the easiest, the hardest, those left out most often and never, and by combined rank."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from thresher.experiments.training.sample_history import RunHistory

MOST_TOGETHER = 12
"""Largest number of samples on a sheet."""
MOST_OF_A_CLASS = 3
"""Largest number of samples of one class on a sheet."""

RowOrder = NDArray[np.int64]
"""Row numbers into a history, in the order in which a sheet shows them."""


def easiest_first(history: RunHistory) -> RowOrder:
    """Returns all samples by mean loss, the lowest first."""
    return np.argsort(history.mean_loss, kind="stable")


def hardest_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were seen by mean loss, the highest first."""
    seen = np.flatnonzero(np.isfinite(history.mean_loss))
    return seen[np.argsort(-history.mean_loss[seen], kind="stable")]


def most_hidden_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were left out, by the number of epochs without them; ties by mean loss, the lowest first."""
    order = np.lexsort((history.mean_loss, -history.hidden))
    return order[history.hidden[order] > 0]


def never_hidden_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were trained on in every epoch, the easiest first; none where no sample was ever left out."""
    order = easiest_first(history)
    return order[history.hidden[order] == 0] if history.hidden.any() else order[:0]


def lowest_combined_rank_first(history: RunHistory) -> RowOrder:
    """Returns all samples by the sum of their ranks by mean loss and by times trained, the lowest first."""
    return np.argsort(rankdata(history.mean_loss) + rankdata(history.trained.sum(axis=1)), kind="stable")


ORDERS: dict[str, Callable[[RunHistory], RowOrder]] = {
    "easiest: the lowest mean loss over the epochs": easiest_first,
    "hardest: the highest mean loss over the epochs": hardest_first,
    "left out in most epochs": most_hidden_first,
    "never left out, the easiest of them first": never_hidden_first,
    "easy and seldom trained on: the lowest sum of the ranks by mean loss and by times trained": lowest_combined_rank_first,
}


def standing_out(history: RunHistory, most: int = MOST_TOGETHER) -> dict[str, RowOrder]:
    """Returns the rows of the samples on each sheet by its title; no sample is on two of them.

    A sheet has at most `MOST_OF_A_CLASS` samples of a class. Those on smaller sheets are among those on larger ones.

    Args:
        history: History of the samples.
        most: Largest number of samples on a sheet, 1 or more. Default: 12.
    """
    left = np.ones(len(history.ids), dtype=bool)
    found: dict[str, RowOrder] = {}
    for title, order in ORDERS.items():
        rows = order(history)
        rows = rows[left[rows]]
        found[title] = (rows if history.targets is None else _first_of_classes(rows, history.targets))[:most]
        left[found[title]] = False
    return {title: rows for title, rows in found.items() if len(rows)}


def _first_of_classes(rows: RowOrder, targets: NDArray[np.int64]) -> RowOrder:
    """Returns the first rows of each class, `MOST_OF_A_CLASS` of them, in their order."""
    by_class = np.argsort(targets[rows], kind="stable")
    ordered = targets[rows][by_class]
    nth = np.empty(len(rows), dtype=np.int64)
    nth[by_class] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return rows[nth < MOST_OF_A_CLASS]
