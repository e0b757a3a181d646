"""Line charts side by side, with bands around the lines, as one figure in a file: a picture or a page of HTML.

Matplotlib draws the pictures, and Plotly, which needs a browser for pictures, the pages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from thresher_lab.report.charts import Look, band_trace, line_trace, look

FIRST_COLOR = "#000000"
"""Color of the first curve of each panel, which is the baseline; the others have those of `charts.look`."""
PANEL_WIDTH = 440
PANEL_HEIGHT = 380
LEGEND_HEIGHT = 60
"""Sizes in pixels, of which an inch has 96."""
PICTURE_SUFFIXES = (".svg", ".png")
MARKERS = {
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "x": "X",
    "pentagon": "p",
    "star": "*",
    "triangle-down": "v",
}
LINES = {"dashdot": "-.", "longdash": "--"}
"""Matplotlib's names for the symbols and the dashes of `charts.look`."""
MATPLOTLIB = {
    "svg.fonttype": "none",
    "svg.hashsalt": "thresher",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": "#444444",
    "grid.color": "#e6e6e6",
    "lines.markersize": 4.5,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}
"""Settings with which texts stay texts, and with which the same curves give the same file."""


@dataclass(frozen=True)
class Curve:
    """A line with a band around it.

    Args:
        name: Name in the legend; curves of several panels with the same name share its entry and must share their position.
        points: The points from left to right: x, y, and the lowest and highest y there.
    """

    name: str
    points: Sequence[tuple[float, float, float, float]]

    def columns(self, low: float) -> tuple[list[float], ...]:
        """Returns x, y and both ends of the band; values below `low`, such as 0, become `low`, the lower end of the axis."""
        x = [point[0] for point in self.points]
        return x, *([max(point[end], low) for point in self.points] for end in (1, 2, 3))


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

    def limits(self) -> tuple[float, float, float]:
        """Returns the right end of the x axis, and the lower and the upper end of the y axis."""
        points = [point for curve in self.curves for point in curve.points]
        ends = [value for point in points for value in point[1:] if value > 0] + [
            value for _, value in self.marks
        ]
        return 1.02 * max(point[0] for point in points), 0.97 * min(ends), 1.03 * max(ends)

    def looks(self) -> list[tuple[Curve, Look]]:
        """Returns the curves, each with its look."""
        return [
            (curve, look(number - 1) if number else Look(FIRST_COLOR))
            for number, curve in enumerate(self.curves)
        ]


PANELS_ACROSS = 3
"""Largest number of panels side by side."""


def panel_size(panels: int) -> tuple[int, int, int, int]:
    """Returns how many panels stand side by side, the number of rows, and the width and the height in pixels.

    Args:
        panels: Number of panels, at least 1.
    """
    across = min(PANELS_ACROSS, panels)
    down = math.ceil(panels / across)
    return across, down, across * PANEL_WIDTH, down * PANEL_HEIGHT + LEGEND_HEIGHT


def plotly_figure(panels: Sequence[Panel]) -> go.Figure:
    """Draws panels in rows, with one legend below all of them.

    Args:
        panels: The panels, at least one.
    """
    across, down, width, height = panel_size(len(panels))
    figure = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=[panel.title for panel in panels],
        horizontal_spacing=90 / width,
        vertical_spacing=110 / height if down > 1 else None,
    )
    legend = {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
    }
    figure.update_layout(template="plotly_white", width=width, height=height, legend=legend)
    figure.update_layout(
        margin={"l": 64, "r": 48, "t": 40, "b": LEGEND_HEIGHT + 50}, font={"size": 12}
    )
    for number, panel in enumerate(panels):
        _add_panel(figure, panel, row=number // across + 1, column=number % across + 1)
    return figure.update_annotations(font={"size": 13})


def _add_panel(figure: go.Figure, panel: Panel, row: int, column: int) -> None:
    at: dict[str, Any] = {"row": row, "col": column}
    right, low, high = panel.limits()
    for curve, of in panel.looks():
        x, middle, least, most = curve.columns(low)
        line = line_trace(curve.name, of, x, middle, showlegend=row == column == 1)
        figure.add_traces([band_trace(curve.name, of, x, least, most), line], rows=row, cols=column)
    for name, value in panel.marks:
        figure.add_hline(y=value, line={"color": "#888888", "width": 1, "dash": "dash"}, **at)
        place = {
            "x": 1,
            "xref": "x domain",
            "xanchor": "left",
            "y": math.log10(value),
            "yanchor": "middle",
        }
        figure.add_annotation(text=name, showarrow=False, **place, **at)
    axis = {"showline": True, "linecolor": "#444444", "mirror": True, "ticks": "outside"}
    bounds = [math.log10(low), math.log10(high)]
    figure.update_xaxes(title=panel.x_label, range=[0, right], zeroline=False, **axis, **at)
    figure.update_yaxes(
        title=panel.y_label, type="log", range=bounds, tickformat="~g", **axis, **at
    )


def check_figure_path(path: Path) -> None:
    """Checks that panels can be written to a file: before hours of training, not after.

    Args:
        path: File that ends in .html, or in .svg or .png, which need the package matplotlib.

    Raises:
        ValueError: The file has another ending, or matplotlib is needed and is not installed.
    """
    if path.suffix not in (".html", *PICTURE_SUFFIXES):
        raise ValueError(f"figure: {path} must end in .html, .svg or .png")
    if path.suffix in PICTURE_SUFFIXES and find_spec("matplotlib") is None:
        raise ValueError(
            f"figure: {path} needs the package matplotlib. Install it (pip install 'thresher[plot]'), or give a file that "
            "ends in .html"
        )


def write_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draws panels in rows, with one legend below all of them, into a file whose folder is made where it does not exist.

    Args:
        panels: The panels, at least one.
        path: File that `check_figure_path` accepts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in PICTURE_SUFFIXES:
        _write_picture(panels, path)
    else:
        plotly_figure(panels).write_html(path, include_plotlyjs=True)


def _write_picture(panels: Sequence[Panel], path: Path) -> None:
    from matplotlib import style
    from matplotlib.figure import Figure

    across, down, width, height = panel_size(len(panels))
    with style.context(["default", MATPLOTLIB]):
        figure = Figure((width / 96, height / 96), layout="constrained")
        for number, panel in enumerate(panels, 1):
            _fill(figure.add_subplot(down, across, number), panel)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower left", ncols=max(1, 4 * across // 3), frameon=False
        )
        figure.savefig(
            path,
            dpi=192,
            metadata={"Creator": None, "Date": None} if path.suffix == ".svg" else None,
        )


def _fill(axes: Any, panel: Panel) -> None:
    right, low, high = panel.limits()
    axes.set(
        title=panel.title,
        xlabel=panel.x_label,
        ylabel=panel.y_label,
        yscale="log",
        xlim=(0, right),
        ylim=(low, high),
    )
    axes.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    for curve, of in panel.looks():
        x, middle, least, most = curve.columns(low)
        axes.fill_between(x, least, most, color=of.color, alpha=0.16, linewidth=0)
        plot_line(axes, curve.name, of, x, middle)
    for name, value in panel.marks:
        axes.axhline(value, color="#888888", linewidth=0.8, linestyle="--")
        place = {
            "xycoords": axes.get_yaxis_transform(),
            "xytext": (4, 0),
            "textcoords": "offset points",
        }
        axes.annotate(name, (1, value), va="center", **place)


def plot_line(axes: Any, name: str, of: Look, x: Sequence[float], y: Sequence[float]) -> None:
    """Adds a line with markers to a chart of matplotlib."""
    line = LINES.get(of.dash, "-")
    marker = MARKERS.get(of.symbol, "o")
    axes.plot(x, y, color=of.color, linestyle=line, marker=marker, label=name)


def error_panels(measured: Mapping[str, Any]) -> list[Panel]:
    """Returns two panels of the test error: against the counted cost, and against CPU time.

    Args:
        measured: Result of `time_to_target.measure`.
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
    points = [
        (p[axis], 100 * p["error"], 100 * p["lowest"], 100 * p["highest"]) for p in arm["curve"]
    ]
    return Curve(arm["method"], points)
