"""Charts of what the histories of samples hold: functions of results and samples, None where there is nothing to draw."""

from itertools import combinations

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from thresher.report.loading import History, Results, Samples, histories, methods
from thresher.report.style import blank, heatmap, line, looks, over_epochs, spread, wrapped

LAST = 10
"""Epochs at the end of training that losses of parts are shown for."""
TOP = 0.02
"""Share of samples, those with the largest losses, that KAKURENBO's paper leaves out to see what they do."""

Pair = tuple[str, str]


def loss_of_part(results: Results, samples: Samples, part: str = "all") -> go.Figure | None:
    """Mean loss in the last epochs of all samples, or of the `top` 2 % in losses of each epoch, or of the `bottom` 98 %."""
    figure = over_epochs(results, "mean loss")
    for method, of_seeds in histories(results, samples).items():
        epochs = min(history.losses.shape[1] for history in of_seeds.values())
        first = max(0, epochs - LAST)
        means = np.array([mean_of_part(history.losses[:, first:epochs], part) for history in of_seeds.values()])
        known = np.isfinite(means).all(axis=0)
        if known.any():
            x = np.arange(first + 1, epochs + 1)[known]
            figure.add_traces(list(spread(method, looks(results)[method], x, means[:, known])))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def mean_of_part(losses: NDArray[np.float32], part: str) -> NDArray[np.float64]:
    """Mean of each column, of all its values, the largest 2 % or the rest; at least one is among the largest; NaN for none."""
    return np.array([_mean(np.sort(column[np.isfinite(column)]), part) for column in losses.T])


def _mean(ordered: NDArray[np.float32], part: str) -> float:
    top = max(1, round(TOP * len(ordered)))
    chosen = {"all": ordered, "bottom": ordered[:-top], "top": ordered[-top:]}[part]
    return float(chosen.mean(dtype=np.float64)) if len(chosen) else float("nan")


def overlap_by_epoch(results: Results, samples: Samples) -> go.Figure | None:
    """How far two methods leave out the same samples, by epoch: those that both do, of those that either does."""
    figure = over_epochs(results, "left out by both, % of by either")
    of = looks(results)
    for (one, other), pairs in paired(results, samples).items():
        epochs = min(history.dropped.shape[1] for pair in pairs for history in pair)
        shares = np.array([overlap(a.dropped[:, :epochs], b.dropped[:, :epochs]) for a, b in pairs])
        known = np.isfinite(shares).all(axis=0)
        if known.any():
            x, y = np.arange(1, epochs + 1)[known], 100 * np.median(shares[:, known], axis=0)
            marker = {"color": of[other].colour, "symbol": of[other].symbol, "size": 8}
            figure.add_trace(line(f"{one} and {other}", of[one], x, y, marker=marker))
    return figure.update_yaxes(range=[0, 100]) if figure.data else None


def overlap_matrix(results: Results, samples: Samples, of_class: str = "") -> go.Figure | None:
    """The same over all epochs, for every pair of methods; of one class where `of_class` names it."""
    pairs = paired(results, samples)
    if not pairs:
        return None
    names = [method for method in methods(results) if any(method in pair for pair in pairs)]
    shares = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(shares, 100.0)
    for (one, other), histories_of_seeds in pairs.items():
        share = 100 * np.mean([_overlap_of_class(a, b, of_class) for a, b in histories_of_seeds])
        row, column = names.index(one), names.index(other)
        shares[row, column] = shares[column, row] = share
    if not np.isfinite(shares).any():
        return None
    labels = [wrapped(name) for name in names]
    text = [["" if np.isnan(share) else f"{share:.0f} %" for share in row] for row in shares]
    trace = heatmap(shares, x=labels, y=labels, text=text, texttemplate="%{text}", zmin=0, zmax=100, showscale=False)
    figure = blank("", "", height=max(300, 90 * len(names) + 90)).add_trace(trace.update(hoverinfo="text"))
    return figure.update_yaxes(autorange="reversed")


def classes(results: Results, samples: Samples) -> list[int]:
    """Classes of the samples, in order."""
    every = [history.targets for of_seeds in histories(results, samples).values() for history in of_seeds.values()]
    return sorted({int(target) for targets in every if targets is not None for target in np.unique(targets)})


def paired(results: Results, samples: Samples) -> dict[Pair, list[tuple[History, History]]]:
    """Of every two methods that leave samples out, the histories with the same seed and the same samples."""
    leaving = {
        method: {seed: history for seed, history in of_seeds.items() if history.dropped.any()}
        for method, of_seeds in histories(results, samples).items()
    }
    found = {
        (one, other): [
            (leaving[one][seed], leaving[other][seed])
            for seed in leaving[one]
            if seed in leaving[other] and np.array_equal(leaving[one][seed].ids, leaving[other][seed].ids)
        ]
        for one, other in combinations(leaving, 2)
    }
    return {pair: of_seeds for pair, of_seeds in found.items() if of_seeds}


def overlap(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Of each column: what is in both, as a share of what is in either; NaN where that is nothing."""
    both, either = (one & other).sum(axis=0), (one | other).sum(axis=0)
    return np.divide(both, either, out=np.full(len(both), np.nan), where=either > 0)


def _overlap_of_class(one: History, other: History, of_class: str) -> float:
    epochs = min(one.dropped.shape[1], other.dropped.shape[1])
    rows = np.ones(len(one.ids), dtype=bool)
    if of_class:
        rows = np.zeros_like(rows) if one.targets is None else one.targets == int(of_class)
    first, second = (history.dropped[rows, :epochs].reshape(-1, 1) for history in (one, other))
    return float(overlap(first, second)[0])
