"""How charts look: one look for a method wherever it is drawn, and texts that say what was meant."""

import html
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from thresher.report.loading import Results, methods

INK = "#76767a"
"""Stands for black on a light page and white on a dark one; the page puts it in."""
GREY = "#8e8e93"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which can be told apart with any colour vision."""
SYMBOLS = ("square", "diamond", "triangle-up", "x", "pentagon", "star", "triangle-down")
DASHES: tuple[str, ...] = ("solid", "dashdot", "longdash")
SCALE = "Cividis"
FEW_EPOCHS = 12
"""Up to which each has a tick."""
KINDS = {"uniform": "random, same cost", "shorter": "fewer epochs, same cost"}
KIND_DASHES = {"uniform": "dot", "shorter": "dash"}


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    symbol: str = "circle"
    dash: str = "solid"

    @property
    def faint(self) -> str:
        """The colour of a band."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},0.16)"


def look(number: int) -> Look:
    """The look of a series by its number; more than there are colours differ in symbol and dash."""
    return Look(COLOURS[number % len(COLOURS)], SYMBOLS[number % len(SYMBOLS)], DASHES[number // len(COLOURS) % len(DASHES)])


def looks(results: Results) -> dict[str, Look]:
    """Of every method; full training has the ink of the page."""
    others = [method for method in methods(results) if method != "full"]
    return {"full": Look(INK)} | {method: look(number) for number, method in enumerate(others)}


def control_look(kind: str) -> Look:
    """Of a kind of control: grey, with a dash of its own."""
    return Look(GREY, "circle-open", KIND_DASHES.get(kind, "longdash"))


def plain(text: Any) -> str:
    """A text that plotly shows as it is, whatever it holds."""
    return html.escape(str(text), quote=False)


def wrapped(text: Any, width: int = 20) -> str:
    """The same over several lines, broken at spaces and colons where they are."""
    lines = textwrap.wrap(str(text).replace(":", " :"), width)
    return "<br>".join(plain(line.replace(" :", ":")) for line in lines)


def short(values: ArrayLike) -> list[Any]:
    """Numbers in five digits, None for what is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [short(row) for row in array]
    return [_five_digits(value) if np.isfinite(value) else None for value in array.tolist()]


def _five_digits(value: float) -> float:
    """Whole numbers as such: "0" for "0.0" takes a tenth off the charts of a page."""
    number = float(f"{value:.5g}")
    return int(number) if number.is_integer() and abs(number) < 1e6 else number


def blank(x: str, y: str, **layout: Any) -> go.Figure:
    """A figure without data."""
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


def over_epochs(results: Results, y: str) -> go.Figure:
    """The same over epochs, which are whole numbers."""
    figure = blank("epoch", y)
    return figure.update_xaxes(dtick=1) if results["epochs"] <= FEW_EPOCHS else figure


def line(
    name: str,
    of: Look,
    x: ArrayLike,
    y: ArrayLike,
    mode: Literal["lines", "markers", "lines+markers"] = "lines+markers",
    **more: Any,
) -> go.Scatter:
    """A series; `legendgroup` is its name as it is, for the page's own legend."""
    drawn = {
        "line": {"color": of.colour, "dash": of.dash, "width": 2},
        "marker": {"color": of.colour, "symbol": of.symbol, "size": 7},
    }
    return go.Scatter(x=short(x), y=short(y), mode=mode, name=plain(name), legendgroup=name, **(drawn | more))


def band(name: str, of: Look, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> go.Scatter:
    """Between two lines; it belongs to the series of that name."""
    across, upper, lower = short(x), short(high), short(low)
    return go.Scatter(
        x=across + across[::-1],
        y=upper + lower[::-1],
        fill="toself",
        fillcolor=of.faint,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        name=plain(name),
        legendgroup=name,
        showlegend=False,
    )


def spread(name: str, of: Look, x: ArrayLike, values: NDArray[np.float64], **more: Any) -> Iterable[go.Scatter]:
    """The median over the rows of `values`, and between the lowest and the highest where there are several."""
    if len(values) > 1:
        yield band(name, of, x, values.min(axis=0), values.max(axis=0))
    yield line(name, of, x, np.median(values, axis=0), **more)


def heatmap(z: ArrayLike, **more: Any) -> go.Heatmap:
    """Colours that brighten evenly for any colour vision."""
    return go.Heatmap(z=short(z), colorscale=SCALE, **more)
