"""Charts of the histories of samples: functions of results and samples that return None where there is nothing to draw."""

from itertools import combinations

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from thresher.experiments.training.sample_history import RunHistory
from thresher.report.loading import ResultsDict, Samples, histories, runs_by_method
from thresher.report.style import empty_figure, epoch_figure, heatmap, line_trace, looks, median_traces, wrapped

LAST_EPOCHS = 10
"""Number of epochs at the end of training that `loss_of_part` draws."""
TOP_SHARE = 0.02
"""Share of the samples with the largest losses, which the paper of KAKURENBO looks at separately."""

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
        means = np.array([mean_of_part(history.losses[:, first:epochs], part) for history in of_seeds.values()])
        known = np.isfinite(means).all(axis=0)
        if known.any():
            x = np.arange(first + 1, epochs + 1)[known]
            figure.add_traces(list(median_traces(method, looks(results)[method], x, means[:, known])))
    return figure.update_yaxes(rangemode="tozero") if figure.data else None


def mean_of_part(losses: NDArray[np.float32], part: str) -> NDArray[np.float64]:
    """Returns the mean of each column over all finite values, the largest 2 % of them (at least one), or the others.

    Args:
        losses: Losses by sample and epoch, shape (N, epochs).
        part: "all", "top" or "bottom".

    Returns:
        Means, shape (epochs,); NaN where there is no value.
    """
    return np.array([_mean_of_sorted(np.sort(column[np.isfinite(column)]), part) for column in losses.T])


def _mean_of_sorted(ordered: NDArray[np.float32], part: str) -> float:
    top = max(1, round(TOP_SHARE * len(ordered)))
    chosen = {"all": ordered, "bottom": ordered[:-top], "top": ordered[-top:]}[part]
    return float(chosen.mean(dtype=np.float64)) if len(chosen) else float("nan")


def overlap_by_epoch(results: ResultsDict, samples: Samples) -> go.Figure | None:
    """Draws for each pair of methods, by epoch, the samples that both left out as a share of those that either left out."""
    figure = epoch_figure(results, "left out by both, % of by either")
    of = looks(results)
    for (one, other), pairs in paired(results, samples).items():
        epochs = min(history.dropped.shape[1] for pair in pairs for history in pair)
        shares = np.array([overlap_shares(a.dropped[:, :epochs], b.dropped[:, :epochs]) for a, b in pairs])
        known = np.isfinite(shares).all(axis=0)
        if known.any():
            x, y = np.arange(1, epochs + 1)[known], 100 * np.median(shares[:, known], axis=0)
            marker = {"color": of[other].colour, "symbol": of[other].symbol, "size": 8}
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
        row, column = names.index(one), names.index(other)
        shares[row, column] = shares[column, row] = share
    if not np.isfinite(shares).any():
        return None
    labels = [wrapped(name) for name in names]
    text = [["" if np.isnan(share) else f"{share:.0f} %" for share in row] for row in shares]
    trace = heatmap(shares, x=labels, y=labels, text=text, texttemplate="%{text}", zmin=0, zmax=100, showscale=False)
    figure = empty_figure("", "", height=max(300, 90 * len(names) + 90)).add_trace(trace.update(hoverinfo="text"))
    return figure.update_yaxes(autorange="reversed")


def class_numbers(results: ResultsDict, samples: Samples) -> list[int]:
    """Returns the numbers of the classes in ascending order."""
    every = [history.targets for of_seeds in histories(results, samples).values() for history in of_seeds.values()]
    return sorted({int(target) for targets in every if targets is not None for target in np.unique(targets)})


def paired(results: ResultsDict, samples: Samples) -> dict[Pair, list[tuple[RunHistory, RunHistory]]]:
    """Returns for every two methods that leave samples out their pairs of histories with the same seed and the same samples."""
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


def overlap_shares(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns for each column the number of rows set in both masks, divided by the number set in either; NaN for 0 / 0."""
    both, either = (one & other).sum(axis=0), (one | other).sum(axis=0)
    return np.divide(both, either, out=np.full(len(both), np.nan), where=either > 0)


def _overlap_of_class(one: RunHistory, other: RunHistory, of_class: str) -> float:
    epochs = min(one.dropped.shape[1], other.dropped.shape[1])
    rows = np.ones(len(one.ids), dtype=bool)
    if of_class:
        rows = np.zeros_like(rows) if one.targets is None else one.targets == int(of_class)
    first, second = (history.dropped[rows, :epochs].reshape(-1, 1) for history in (one, other))
    return float(overlap_shares(first, second)[0])
