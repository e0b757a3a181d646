"""KAKURENBO: figures 1 to 4 of its appendix, which show single epochs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.stats import rankdata

from thresher.experiments.comparison.summary import RunDict
from thresher.experiments.reproduction.artefact import (
    FULL_ROW,
    HALF_A_POINT,
    Artefact,
    ArtefactPart,
    Claim,
    PageTable,
    RunsByPart,
    cpu,
    metric,
    minus,
)
from thresher.experiments.reproduction.kakurenbo import (
    ABLATION_EPOCHS,
    ABLATION_SETUP,
    ABLATION_TASK,
    FASHION_EPOCHS,
    FASHION_SETUP,
    FASHION_TASK,
    KAKURENBO_PAPER,
    SECOND_EPOCHS,
    SECOND_SETUP,
    SECOND_TASK,
    hiding,
)

INSIDE_PART = ArtefactPart("inside", FASHION_TASK, FASHION_EPOCHS, {"KAKURENBO-0.3": hiding(0.3)})
HIDING_ROW = "KAKURENBO-0.3"


def _runs_of_row(measured: RunsByPart, row: str = HIDING_ROW) -> list[RunDict]:
    return list(measured[INSIDE_PART.name][row].values())


def _means_by_epoch(runs: Sequence[RunDict], name: str) -> list[float]:
    """Returns the means over the runs of a value of the history, one per epoch."""
    return [statistics.mean(entries) for entries in zip(*([e[name] for e in run["history"]] for run in runs), strict=True)]


def easy_late(measured: RunsByPart, seed: int) -> float:
    """Returns the smallest share of easy samples in an epoch of full training, after 30 % of the epochs."""
    history = measured[INSIDE_PART.name][FULL_ROW][seed]["history"]
    return min(entry["easy_share"] for entry in history[round(0.3 * len(history)) :])


def _figure_1(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    full, own = (_means_by_epoch(_runs_of_row(measured, row), "easy_share") for row in (FULL_ROW, HIDING_ROW))
    rows = [[str(epoch), f"{100 * a:.1f}", f"{100 * b:.1f}"] for epoch, (a, b) in enumerate(zip(full, own, strict=True))]
    header = ["epoch", "full, %", f"{HIDING_ROW}, %"]
    return [PageTable("Share of samples whose loss is below 5 % of the largest (mean of the seeds)", header, rows)]


KAKURENBO_FIGURE_1 = Artefact(
    name="kakurenbo-figure-1",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 1",
    shows="how many samples have a small loss, by epoch",
    here=FASHION_SETUP,
    parts=[INSIDE_PART],
    claims=[
        Claim(
            "after 30 % of the epochs, more than half of the samples have a loss below 5 % of the largest", easy_late, above=0.5
        )
    ],
    tables=_figure_1,
)


def rank_change(measured: RunsByPart, seed: int) -> float:
    """Returns 1 minus the rank correlation of the hidden samples by class, between a third of training and its end.

    It is NaN where as many samples of each class are hidden, so that classes have no order.
    """
    history = measured[INSIDE_PART.name][HIDING_ROW][seed]["history"]
    early, late = (rankdata(history[at]["hidden_by_class"]) for at in (len(history) // 3, -1))
    return 1 - float(np.corrcoef(early, late)[0, 1]) if np.ptp(early) and np.ptp(late) else math.nan


def _figure_2(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    history = _runs_of_row(measured)[0]["history"]
    epochs = [len(history) // 3, 2 * len(history) // 3, len(history) - 1]
    columns = []
    for epoch in epochs:
        hidden = np.array(history[epoch]["hidden_by_class"])
        columns.append([f"{count} ({rank:.0f})" for count, rank in zip(hidden, rankdata(-hidden, method="min"), strict=True)])
    rows = [[str(label), *(column[label] for column in columns)] for label in range(len(columns[0]))]
    header = ["class", *(f"epoch {epoch}" for epoch in epochs)]
    return [
        PageTable(
            "Hidden samples by class, with the rank of the class, 1 for the most hidden samples (first seed)", header, rows
        )
    ]


KAKURENBO_FIGURE_2 = Artefact(
    name="kakurenbo-figure-2",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 2",
    shows="how many samples of each class are hidden, by epoch",
    here=FASHION_SETUP,
    parts=[INSIDE_PART],
    claims=[
        Claim(
            "the most hidden classes change: the rank correlation between a third of training and its end is below 0.95",
            rank_change,
            above=0.05,
            scale=1,
        )
    ],
    tables=_figure_2,
)


# Figure 3: the share that is hidden, on the task of table 5, where samples are moved back

EVOLUTION_ROW = "KAKURENBO-0.4"
EVOLUTION_PART = ArtefactPart("evolution", ABLATION_TASK, ABLATION_EPOCHS, {EVOLUTION_ROW: hiding(0.4)})


def back_early(measured: RunsByPart, seed: int) -> float:
    """Returns the share moved back of what may be hidden, in the first third of the epochs that hide, minus the last third."""
    history = measured[EVOLUTION_PART.name][EVOLUTION_ROW][seed]["history"][1:]
    back = [1 - entry["actual_fraction"] / entry["scheduled_fraction"] for entry in history]
    third = len(back) // 3
    return statistics.mean(back[:third]) - statistics.mean(back[-third:])


def saved_time(measured: RunsByPart, seed: int) -> list[float]:
    """Returns for each epoch the CPU time saved, as a share of the mean CPU time of an epoch of full training."""
    own, full = (_epoch_times(measured[EVOLUTION_PART.name][row][seed]) for row in (EVOLUTION_ROW, FULL_ROW))
    baseline = statistics.mean(full)
    return [1 - seconds / baseline for seconds in own]


def _epoch_times(run: RunDict) -> list[float]:
    ends = [0.0, *(entry["cpu_s"] for entry in run["history"])]
    return [end - start for start, end in pairwise(ends)]


def below_hidden(measured: RunsByPart, seed: int) -> float:
    """Returns the mean share hidden minus the mean share of time saved, over the epochs that hide."""
    hidden = [entry["actual_fraction"] for entry in measured[EVOLUTION_PART.name][EVOLUTION_ROW][seed]["history"]]
    return statistics.mean(hidden[1:]) - statistics.mean(saved_time(measured, seed)[1:])


def _figure_3(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    runs = list(measured[EVOLUTION_PART.name][EVOLUTION_ROW].values())
    cap, actual = (_means_by_epoch(runs, name) for name in ("scheduled_fraction", "actual_fraction"))
    saved = [statistics.mean(values) for values in zip(*(saved_time(measured, run["seed"]) for run in runs), strict=True)]
    rows = [
        [str(epoch), *(f"{100 * value:.1f}" for value in values)]
        for epoch, values in enumerate(zip(cap, actual, saved, strict=True))
    ]
    return [PageTable("Mean of the seeds", ["epoch", "largest share, %", "hidden, %", "CPU time saved, %"], rows)]


KAKURENBO_FIGURE_3 = Artefact(
    name="kakurenbo-figure-3",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 3",
    shows="largest share, share that is hidden, and time saved, by epoch",
    here=ABLATION_SETUP,
    parts=[EVOLUTION_PART],
    claims=[
        Claim("moving back matters most early in training", back_early),
        Claim("less time is saved than samples are hidden", below_hidden),
    ],
    tables=_figure_3,
    seeds=(0, 1, 2, 3, 4),
)

# Figure 4: convergence with two recipes

CONVERGENCE_PARTS = [
    ArtefactPart("recipe A", FASHION_TASK, FASHION_EPOCHS, {HIDING_ROW: hiding(0.3)}),
    ArtefactPart("recipe B", SECOND_TASK, SECOND_EPOCHS, {HIDING_ROW: hiding(0.3)}),
]
SHOWN_EPOCHS = 6
"""Number of epochs that a table of the figure shows."""


def _figure_4(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    tables = []
    for part in CONVERGENCE_PARTS:
        runs = {row: list(measured[part.name][row].values()) for row in (FULL_ROW, HIDING_ROW)}
        name = runs[FULL_ROW][0]["metric"]["name"]
        columns = [_means_by_epoch(runs[row], of) for of in (name, "cpu_s") for row in runs]
        shown = sorted({round(at) for at in np.linspace(0, len(columns[0]) - 1, SHOWN_EPOCHS)})
        rows = [
            [str(at), *(f"{100 * column[at]:.2f}" for column in columns[:2]), *(f"{column[at]:.1f}" for column in columns[2:])]
            for at in shown
        ]
        header = ["epoch", *(f"{row}, {of}" for of in (f"{name}, %", "CPU s") for row in runs)]
        tables.append(PageTable(f"{part.name}, mean of the seeds", header, rows))
    return tables


KAKURENBO_FIGURE_4 = Artefact(
    name="kakurenbo-figure-4",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 4",
    shows="convergence and speedup with two recipes",
    here=SECOND_SETUP,
    parts=CONVERGENCE_PARTS,
    claims=[
        claim
        for part in CONVERGENCE_PARTS
        for claim in (
            Claim(
                f"{part.name}: after the last epoch, accuracy is within half a point of full training's",
                minus(metric(part.name, HIDING_ROW), metric(part.name, FULL_ROW)),
                above=-HALF_A_POINT,
            ),
            Claim(f"{part.name}: it takes less CPU time", minus(cpu(part.name, FULL_ROW), cpu(part.name, HIDING_ROW))),
        )
    ],
    tables=_figure_4,
    seeds=(0, 1, 2, 3, 4),
)

KAKURENBO_INSIDE_FIGURES = (KAKURENBO_FIGURE_1, KAKURENBO_FIGURE_2, KAKURENBO_FIGURE_3, KAKURENBO_FIGURE_4)
