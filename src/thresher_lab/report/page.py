"""Writes the report as one page: table, sentences, charts, sheets of samples and settings; or as Markdown."""

import base64
import csv
import io
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from thresher_lab.comparison.controls import CONTROLS, SAME_TIME
from thresher_lab.comparison.summary import (
    conclude,
    difference_text,
    forms,
    interval_sentences,
    is_share,
    left_out_sentence,
    length_sentences,
    listed,
    rates_sentences,
    sentences_on_times,
    training_text,
    unfinished,
)
from thresher_lab.report import charts, class_charts
from thresher_lab.report.charts import INK
from thresher_lab.report.first_screen import bottom_line
from thresher_lab.report.loading import (
    ResultsDict,
    Samples,
    ShownOfRuns,
    controls,
    load_comparison,
    load_shown,
    runs_by_method,
)
from thresher_lab.report.sheets import sheets, suspect_sheet
from thresher_lab.tasks.pictures import ImageArray, training_images
from thresher_lab.training.files import markdown_table
from thresher_lab.training.loop import COST_COUNTERS
from thresher_lab.training.samples import MOST_OF_A_CLASS, class_name
from thresher_lab.training.store import whole


@cache
def plotly_js() -> str:
    """Returns the source of plotly.js with the traces that our charts have: scatter, bar and heatmap."""
    return files("thresher_lab.report").joinpath("plotly.js").read_text(encoding="utf-8")


@cache
def _deflated_plotly() -> str:
    return _deflated(plotly_js())


def as_markdown(results: ResultsDict) -> str:
    """Returns the results of a comparison as Markdown.

    Args:
        results: Content of results.json.
    """
    metric = results["runs"][0]["metric"]["name"]
    share = is_share(results["runs"])
    title = f"**{results['task']}**, {training_text(results)}"
    header = (
        "method",
        f"{metric}, %" if share else metric,
        "difference to full",
        "cost",
        "CPU time",
        "memory of a step",
        "verdict",
    )
    rows = [_cells(row, results) for row in results["summary"]]
    sentences = unfinished(results) + conclude(results).sentences
    sentences += interval_sentences(results) + rates_sentences(results)
    return "\n\n".join([title, *sentences, markdown_table(header, rows)]) + "\n"


def _cells(row: dict[str, Any], results: ResultsDict) -> tuple[str, ...]:
    show, signed = forms(results)
    spread = "" if row["std"] is None else f" ± {show(row['std'])}"
    if row["control_of"] is None:
        name = f"`{row['method']}`"
    else:
        name = f"  `{row['method']}` for `{row['control_of']}`"
    ratios = (row.get("cpu_ratio"), row.get("memory_ratio"))
    shares = ("unknown" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    mean = f"{show(row['mean'])}{spread}"
    cost = f"{row['cost_ratio']:.3f}"
    return name, mean, difference_text(row, signed), cost, *shares, row["verdict"]


REPORT = "report.html"
REFRESH_S = 30
"""Seconds after which an open page loads itself again while the comparison runs."""
COST_MEASURES = {
    "cost": "cost as counted",
    "cpu": "CPU time",
    "wall": "wall time",
    "memory": "memory of a step",
}
"""Labels of the measures of cost by the first part of their key in `summary`."""

ChartFunction = Callable[..., go.Figure | None]
"""A function of results and samples; None where there is nothing to draw."""
Views = Callable[[ResultsDict, Samples], Mapping[str, ChartFunction]]
"""A function of results and samples that returns chart functions by the label under which the reader chooses them."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page, in one or several views.

    Args:
        key: Identifier in the HTML and in file names.
        title: Heading above the chart.
        note: Explanation below the title: what is drawn, and how to read it.
        views: Function that returns the views among which the reader can choose.
    """

    key: str
    title: str
    note: str
    views: Views

    def figures(self, results: ResultsDict, samples: Samples) -> dict[str, go.Figure]:
        """Returns the figures of all views for which there is data, by label."""
        drawn = {
            label: draw(results, samples) for label, draw in self.views(results, samples).items()
        }
        return {label: figure for label, figure in drawn.items() if figure is not None}


def single_view(draw: ChartFunction) -> Views:
    """Returns the views of a chart that has only one."""
    return lambda results, samples: {"": draw}


def views_by(draw: ChartFunction, labels: Mapping[str, str], argument: str = "by") -> Views:
    """Returns one view per value of an argument.

    Args:
        draw: Chart function with this argument.
        labels: Labels of the views by value.
        argument: Name of the argument. Default: by.
    """
    return lambda results, samples: {
        label: partial(draw, **{argument: value}) for value, label in labels.items()
    }


def each_method(draw: ChartFunction) -> Views:
    """Returns one view per method."""
    return lambda results, samples: {
        method: partial(draw, method=method) for method in runs_by_method(results)
    }


def each_class(draw: ChartFunction) -> Views:
    """Returns one view of all classes together, and one per class."""

    def views(results: ResultsDict, samples: Samples) -> dict[str, ChartFunction]:
        one_class = {
            f"class {class_name(number, results.get('classes'))}": partial(
                draw, of_class=str(number)
            )
            for number in charts.class_numbers(results, samples)
        }
        return {"all classes": draw, **one_class}

    return views


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "What it cost, and what it reached": (
        Chart(
            "cost",
            "Against cost",
            "Each point is the mean of a method over the seeds; its bar is the 95 % interval of the difference to full "
            "training, paired by seed. Grey lines join the controls, which cost the same as the methods. The dotted line is "
            "full training, and the shade below it is the margin: a difference that does not matter.",
            views_by(charts.metric_against_cost, COST_MEASURES),
        ),
        Chart(
            "curves",
            "During training",
            "The line is the median of the seeds; the band reaches from the lowest to the highest seed. Controls are hidden "
            "until you choose them in the legend.",
            views_by(
                charts.metric_curve,
                {
                    "epoch": "epochs",
                    "cost": "cost as counted",
                    "cpu_s": "CPU time",
                    "wall_s": "wall time",
                },
            ),
        ),
        Chart(
            "classes",
            "Of each class",
            "The accuracy of each class less that of full training, with 95 % intervals over the seeds, paired; not corrected "
            "for the number of classes. The samples are those of the metric, with their number in brackets. Of more than 30 "
            "classes, those that change most.",
            single_view(class_charts.change_by_class),
        ),
        Chart(
            "confusion",
            "Taken for another class",
            "The share of each class that is taken for each class: of full training as it is, of a method as the difference "
            "to full training; means of the seeds.",
            each_method(class_charts.taken_for),
        ),
        Chart(
            "targets",
            "Time to target",
            "The cost until the error was at most 1.4, 1.2 and 1.1 times the median final error of full training, as a share "
            "of what full training took to reach the same error; medians of the seeds. Where a bar is missing, at least half "
            "of the seeds did not reach the target.",
            views_by(charts.times_to_targets, {"cost": "cost as counted", "cpu_s": "CPU time"}),
        ),
        Chart(
            "speed",
            "Speed-up",
            "The time of the median epoch of full training, divided by the time of this epoch; above 1 is faster.",
            views_by(
                charts.speed_up,
                {
                    "cpu_s": "CPU time of an epoch",
                    "wall_s": "wall time of an epoch",
                    "step_s": "time of a step",
                },
            ),
        ),
    ),
    "What was left out": (
        Chart(
            "left-out",
            "Share left out of the epoch",
            "The share of the samples that the plan of an epoch left out. Dashed: the maximum that was set, where the method "
            "has one.",
            single_view(charts.left_out),
        ),
        Chart(
            "hidden",
            "Left out, by class",
            "The share of each class that an epoch was not trained on, mean of the seeds; below, the rank of the classes by "
            "that share. Where the sizes of the classes are not known, it is the number of samples. Samples that the loader "
            "did not yield (because of its sampler or drop_last) are counted too.",
            each_method(charts.hidden_by_class),
        ),
        Chart(
            "overlap",
            "Do methods leave out the same samples?",
            "The samples that both methods left out of an epoch, as a share of those that either left out; line and marker "
            "have the colors of the two methods. For comparison: two random halves of the samples overlap by a third, two "
            "random sets of two thirds by a half. Samples that full training with the same seed did not get from its loader "
            "are not counted; samples that drop_last removes from smaller epochs are.",
            single_view(charts.overlap_by_epoch),
        ),
        Chart(
            "overlap-matrix",
            "The same over all epochs",
            "Pairs of sample and epoch that both methods left out, as a share of those that either left out; mean of the "
            "seeds.",
            each_class(charts.overlap_matrix),
        ),
        Chart(
            "weights",
            "Weights of mixed methods",
            "The weight that a method which mixes several selectors gives to each of them.",
            each_method(charts.weights),
        ),
    ),
    "Losses of the samples": (
        Chart(
            "histogram",
            "Distribution of losses",
            "The share of samples by their latest loss after each epoch; colors change by powers of ten. The outermost "
            "bins also hold all smaller and all larger losses.",
            each_method(charts.loss_histogram),
        ),
        Chart(
            "easy",
            "Easy samples",
            "The share of samples whose loss is below 5 % of the largest loss.",
            single_view(charts.easy_share),
        ),
        Chart(
            "parts",
            "The last ten epochs",
            "The mean of the latest losses of all samples, of the 2 % with the largest loss in each epoch, and of the others.",
            views_by(
                charts.loss_of_part,
                {"all": "all samples", "bottom": "lowest 98 %", "top": "highest 2 %"},
                "part",
            ),
        ),
    ),
}


def write_report(folder: Path, data: Path | None = None, *, refreshes: bool = False) -> Path:
    """Writes the report of a comparison into its folder. An error leaves an existing report as it was.

    Args:
        folder: Folder of the comparison.
        data: Folder with the data, for tasks that take one. Without the data, samples are shown as rows of a table instead of
            images.
        refreshes: Whether an open page loads itself again, because the comparison is still running. Default: False.

    Returns:
        Path of the HTML file.

    Raises:
        FileNotFoundError: The folder has no results.json, or `data` was given and lacks files.
        ValueError: A file of the comparison is damaged.
    """
    results, samples = load_comparison(folder)
    with whole(folder / REPORT) as file:
        images = _images_of_samples(results, samples, data)
        file.write(
            render_page(
                results, samples, images, load_shown(folder, results), refreshes=refreshes
            ).encode()
        )
    return folder / REPORT


def _images_of_samples(
    results: ResultsDict, samples: Samples, data: Path | None
) -> ImageArray | None:
    if not samples:
        return None
    try:
        return training_images(results["task"], data)
    except FileNotFoundError:
        if data is not None:
            raise
        return None


def render_page(
    results: ResultsDict,
    samples: Samples,
    images: ImageArray | None = None,
    shown: ShownOfRuns | None = None,
    *,
    refreshes: bool = False,
) -> str:
    """Returns the report as HTML.

    Args:
        results: Content of results.json.
        samples: Histories of the samples by file name.
        images: Training images for the sheets, shape (N, H, W) or (N, H, W, 3), uint8. None: samples that the runs have
            not shown themselves are rows of a table.
        shown: Pictures and texts of samples, see `load_shown`. Default: none.
        refreshes: Whether an open page loads itself again, see `write_report`. Default: False.
    """
    sections = {title: _section_charts(held, results, samples) for title, held in SECTIONS.items()}
    metric = results["runs"][0]["metric"]["name"]
    return template("page.html.jinja").render(
        results=results,
        refresh_s=REFRESH_S if refreshes else None,
        unfinished=unfinished(results),
        first=bottom_line(results),
        seeds=sorted({run["seed"] for run in results["runs"]}),
        columns=("method", metric, "difference to full", *COST_MEASURES.values(), "verdict"),
        on_times=sentences_on_times(results),
        margin=margin_text(results, results.get("margin")),
        csv=_csv(results),
        rows=[_verdict_row(row, results) for row in results["summary"]],
        controls=_controls_in_words(results),
        left_out=[
            *interval_sentences(results),
            *map(left_out_sentence, results.get("left_out", ())),
            *length_sentences(results),
            *rates_sentences(results),
        ],
        sections=sections,
        figures=_deflated(
            json.dumps(
                {
                    chart.key: list(views.values())
                    for held in sections.values()
                    for chart, views in held
                }
            )
        ),
        suspects=suspect_sheet(results, samples, images, shown),
        sheets=sheets(results, samples, images, shown),
        most_of_a_class=MOST_OF_A_CLASS,
        settings=_method_settings(results),
        counted=COST_COUNTERS,
        plotly=_deflated_plotly(),
        ink=INK,
    )


def template(name: str) -> Template:
    """Returns a template of this package, which escapes what it is given."""
    loader = PackageLoader("thresher_lab.report", ".")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


CSV_COLUMNS = ("method", "control_of", "mean", "std", "difference", "low", "high", "cost_ratio", "wall_ratio", "cpu_ratio",
    "memory_ratio", "verdict")  # fmt: skip
"""Columns of the table of verdicts as CSV, as in results.json; `low` and `high` are the 95 % interval of the difference."""


def _csv(results: ResultsDict) -> str:
    """Returns the table of verdicts as CSV with full precision, as the address of a link."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for row in results["summary"]:
        low, high = row["ci95"] or ("", "")
        writer.writerow({**row, "low": low, "high": high})
    return f"data:text/csv;charset=utf-8,{quote(text.getvalue())}"


def _deflated(text: str) -> str:
    """Returns a text as the page holds what it needs later: compressed, in base64."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _section_charts(
    held: tuple[Chart, ...], results: ResultsDict, samples: Samples
) -> list[tuple[Chart, dict[str, str]]]:
    """Returns the charts of a section that have data, each with its views as JSON by their labels."""
    drawn = [(chart, chart.figures(results, samples)) for chart in held]
    return [
        (chart, {label: str(figure.to_json()) for label, figure in figures.items()})
        for chart, figures in drawn
        if figures
    ]


def _verdict_row(row: Mapping[str, Any], results: ResultsDict) -> dict[str, Any]:
    """Returns the texts of a row's cells with the values they are sorted by; None sorts last."""
    scale, digits = (100, 2) if is_share(results["runs"]) else (1, 4)
    spread = "" if row.get("std") is None else f" ± {scale * row['std']:.{digits}f}"
    cells = [
        (f"{scale * row['mean']:.{digits}f}{spread}", row["mean"]),
        (difference_text(row, lambda value: f"{scale * value:+.{digits}f}"), row["difference"]),
    ]
    for name in COST_MEASURES:
        share = row.get(f"{name}_ratio")
        # A sentence on the page says why the wall time is left blank.
        missing = "" if name == "wall" else "unknown"
        cells.append((missing if share is None else f"{share:.3f}", share))
    return {
        "method": row["method"],
        "control_of": row["control_of"],
        "cells": cells,
        "verdict": row["verdict"],
        "finding": row.get("finding"),
    }


def _controls_in_words(results: ResultsDict) -> str:
    """Returns the kinds of controls that were trained, in the same time and of the same cost; "" without any."""
    named = {kind: f"{CONTROLS[kind].words} ({kind})" for kind in controls(results)}
    said = [named.pop(SAME_TIME)] if SAME_TIME in named else []
    if named:
        said.append(f"controls of the same cost: {listed([*named.values()])}")
    return ", and ".join(said)


def margin_text(results: ResultsDict, margin: float | None) -> str:
    """Returns the margin with its unit: points where the metric is a share, else nothing."""
    if margin is None:
        return ""
    return f"{margin:g}{' points' if is_share(results['runs']) else ''}"


def _method_settings(results: ResultsDict) -> dict[str, dict[str, str]]:
    """Returns for each method its settings and the mean of every counter over its runs."""
    return {
        method: {
            "settings": json.dumps(runs[0]["settings"], default=str) if runs[0]["settings"] else "",
            **{name: _mean_count(runs, name) for name in COST_COUNTERS},
        }
        for method, runs in runs_by_method(results).items()
    }


def _mean_count(runs: list[dict[str, Any]], name: str) -> str:
    values = [run["cost"].get(name) for run in runs]
    return "" if None in values else f"{sum(values) / len(values):,.0f}"
