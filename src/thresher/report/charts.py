"""Charts of what results.json holds: functions of results and samples, None where there is nothing to draw."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from scipy.stats import rankdata

from thresher.experiments.comparison.summary import is_share, kind_of
from thresher.experiments.comparison.time_to_target import measure
from thresher.report.loading import Results, Samples, by_epoch, controls, methods
from thresher.report.style import (
    INK,
    KINDS,
    Look,
    blank,
    control_look,
    heatmap,
    line,
    look,
    looks,
    over_epochs,
    plain,
    short,
    spread,
)

OF_FULL = {
    "cost": "cost as counted, share of full training",
    "cpu": "CPU time, share of full training",
    "wall": "wall time, share of full training",
}
AXES = {
    "epoch": "epoch",
    "cost": "cost as counted, in full trainings",
    "cpu_s": "CPU time of training, s",
    "wall_s": "wall time of training, s",
}
MOST_RANKS = 24
"""Columns up to which ranks are written into the chart."""


def metric_against_cost(results: Results, _: Samples, by: str = "cost") -> go.Figure | None:
    """Every method and control as a point: its mean against what it took, with the interval of its difference to full."""
    rows = [row for row in results["summary"] if row.get(f"{by}_ratio") is not None]
    if not rows:
        return None
    figure = blank(OF_FULL[by], _metric_title(results))
    _margin_below_full(figure, results)
    for kind in dict.fromkeys(filter(None, map(kind_of, rows))):
        group = [row for row in rows if kind_of(row) == kind]
        _points(figure, results, KINDS.get(kind, kind), control_look(kind), group, f"{by}_ratio", "lines+markers")
    for row in rows:
        if kind_of(row) is None:
            _points(figure, results, row["method"], looks(results)[row["method"]], [row], f"{by}_ratio", "markers")
    return figure


def _points(figure: go.Figure, results: Results, name: str, of: Look, rows: list[dict[str, Any]], x: str, mode: Any) -> None:
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
    figure.add_trace(line(name, of, [row[x] for row in rows], means, mode, error_y=interval, marker=marker))


def _margin_below_full(figure: go.Figure, results: Results) -> None:
    """A line at full training's mean, and a shade down to the loss that does not matter."""
    means = [row["mean"] for row in results["summary"] if row["method"] == "full"]
    if not means:
        return
    level = _scale(results) * means[0]
    figure.add_hline(y=level, line={"color": INK, "width": 1, "dash": "dot"})
    if results.get("margin"):
        figure.add_hrect(y0=level - results["margin"], y1=level, fillcolor=INK, opacity=0.12, line={"width": 0}, layer="below")


def metric_curve(results: Results, _: Samples, by: str = "epoch") -> go.Figure | None:
    """The metric after each epoch: median of the seeds, and between their lowest and highest; controls as lines alone."""
    figure = over_epochs(results, _metric_title(results)) if by == "epoch" else blank(AXES[by], _metric_title(results))
    for kind, of_methods in controls(results).items():
        curves = [_curve(results, runs, by, KINDS.get(kind, kind), control_look(kind))[-1:] for runs in of_methods.values()]
        for number, [median] in enumerate(filter(None, curves)):
            figure.add_trace(median.update(mode="lines", line={"width": 1}, showlegend=not number, visible="legendonly"))
    for method, runs in methods(results).items():
        figure.add_traces(_curve(results, runs, by, method, looks(results)[method]))
    return figure if figure.data else None


def _curve(results: Results, runs: list[dict[str, Any]], by: str, name: str, of: Look) -> list[go.Scatter]:
    found = by_epoch(runs, runs[0]["metric"]["name"])
    across = None if by == "epoch" else by_epoch(runs, by)
    if found is None or (by != "epoch" and across is None):
        return []
    epochs, values = found
    if across is None:
        return list(spread(name, of, epochs, _scale(results) * values))
    both = np.isin(epochs, across[0])
    x = np.median(across[1][:, np.isin(across[0], epochs)], axis=0)
    return list(spread(name, of, x, _scale(results) * values[:, both]))


def time_to_target(results: Results, _: Samples, by: str = "cost") -> go.Figure | None:
    """What methods took to errors of 1.4, 1.2 and 1.1 times that which full training ends with, of what full training took."""
    if not is_share(results["runs"]) or not _has_curves(results, by):
        return None
    measured = measure(results)
    figure = blank("error of full training, times", OF_FULL["cpu" if by == "cpu_s" else by], barmode="group")
    targets = [f"{target['factor']:g} ({100 * target['error']:.2f} %)" for target in measured["targets"]]
    field = "cpu_to_full" if by == "cpu_s" else f"{by}_to_full"
    for arm in measured["arms"]:
        of = looks(results)[arm["method"]]
        y = short([np.nan if reached[field] is None else reached[field] for reached in arm["reached"]])
        said = [f"{reached['seeds']} of {reached['of']} seeds reached it" for reached in arm["reached"]]
        name = {"name": plain(arm["method"]), "legendgroup": arm["method"]}
        figure.add_trace(go.Bar(x=targets, y=y, hovertext=said, marker={"color": of.colour}, **name))
    return figure.update_xaxes(type="category")


def _has_curves(results: Results, by: str) -> bool:
    """Whether all runs of methods have the metric and what it took after every epoch, full training of every seed too."""
    groups = methods(results)
    seeds = {run["seed"] for runs in groups.values() for run in runs}
    complete = all(
        isinstance(entry.get(name), int | float)
        for runs in groups.values()
        for run in runs
        for entry in run["history"]
        for name in (run["metric"]["name"], by, "cost", "cpu_s")
    )
    return complete and seeds == {run["seed"] for run in groups.get("full", ())}


def left_out(results: Results, _: Samples) -> go.Figure | None:
    """The share of samples that a plan leaves out of each epoch; dashed, the cap that was asked for."""
    figure = over_epochs(results, "left out of the epoch, %")
    for method, runs in methods(results).items():
        of = looks(results)[method]
        cap, actual = (by_epoch(runs, name) for name in ("scheduled_fraction", "actual_fraction"))
        if actual is not None and actual[1].any():
            figure.add_traces(list(spread(method, of, actual[0], 100 * actual[1])))
        if cap is not None and cap[1].any():
            figure.add_trace(_cap(method, of, cap[0], 100 * np.median(cap[1], axis=0)))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def _cap(method: str, of: Look, epochs: Any, values: Any) -> go.Scatter:
    dashed = {"color": of.colour, "dash": "dash", "width": 1.5}
    return line(method, of, epochs, values, "lines", line=dashed, showlegend=False).update(name=plain(f"{method}: cap"))


def speed_up(results: Results, _: Samples, by: str = "cpu_s") -> go.Figure | None:
    """How many times faster an epoch is, or a step (`by` "step_s"), than the median one of full training."""
    full = methods(results).get("full", [])
    baseline = _durations(full, by) if full else None
    if baseline is None:
        return None
    figure = over_epochs(results, "times as fast as full training")
    for method, runs in methods(results).items():
        found = _durations(runs, by)
        if found is not None:
            figure.add_traces(list(spread(method, looks(results)[method], found[0], np.median(baseline[1]) / found[1])))
    return figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})


def _durations(runs: list[dict[str, Any]], by: str) -> tuple[Any, Any] | None:
    """Seconds of each epoch, of clocks that add up, or of a step; None where any is not above 0."""
    found = by_epoch(runs, by)
    if found is None or by == "step_s":
        return found if found is None or (found[1] > 0).all() else None
    epochs, seconds = found
    each = np.diff(seconds, axis=1, prepend=0.0)
    return (epochs, each) if len(epochs) == epochs[-1] and (each > 0).all() else None


def easy_share(results: Results, _: Samples) -> go.Figure | None:
    """The share of samples whose loss is below 5 % of the largest, by epoch."""
    return _fact(results, "easy_share", "easy samples, %", 100)


def _fact(results: Results, name: str, title: str, scale: float) -> go.Figure | None:
    figure = over_epochs(results, title)
    for method, runs in methods(results).items():
        found = by_epoch(runs, name)
        if found is not None:
            figure.add_traces(list(spread(method, looks(results)[method], found[0], scale * found[1])))
    return figure if figure.data else None


def loss_histogram(results: Results, _: Samples, method: str) -> go.Figure | None:
    """How losses are spread after each epoch: share of samples in each of the bins, mean of the seeds."""
    edges = results.get("loss_bins")
    found = _lists(results, method, "loss_histogram")
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
    figure = over_epochs(results, "loss of a sample")
    figure.update_yaxes(type="log", exponentformat="power", dtick=2)
    cells = {"x": epochs.tolist(), "y": list(edges), "customdata": short(share)}
    return figure.add_trace(heatmap(powers, colorbar=bar, hovertemplate=says, **cells))


def hidden_by_class(results: Results, _: Samples, method: str) -> go.Figure | None:
    """How many samples of each class an epoch was not trained on, mean of the seeds, and the rank of the classes by it."""
    found = _lists(results, method, "hidden_by_class")
    if found is None or not found[1].any():
        return None
    epochs, counts = found[0].tolist(), found[1].mean(axis=0).T
    ranks = np.where(counts.any(axis=0), rankdata(-counts, "min", axis=0), np.nan)
    figure = over_epochs(results, "class").update_layout(height=max(420, 34 * len(counts) + 140), margin={"t": 32})
    tick = figure.layout.xaxis.dtick
    titles = ("samples", "rank, 1 for the most")
    figure.set_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=titles)
    numbers, places = _cells(epochs, counts, "samples"), _cells(epochs, ranks, "rank").update(reversescale=True)
    if len(epochs) <= MOST_RANKS:
        places.update(text=[["" if np.isnan(rank) else f"{rank:.0f}" for rank in row] for row in ranks], texttemplate="%{text}")
    for row, trace in enumerate((numbers, places), 1):
        bar = {"thickness": 12, "len": 0.46, "y": 1.23 - row / 2, "yanchor": "middle"}
        figure.add_trace(trace.update(colorbar=bar), row, 1)
    figure.update_yaxes(type="category", title_text="class", automargin=True)
    return figure.update_xaxes(dtick=tick).update_xaxes(title_text="", row=1).update_xaxes(title_text="epoch", row=2)


def _cells(epochs: list[int], values: Any, name: str) -> go.Heatmap:
    says = f"class %{{y}}, epoch %{{x}}<br>{name} %{{z:.4g}}<extra></extra>"
    return heatmap(values, x=epochs, y=[str(number) for number in range(len(values))], hovertemplate=says)


def weights(results: Results, _: Samples, method: str) -> go.Figure | None:
    """What weight a method that mixes others gives to each of them, by epoch."""
    runs = methods(results)[method]
    names = dict.fromkeys(name for run in runs for entry in run["history"] for name in entry if name.startswith("weight_"))
    figure = over_epochs(results, "weight")
    for number, name in enumerate(names):
        found = by_epoch(runs, name)
        if found is not None:
            figure.add_traces(list(spread(name.removeprefix("weight_"), look(number), *found)))
    return figure if figure.data else None


def _lists(results: Results, method: str, name: str) -> tuple[Any, Any] | None:
    """Epochs, and a fact that is a list in each of them, shape (runs, epochs, length); None where any lacks it."""
    histories = [[entry.get(name) for entry in run["history"]] for run in methods(results)[method]]
    values = [lists[: min(map(len, histories))] for lists in histories]
    lengths = {len(held) if isinstance(held, list) else 0 for lists in values for held in lists}
    if len(lengths) != 1 or 0 in lengths:
        return None
    array = np.array(values, dtype=np.float64)
    return np.arange(1, array.shape[1] + 1), array


def _scale(results: Results) -> float:
    return 100.0 if is_share(results["runs"]) else 1.0


def _metric_title(results: Results) -> str:
    return plain(results["runs"][0]["metric"]["name"]) + (", %" if is_share(results["runs"]) else "")
