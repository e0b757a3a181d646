"""Sheets of samples that stand out, with their pictures or texts where there are some."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thresher_lab.report.loading import ResultsDict, Samples, ShownOfRuns, histories, runs_by_method
from thresher_lab.tasks.pictures import ImageArray, data_uri
from thresher_lab.training.samples import (
    MOST_TOGETHER,
    ORDERS,
    SHOWN_SUSPECTS,
    RunHistory,
    class_name,
    standing_out,
    suspects,
)

IMAGES_PER_PAGE = 720
"""Largest number of images on a page, which keeps the page of twenty methods below 4 MB."""

See = Callable[[int], tuple[str | None, str | None]]
"""A function from the id of a sample to its image, as a data URI, and its text; None for what there is not."""
ShownOfSamples = Mapping[int, Mapping[str, str | None]]
"""What samples look like by id, see `ShownOfRuns`."""


@dataclass(frozen=True)
class Sheet:
    """Samples that have something in common.

    Args:
        title: Heading that says what they have in common.
        cards: The samples in order: `id`, `target` (name of the class, or its number; None for data without classes), `loss`
            (the mean over the epochs), `trained` (how often), `hidden` (number of epochs without the sample), `image` (a data
            URI) and `text`, None if there is none.
    """

    title: str
    cards: list[dict[str, Any]]

    @property
    def shows(self) -> bool:
        """Whether there is more to see than numbers."""
        return any(card["image"] is not None or card["text"] is not None for card in self.cards)


def sheets(
    results: ResultsDict,
    samples: Samples,
    images: ImageArray | None,
    shown: ShownOfRuns | None = None,
) -> dict[str, list[Sheet]]:
    """Returns the sheets of each method for its first seed; full training, which leaves nothing out, is the last.

    Args:
        results: Content of results.json.
        samples: Histories of the samples by file name.
        images: Images of all training samples by id; None: the cards have no images, but for those of `shown`.
        shown: Pictures and texts of samples that the runs of a user's own training have written. Default: none.
    """
    held = sorted(histories(results, samples).items(), key=lambda item: item[0] == "full")
    of_methods = {method: next(iter(of_seeds.items())) for method, of_seeds in held}
    if images is None and not shown:
        most = MOST_TOGETHER
    else:
        most = cards_per_sheet(len(of_methods))
    by_method: dict[str, list[Sheet]] = {}
    for method, (seed, history) in of_methods.items():
        if len(history.ids):
            see = _seen(history, images, _shown_of(results, method, seed, shown or {}))
            by_method[method] = _sheets_of(history, see, results.get("classes"), most)
    return by_method


def suspect_sheet(
    results: ResultsDict,
    samples: Samples,
    images: ImageArray | None,
    shown: ShownOfRuns | None = None,
) -> tuple[str, int, Sheet] | None:
    """Returns the samples whose labels are likeliest to be wrong, as the first method saw them, with its name and the seed.

    Args:
        results: Content of results.json.
        samples: Histories of the samples by file name.
        images: Images of all training samples by id; None: the cards have those of `shown`.
        shown: Pictures and texts of samples that the runs of a user's own training have written. Default: none.

    Returns:
        None if samples have no class or cannot be shown.
    """
    for method, of_seeds in sorted(
        histories(results, samples).items(), key=lambda item: item[0] == "full"
    ):
        seed, history = next(iter(of_seeds.items()))
        see = _seen(history, images, _shown_of(results, method, seed, shown or {}))
        rows = suspects(history)[:SHOWN_SUSPECTS]
        sheet = Sheet(
            "Labels to check",
            [_sample_card(history, int(row), see, results.get("classes")) for row in rows],
        )
        return (method, seed, sheet) if sheet.shows else None
    return None


def cards_per_sheet(of_methods: int) -> int:
    """Returns how many samples a sheet shows as images, which is fewer where there are many methods."""
    return min(MOST_TOGETHER, max(1, IMAGES_PER_PAGE // (len(ORDERS) * max(1, of_methods))))


def _shown_of(results: ResultsDict, method: str, seed: int, shown: ShownOfRuns) -> ShownOfSamples:
    run = next(run for run in runs_by_method(results)[method] if run["seed"] == seed)
    return shown.get(run.get("shown") or "", {})


def _sheets_of(
    history: RunHistory, see: See, classes: Sequence[str] | None, most: int
) -> list[Sheet]:
    return [
        Sheet(title, [_sample_card(history, int(row), see, classes) for row in rows])
        for title, rows in standing_out(history, most).items()
    ]


def _seen(history: RunHistory, images: ImageArray | None, shown: ShownOfSamples) -> See:
    if images is not None and history.ids[-1] >= len(images):
        images = None

    def see(number: int) -> tuple[str | None, str | None]:
        if images is not None:
            return data_uri(images[number]), None
        sample = shown.get(number, {})
        return None if sample.get(
            "png"
        ) is None else f"data:image/png;base64,{sample['png']}", sample.get("text")

    return see


def _sample_card(
    history: RunHistory, row: int, see: See, classes: Sequence[str] | None
) -> dict[str, Any]:
    number = int(history.ids[row])
    image, text = see(number)
    return {
        "id": number,
        "target": None
        if history.targets is None
        else class_name(int(history.targets[row]), classes),
        "loss": float(history.mean_loss[row]),
        "trained": int(history.trained[row].sum()),
        "hidden": int(history.hidden[row]),
        "image": image,
        "text": text,
    }
