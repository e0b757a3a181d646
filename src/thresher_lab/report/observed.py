"""Writes the page of a data map: the map, the classes, and the samples that stand out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from thresher import DataMap
from thresher.sheet import write_sheet
from thresher_lab.report.charts import empty_figure, short
from thresher_lab.report.page import plotly_js, template
from thresher_lab.training.samples import class_name
from thresher_lab.training.store import whole

MOST_DRAWN = 10_000
"""Largest number of points of the map: an evenly spaced part of the samples."""
PER_SHEET = 48
"""Number of samples of a sheet."""


def write_observed(
    path: Path,
    found: DataMap,
    *,
    task: str,
    epochs: int,
    seed: int,
    parquet: str,
    classes: Sequence[str] | None = None,
    show: Callable[[int], Any] | None = None,
) -> None:
    """Writes the page; an error leaves an existing one as it was.

    Args:
        path: File of the page.
        found: The data map.
        task: Name of the task.
        epochs: Number of epochs of the training.
        seed: Random seed of the training.
        parquet: Name of the file with the table, in the folder of the page.
        classes: Names of the classes. Default: they have numbers alone.
        show: Function from the id of a sample to a picture or a text. Default: the dataset is read, see `DataMap.sheet`.
    """
    drawn = rows_to_draw(found)
    page = template("observed.html.jinja").render(
        task=task,
        samples=len(found["id"]),
        epochs=epochs,
        seed=seed,
        parquet=parquet,
        code=next_steps(parquet),
        chart=figure(found, drawn, classes).to_json() if "confidence" in found else None,
        drawn=len(drawn),
        class_columns=CLASS_COLUMNS,
        classes=class_rows(found, classes) if {"label", "confidence"} <= set(found) else [],
        sheets={
            title: [_card(found, number, classes, show) for number in ids.tolist()]
            for title, ids in ids_that_stand_out(found).items()
            if len(ids)
        },
        plotly=plotly_js(),
    )
    with whole(path) as file:
        file.write(page.encode())


def next_steps(parquet: str) -> str:
    """Returns lines of Python that train without the most suspicious samples.

    Args:
        parquet: Name of the file with the table.
    """
    return (
        "import pyarrow.parquet as pq\n"
        f'table = pq.read_table("{parquet}").sort_by([("suspicion", "descending")])\n'
        'suspects = table.column("id").to_pylist()[:100]  # look at them first\n'
        "kept = sorted(set(range(len(dataset))) - set(suspects))\n"
        "dataset = torch.utils.data.Subset(dataset, kept)  # and train without those that are wrong"
    )


def rows_to_draw(found: DataMap) -> NDArray[np.int64]:
    """Returns the rows of samples that were seen, at most `MOST_DRAWN`, evenly spaced."""
    rows = np.flatnonzero(found["times_seen"] > 0)
    return rows[:: max(1, -(-len(rows) // MOST_DRAWN))]


def figure(found: DataMap, rows: NDArray[np.int64], classes: Sequence[str] | None) -> go.Figure:
    """Returns the data map, confidence over variability, with the ids of the samples as custom data.

    Args:
        found: The data map.
        rows: Rows of the samples that are drawn.
        classes: Names of the classes; None where there are none.
    """
    drawn = empty_figure("variability", "confidence", height=520)
    names = None if "label" not in found else [_name(found["label"][row], classes) for row in rows]
    drawn.add_trace(
        go.Scatter(
            x=short(found["variability"][rows]),
            y=short(found["confidence"][rows]),
            customdata=found["id"][rows].tolist(),
            text=names,
            mode="markers",
            marker={
                "size": 5,
                "opacity": 0.7,
                "color": found["forgetting"][rows].tolist(),
                "colorscale": "Viridis",
                "colorbar": {"title": "forgotten"},
            },
            hovertemplate="sample %{customdata}, %{text}<br>confidence %{y}, variability %{x}<extra></extra>",
        )
    )
    return drawn.update_layout(dragmode="select", showlegend=False)


def write_review(
    path: Path, found: DataMap, *, classes: Sequence[str] | None, show: Callable[[int], Any] | None
) -> None:
    """Writes a page on which a person says which labels are wrong; `DataMap.precision` reads the answers.

    Args:
        path: The file.
        found: The data map.
        classes: Names of the classes; None where there are none.
        show: See `write_observed`.
    """
    drawn = found.review()
    cards = [_card(found, number, classes, show) for number in drawn["id"].tolist()]
    title = f"{len(cards)} of {len(found['id']):,} samples, spread over the ranking"
    write_sheet(path, title, cards, drawn["rank"].tolist())


def ids_that_stand_out(found: DataMap) -> dict[str, NDArray[np.int64]]:
    """Returns the ids of samples that stand out, by what they have in common."""
    held = {"The likeliest wrong labels": found.suspects(PER_SHEET)}
    if "label" in found:
        held["The likeliest wrong labels of each class"] = found.suspects(PER_SHEET, by_class=True)
    seen = np.flatnonzero(found["times_seen"] > 0)
    spread = found["variability"] if "variability" in found else found["loss_spread"]
    for title, values in (
        ("The network changes its mind", -spread),
        ("The easiest", found["suspicion"]),
    ):
        rows = seen[np.argsort(values[seen], kind="stable")[:PER_SHEET]]
        held[title] = found["id"][rows]
    return held


CLASS_COLUMNS = ("samples", "confidence", "variability", "forgotten", "last wrong, %")


def class_rows(found: DataMap, classes: Sequence[str] | None) -> list[tuple[str, list[str]]]:
    """Returns for each class its name, and the cells of `CLASS_COLUMNS`: the least confident class first.

    Args:
        found: The data map, with labels and confidence.
        classes: Names of the classes; None where there are none.
    """

    def mean(values: NDArray[Any]) -> float:
        return float(np.nanmean(values))

    rows = []
    for label in np.unique(found["label"]):
        rows_of_class = (found["label"] == label) & (found["times_seen"] > 0)
        if not rows_of_class.any():
            continue
        confidence = mean(found["confidence"][rows_of_class])
        cells = [
            f"{rows_of_class.sum():,}",
            f"{confidence:.3f}",
            f"{mean(found['variability'][rows_of_class]):.3f}",
            f"{mean(found['forgetting'][rows_of_class]):.2f}",
            f"{100 * mean(found['learned_at'][rows_of_class] == 0):.1f}",
        ]
        rows.append((confidence, _name(label, classes), cells))
    return [(name, cells) for _, name, cells in sorted(rows)]


def _name(label: Any, classes: Sequence[str] | None) -> str:
    return label if isinstance(label, str) else class_name(int(label), classes)


def _card(found: DataMap, number: int, classes: Sequence[str] | None, show: Any) -> Any:
    """Returns the card of a sample; if it cannot be shown, the error is its text."""
    try:
        return found.card(number, classes=classes, show=show)
    except Exception as error:  # of `show` or the dataset, which are the user's
        message = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        return found.card(number, classes=classes, show=lambda _: message)
