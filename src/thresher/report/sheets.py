"""Sheets of samples that stand out: the easiest, the hardest, those left out most and never, the lowest in combined rank."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import rankdata

from thresher.experiments.tasks import TASKS, built_in
from thresher.report.loading import History, Results, Samples, histories

CARDS = 12
"""Samples a sheet, at most."""
PICTURES = 600
"""On a page, at most: what keeps that of twenty methods below 4 MB."""

Pictures = NDArray[np.uint8]
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Card:
    """One sample, for people."""

    id: int
    target: int | None
    loss: float
    trained: int
    hidden: int
    picture: str | None
    """A data URI."""


@dataclass(frozen=True)
class Sheet:
    """Samples with something in common."""

    title: str
    cards: list[Card]


def sheets(results: Results, samples: Samples, pictures: Pictures | None) -> dict[str, list[Sheet]]:
    """The sheets of each method's first seed; full training, which leaves nothing out, is the last."""
    held = sorted(histories(results, samples).items(), key=lambda item: item[0] == "full")
    of_methods = {method: next(iter(of_seeds.values())) for method, of_seeds in held}
    cards = CARDS if pictures is None else cards_a_sheet(len(of_methods))
    return {method: _sheets_of(history, pictures, cards) for method, history in of_methods.items() if len(history.ids)}


def cards_a_sheet(of_methods: int) -> int:
    """How many samples a sheet shows as pictures, where there are so many methods: fewer, the more there are."""
    return min(CARDS, max(1, PICTURES // (len(ORDERS) * max(1, of_methods))))


def _sheets_of(history: History, pictures: Pictures | None, cards: int) -> list[Sheet]:
    if pictures is not None and history.ids[-1] >= len(pictures):
        pictures = None
    chosen = {title: choose(history)[:cards] for title, choose in ORDERS.items()}
    return [Sheet(title, [_card(history, at, pictures) for at in order]) for title, order in chosen.items() if len(order)]


def easiest(history: History) -> Order:
    """By mean loss, the lowest first."""
    return np.argsort(history.mean_loss, kind="stable")


def hardest(history: History) -> Order:
    """By mean loss, the highest first; what was never seen has none."""
    seen = np.flatnonzero(np.isfinite(history.mean_loss))
    return seen[np.argsort(-history.mean_loss[seen], kind="stable")]


def most_hidden(history: History) -> Order:
    """By the number of epochs without them; of as many, the easiest first."""
    order = np.lexsort((history.mean_loss, -history.hidden))
    return order[history.hidden[order] > 0]


def never_hidden(history: History) -> Order:
    """Trained on in every epoch, the easiest first; none where nothing is ever left out."""
    order = easiest(history)
    return order[history.hidden[order] == 0] if history.hidden.any() else order[:0]


def lowest_combined_rank(history: History) -> Order:
    """By the sum of the rank in mean loss and the rank in times trained, the lowest first."""
    return np.argsort(rankdata(history.mean_loss) + rankdata(history.trained.sum(axis=1)), kind="stable")


ORDERS: dict[str, Callable[[History], Order]] = {
    "easiest: the lowest mean loss over the epochs": easiest,
    "hardest: the highest mean loss": hardest,
    "left out in most epochs": most_hidden,
    "never left out, the easiest first": never_hidden,
    "lowest in rank by mean loss and rank by times trained, added up": lowest_combined_rank,
}


def _card(history: History, at: int, pictures: Pictures | None) -> Card:
    number = int(history.ids[at])
    return Card(
        id=number,
        target=None if history.targets is None else int(history.targets[at]),
        loss=float(history.mean_loss[at]),
        trained=int(history.trained[at].sum()),
        hidden=int(history.hidden[at]),
        picture=None if pictures is None else data_uri(pictures[number]),
    )


def pictures_of(task: str, folder: Path | None = None) -> Pictures | None:
    """The training pictures of a task of this package, shape (N, H, W), or (N, H, W, 3) of those in colour.

    None of a task without pictures, and of a user's own training, which is not run.

    Args:
        task: As results.json names it.
        folder: With the data, for tasks that take one.

    Raises:
        FileNotFoundError: The data is not there; the message says where to get it.
    """
    name = task.partition("@")[0]
    if name not in TASKS or not TASKS[name].has_images:
        return None
    found = built_in(task)
    inputs = found.load(found.find(folder)).train.tensors[0]
    low, high = inputs.amin((0, 2, 3), keepdim=True), inputs.amax((0, 2, 3), keepdim=True)
    pixels = (255 * (inputs - low) / (high - low)).round().to(torch.uint8).numpy()
    return pixels[:, 0] if pixels.shape[1] == 1 else pixels.transpose(0, 2, 3, 1)


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """A grey picture, shape (H, W), or one in colour, shape (H, W, 3), as a PNG that a page holds itself."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
