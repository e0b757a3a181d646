"""Sheets of samples that stand out: the easiest, the hardest, those left out most often and never, and by combined rank."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from thresher.experiments.tasks.pictures import ImageArray, data_uri
from thresher.report.loading import ResultsDict, RunHistory, Samples, histories

CARDS_PER_SHEET = 12
"""Largest number of samples on a sheet."""
IMAGES_PER_PAGE = 600
"""Largest number of images on a page, which keeps the page of twenty methods below 4 MB."""

RowOrder = NDArray[np.int64]
"""Row numbers into a history, in the order in which a sheet shows them."""


@dataclass(frozen=True)
class SampleCard:
    """What a sheet shows of one sample.

    Args:
        id: Id of the sample.
        target: Class of the sample; None for data without classes.
        loss: Mean loss over the epochs.
        trained: Number of times that the sample was trained on.
        hidden: Number of epochs in which the sample was left out.
        image: Image as a data URI; None where there is none.
    """

    id: int
    target: int | None
    loss: float
    trained: int
    hidden: int
    image: str | None


@dataclass(frozen=True)
class Sheet:
    """Samples that have something in common.

    Args:
        title: Heading that says what they have in common.
        cards: The samples in order.
    """

    title: str
    cards: list[SampleCard]


def sheets(results: ResultsDict, samples: Samples, images: ImageArray | None) -> dict[str, list[Sheet]]:
    """Returns the sheets of each method for its first seed; full training, which leaves nothing out, is the last.

    Args:
        results: Content of results.json.
        samples: Histories of the samples by file name.
        images: Images of all training samples by id; None: the cards have no images.
    """
    held = sorted(histories(results, samples).items(), key=lambda item: item[0] == "full")
    of_methods = {method: next(iter(of_seeds.values())) for method, of_seeds in held}
    cards = CARDS_PER_SHEET if images is None else cards_per_sheet(len(of_methods))
    return {method: _sheets_of(history, images, cards) for method, history in of_methods.items() if len(history.ids)}


def cards_per_sheet(of_methods: int) -> int:
    """Returns how many samples a sheet shows as images, which is fewer where there are many methods."""
    return min(CARDS_PER_SHEET, max(1, IMAGES_PER_PAGE // (len(ORDERS) * max(1, of_methods))))


def _sheets_of(history: RunHistory, images: ImageArray | None, cards: int) -> list[Sheet]:
    if images is not None and history.ids[-1] >= len(images):
        images = None
    chosen = {title: choose(history)[:cards] for title, choose in ORDERS.items()}
    return [Sheet(title, [_sample_card(history, row, images) for row in rows]) for title, rows in chosen.items() if len(rows)]


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
    "hardest: the highest mean loss": hardest_first,
    "left out in most epochs": most_hidden_first,
    "never left out, the easiest first": never_hidden_first,
    "lowest sum of the rank by mean loss and the rank by times trained": lowest_combined_rank_first,
}


def _sample_card(history: RunHistory, row: int, images: ImageArray | None) -> SampleCard:
    number = int(history.ids[row])
    return SampleCard(
        id=number,
        target=None if history.targets is None else int(history.targets[row]),
        loss=float(history.mean_loss[row]),
        trained=int(history.trained[row].sum()),
        hidden=int(history.hidden[row]),
        image=None if images is None else data_uri(images[number]),
    )
