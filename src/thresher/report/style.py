"""Style of the charts: one colour, symbol and dash per method in every chart, escaped texts, and short numbers."""

import html
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from thresher.report.loading import ResultsDict, runs_by_method

INK = "#76767a"
"""Placeholder colour that the page replaces by black in the light theme and by white in the dark theme."""
GREY = "#8e8e93"
METHOD_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, whose colours can be told apart with any colour vision."""
SYMBOLS = ("square", "diamond", "triangle-up", "x", "pentagon", "star", "triangle-down")
DASHES: tuple[str, ...] = ("solid", "dashdot", "longdash")
SCALE = "Cividis"
FEW_EPOCHS = 12
"""Largest number of epochs for which each epoch has a tick on the axis."""
CONTROL_LABELS = {
    "uniform": "random, same cost",
    "shorter": "fewer epochs, same cost",
    "smaller": "smaller batches, same cost",
    "placebo": "signals permuted",
}
CONTROL_DASHES = {"uniform": "dot", "shorter": "dash", "smaller": "dashdot", "placebo": "longdash"}


@dataclass(frozen=True)
class Look:
    """Colour, symbol and dash of a series.

    Args:
        colour: Colour as "#rrggbb".
        symbol: Name of plotly's marker symbol.
        dash: Name of plotly's line style.
    """

    colour: str
    symbol: str = "circle"
    dash: str = "solid"

    @property
    def faint(self) -> str:
        """The colour for a band: the same colour, nearly transparent."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},0.16)"


def look(number: int) -> Look:
    """Returns the look of the series with this number; series beyond the number of colours differ in symbol and dash."""
    return Look(
        METHOD_COLOURS[number % len(METHOD_COLOURS)],
        SYMBOLS[number % len(SYMBOLS)],
        DASHES[number // len(METHOD_COLOURS) % len(DASHES)],
    )


def looks(results: ResultsDict) -> dict[str, Look]:
    """Returns the look of every method; full training is drawn in the text colour of the page."""
    others = [method for method in runs_by_method(results) if method != "full"]
    return {"full": Look(INK)} | {method: look(number) for number, method in enumerate(others)}


def control_look(kind: str) -> Look:
    """Returns the look of a kind of control: grey, with its own dash."""
    return Look(GREY, "circle-open", CONTROL_DASHES.get(kind, "longdash"))


def escaped(text: Any) -> str:
    """Returns a text with its HTML characters escaped, so that plotly shows it unchanged."""
    return html.escape(str(text), quote=False)


def wrapped(text: Any, width: int = 20) -> str:
    """Returns an escaped text that is broken into lines at spaces and before colons."""
    lines = textwrap.wrap(str(text).replace(":", " :"), width)
    return "<br>".join(escaped(line.replace(" :", ":")) for line in lines)


def short(values: ArrayLike) -> list[Any]:
    """Returns numbers rounded to five significant digits, with None in the place of values that are not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [short(row) for row in array]
    return [_five_digits(value) if np.isfinite(value) else None for value in array.tolist()]


def _five_digits(value: float) -> float:
    """Returns whole numbers as int: "0" instead of "0.0" makes the charts of a page a tenth smaller."""
    number = float(f"{value:.5g}")
    return int(number) if number.is_integer() and abs(number) < 1e6 else number


def empty_figure(x: str, y: str, **layout: Any) -> go.Figure:
    """Returns a figure without data.

    Args:
        x: Title of the x axis.
        y: Title of the y axis.
        layout: Further layout settings of plotly.
    """
    figure = go.Figure(layout={"template": "none"})
    figure.update_layout(
        height=380,
        margin={"l": 60, "r": 16, "t": 16, "b": 52},
        hovermode="closest",
        hoverlabel={"namelength": -1},
        xaxis={"title": {"text": x}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
    )
    return figure.update_layout(**layout)


def epoch_figure(results: ResultsDict, y: str) -> go.Figure:
    """Returns a figure without data whose x axis is the epoch, with ticks at whole numbers."""
    figure = empty_figure("epoch", y)
    return figure.update_xaxes(dtick=1) if results["epochs"] <= FEW_EPOCHS else figure


def line_trace(
    name: str,
    of: Look,
    x: ArrayLike,
    y: ArrayLike,
    mode: Literal["lines", "markers", "lines+markers"] = "lines+markers",
    **more: Any,
) -> go.Scatter:
    """Returns one series.

    Args:
        name: Name of the series. The page's own legend reads it, unescaped, from `legendgroup`.
        of: Look of the series.
        x: Values on the x axis, shape (n,).
        y: Values on the y axis, shape (n,).
        mode: Whether lines, markers or both are drawn.
        more: Further settings of `plotly.graph_objects.Scatter`.
    """
    drawn = {
        "line": {"color": of.colour, "dash": of.dash, "width": 2},
        "marker": {"color": of.colour, "symbol": of.symbol, "size": 7},
    }
    return go.Scatter(x=short(x), y=short(y), mode=mode, name=escaped(name), legendgroup=name, **(drawn | more))


def band_trace(name: str, of: Look, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> go.Scatter:
    """Returns the band between two lines, which is shown and hidden together with the series of that name."""
    across, upper, lower = short(x), short(high), short(low)
    return go.Scatter(
        x=across + across[::-1],
        y=upper + lower[::-1],
        fill="toself",
        fillcolor=of.faint,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        name=escaped(name),
        legendgroup=name,
        showlegend=False,
    )


def median_traces(name: str, of: Look, x: ArrayLike, values: NDArray[np.float64], **more: Any) -> Iterable[go.Scatter]:
    """Yields the median over the rows of `values`, and for several rows also the band from the lowest to the highest."""
    if len(values) > 1:
        yield band_trace(name, of, x, values.min(axis=0), values.max(axis=0))
    yield line_trace(name, of, x, np.median(values, axis=0), **more)


def heatmap(z: ArrayLike, **more: Any) -> go.Heatmap:
    """Returns a heatmap whose colours brighten evenly for any colour vision."""
    return go.Heatmap(z=short(z), colorscale=SCALE, **more)
