"""Draws the tables of reproduced tables and figures, as their `TableChart` says, into SVG pictures."""

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thresher_lab.report.charts import Look, look
from thresher_lab.report.panels import FIRST_COLOR, MARKERS, MATPLOTLIB, panel_size, plot_line
from thresher_lab.reproduction.artefact import FULL_ROW, TableChart

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SPREAD = re.compile(r"± (\d+(?:\.\d+)?)")
TITLE_WIDTH = 52
COST = "cost"


def table_chart(tables: Sequence[Mapping[str, Any]], chart: TableChart) -> bytes:
    """Draws tables side by side, with one legend below all of them.

    Args:
        tables: Tables in the results of `reproduce`: title, header and rows.
        chart: How they are drawn.

    Returns:
        The content of an SVG file; the same tables give the same content with one version of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: A table has no such column.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    drawn = [tables[at] for at in chart.tables or range(len(tables))]
    across, down, width, height = panel_size(len(drawn))
    file = io.BytesIO()
    with style.context(["default", MATPLOTLIB]):
        figure = Figure((width / 96, height / 96), layout="constrained")
        for number, table in enumerate(drawn, 1):
            axes = figure.add_subplot(down, across, number)
            axes.set(
                title=_short(table["title"]), xlabel=chart.x or table["header"][0], ylabel=chart.y
            )
            axes.grid(visible=True)
            axes.set_axisbelow(True)
            DRAWERS[chart.kind](axes, table, chart)
        handles, names = figure.axes[0].get_legend_handles_labels()
        if names:
            figure.legend(handles, names, loc="outside lower left", ncols=2 * across, frameon=False)
        figure.savefig(file, format="svg", metadata={"Creator": None, "Date": None})
    return file.getvalue()


def _short(title: str) -> str:
    """Returns the part of a title before its first remark, in lines that fit above a panel."""
    return textwrap.fill(re.split(r" \(|, with the rank", title)[0], TITLE_WIDTH)


@dataclass(frozen=True)
class _Series:
    """A line, or bars of one color: a name, its x (for lines) and its y, NaN where the cell has no number."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def _number(cell: str) -> float:
    """Returns the number at the start of a cell; NaN where there is none, such as in "never"."""
    number = NUMBER.match(cell.lstrip("+"))
    return float(number[0]) if number else math.nan


def _columns(table: Mapping[str, Any], chart: TableChart) -> list[_Series]:
    header = list(table["header"])
    names = list(chart.columns) or header[1:]
    over = list(chart.over) or [header[0]] * len(names)
    cells = [
        [[_number(row[header.index(name)]) for row in table["rows"]] for name in of]
        for of in (over, names)
    ]
    return [_Series(name, x, y) for name, x, y in zip(_without_end(names), *cells, strict=True)]


def _without_end(names: Sequence[str]) -> list[str]:
    """Returns names of columns without the words after a comma that all of them end with: the quantity and its unit."""
    parts = [name.split(", ") for name in names]
    while len({part[-1] for part in parts}) == 1 and all(len(part) > 1 for part in parts):
        parts = [part[:-1] for part in parts]
    return [", ".join(part) for part in parts]


def _rows(table: Mapping[str, Any]) -> list[_Series]:
    x = [_number(cell) for cell in table["header"][1:]]
    return [_Series(row[0], x, [_number(cell) for cell in row[1:]]) for row in table["rows"]]


def _looks(series: Sequence[_Series]) -> list[tuple[_Series, Look]]:
    """Returns the series with their looks: full training is black, as in the report."""
    others = [one for one in series if one.name != FULL_ROW]
    return [
        (one, Look(FIRST_COLOR) if one.name == FULL_ROW else look(others.index(one)))
        for one in series
    ]


def _draw_lines(axes: Any, table: Mapping[str, Any], chart: TableChart) -> None:
    series = _rows(table) if chart.kind == "rows" else _columns(table, chart)
    for one, of in _looks(series):
        plot_line(axes, one.name, of, one.x, one.y)
    if all(x.is_integer() for one in series for x in one.x):
        axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_bars(axes: Any, table: Mapping[str, Any], chart: TableChart) -> None:
    series = _columns(table, chart)
    places = np.arange(len(table["rows"]))
    width = 0.8 / len(series)
    for number, (one, of) in enumerate(_looks(series)):
        axes.bar(
            places + (number - (len(series) - 1) / 2) * width,
            one.y,
            width,
            color=of.color,
            label=one.name,
        )
    axes.set_xticks(places, [row[0] for row in table["rows"]])


def _draw_points(axes: Any, table: Mapping[str, Any], chart: TableChart) -> None:
    """Draws the first number of each row over its cost: a color per method, whose name is what stands before a setting."""
    at = list(table["header"]).index(COST)
    methods: dict[str, list[Sequence[str]]] = {}
    for row in table["rows"]:
        methods.setdefault(re.split(r", F =| \d", row[0])[0], []).append(row)
    axes.set_xlabel(chart.x or "cost as a share of full training")
    for one, of in _looks([_Series(name, (), ()) for name in methods]):
        rows = sorted(methods[one.name], key=lambda row: float(row[at]))
        x, y = ([_number(row[column]) for row in rows] for column in (at, 1))
        spread = [float(found[1]) if (found := SPREAD.search(row[1])) else 0.0 for row in rows]
        marker = MARKERS.get(of.symbol, "o")
        axes.errorbar(
            x,
            y,
            spread,
            color=of.color,
            marker=marker,
            linewidth=1,
            elinewidth=0.6,
            capsize=2,
            label=one.name,
        )


DRAWERS = {"lines": _draw_lines, "rows": _draw_lines, "bars": _draw_bars, "points": _draw_points}
"""Function that draws a table into axes, by the kind of the chart."""
