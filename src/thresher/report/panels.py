"""Line charts side by side, with bands around the lines, as one figure in a file: SVG or a page of HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from thresher.report.style import Look, look

FIRST_COLOUR = "#000000"
"""Colour of the first curve of each panel, which is the baseline; the others have those of `style.look`."""
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_HEIGHT = 440, 380, 60
"""Sizes in pixels."""


@dataclass(frozen=True)
class Curve:
    """A line with a band around it.

    Args:
        name: Name in the legend; curves of several panels with the same name share its entry and must share their position.
        points: The points from left to right: x, y, and the lowest and highest y there.
    """

    name: str
    points: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart with a logarithmic y axis.

    Args:
        title: Text above the chart.
        x_label: Title of the x axis.
        y_label: Title of the y axis.
        curves: The curves in the order of the legend.
        marks: Names and y values of dashed horizontal lines.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[tuple[str, float]] = ()


def draw(panels: Sequence[Panel], columns: int = 3) -> go.Figure:
    """Draws panels in rows, with one legend below all of them.

    Args:
        panels: The panels, at least one.
        columns: Largest number of panels side by side.
    """
    across = min(columns, len(panels))
    down = math.ceil(len(panels) / across)
    height, width = down * PANEL_HEIGHT + LEGEND_HEIGHT, across * PANEL_WIDTH
    figure = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=[panel.title for panel in panels],
        horizontal_spacing=90 / width,
        vertical_spacing=110 / height if down > 1 else None,
    )
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(template="plotly_white", width=width, height=height, legend=legend)
    figure.update_layout(margin={"l": 64, "r": 48, "t": 40, "b": LEGEND_HEIGHT + 50}, font={"size": 12})
    for number, panel in enumerate(panels):
        _add_panel(figure, panel, row=number // across + 1, column=number % across + 1)
    return figure.update_annotations(font={"size": 13})


def _add_panel(figure: go.Figure, panel: Panel, row: int, column: int) -> None:
    at: dict[str, Any] = {"row": row, "col": column}
    points = [point for curve in panel.curves for point in curve.points]
    ends = [value for point in points for value in point[1:] if value > 0] + [value for _, value in panel.marks]
    low, high = 0.97 * min(ends), 1.03 * max(ends)
    for number, curve in enumerate(panel.curves):
        of = look(number - 1) if number else Look(FIRST_COLOUR)
        figure.add_traces(_traces(curve, of, low, legend=row == column == 1), rows=row, cols=column)
    for name, value in panel.marks:
        figure.add_hline(y=value, line={"color": "#888888", "width": 1, "dash": "dash"}, **at)
        place = {"x": 1, "xref": "x domain", "xanchor": "left", "y": math.log10(value), "yanchor": "middle"}
        figure.add_annotation(text=name, showarrow=False, **place, **at)
    axis = {"showline": True, "linecolor": "#444444", "mirror": True, "ticks": "outside"}
    bounds = [math.log10(low), math.log10(high)]
    figure.update_xaxes(title=panel.x_label, range=[0, 1.02 * max(point[0] for point in points)], zeroline=False, **axis, **at)
    figure.update_yaxes(title=panel.y_label, type="log", range=bounds, tickformat="~g", **axis, **at)


def _traces(curve: Curve, of: Look, low: float, *, legend: bool) -> list[go.Scatter]:
    """The band and the line of a curve; values below `low`, such as 0, are drawn at the lower end of the axis."""
    x = [point[0] for point in curve.points]
    middle, least, most = ([max(point[end], low) for point in curve.points] for end in (1, 2, 3))
    shared: dict[str, Any] = {"name": curve.name, "legendgroup": curve.name}
    band = go.Scatter(
        x=x + x[::-1],
        y=most + least[::-1],
        fill="toself",
        fillcolor=of.faint,
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        **shared,
    )
    marker = {"color": of.colour, "symbol": of.symbol, "size": 6}
    line = go.Scatter(
        x=x,
        y=middle,
        mode="lines+markers",
        line={"color": of.colour, "dash": of.dash, "width": 2},
        marker=marker,
        showlegend=legend,
        **shared,
    )
    return [band, line]


def check_figure_path(path: Path) -> None:
    """Checks that a figure can be written to a file: before hours of training, not after.

    Args:
        path: File that ends in .html, or in .svg, which needs the package kaleido and a Chromium or Chrome browser.

    Raises:
        ValueError: The file has another ending, or what SVG needs is not installed.
    """
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"figure: {path} must end in .html or .svg")
    if path.suffix == ".svg":
        try:
            go.Figure().to_image("svg")
        except (ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"figure: {path} cannot be drawn as SVG ({reason}). Install kaleido (pip install 'thresher[figures]') and "
                "Chromium or Chrome, whose place BROWSER_PATH may give, or give a file that ends in .html"
            ) from error


def write_figure(figure: go.Figure, path: Path) -> None:
    """Writes a figure to a file that `check_figure_path` accepts; the folder is made where it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        figure.write_image(path)
    else:
        figure.write_html(path, include_plotlyjs=True)


def error_panels(measured: Mapping[str, Any]) -> list[Panel]:
    """Returns two panels of the test error: against the counted cost, and against CPU time.

    Args:
        measured: Result of `time_to_target.measure_targets`.
    """
    axes = (("cost", "cost in full trainings"), ("cpu_s", "CPU seconds"))
    marks = [(f"{target['factor']:g}x", 100 * target["error"]) for target in measured["targets"]]
    return [
        Panel(
            title=f"{measured['task']}, {measured['epochs']} epochs",
            x_label=label,
            y_label="test error, %",
            curves=[_error_curve(arm, axis) for arm in measured["arms"]],
            marks=marks,
        )
        for axis, label in axes
    ]


def _error_curve(arm: Mapping[str, Any], axis: str) -> Curve:
    points = [(p[axis], 100 * p["error"], 100 * p["lowest"], 100 * p["highest"]) for p in arm["curve"]]
    return Curve(arm["method"], points)
