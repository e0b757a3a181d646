"""The page: the table, the sentences, every chart that there is data for, sheets of samples and settings, in one file."""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from thresher.experiments.comparison.summary import is_share
from thresher.experiments.training.store import whole
from thresher.report import charts, sample_charts
from thresher.report.loading import Results, Samples, load, methods
from thresher.report.sheets import Pictures, pictures_of, sheets
from thresher.report.style import INK

REPORT = "report.html"
SHARES = {"cost": "cost as counted", "cpu": "CPU time", "wall": "wall time"}

Draw = Callable[..., go.Figure | None]
Views = Callable[[Results, Samples], Mapping[str, Draw]]


@dataclass(frozen=True)
class Chart:
    """A place on the page.

    Args:
        key: Names it in the page and in file names.
        title: Above it.
        note: Below the title: what is drawn, and how to read it.
        views: What can be chosen to be drawn there, by label, as functions of results and samples.
    """

    key: str
    title: str
    note: str
    views: Views

    def figures(self, results: Results, samples: Samples) -> dict[str, go.Figure]:
        """Those views that there is data for."""
        drawn = {label: draw(results, samples) for label, draw in self.views(results, samples).items()}
        return {label: figure for label, figure in drawn.items() if figure is not None}


def one(draw: Draw) -> Views:
    """A chart with a single view."""
    return lambda results, samples: {"": draw}


def each(draw: Draw, labels: Mapping[str, str]) -> Views:
    """A view for each of the values that `draw` takes, given with their labels."""
    return lambda results, samples: {label: partial(draw, by=value) for value, label in labels.items()}


def each_method(draw: Draw) -> Views:
    """A view for each method."""
    return lambda results, samples: {method: partial(draw, method=method) for method in methods(results)}


def each_part(draw: Draw) -> Views:
    """A view for each part of the samples by their loss."""
    parts = {"all": "all samples", "bottom": "lowest 98 %", "top": "highest 2 %"}
    return lambda results, samples: {label: partial(draw, part=part) for part, label in parts.items()}


def each_class(draw: Draw) -> Views:
    """A view of all classes together, and one for each."""

    def views(results: Results, samples: Samples) -> dict[str, Draw]:
        one_class = {
            f"class {number}": partial(draw, of_class=str(number)) for number in sample_charts.classes(results, samples)
        }
        return {"all classes": draw, **one_class}

    return views


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "What it cost, and what it reached": (
        Chart(
            "cost",
            "Against cost",
            "Each method's mean over the seeds; bars are the 95 % interval of the difference to full training, seed by seed. "
            "Grey lines join the controls, which cost the same as the methods. The dotted line is full training, the shade "
            "below it the margin: a loss that does not matter.",
            each(charts.metric_against_cost, SHARES),
        ),
        Chart(
            "curves",
            "During training",
            "Median of the seeds; the band reaches from the lowest to the highest. Controls can be switched on.",
            each(
                charts.metric_curve, {"epoch": "epochs", "cost": "cost as counted", "cpu_s": "CPU time", "wall_s": "wall time"}
            ),
        ),
        Chart(
            "targets",
            "Time to target",
            "What it took until the error was no larger than 1.4, 1.2 and 1.1 times the one that full training ends with, as a "
            "share of what full training took to get there; medians of the seeds. No bar: half of the seeds did not reach it.",
            each(charts.time_to_target, {"cost": "cost as counted", "cpu_s": "CPU time"}),
        ),
        Chart(
            "speed",
            "Speed-up",
            "The median epoch of full training, divided by the time that this epoch took; above 1 is faster.",
            each(
                charts.speed_up,
                {"cpu_s": "CPU time of an epoch", "wall_s": "wall time of an epoch", "step_s": "time of a step"},
            ),
        ),
    ),
    "What was left out": (
        Chart(
            "left-out",
            "Share left out of the epoch",
            "What an epoch was not trained on. Dashed: the cap on it that was asked for, where the method has one.",
            one(charts.left_out),
        ),
        Chart(
            "hidden",
            "Left out, by class",
            "Samples of each class that an epoch was not trained on, mean of the seeds; below, the rank of the classes by it. "
            "What the loader did not yield, by its sampler or drop_last, is among them.",
            each_method(charts.hidden_by_class),
        ),
        Chart(
            "overlap",
            "Do methods leave out the same samples?",
            "Those that both left out of an epoch, as a share of those that either did; line and marker have the colours of "
            "the two. Two halves drawn at random have a third in common, two thirds of the samples a half. Not counted is what "
            "full training with the same seed did not get from its loader; counted is what drop_last takes of smaller epochs.",
            one(sample_charts.overlap_by_epoch),
        ),
        Chart(
            "overlap-matrix",
            "The same over all epochs",
            "Sample by sample and epoch by epoch: left out by both, as a share of left out by either; mean of the seeds.",
            each_class(sample_charts.overlap_matrix),
        ),
        Chart(
            "weights",
            "Weights of mixed methods",
            "What a method that mixes several gives to each of them.",
            each_method(charts.weights),
        ),
    ),
    "Losses of the samples": (
        Chart(
            "histogram",
            "Distribution of losses",
            "Share of samples by loss after each epoch, as each was last seen, in colours by powers of ten; the outermost bins "
            "hold what lies outside.",
            each_method(charts.loss_histogram),
        ),
        Chart(
            "easy",
            "Easy samples",
            "Share of samples whose loss is below 5 % of the largest.",
            one(charts.easy_share),
        ),
        Chart(
            "parts",
            "The last ten epochs",
            "Mean loss of all samples, of the 2 % with the largest loss in each epoch, and of the others, as "
            "each was last seen.",
            each_part(sample_charts.loss_of_part),
        ),
    ),
}


def write_report(folder: Path, data: Path | None = None) -> Path:
    """Write the page of a comparison into its folder, whole or not at all.

    Args:
        folder: Of the comparison.
        data: Folder with the data, for tasks that take one; without the data, samples are shown as rows.

    Returns:
        Where the page is.

    Raises:
        FileNotFoundError: The folder has no results; or `data` was given, and lacks files.
        ValueError: A file of the comparison is damaged.
    """
    results, samples = load(folder)
    with whole(folder / REPORT) as file:
        file.write(page(results, samples, _pictures(results, samples, data)).encode())
    return folder / REPORT


def _pictures(results: Results, samples: Samples, data: Path | None) -> Pictures | None:
    if not samples:
        return None
    try:
        return pictures_of(results["task"], data)
    except FileNotFoundError:
        if data is not None:
            raise
        return None


def page(results: Results, samples: Samples, pictures: Pictures | None = None) -> str:
    """The page as HTML."""
    loader = PackageLoader("thresher.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.jinja").render(
        results=results,
        seeds=sorted({run["seed"] for run in results["runs"]}),
        columns=(*COLUMNS[:1], results["runs"][0]["metric"]["name"], *COLUMNS[1:]),
        margin=amount(results, results.get("margin")),
        rows=[_row(row, results) for row in results["summary"]],
        sections={title: _drawn(held, results, samples) for title, held in SECTIONS.items()},
        sheets=sheets(results, samples, pictures),
        settings=_settings(results),
        counted=COUNTED,
        plotly=base64.b64encode(zlib.compress(get_plotlyjs().encode())).decode(),
        ink=INK,
    )


def _drawn(held: tuple[Chart, ...], results: Results, samples: Samples) -> list[tuple[Chart, dict[str, str]]]:
    """Charts of a section with their views as JSON that is safe within HTML; charts without data left out."""
    drawn = [(chart, chart.figures(results, samples)) for chart in held]
    return [(chart, {label: str(figure.to_json()) for label, figure in figures.items()}) for chart, figures in drawn if figures]


COUNTED = ("forward", "backward", "refresh", "scoring", "steps")
COLUMNS = ("method", "difference to full", "cost as counted", "CPU time", "wall time", "verdict")


def _row(row: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Texts of the cells and what they are sorted by; None sorts last."""
    scale, digits = (100, 2) if is_share(results["runs"]) else (1, 4)
    spread = "" if row.get("std") is None else f" ± {scale * row['std']:.{digits}f}"
    shares = [row.get(f"{name}_ratio") for name in SHARES]
    cells = [
        (f"{scale * row['mean']:.{digits}f}{spread}", row["mean"]),
        (_difference(row, scale, digits), row["difference"]),
        *(("" if share is None else f"{share:.3f}", share) for share in shares),
    ]
    return {
        "method": row["method"],
        "of": row["control_of"],
        "cells": cells,
        "verdict": row["verdict"],
        "finding": row.get("finding"),
    }


def amount(results: Results, margin: float | None) -> str:
    """The margin with its unit, as results.json holds it: points where the metric is a share."""
    return "" if margin is None else f"{margin:g}{' points' if is_share(results['runs']) else ''}"


def _difference(row: Mapping[str, Any], scale: int, digits: int) -> str:
    if row["difference"] is None:
        return ""
    bounds = "" if row["ci95"] is None else " [{}, {}]".format(*(f"{scale * bound:+.{digits}f}" for bound in row["ci95"]))
    return f"{scale * row['difference']:+.{digits}f}{bounds}"


def _settings(results: Results) -> dict[str, dict[str, str]]:
    """What each method was given, and the mean of what its runs counted."""
    return {
        method: {
            "settings": json.dumps(runs[0]["settings"], default=str) if runs[0]["settings"] else "",
            **{name: _mean_of(runs, name) for name in COUNTED},
        }
        for method, runs in methods(results).items()
    }


def _mean_of(runs: list[dict[str, Any]], name: str) -> str:
    values = [run["cost"].get(name) for run in runs]
    return "" if None in values else f"{sum(values) / len(values):,.0f}"
