"""Charts of the classes, of the samples that the metric is measured on: how many are right, and what they are taken for."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from scipy import stats

from thresher_lab.report.charts import (
    INK,
    Look,
    empty_figure,
    escaped,
    heatmap,
    line_trace,
    looks,
    short,
)
from thresher_lab.report.loading import ResultsDict, Samples, runs_by_method
from thresher_lab.training.samples import class_name

MOST_ROWS = 30
"""Largest number of classes in a chart: those that change most."""
DIVERGING = "PuOr"
"""Colors of differences, which can be told apart with any color vision."""


def change_by_class(results: ResultsDict, _: Samples) -> go.Figure | None:
    """Draws for each method the difference of the accuracy of each class to full training, with its interval.

    Args:
        results: Content of results.json.
    """
    confusions = {
        method: of
        for method in runs_by_method(results)
        if (of := _confused(results, method)) is not None
    }
    if "full" not in confusions or len(confusions) < 2:
        return None
    full = confusions.pop("full")
    changes = {
        method: _accuracies(of) - _accuracies(_full_beside(results, method))
        for method, of in confusions.items()
    }
    most = np.max([np.abs(np.nan_to_num(change).mean(0)) for change in changes.values()], axis=0)
    shown = np.sort(np.argsort(-most, kind="stable")[:MOST_ROWS])[::-1]
    figure = empty_figure(
        "accuracy less full training's, points", "class", height=max(380, 26 * len(shown) + 120)
    )
    figure.add_vline(x=0, line={"color": INK, "width": 1, "dash": "dot"})
    sizes = full.sum(2).mean(0)
    names = [
        f"{escaped(class_name(number, results.get('classes')))} ({sizes[number]:.0f})"
        for number in shown.tolist()
    ]
    for place, (method, change) in enumerate(changes.items()):
        of = looks(results)[method]
        figure.add_trace(
            _points(method, of, change[:, shown], names, (place - (len(changes) - 1) / 2) * 0.12)
        )
    return figure.update_yaxes(tickmode="array", tickvals=[*range(len(names))], ticktext=names)


def _points(
    method: str, of: Look, change: NDArray[np.float64], names: list[str], shift: float
) -> go.Scatter:
    seeds = len(change)
    if seeds > 1:
        half = stats.t.ppf(0.975, seeds - 1) * change.std(0, ddof=1) / seeds**0.5
    else:
        half = np.full(change.shape[1], np.nan)
    bar = {"type": "data", "array": short(half), "color": of.color, "thickness": 2, "width": 4}
    says = "%{text}: %{x:+.3g} points<extra></extra>"
    y = shift + np.arange(len(names))
    marker = {"color": of.color, "symbol": of.symbol, "size": 9}
    return line_trace(
        method,
        of,
        change.mean(0),
        y,
        "markers",
        error_x=bar,
        marker=marker,
        text=names,
        hovertemplate=says,
    )


def taken_for(results: ResultsDict, _: Samples, method: str) -> go.Figure | None:
    """Draws which share of each class is taken for each class; of a method, the difference to full training.

    Args:
        results: Content of results.json.
        method: Name of the method.
    """
    own = _confused(results, method)
    if own is None or _confused(results, "full") is None:
        return None
    shares = _shares(own).mean(0) - (
        0.0 if method == "full" else _shares(_full_beside(results, method)).mean(0)
    )
    names = [escaped(class_name(number, results.get("classes"))) for number in range(len(shares))]
    unit = "%" if method == "full" else "points more than with full training"
    says = f"%{{y}}, taken for %{{x}}: %{{z:.3g}} {unit}<extra></extra>"
    look: dict[str, Any] = {} if method == "full" else {"colorscale": DIVERGING, "zmid": 0}
    figure = empty_figure("taken for", "class", height=max(420, 22 * len(names) + 160))
    bar = {"thickness": 12, "title": {"text": unit, "side": "right"}}
    figure.add_trace(
        heatmap(shares, x=names, y=names, hovertemplate=says, colorbar=bar).update(**look)
    )
    return figure.update_xaxes(type="category").update_yaxes(type="category", autorange="reversed")


def _confused(results: ResultsDict, method: str) -> NDArray[np.float64] | None:
    """Returns the counts of a method's runs, seeds in ascending order, shape (runs, C, C); None where a run has none."""
    runs = sorted(runs_by_method(results)[method], key=lambda run: run["seed"])
    counts: list[Any] = [run.get("confusion") for run in runs]
    if None in counts:
        return None
    # A run whose predictions and samples have none of the last classes has fewer rows.
    classes = max(len(run.get("confusion") or ()) for run in results["runs"])
    counts = [np.pad(one, (0, classes - len(one))) for one in counts]
    return np.array(counts, dtype=np.float64)


def _full_beside(results: ResultsDict, method: str) -> NDArray[np.float64]:
    """Returns the counts of full training with the seeds of a method, which has fewer while a comparison runs."""
    runs = runs_by_method(results)
    seeds = {run["seed"] for run in runs[method]}
    counts = _confused(results, "full")
    assert counts is not None
    held = sorted(run["seed"] for run in runs["full"])
    return counts[[place for place, seed in enumerate(held) if seed in seeds]]


def _shares(confused: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns percentages of the samples of each class; nan where it has none."""
    of_class = confused.sum(2, keepdims=True)
    return np.divide(
        100 * confused, of_class, out=np.full_like(confused, np.nan), where=of_class > 0
    )


def _accuracies(confused: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.diagonal(_shares(confused), axis1=1, axis2=2)
