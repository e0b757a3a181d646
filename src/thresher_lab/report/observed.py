"""Writes the page of a data map: the map, the classes, and the samples that stand out."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from thresher import DataMap
from thresher_lab.report.charts import empty_figure, short
from thresher_lab.report.page import plotly_js, template
from thresher_lab.tasks.pictures import ImageArray, training_images
from thresher_lab.training.samples import class_name
from thresher_lab.training.shown import Show, UnshowableError, shown
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
    show: Show | None = None,
    images: ImageArray | None = None,
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
        show: Function from the id of a sample to a picture or a text. Default: samples have their numbers.
        images: Images of all samples, shape (N, H, W) or (N, H, W, 3), uint8, instead. Default: none.
    """
    if images is not None:
        show = images.__getitem__
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
            title: [_card(found, int(row), classes, show) for row in rows]
            for title, rows in rows_that_stand_out(found).items()
            if len(rows)
        },
        plotly=plotly_js(),
    )
    with whole(path) as file:
        file.write(page.encode())


def images_of(task: str, data: Path | None, samples: int) -> ImageArray | None:
    """Returns the images of the samples of a built-in task; None where there are none, or they are not those of the samples.

    Args:
        task: Name of the task.
        data: Folder with the data; None where the task finds it.
        samples: Number of samples of the training.
    """
    with suppress(FileNotFoundError):
        images = training_images(task, data)
        return images if images is not None and len(images) == samples else None
    return None


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
    names = (
        None
        if "label" not in found
        else [class_name(int(found["label"][row]), classes) for row in rows]
    )
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


def rows_that_stand_out(found: DataMap) -> dict[str, NDArray[np.int64]]:
    """Returns the rows of samples that stand out, by what they have in common."""
    place = {int(one): row for row, one in enumerate(found["id"])}

    def rows_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([place[int(one)] for one in ids], dtype=np.int64)

    held = {"The likeliest wrong labels": rows_of(found.suspects(PER_SHEET))}
    if "label" in found:
        held["The likeliest wrong labels of each class"] = rows_of(
            found.suspects(PER_SHEET, by_class=True)
        )
    seen = np.flatnonzero(found["times_seen"] > 0)
    spread = found["variability"] if "variability" in found else found["loss_spread"]
    held["The network changes its mind"] = seen[
        np.argsort(-spread[seen], kind="stable")[:PER_SHEET]
    ]
    held["The easiest"] = seen[np.argsort(found["suspicion"][seen], kind="stable")[:PER_SHEET]]
    return held


CLASS_COLUMNS = ("samples", "confidence", "variability", "forgotten", "never learned, %")


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
        rows.append((confidence, class_name(int(label), classes), cells))
    return [(name, cells) for _, name, cells in sorted(rows)]


def _card(
    found: DataMap, row: int, classes: Sequence[str] | None, show: Show | None
) -> dict[str, Any]:
    """Returns what a sheet shows of one sample: id, class (None if it is not known), values in words, and picture or text."""
    number = int(found["id"][row])
    seen: dict[str, str] = {}
    if show is not None:
        try:
            seen = shown(show(number))
        except UnshowableError as error:
            seen = {"text": str(error)}
    name = "confidence" if "confidence" in found else "loss_mean"
    label = None if "label" not in found else class_name(int(found["label"][row]), classes)
    if (
        label
        and "predicted" in found
        and (guess := int(found["predicted"][row])) not in (-1, int(found["label"][row]))
    ):
        label += f", predicted {class_name(guess, classes)}"
    return {
        "id": number,
        "label": label,
        "observed": f"{name.replace('_mean', '')} {found[name][row]:.3g}, {int(found['times_seen'][row])}x",
        "image": None if "png" not in seen else f"data:image/png;base64,{seen['png']}",
        "text": seen.get("text"),
    }
