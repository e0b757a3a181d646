"""Charts of results and of the histories of samples: functions that return None where there is nothing to draw.

Their first two arguments are the content of results.json and the histories of the samples; most of these charts use the
first only.
"""

import html
import textwrap
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from thresher_lab.comparison.controls import CONTROLS, kind_of
from thresher_lab.comparison.summary import is_share
from thresher_lab.comparison.time_to_target import measure
from thresher_lab.report.loading import (
    ResultsDict,
    Samples,
    by_epoch,
    controls,
    histories,
    runs_by_method,
)
from thresher_lab.training.samples import RunHistory, class_name, mean_of_part

INK = "#76767a"
"""Placeholder color that the page replaces by black in the light theme and by white in the dark theme."""
GREY = "#8e8e93"
METHOD_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, whose colors can be told apart with any color vision."""
SYMBOLS = ("square", "diamond", "triangle-up", "x", "pentagon", "star", "triangle-down")
DASHES: tuple[str, ...] = ("solid", "dashdot", "longdash")
SCALE = "Cividis"
FEW_EPOCHS = 12
"""Largest number of epochs for which each epoch has a tick on the axis."""


@dataclass(frozen=True)
class Look:
    """Color, symbol and dash of a series.

    Args:
        color: Color as "#rrggbb".
        symbol: Name of plotly's marker symbol.
        dash: Name of plotly's line style.
    """

    color: str
    symbol: str = "circle"
    dash: str = "solid"

    @property
    def faint(self) -> str:
        """The color for a band: the same color, nearly transparent."""
        red, green, blue = (int(self.color[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},0.16)"


def look(number: int) -> Look:
    """Returns the look of the series with this number; series beyond the number of colors differ in symbol and dash."""
    return Look(
        METHOD_COLORS[number % len(METHOD_COLORS)],
        SYMBOLS[number % len(SYMBOLS)],
        DASHES[number // len(METHOD_COLORS) % len(DASHES)],
    )


def looks(results: ResultsDict) -> dict[str, Look]:
    """Returns the look of every method; full training is drawn in the text color of the page."""
    others = [method for method in runs_by_method(results) if method != "full"]
    return {"full": Look(INK)} | {method: look(number) for number, method in enumerate(others)}


def control_look(kind: str) -> Look:
    """Returns the look of a kind of control: gray, with its own dash."""
    return Look(GREY, "circle-open", CONTROLS[kind].dash)


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
    if results["epochs"] <= FEW_EPOCHS:
        return figure.update_xaxes(dtick=1)
    return figure


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
        "line": {"color": of.color, "dash": of.dash, "width": 2},
        "marker": {"color": of.color, "symbol": of.symbol, "size": 7},
    }
    return go.Scatter(
        x=short(x), y=short(y), mode=mode, name=escaped(name), legendgroup=name, **(drawn | more)
    )


def band_trace(name: str, of: Look, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> go.Scatter:
    """Returns the band between two lines, which is shown and hidden together with the series of that name."""
    across = short(x)
    upper = short(high)
    lower = short(low)
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


def median_traces(
    name: str, of: Look, x: ArrayLike, values: NDArray[np.float64]
) -> list[go.Scatter]:
    """Returns the median over the rows of `values`; for several rows, a band from the lowest to the highest comes first."""
    median = line_trace(name, of, x, np.median(values, axis=0))
    if len(values) == 1:
        return [median]
    return [band_trace(name, of, x, values.min(axis=0), values.max(axis=0)), median]


def heatmap(z: ArrayLike, **more: Any) -> go.Heatmap:
    """Returns a heatmap whose colors brighten evenly for any color vision."""
    return go.Heatmap(z=short(z), colorscale=SCALE, **more)


OF_FULL = {
    "cost": "cost as counted, share of full training",
    "cpu": "CPU time, share of full training",
    "wall": "wall time, share of full training",
    "memory": "peak memory of a step, share of full training",
}
AXES = {
    "epoch": "epoch",
    "cost": "cost as counted, in full trainings",
    "cpu_s": "CPU time of training, s",
    "wall_s": "wall time of training, s",
}
MOST_RANKS = 24
"""Largest number of epochs for which the ranks are written into the chart."""


def metric_against_cost(results: ResultsDict, _: Samples, by: str = "cost") -> go.Figure | None:
    """Draws every method and control as a point: mean metric against cost, with the interval of its difference to full.

    Args:
        results: Content of results.json.
        by: Measure of cost: "cost" as counted, "cpu" or "wall" time, or "memory" of a step.
    """
    rows = [row for row in results["summary"] if row.get(f"{by}_ratio") is not None]
    if not rows:
        return None
    figure = empty_figure(OF_FULL[by], _metric_title(results))
    _margin_below_full(figure, results)
    x = f"{by}_ratio"
    scale = _scale(results)
    for kind in dict.fromkeys(filter(None, map(kind_of, rows))):
        group = sorted((row for row in rows if kind_of(row) == kind), key=lambda row: row[x])
        name = CONTROLS[kind].label
        figure.add_trace(_points(name, control_look(kind), group, x, scale, CONTROL_POINTS))
    for row in rows:
        if kind_of(row) is None:
            of = looks(results)[row["method"]]
            figure.add_trace(_points(row["method"], of, [row], x, scale, METHOD_POINTS))
    return figure


@dataclass(frozen=True)
class _PointStyle:
    mode: Literal["markers", "lines+markers"]
    size: int
    thickness: int
    width: int


METHOD_POINTS = _PointStyle("markers", size=12, thickness=2, width=5)
CONTROL_POINTS = _PointStyle("lines+markers", size=7, thickness=1, width=0)


def _points(
    name: str, of: Look, rows: list[dict[str, Any]], x: str, scale: float, style: _PointStyle
) -> go.Scatter:
    bounds = np.array([row.get("ci95") or (np.nan, np.nan) for row in rows], dtype=np.float64)
    middle = np.array([row["difference"] or 0.0 for row in rows])
    interval = {
        "type": "data",
        "symmetric": False,
        "array": short(scale * (bounds[:, 1] - middle)),
        "arrayminus": short(scale * (middle - bounds[:, 0])),
        "color": of.color,
        "thickness": style.thickness,
        "width": style.width,
    }
    means = scale * np.array([row["mean"] for row in rows])
    marker = {"color": of.color, "symbol": of.symbol, "size": style.size}
    costs = [row[x] for row in rows]
    return line_trace(name, of, costs, means, style.mode, error_y=interval, marker=marker)


def _margin_below_full(figure: go.Figure, results: ResultsDict) -> None:
    """Adds a line at the mean of full training, and a shade from there down by the margin."""
    means = [row["mean"] for row in results["summary"] if row["method"] == "full"]
    if not means:
        return
    level = _scale(results) * means[0]
    figure.add_hline(y=level, line={"color": INK, "width": 1, "dash": "dot"})
    if results.get("margin"):
        figure.add_hrect(
            y0=level - results["margin"],
            y1=level,
            fillcolor=INK,
            opacity=0.12,
            line={"width": 0},
            layer="below",
        )


def metric_curve(results: ResultsDict, _: Samples, by: str = "epoch") -> go.Figure | None:
    """Draws the metric after each epoch: the median of the seeds with a band from lowest to highest; controls without a band.

    Args:
        results: Content of results.json.
        by: Quantity on the x axis, a key of `AXES`.
    """
    figure = epoch_figure(results, _metric_title(results))
    if by != "epoch":
        figure = empty_figure(AXES[by], _metric_title(results))
    for kind, of_methods in controls(results).items():
        curves = [
            _curve_traces(results, runs, by, CONTROLS[kind].label, control_look(kind))[-1:]
            for runs in of_methods.values()
        ]
        for number, [median] in enumerate(filter(None, curves)):
            figure.add_trace(
                median.update(
                    mode="lines", line={"width": 1}, showlegend=not number, visible="legendonly"
                )
            )
    for method, runs in runs_by_method(results).items():
        figure.add_traces(_curve_traces(results, runs, by, method, looks(results)[method]))
    return figure if figure.data else None


def _curve_traces(
    results: ResultsDict, runs: list[dict[str, Any]], by: str, name: str, of: Look
) -> list[go.Scatter]:
    by_epochs = by_epoch(runs, runs[0]["metric"]["name"])
    if by_epochs is None:
        return []
    epochs, values = by_epochs
    if by == "epoch":
        return median_traces(name, of, epochs, _scale(results) * values)
    across = by_epoch(runs, by)
    if across is None:
        return []
    both = np.isin(epochs, across[0])
    x = np.median(across[1][:, np.isin(across[0], epochs)], axis=0)
    return median_traces(name, of, x, _scale(results) * values[:, both])


def times_to_targets(results: ResultsDict, _: Samples, by: str = "cost") -> go.Figure | None:
    """Draws the cost of each method until its error is 1.4, 1.2 and 1.1 times the final error of full training.

    The cost is a share of what full training took to reach the same error.

    Args:
        results: Content of results.json.
        by: Measure of cost: "cost" as counted, or "cpu_s" for CPU time.
    """
    if not is_share(results["runs"]) or not _has_curves(results, by):
        return None
    measured = measure(results)
    clock = by.removesuffix("_s")
    figure = empty_figure("error of full training, times", OF_FULL[clock], barmode="group")
    targets = [
        f"{target['factor']:g} ({100 * target['error']:.2f} %)" for target in measured["targets"]
    ]
    for arm in measured["arms"]:
        of = looks(results)[arm["method"]]
        costs = [reached[f"{clock}_to_full"] for reached in arm["reached"]]
        y = short(np.array(costs, dtype=np.float64))
        said = [
            f"{reached['seeds']} of {reached['of']} seeds reached it" for reached in arm["reached"]
        ]
        name = {"name": escaped(arm["method"]), "legendgroup": arm["method"]}
        figure.add_trace(go.Bar(x=targets, y=y, hovertext=said, marker={"color": of.color}, **name))
    return figure.update_xaxes(type="category")


def _has_curves(results: ResultsDict, by: str) -> bool:
    """Returns whether all runs of methods have the metric and the costs after every epoch, and full training has every seed."""
    groups = runs_by_method(results)
    seeds = {run["seed"] for runs in groups.values() for run in runs}
    complete = all(
        isinstance(entry.get(name), int | float)
        for runs in groups.values()
        for run in runs
        for entry in run["history"]
        for name in (run["metric"]["name"], by, "cost", "cpu_s")
    )
    return complete and seeds == {run["seed"] for run in groups.get("full", ())}


def left_out(results: ResultsDict, _: Samples) -> go.Figure | None:
    """Draws the share of samples that the plan leaves out of each epoch, and as a dashed line the maximum that was set."""
    figure = epoch_figure(results, "left out of the epoch, %")
    for method, runs in runs_by_method(results).items():
        of = looks(results)[method]
        cap, actual = (by_epoch(runs, name) for name in ("scheduled_fraction", "actual_fraction"))
        if actual is not None and actual[1].any():
            figure.add_traces(median_traces(method, of, actual[0], 100 * actual[1]))
        if cap is not None and cap[1].any():
            largest = 100 * np.median(cap[1], axis=0)
            dashed = {"color": of.color, "dash": "dash", "width": 1.5}
            line = line_trace(method, of, cap[0], largest, "lines", line=dashed, showlegend=False)
            figure.add_trace(line.update(name=escaped(f"{method}: cap")))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def speed_up(results: ResultsDict, _: Samples, by: str = "cpu_s") -> go.Figure | None:
    """Draws how many times as fast each epoch is as the median epoch of full training.

    Args:
        results: Content of results.json.
        by: Clock: "cpu_s" or "wall_s" of an epoch, or "step_s" for the time of one step.
    """
    durations = {method: _durations(runs, by) for method, runs in runs_by_method(results).items()}
    baseline = durations.get("full")
    if baseline is None:
        return None
    figure = epoch_figure(results, "times as fast as full training")
    for method, took in durations.items():
        if took is not None:
            figure.add_traces(
                list(
                    median_traces(
                        method, looks(results)[method], took[0], np.median(baseline[1]) / took[1]
                    )
                )
            )
    return figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})


def _durations(runs: list[dict[str, Any]], by: str) -> tuple[Any, Any] | None:
    """Returns epochs and the seconds that each epoch (or, for "step_s", each step) took; None where a time is not above 0."""
    durations = by_epoch(runs, by)
    if durations is None:
        return None
    epochs, seconds = durations
    if by != "step_s":
        if len(epochs) < epochs[-1]:
            return None
        # Clocks of epochs go on from one epoch to the next.
        seconds = np.diff(seconds, axis=1, prepend=0.0)
    return (epochs, seconds) if (seconds > 0).all() else None


def easy_share(results: ResultsDict, _: Samples) -> go.Figure | None:
    """Draws by epoch the share of samples whose loss is below 5 % of the largest loss."""
    figure = epoch_figure(results, "easy samples, %")
    for method, runs in runs_by_method(results).items():
        shares = by_epoch(runs, "easy_share")
        if shares is not None:
            figure.add_traces(
                median_traces(method, looks(results)[method], shares[0], 100 * shares[1])
            )
    return figure if figure.data else None


def loss_histogram(results: ResultsDict, _: Samples, method: str) -> go.Figure | None:
    """Draws the distribution of losses after each epoch: the share of samples in each bin, mean of the seeds.

    Args:
        results: Content of results.json.
        method: Name of the method.
    """
    edges = results.get("loss_bins")
    lists = _lists_by_epoch(results, method, "loss_histogram")
    if not edges or lists is None or lists[1].shape[2] != len(edges) - 1:
        return None
    epochs, counts = lists
    share = (100 * counts / counts.sum(axis=2, keepdims=True).clip(1)).mean(axis=0).T
    powers = np.log10(share, out=np.full(share.shape, np.nan), where=share > 0)
    bar = {
        "title": {"text": "%"},
        "thickness": 12,
        "tickvals": [-2, -1, 0, 1, 2],
        "ticktext": ["0.01", "0.1", "1", "10", "100"],
    }
    says = "epoch %{x}<br>loss about %{y:.2g}<br>%{customdata} % of the samples<extra></extra>"
    figure = epoch_figure(results, "loss of a sample")
    figure.update_yaxes(type="log", exponentformat="power", dtick=2)
    cells = {"x": epochs.tolist(), "y": list(edges), "customdata": short(share)}
    return figure.add_trace(heatmap(powers, colorbar=bar, hovertemplate=says, **cells))


def hidden_by_class(results: ResultsDict, samples: Samples, method: str) -> go.Figure | None:
    """Draws which share of each class an epoch was not trained on (mean of the seeds), and the rank of the classes by it.

    Where the number of samples in a class is not known, because no history of the samples is there, their number is drawn.

    Args:
        results: Content of results.json.
        samples: Histories of the samples.
        method: Name of the method.
    """
    lists = _lists_by_epoch(results, method, "hidden_by_class")
    if lists is None or not lists[1].any():
        return None
    epochs = lists[0].tolist()
    left_out = lists[1].mean(axis=0).T
    sizes = class_sizes(samples, len(left_out))
    if sizes is not None:
        left_out = np.divide(
            100 * left_out,
            sizes[:, None],
            out=np.full_like(left_out, np.nan),
            where=sizes[:, None] > 0,
        )
    unit = "number of samples" if sizes is None else "share of the class, %"
    ranked = (left_out > 0).any(axis=0) & ~np.isnan(left_out)
    ranks = np.where(ranked, rankdata(-np.nan_to_num(left_out), "min", axis=0), np.nan)
    names = [class_name(number, results.get("classes")) for number in range(len(left_out))]
    figure = epoch_figure(results, "class").update_layout(
        height=max(420, 34 * len(left_out) + 140), margin={"t": 32}
    )
    tick = figure.layout.xaxis.dtick
    figure.set_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=(unit, "rank, 1 for the most"),
    )
    shares = _class_heatmap(epochs, left_out, names, unit)
    places = _class_heatmap(epochs, ranks, names, "rank")
    places.update(reversescale=True)
    if len(epochs) <= MOST_RANKS:
        places.update(
            text=[["" if np.isnan(rank) else f"{rank:.0f}" for rank in row] for row in ranks],
            texttemplate="%{text}",
        )
    for row, trace in enumerate((shares, places), 1):
        bar = {"thickness": 12, "len": 0.46, "y": 1.23 - row / 2, "yanchor": "middle"}
        figure.add_trace(trace.update(colorbar=bar), row, 1)
    figure.update_yaxes(type="category", title_text="class", automargin=True)
    return (
        figure.update_xaxes(dtick=tick)
        .update_xaxes(title_text="", row=1)
        .update_xaxes(title_text="epoch", row=2)
    )


def class_sizes(samples: Samples, classes: int) -> NDArray[np.int64] | None:
    """Returns the number of samples of each class, shape (classes,); None where no history has that many classes.

    Args:
        samples: Histories of the samples.
        classes: Number of classes, 1 or more.
    """
    counted = (
        np.bincount(history.targets) for history in samples.values() if history.targets is not None
    )
    return next((sizes for sizes in counted if len(sizes) == classes), None)


def _class_heatmap(epochs: list[int], values: Any, names: list[str], measure: str) -> go.Heatmap:
    says = f"class %{{y}}, epoch %{{x}}<br>{measure}: %{{z:.4g}}<extra></extra>"
    return heatmap(values, x=epochs, y=[escaped(name) for name in names], hovertemplate=says)


def weights(results: ResultsDict, _: Samples, method: str) -> go.Figure | None:
    """Draws by epoch the weight that a method which mixes several selectors gives to each of them.

    Args:
        results: Content of results.json.
        method: Name of the method.
    """
    runs = runs_by_method(results)[method]
    names = dict.fromkeys(
        name
        for run in runs
        for entry in run["history"]
        for name in entry
        if name.startswith("weight_")
    )
    figure = epoch_figure(results, "weight")
    for number, name in enumerate(names):
        by_epochs = by_epoch(runs, name)
        if by_epochs is not None:
            figure.add_traces(median_traces(name.removeprefix("weight_"), look(number), *by_epochs))
    return figure if figure.data else None


def _lists_by_epoch(results: ResultsDict, method: str, name: str) -> tuple[Any, Any] | None:
    """Returns epochs and the lists under a key of the history, shape (runs, epochs, length); None where an entry lacks it."""
    histories = [
        [entry.get(name) for entry in run["history"]] for run in runs_by_method(results)[method]
    ]
    values = [lists[: min(map(len, histories))] for lists in histories]
    lengths = {len(held) if isinstance(held, list) else 0 for lists in values for held in lists}
    if len(lengths) != 1 or 0 in lengths:
        return None
    array = np.array(values, dtype=np.float64)
    return np.arange(1, array.shape[1] + 1), array


def _scale(results: ResultsDict) -> float:
    return 100.0 if is_share(results["runs"]) else 1.0


def _metric_title(results: ResultsDict) -> str:
    return escaped(results["runs"][0]["metric"]["name"]) + (
        ", %" if is_share(results["runs"]) else ""
    )


LAST_EPOCHS = 10
"""Number of epochs at the end of training that `loss_of_part` draws."""

Pair = tuple[str, str]
"""The names of two methods."""


def loss_of_part(results: ResultsDict, samples: Samples, part: str = "all") -> go.Figure | None:
    """Draws the mean loss in the last epochs.

    Args:
        results: Content of results.json.
        samples: Histories of the samples.
        part: "all" samples, the "top" 2 % by loss in each epoch, or the "bottom" 98 %.
    """
    figure = epoch_figure(results, "mean loss")
    for method, of_seeds in histories(results, samples).items():
        epochs = min(history.losses.shape[1] for history in of_seeds.values())
        first = max(0, epochs - LAST_EPOCHS)
        means = np.array(
            [mean_of_part(history.losses[:, first:epochs], part) for history in of_seeds.values()]
        )
        known = np.isfinite(means).all(axis=0)
        if known.any():
            x = np.arange(first + 1, epochs + 1)[known]
            figure.add_traces(median_traces(method, looks(results)[method], x, means[:, known]))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def overlap_by_epoch(results: ResultsDict, samples: Samples) -> go.Figure | None:
    """Draws for each pair of methods, by epoch, the samples that both left out as a share of those that either left out."""
    figure = epoch_figure(results, "left out by both, % of by either")
    of = looks(results)
    for (one, other), pairs in paired(results, samples).items():
        epochs = min(history.dropped.shape[1] for pair in pairs for history in pair)
        shares = np.array(
            [overlap_shares(a.dropped[:, :epochs], b.dropped[:, :epochs]) for a, b in pairs]
        )
        known = np.isfinite(shares).all(axis=0)
        if known.any():
            x = np.arange(1, epochs + 1)[known]
            y = 100 * np.median(shares[:, known], axis=0)
            marker = {"color": of[other].color, "symbol": of[other].symbol, "size": 8}
            figure.add_trace(line_trace(f"{one} and {other}", of[one], x, y, marker=marker))
    return figure.update_yaxes(range=[0, 100]) if figure.data else None


def overlap_matrix(results: ResultsDict, samples: Samples, of_class: str = "") -> go.Figure | None:
    """Draws the same share over all epochs as a matrix of methods.

    Args:
        results: Content of results.json.
        samples: Histories of the samples.
        of_class: Number of the class whose samples are counted, as text. "": all classes.
    """
    pairs = paired(results, samples)
    if not pairs:
        return None
    names = [method for method in runs_by_method(results) if any(method in pair for pair in pairs)]
    shares = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(shares, 100.0)
    for (one, other), histories_of_seeds in pairs.items():
        share = 100 * np.mean([_overlap_of_class(a, b, of_class) for a, b in histories_of_seeds])
        row = names.index(one)
        column = names.index(other)
        shares[row, column] = shares[column, row] = share
    if not np.isfinite(shares).any():
        return None
    labels = [wrapped(name) for name in names]
    text = [["" if np.isnan(share) else f"{share:.0f} %" for share in row] for row in shares]
    trace = heatmap(
        shares,
        x=labels,
        y=labels,
        text=text,
        texttemplate="%{text}",
        zmin=0,
        zmax=100,
        showscale=False,
    )
    figure = empty_figure("", "", height=max(300, 90 * len(names) + 90)).add_trace(
        trace.update(hoverinfo="text")
    )
    return figure.update_yaxes(autorange="reversed")


def class_numbers(results: ResultsDict, samples: Samples) -> list[int]:
    """Returns the numbers of the classes in ascending order."""
    every = [
        history.targets
        for of_seeds in histories(results, samples).values()
        for history in of_seeds.values()
    ]
    return sorted(
        {int(target) for targets in every if targets is not None for target in np.unique(targets)}
    )


def paired(
    results: ResultsDict, samples: Samples
) -> dict[Pair, list[tuple[RunHistory, RunHistory]]]:
    """Returns for every two methods that leave samples out their pairs of histories with the same seed and the same samples."""
    leaving = {
        method: {seed: history for seed, history in of_seeds.items() if history.dropped.any()}
        for method, of_seeds in histories(results, samples).items()
    }
    pairs = {
        (one, other): [
            (leaving[one][seed], leaving[other][seed])
            for seed in leaving[one]
            if seed in leaving[other]
            and np.array_equal(leaving[one][seed].ids, leaving[other][seed].ids)
        ]
        for one, other in combinations(leaving, 2)
    }
    return {pair: of_seeds for pair, of_seeds in pairs.items() if of_seeds}


def overlap_shares(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns for each column the number of rows set in both masks, divided by the number set in either; NaN for 0 / 0."""
    both = (one & other).sum(axis=0)
    either = (one | other).sum(axis=0)
    return np.divide(both, either, out=np.full(len(both), np.nan), where=either > 0)


def _overlap_of_class(one: RunHistory, other: RunHistory, of_class: str) -> float:
    epochs = min(one.dropped.shape[1], other.dropped.shape[1])
    rows = np.ones(len(one.ids), dtype=bool)
    if of_class:
        rows = np.zeros_like(rows) if one.targets is None else one.targets == int(of_class)
    first, second = (history.dropped[rows, :epochs].reshape(-1, 1) for history in (one, other))
    return float(overlap_shares(first, second)[0])
