"""Charts of results.json: functions of results and samples that return None where there is nothing to draw.

Their first two arguments are the content of results.json and the histories of the samples; most of these charts use the
first only.
"""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from scipy.stats import rankdata

from thresher.experiments.comparison.summary import is_share, kind_of
from thresher.experiments.comparison.time_to_target import measure
from thresher.experiments.training.sample_history import class_name
from thresher.report.loading import ResultsDict, Samples, by_epoch, controls, runs_by_method
from thresher.report.style import (
    CONTROL_LABELS,
    INK,
    Look,
    control_look,
    empty_figure,
    epoch_figure,
    escaped,
    heatmap,
    line_trace,
    look,
    looks,
    median_traces,
    short,
)

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
    for kind in dict.fromkeys(filter(None, map(kind_of, rows))):
        group = [row for row in rows if kind_of(row) == kind]
        _add_points(figure, results, CONTROL_LABELS.get(kind, kind), control_look(kind), group, f"{by}_ratio", "lines+markers")
    for row in rows:
        if kind_of(row) is None:
            _add_points(figure, results, row["method"], looks(results)[row["method"]], [row], f"{by}_ratio", "markers")
    return figure


def _add_points(
    figure: go.Figure, results: ResultsDict, name: str, of: Look, rows: list[dict[str, Any]], x: str, mode: Any
) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    scale = _scale(results)
    bounds = np.array([row.get("ci95") or (np.nan, np.nan) for row in rows], dtype=np.float64)
    middle = np.array([row["difference"] or 0.0 for row in rows])
    control = rows[0]["control_of"] is not None
    interval = {
        "type": "data",
        "symmetric": False,
        "array": short(scale * (bounds[:, 1] - middle)),
        "arrayminus": short(scale * (middle - bounds[:, 0])),
        "color": of.colour,
        "thickness": 1 if control else 2,
        "width": 0 if control else 5,
    }
    means = scale * np.array([row["mean"] for row in rows])
    marker = {"color": of.colour, "symbol": of.symbol, "size": 7 if control else 12}
    figure.add_trace(line_trace(name, of, [row[x] for row in rows], means, mode, error_y=interval, marker=marker))


def _margin_below_full(figure: go.Figure, results: ResultsDict) -> None:
    """Adds a line at the mean of full training, and a shade from there down by the margin."""
    means = [row["mean"] for row in results["summary"] if row["method"] == "full"]
    if not means:
        return
    level = _scale(results) * means[0]
    figure.add_hline(y=level, line={"color": INK, "width": 1, "dash": "dot"})
    if results.get("margin"):
        figure.add_hrect(y0=level - results["margin"], y1=level, fillcolor=INK, opacity=0.12, line={"width": 0}, layer="below")


def metric_curve(results: ResultsDict, _: Samples, by: str = "epoch") -> go.Figure | None:
    """Draws the metric after each epoch: the median of the seeds with a band from lowest to highest; controls without a band.

    Args:
        results: Content of results.json.
        by: Quantity on the x axis, a key of `AXES`.
    """
    figure = epoch_figure(results, _metric_title(results)) if by == "epoch" else empty_figure(AXES[by], _metric_title(results))
    for kind, of_methods in controls(results).items():
        curves = [
            _curve_traces(results, runs, by, CONTROL_LABELS.get(kind, kind), control_look(kind))[-1:]
            for runs in of_methods.values()
        ]
        for number, [median] in enumerate(filter(None, curves)):
            figure.add_trace(median.update(mode="lines", line={"width": 1}, showlegend=not number, visible="legendonly"))
    for method, runs in runs_by_method(results).items():
        figure.add_traces(_curve_traces(results, runs, by, method, looks(results)[method]))
    return figure if figure.data else None


def _curve_traces(results: ResultsDict, runs: list[dict[str, Any]], by: str, name: str, of: Look) -> list[go.Scatter]:
    found = by_epoch(runs, runs[0]["metric"]["name"])
    across = None if by == "epoch" else by_epoch(runs, by)
    if found is None or (by != "epoch" and across is None):
        return []
    epochs, values = found
    if across is None:
        return list(median_traces(name, of, epochs, _scale(results) * values))
    both = np.isin(epochs, across[0])
    x = np.median(across[1][:, np.isin(across[0], epochs)], axis=0)
    return list(median_traces(name, of, x, _scale(results) * values[:, both]))


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
    figure = empty_figure("error of full training, times", OF_FULL["cpu" if by == "cpu_s" else by], barmode="group")
    targets = [f"{target['factor']:g} ({100 * target['error']:.2f} %)" for target in measured["targets"]]
    field = "cpu_to_full" if by == "cpu_s" else f"{by}_to_full"
    for arm in measured["arms"]:
        of = looks(results)[arm["method"]]
        y = short([np.nan if reached[field] is None else reached[field] for reached in arm["reached"]])
        said = [f"{reached['seeds']} of {reached['of']} seeds reached it" for reached in arm["reached"]]
        name = {"name": escaped(arm["method"]), "legendgroup": arm["method"]}
        figure.add_trace(go.Bar(x=targets, y=y, hovertext=said, marker={"color": of.colour}, **name))
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
            figure.add_traces(list(median_traces(method, of, actual[0], 100 * actual[1])))
        if cap is not None and cap[1].any():
            figure.add_trace(_cap(method, of, cap[0], 100 * np.median(cap[1], axis=0)))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def _cap(method: str, of: Look, epochs: Any, values: Any) -> go.Scatter:
    dashed = {"color": of.colour, "dash": "dash", "width": 1.5}
    return line_trace(method, of, epochs, values, "lines", line=dashed, showlegend=False).update(name=escaped(f"{method}: cap"))


def speed_up(results: ResultsDict, _: Samples, by: str = "cpu_s") -> go.Figure | None:
    """Draws how many times as fast each epoch is as the median epoch of full training.

    Args:
        results: Content of results.json.
        by: Clock: "cpu_s" or "wall_s" of an epoch, or "step_s" for the time of one step.
    """
    full = runs_by_method(results).get("full", [])
    baseline = _durations(full, by) if full else None
    if baseline is None:
        return None
    figure = epoch_figure(results, "times as fast as full training")
    for method, runs in runs_by_method(results).items():
        found = _durations(runs, by)
        if found is not None:
            figure.add_traces(list(median_traces(method, looks(results)[method], found[0], np.median(baseline[1]) / found[1])))
    return figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})


def _durations(runs: list[dict[str, Any]], by: str) -> tuple[Any, Any] | None:
    """Returns epochs and the seconds that each epoch (or, for "step_s", each step) took; None where a time is not above 0."""
    found = by_epoch(runs, by)
    if found is None or by == "step_s":
        return found if found is None or (found[1] > 0).all() else None
    epochs, seconds = found
    each = np.diff(seconds, axis=1, prepend=0.0)
    return (epochs, each) if len(epochs) == epochs[-1] and (each > 0).all() else None


def easy_share(results: ResultsDict, _: Samples) -> go.Figure | None:
    """Draws by epoch the share of samples whose loss is below 5 % of the largest loss."""
    return _value_chart(results, "easy_share", "easy samples, %", 100)


def _value_chart(results: ResultsDict, name: str, title: str, scale: float) -> go.Figure | None:
    figure = epoch_figure(results, title)
    for method, runs in runs_by_method(results).items():
        found = by_epoch(runs, name)
        if found is not None:
            figure.add_traces(list(median_traces(method, looks(results)[method], found[0], scale * found[1])))
    return figure if figure.data else None


def loss_histogram(results: ResultsDict, _: Samples, method: str) -> go.Figure | None:
    """Draws the distribution of losses after each epoch: the share of samples in each bin, mean of the seeds.

    Args:
        results: Content of results.json.
        method: Name of the method.
    """
    edges = results.get("loss_bins")
    found = _lists_by_epoch(results, method, "loss_histogram")
    if not edges or found is None or found[1].shape[2] != len(edges) - 1:
        return None
    epochs, counts = found
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
    found = _lists_by_epoch(results, method, "hidden_by_class")
    if found is None or not found[1].any():
        return None
    epochs, left_out = found[0].tolist(), found[1].mean(axis=0).T
    sizes = class_sizes(samples, len(left_out))
    if sizes is not None:
        left_out = np.divide(100 * left_out, sizes[:, None], out=np.full_like(left_out, np.nan), where=sizes[:, None] > 0)
    unit = "number of samples" if sizes is None else "share of the class, %"
    ranked = (left_out > 0).any(axis=0) & ~np.isnan(left_out)
    ranks = np.where(ranked, rankdata(-np.nan_to_num(left_out), "min", axis=0), np.nan)
    names = [class_name(number, results.get("classes")) for number in range(len(left_out))]
    figure = epoch_figure(results, "class").update_layout(height=max(420, 34 * len(left_out) + 140), margin={"t": 32})
    tick = figure.layout.xaxis.dtick
    figure.set_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=(unit, "rank, 1 for the most"))
    shares, places = _class_heatmap(epochs, left_out, names, unit), _class_heatmap(epochs, ranks, names, "rank")
    places.update(reversescale=True)
    if len(epochs) <= MOST_RANKS:
        places.update(text=[["" if np.isnan(rank) else f"{rank:.0f}" for rank in row] for row in ranks], texttemplate="%{text}")
    for row, trace in enumerate((shares, places), 1):
        bar = {"thickness": 12, "len": 0.46, "y": 1.23 - row / 2, "yanchor": "middle"}
        figure.add_trace(trace.update(colorbar=bar), row, 1)
    figure.update_yaxes(type="category", title_text="class", automargin=True)
    return figure.update_xaxes(dtick=tick).update_xaxes(title_text="", row=1).update_xaxes(title_text="epoch", row=2)


def class_sizes(samples: Samples, classes: int) -> NDArray[np.int64] | None:
    """Returns the number of samples of each class, shape (classes,); None where no history has that many classes.

    Args:
        samples: Histories of the samples.
        classes: Number of classes, 1 or more.
    """
    counted = (np.bincount(history.targets) for history in samples.values() if history.targets is not None)
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
    names = dict.fromkeys(name for run in runs for entry in run["history"] for name in entry if name.startswith("weight_"))
    figure = epoch_figure(results, "weight")
    for number, name in enumerate(names):
        found = by_epoch(runs, name)
        if found is not None:
            figure.add_traces(list(median_traces(name.removeprefix("weight_"), look(number), *found)))
    return figure if figure.data else None


def _lists_by_epoch(results: ResultsDict, method: str, name: str) -> tuple[Any, Any] | None:
    """Returns epochs and the lists under a key of the history, shape (runs, epochs, length); None where an entry lacks it."""
    histories = [[entry.get(name) for entry in run["history"]] for run in runs_by_method(results)[method]]
    values = [lists[: min(map(len, histories))] for lists in histories]
    lengths = {len(held) if isinstance(held, list) else 0 for lists in values for held in lists}
    if len(lengths) != 1 or 0 in lengths:
        return None
    array = np.array(values, dtype=np.float64)
    return np.arange(1, array.shape[1] + 1), array


def _scale(results: ResultsDict) -> float:
    return 100.0 if is_share(results["runs"]) else 1.0


def _metric_title(results: ResultsDict) -> str:
    return escaped(results["runs"][0]["metric"]["name"]) + (", %" if is_share(results["runs"]) else "")
