"""KAKURENBO: what the claims on the tables and figures of its appendix measure, and the tables of its figures."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from thresher_lab.comparison.summary import RunDict
from thresher_lab.recipes.running import task_of
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    PageTable,
    PartResults,
    RunsByPart,
    RunsByRow,
    numbered_rows,
)
from thresher_lab.reproduction.measures import mean_gain, metric
from thresher_lab.tasks.contours import Transfer
from thresher_lab.training.samples import LOSS_BINS, TOP_SHARE, mean_of_part, read_history

HIDING_ROW = "KAKURENBO-0.3"
"""Row of the figures that show one run of the method."""


# Table 2, the columns of DeiT: pretraining with selection, then fine-tuning without


@cache
def from_scratch(seed: int) -> float:
    """Returns the downstream accuracy of a network without pretraining, which is trained as the others are fine-tuned."""
    task = task_of("contours-digits")
    assert isinstance(task, Transfer)
    return task.downstream(task.build(seed), task.load(task.find(None)).downstream, seed)


def pretraining_gain(runs: RunsByRow, seed: int) -> float:
    """Returns what full pretraining gains over no pretraining."""
    return metric(runs, seed) - from_scratch(seed)


# Table 5: the ablations


def gain_of_moving_back(
    runs: RunsByRow, seed: int, rows: Sequence[str], over: Sequence[str]
) -> float:
    """Returns the mean gain of `rows` over `over`; NaN, which judges nothing, where one of `rows` moves no sample back."""
    for row in rows:
        if not any(entry["moved_back"] for entry in runs[row][seed]["history"]):
            return math.nan
    return mean_gain(runs, seed, rows, over)


def _means_by_epoch(runs: Mapping[int, RunDict], name: str) -> list[float]:
    """Returns the means over the seeds of a value of the history, one per epoch."""
    columns = ([entry[name] for entry in run["history"]] for run in runs.values())
    return _means(columns)


def _means(columns: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*columns, strict=True)]


# Figure 1: the losses


def easy_late(runs: RunsByRow, seed: int) -> float:
    """Returns the smallest share of easy samples in an epoch of full training, after 30 % of the epochs."""
    history = runs[FULL_ROW][seed]["history"]
    return min(entry["easy_share"] for entry in history[round(0.3 * len(history)) :])


def figure_1(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the losses of full training, and the share of easy samples by epoch."""
    [runs] = measured.values()
    shares = 100 * np.array(
        [_means_by_epoch(runs[row], "easy_share") for row in (FULL_ROW, HIDING_ROW)]
    )
    title = "Share of samples whose loss is below 5 % of the largest (mean of the seeds)"
    header = ["epoch", "full, %", f"{HIDING_ROW}, %"]
    histogram = _loss_histogram(list(runs[FULL_ROW].values()))
    return [histogram, PageTable(title, header, numbered_rows(shares, ".1f"))]


def _loss_histogram(runs: Sequence[RunDict]) -> PageTable:
    """Returns the share of samples in each range of losses after the first epoch, a third of the epochs, and the last one."""
    last = len(runs[0]["history"]) - 1
    epochs = [0, round(last / 3), last]
    counts = np.mean(
        [[run["history"][epoch]["loss_histogram"] for epoch in epochs] for run in runs], axis=0
    )
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    powers = np.floor(np.log10(LOSS_BINS[:-1]) + 1e-9).astype(
        int
    )  # of the lower end of each bin, which rounding may move
    rows = [
        [f"1e{power}", *(f"{share:.1f}" for share in shares[:, powers == power].sum(axis=1))]
        for power in np.unique(powers)
    ]
    header = ["loss from", *(f"epoch {epoch}, %" for epoch in epochs)]
    return PageTable(
        "Share of samples by loss, in powers of ten, full training (mean of the seeds)",
        header,
        rows,
    )


# Figure 2: the classes of the hidden samples


def rank_change(runs: RunsByRow, seed: int) -> float:
    """Returns 1 minus the rank correlation of the hidden samples by class, between a third of training and its end.

    It is NaN where as many samples of each class are hidden, so that classes have no order.
    """
    history = runs[HIDING_ROW][seed]["history"]
    early, late = (history[at]["hidden_by_class"] for at in (len(history) // 3, -1))
    return 1 - _rank_correlation(early, late)


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's correlation; NaN where the values of one are all equal."""
    if not (np.ptp(one) and np.ptp(other)):
        return math.nan
    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])


def class_shift(runs: RunsByRow, seed: int) -> float:
    """Returns the share of the hidden samples that is in other classes at the end than after a third of training.

    It is NaN where one of the two epochs hides no sample.
    """
    run = runs[HIDING_ROW][seed]
    early, _, late = _shares_by_class(run, _thirds(run["history"]))
    return float(np.abs(late - early).sum() / 2)


def _thirds(history: Sequence[Any]) -> list[int]:
    return [len(history) // 3, 2 * len(history) // 3, len(history) - 1]


def _shares_by_class(run: RunDict, epochs: Sequence[int]) -> NDArray[np.float64]:
    hidden = np.array([run["history"][epoch]["hidden_by_class"] for epoch in epochs], np.float64)
    hidden[~hidden.any(axis=1)] = np.nan  # no sample is hidden: its class has no share
    return hidden / hidden.sum(axis=1, keepdims=True)


def _with_rank(share: float, rank: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1f} ({rank:.0f})"


def figure_2(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the classes of the hidden samples, the first 50 as in the paper, after three epochs of the first seed."""
    [runs] = measured.values()
    run = next(iter(runs[HIDING_ROW].values()))
    epochs = _thirds(run["history"])
    shares = 100 * _shares_by_class(run, epochs)
    ranks = rankdata(-shares, method="min", axis=1)
    rows = [
        [str(label), *(_with_rank(share, rank) for share, rank in zip(*of, strict=True))]
        for label, of in enumerate(zip(shares.T, ranks.T, strict=True))
    ]
    header = ["class", *(f"epoch {epoch}" for epoch in epochs)]
    title = (
        "Share of the hidden samples, %, with the rank of the class, 1 for the most (first seed)"
    )
    return [PageTable(title, header, rows[:50])]


# Figure 3: the share that is hidden, on the task of table 5, where samples are moved back


def back_early(runs: RunsByRow, seed: int) -> float:
    """Returns the share moved back of what may be hidden, in the first third of the epochs that hide, minus the last third."""
    history = runs[HIDING_ROW][seed]["history"][1:]
    back = [1 - entry["actual_fraction"] / entry["scheduled_fraction"] for entry in history]
    third = len(back) // 3
    return statistics.mean(back[:third]) - statistics.mean(back[-third:])


def saved_time(runs: RunsByRow, seed: int) -> list[float]:
    """Returns for each epoch the CPU time saved, as a share of the mean CPU time of an epoch of full training."""
    baseline = statistics.mean(_epoch_times(runs[FULL_ROW][seed]))
    return [1 - seconds / baseline for seconds in _epoch_times(runs[HIDING_ROW][seed])]


def _epoch_times(run: RunDict) -> list[float]:
    ends = [0.0, *(entry["cpu_s"] for entry in run["history"])]
    return [end - start for start, end in pairwise(ends)]


def below_hidden(runs: RunsByRow, seed: int) -> float:
    """Returns the mean share hidden minus the mean share of time saved, over the epochs that hide."""
    hidden = [entry["actual_fraction"] for entry in runs[HIDING_ROW][seed]["history"]]
    return statistics.mean(hidden[1:]) - statistics.mean(saved_time(runs, seed)[1:])


def follows_hidden(runs: RunsByRow, seed: int) -> float:
    """Returns the rank correlation of the shares hidden and of the time saved, over the epochs that hide."""
    hidden = [entry["actual_fraction"] for entry in runs[HIDING_ROW][seed]["history"]]
    return _rank_correlation(hidden[1:], saved_time(runs, seed)[1:])


def figure_3(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the largest share, the share that is hidden, and the time saved by epoch."""
    [runs] = measured.values()
    columns = [
        _means_by_epoch(runs[HIDING_ROW], name)
        for name in ("scheduled_fraction", "actual_fraction")
    ]
    columns.append(_means(saved_time(runs, seed) for seed in runs[HIDING_ROW]))
    header = ["epoch", "largest share, %", "hidden, %", "CPU time saved, %"]
    return [PageTable("Mean of the seeds", header, numbered_rows(100 * np.array(columns), ".1f"))]


# Figure 4: convergence with two recipes

SHOWN_EPOCHS = 6
"""Number of epochs that a table of the figure shows."""


def figure_4(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns accuracy and CPU time after some epochs, a table per recipe."""
    return [_convergence(part, runs) for part, runs in measured.items()]


def _convergence(part: str, runs: RunsByRow) -> PageTable:
    names = (FULL_ROW, HIDING_ROW)
    metric_name = next(iter(runs[FULL_ROW].values()))["metric"]["name"]
    reached = [_means_by_epoch(runs[row], metric_name) for row in names]
    seconds = [_means_by_epoch(runs[row], "cpu_s") for row in names]
    rows = [
        [
            str(at),
            *(f"{100 * column[at]:.2f}" for column in reached),
            *(f"{column[at]:.1f}" for column in seconds),
        ]
        for at in sorted({round(at) for at in np.linspace(0, len(reached[0]) - 1, SHOWN_EPOCHS)})
    ]
    header = ["epoch", *(f"{row}, {of}" for of in (f"{metric_name}, %", "CPU s") for row in names)]
    return PageTable(f"{part}, mean of the seeds", header, rows)


# Figure 6: the losses that stay

LAST_EPOCHS = 10
"""Number of epochs that the figure shows."""


def top_losses(run: RunDict) -> dict[str, list[float]]:
    """Returns the mean losses of all samples, of the 2 % with the largest losses and of the others in the last ten epochs."""
    losses = read_history(Path(run["samples"])).losses[:, -LAST_EPOCHS:]
    return {part: mean_of_part(losses, part).tolist() for part in ("all", "bottom", "top")}


def top_stays(runs: RunsByRow, seed: int) -> float:
    """Returns the mean loss of the top 2 % in the last epoch over that nine epochs earlier, in full training."""
    top = top_losses(runs[FULL_ROW][seed])["top"]
    return top[-1] / top[0]


def top_above(runs: RunsByRow, seed: int) -> float:
    """Returns the mean loss of the top 2 % over that of the other samples, in the last epoch of full training."""
    losses = top_losses(runs[FULL_ROW][seed])
    return losses["top"][-1] / losses["bottom"][-1]


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def figure_6(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the distributions of the losses in the last epochs of full training, as quantiles."""
    [runs] = measured.values()
    cells = np.mean([_quantiles(run) for run in runs[FULL_ROW].values()], axis=0)
    names = [f"{part}, {share:.0%}" for part in ("bottom", "top") for share in QUANTILES]
    rows = numbered_rows(cells, ".4f", -cells.shape[1])
    title = "Loss below which a share of the bottom 98 % and of the top 2 % is, full training (mean of the seeds)"
    return [PageTable(title, ["epoch from the end", *names], rows)]


def _quantiles(run: RunDict) -> NDArray[np.floating[Any]]:
    losses = np.sort(read_history(Path(run["samples"])).losses[:, -LAST_EPOCHS:], axis=0)
    top = round((1 - TOP_SHARE) * len(losses))
    return np.concatenate(
        [np.quantile(part, QUANTILES, axis=0) for part in np.split(losses, [top])]
    )
