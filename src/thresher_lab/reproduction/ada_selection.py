"""AdaSelection: what the claims on its tables and figures measure, and the tables that are not one per part."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import rankdata

from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    PageTable,
    PartResults,
    RunsByPart,
    RunsByRow,
    numbered_rows,
    units_of,
    with_spread,
)
from thresher_lab.reproduction.measures import best_of, cpu, lead, metric, steps

RATES = (0.1, 0.2, 0.3, 0.4, 0.5)
WEIGHTS_ROW = "AdaSelection 0.3"
WEIGHT_NAMES = ("weight_big_loss", "weight_small_loss", "weight_uniform")
POOL = ("Big Loss", "Small Loss", "Uniform")
"""Candidates whose weights are `WEIGHT_NAMES`."""
LATE_UNIFORM = 0.5
"""Weight of uniform selection from which on selection counts as random."""


def row_name(method: str, rate: float) -> str:
    """Returns the name of the row of a method at a rate."""
    return FULL_ROW if method == FULL_ROW else f"{method} {rate}"


# Tables 3 and 4, and figures 2 to 6 and 9: methods by rate


def over_rates(runs: RunsByRow, seed: int, method: str, of: Callable[..., float] = metric) -> float:
    """Returns the metric of a method, or another value of its rows, in the mean over the rates."""
    return fmean(of(runs, seed, row_name(method, rate)) for rate in RATES)


def gain_over_rates(runs: RunsByRow, seed: int, method: str, over: str) -> float:
    """Returns the gain of one method over another, in the mean over the rates."""
    return over_rates(runs, seed, method) - over_rates(runs, seed, over)


def gain_over_best(runs: RunsByRow, seed: int, method: str, candidates: Sequence[str]) -> float:
    """Returns the gain of a method over the best of some others, in the mean over the rates."""
    values = [partial(over_rates, runs, method=candidate) for candidate in candidates]
    return over_rates(runs, seed, method) - best_of(values, runs[FULL_ROW])(seed)


def fast_methods(runs: RunsByRow, seed: int, methods: Sequence[str], time: float) -> int:
    """Returns how many methods take at most a share of the CPU time of full training at every rate."""
    return sum(
        max(cpu(runs, seed, row_name(method, rate)) for rate in RATES) <= time for method in methods
    )


def mean_ranks(runs: RunsByRow, methods: Sequence[str]) -> list[float]:
    """Returns the ranks of the methods, in the mean over the rates; 1 is the best."""
    ranks = [
        rankdata([-_mean_metric(runs, row_name(method, rate)) for method in methods])
        for rate in RATES
    ]
    return np.mean(ranks, axis=0).tolist()


def _mean_metric(runs: RunsByRow, row: str) -> float:
    return statistics.mean(metric(runs, seed, row) for seed in runs[row])


def table_3(measured: RunsByPart, _: PartResults, published: Any) -> list[PageTable]:
    """Returns the mean ranks here, the numbers of steps, and the mean ranks in the paper, a table as it is printed."""
    header = published["header"]
    ranks = [
        [part, *(f"{rank:.1f}" for rank in mean_ranks(runs, header[1:]))]
        for part, runs in measured.items()
    ]
    here = PageTable("Mean rank over the rates, here", header, ranks)
    return [here, _steps_table(measured, header), PageTable(**published)]


def table_4(measured: RunsByPart, results: PartResults, published: Any) -> list[PageTable]:
    """Returns the means over the rates here, the numbers of steps, and the means in the paper, a table as it is printed."""
    header = published["header"]
    rows = []
    title = "Mean over the rates, here; shares in hundredths; larger is better"
    for part, runs in measured.items():
        name = results[part]["metric"]
        values = {
            method: [over_rates(runs, seed, method) for seed in runs[FULL_ROW]]
            for method in header[1:]
        }
        cells = [
            with_spread(statistics.mean(of), statistics.stdev(of), units_of(name))
            for of in values.values()
        ]
        rows.append([f"{part}, {name}", *cells])
        for alike in _alike(values):
            title += f". {part}: {' and '.join(alike)} train on the same rows in every run"
    here = PageTable(title, header, rows)
    return [here, _steps_table(measured, header), PageTable(**published)]


def _alike(values: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Returns the groups of methods with the same values, of at least two each."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for method, of_method in values.items():
        groups.setdefault(tuple(of_method), []).append(method)
    return [group for group in groups.values() if len(group) > 1]


def _steps_table(measured: RunsByPart, header: Sequence[str]) -> PageTable:
    """Returns the numbers of optimizer steps, in the mean over rates and seeds; those of all selectors are equal."""
    rows = [
        [part, *(f"{_mean_steps(runs, method):.0f}" for method in header[1:])]
        for part, runs in measured.items()
    ]
    title = "Optimizer steps, mean over the rates; kept rows are filled up to full batches"
    return PageTable(title, header, rows)


def _mean_steps(runs: RunsByRow, method: str) -> float:
    return statistics.mean(over_rates(runs, seed, method, steps) for seed in runs[FULL_ROW])


def by_rate(measured: RunsByPart, results: PartResults, methods: Sequence[str]) -> list[PageTable]:
    """Returns metric, CPU time and steps by rate, a table per part."""
    return [
        _rates_table(part, runs, methods, results[part]["metric"])
        for part, runs in measured.items()
    ]


def _rates_table(part: str, runs: RunsByRow, methods: Sequence[str], metric_name: str) -> PageTable:
    scale = units_of(metric_name)
    rows = [
        [method, *(_rate_cell(runs, row_name(method, rate), scale) for rate in RATES)]
        for method in methods
    ]
    full = scale * _mean_metric(runs, FULL_ROW)
    unit = "metric in hundredths" if scale == 100 else metric_name
    title = f"{part}: {unit} (full training {full:.2f}), CPU time over that of full training, steps"
    return PageTable(title, ["rate", *map(str, RATES)], rows)


def _rate_cell(runs: RunsByRow, row: str, scale: float) -> str:
    time = statistics.median(cpu(runs, seed, row) for seed in runs[row])
    return f"{scale * _mean_metric(runs, row):.2f}, {time:.2f}, {steps(runs, 0, row):.0f}"


# Figure 7 and section 4: beta and the pool


def gain_of_best(runs: RunsByRow, seed: int, rows: Sequence[str], over: str) -> float:
    """Returns the gain of the best of some rows over another."""
    return -lead(runs, seed, over, rows)


def spread(runs: RunsByRow, seed: int, rows: Sequence[str]) -> float:
    """Returns the metric of the best of some rows minus that of the worst."""
    values = [partial(metric, runs, row=row) for row in rows]
    best, worst = (best_of(values, runs[FULL_ROW], choose) for choose in (max, min))
    return best(seed) - worst(seed)


def negative_spread(runs: RunsByRow, seed: int, rows: Sequence[str]) -> float:
    """Returns the metric of the worst of some rows minus that of the best."""
    return -spread(runs, seed, rows)


def spread_between_parts(measured: RunsByPart, seed: int, rows: Sequence[str]) -> float:
    """Returns the spread of some rows on the part where it is the largest, minus that where it is the smallest."""
    values = [partial(spread, runs, rows=rows) for runs in measured.values()]
    most, least = (best_of(values, _seeds(measured), choose) for choose in (max, min))
    return most(seed) - least(seed)


def _seeds(measured: RunsByPart) -> Sequence[int]:
    return list(next(iter(measured.values()))[FULL_ROW])


# Figure 8: the weights


def weights_by_epoch(runs: RunsByRow, seed: int) -> list[list[float]]:
    """Returns the weights of big loss, small loss and uniform selection at the end of each epoch."""
    return [[entry[name] for name in WEIGHT_NAMES] for entry in runs[WEIGHTS_ROW][seed]["history"]]


def weight_on_best(runs: RunsByRow, seed: int) -> float:
    """Returns the last weight of the candidate that is best alone, in the mean of the seeds."""
    means = [_mean_metric(runs, f"{candidate} 0.3") for candidate in POOL]
    return weights_by_epoch(runs, seed)[-1][int(np.argmax(means))]


def weights_between_tasks(measured: RunsByPart, seed: int) -> float:
    """Returns the share of the weight by which the ends of the two most different tasks differ, [0, 1]."""
    pairs = combinations(measured.values(), 2)
    return best_of([partial(_distance, *pair) for pair in pairs], _seeds(measured))(seed)


def _distance(one: RunsByRow, other: RunsByRow, seed: int) -> float:
    ends = (weights_by_epoch(runs, seed)[-1] for runs in (one, other))
    return sum(abs(a - b) for a, b in zip(*ends, strict=True)) / 2


def figure_8(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the weights at the end of each epoch, a table per task."""
    tables = []
    for part, runs in measured.items():
        means = np.mean([weights_by_epoch(runs, seed) for seed in runs[WEIGHTS_ROW]], axis=0)
        title = f"{part}: weights at the end of each epoch (mean of the seeds)"
        tables.append(PageTable(title, ["epoch", *POOL], numbered_rows(means.T, ".3f")))
    return tables


def late_selection(tables: Sequence[Mapping[str, Any]]) -> str:
    """Returns on how many tasks the last weight is that of uniform selection, as a sentence.

    Args:
        tables: Tables of figure 8, one per task.
    """
    last = [float(table["rows"][-1][table["header"].index(POOL[-1])]) for table in tables]
    uniform = sorted(weight for weight in last if weight >= LATE_UNIFORM)
    if not uniform:
        return ""
    return (
        f"AdaSelection ends on {len(uniform)} of {len(last)} tasks with {uniform[0]:.2f} to {uniform[-1]:.2f} of its weight on "
        "uniform selection: there, its late selection is random."
    )
