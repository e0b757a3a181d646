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
    data_map: DataMap,
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
        data_map: The data map.
        task: Name of the task.
        epochs: Number of epochs of the training.
        seed: Random seed of the training.
        parquet: Name of the file with the table, in the folder of the page.
        classes: Names of the classes. Default: they have numbers alone.
        show: Function from the id of a sample to a picture or a text. Default: the dataset is read, see `DataMap.sheet`.
    """
    rows = rows_to_draw(data_map)
    page = template("observed.html.jinja").render(
        task=task,
        samples=len(data_map["id"]),
        epochs=epochs,
        seed=seed,
        parquet=parquet,
        code=next_steps(parquet),
        chart=figure(data_map, rows, classes).to_json() if "confidence" in data_map else None,
        drawn=len(rows),
        class_columns=CLASS_COLUMNS,
        classes=class_rows(data_map, classes) if {"label", "confidence"} <= set(data_map) else [],
        sheets={
            title: [_card(data_map, number, classes, show) for number in ids.tolist()]
            for title, ids in ids_that_stand_out(data_map).items()
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


def rows_to_draw(data_map: DataMap) -> NDArray[np.int64]:
    """Returns the rows of samples that were seen, at most `MOST_DRAWN`, evenly spaced."""
    rows = np.flatnonzero(data_map["times_seen"] > 0)
    return rows[:: max(1, -(-len(rows) // MOST_DRAWN))]


def figure(data_map: DataMap, rows: NDArray[np.int64], classes: Sequence[str] | None) -> go.Figure:
    """Returns the data map, confidence over variability, with the ids of the samples as custom data.

    Args:
        data_map: The data map.
        rows: Rows of the samples to draw.
        classes: Names of the classes; None if they have none.
    """
    chart = empty_figure("variability", "confidence", height=520)
    if "label" not in data_map:
        names = None
    else:
        names = [_name(data_map["label"][row], classes) for row in rows]
    chart.add_trace(
        go.Scatter(
            x=short(data_map["variability"][rows]),
            y=short(data_map["confidence"][rows]),
            customdata=data_map["id"][rows].tolist(),
            text=names,
            mode="markers",
            marker={
                "size": 5,
                "opacity": 0.7,
                "color": data_map["forgetting"][rows].tolist(),
                "colorscale": "Viridis",
                "colorbar": {"title": "forgotten"},
            },
            hovertemplate="sample %{customdata}, %{text}<br>confidence %{y}, variability %{x}<extra></extra>",
        )
    )
    return chart.update_layout(dragmode="select", showlegend=False)


def write_review(
    path: Path,
    data_map: DataMap,
    *,
    classes: Sequence[str] | None,
    show: Callable[[int], Any] | None,
) -> None:
    """Writes a page on which a person marks the wrong labels; `DataMap.precision` reads the answers.

    Args:
        path: The file.
        data_map: The data map.
        classes: Names of the classes; None if they have none.
        show: See `write_observed`.
    """
    review = data_map.review()
    cards = [_card(data_map, number, classes, show) for number in review["id"].tolist()]
    title = f"{len(cards)} of {len(data_map['id']):,} samples, spread over the ranking"
    write_sheet(path, title, cards, review["rank"].tolist())


def ids_that_stand_out(data_map: DataMap) -> dict[str, NDArray[np.int64]]:
    """Returns the ids of samples that stand out, by what they have in common."""
    groups = {"The likeliest wrong labels": data_map.suspects(PER_SHEET)}
    if "label" in data_map:
        groups["The likeliest wrong labels of each class"] = data_map.suspects(
            PER_SHEET, by_class=True
        )
    seen = np.flatnonzero(data_map["times_seen"] > 0)
    if "variability" in data_map:
        spread = data_map["variability"]
    else:
        spread = data_map["loss_spread"]
    for title, values in (
        ("The network changes its mind", -spread),
        ("The easiest", data_map["suspicion"]),
    ):
        rows = seen[np.argsort(values[seen], kind="stable")[:PER_SHEET]]
        groups[title] = data_map["id"][rows]
    return groups


CLASS_COLUMNS = ("samples", "confidence", "variability", "forgotten", "last wrong, %")


def class_rows(data_map: DataMap, classes: Sequence[str] | None) -> list[tuple[str, list[str]]]:
    """Returns for each class its name, and the cells of `CLASS_COLUMNS`: the least confident class first.

    Args:
        data_map: The data map, with labels and confidence.
        classes: Names of the classes; None if they have none.
    """

    def mean(values: NDArray[Any]) -> float:
        return float(np.nanmean(values))

    rows = []
    for label in np.unique(data_map["label"]):
        rows_of_class = (data_map["label"] == label) & (data_map["times_seen"] > 0)
        if not rows_of_class.any():
            continue
        confidence = mean(data_map["confidence"][rows_of_class])
        cells = [
            f"{rows_of_class.sum():,}",
            f"{confidence:.3f}",
            f"{mean(data_map['variability'][rows_of_class]):.3f}",
            f"{mean(data_map['forgetting'][rows_of_class]):.2f}",
            f"{100 * mean(data_map['learned_at'][rows_of_class] == 0):.1f}",
        ]
        rows.append((confidence, _name(label, classes), cells))
    return [(name, cells) for _, name, cells in sorted(rows)]


def _name(label: Any, classes: Sequence[str] | None) -> str:
    return label if isinstance(label, str) else class_name(int(label), classes)


def _card(data_map: DataMap, number: int, classes: Sequence[str] | None, show: Any) -> Any:
    """Returns the card of a sample; if it cannot be shown, the error is its text."""
    try:
        return data_map.card(number, classes=classes, show=show)
    except Exception as error:  # of `show` or the dataset, which are the user's
        if isinstance(error, TypeError):
            message = str(error)
        else:
            message = f"{type(error).__name__}: {error}"
        return data_map.card(number, classes=classes, show=lambda _: message)
