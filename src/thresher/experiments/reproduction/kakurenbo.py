"""KAKURENBO: tables 2 (in part), 3, 4 and 5 and figures 1, 2, 3, 5 and 6 of its appendix."""

import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import rankdata

from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.reproduction.artefact import (
    FULL,
    Artefact,
    Claim,
    Measured,
    Part,
    Run,
    Table,
    Value,
    cost,
    mean_of,
    metric,
    minus,
)
from thresher.experiments.tasks.contours import Transfer

PAPER = "KAKURENBO (arXiv 2310.10102)"
IMAGES = "fashion-mnist-small"
EPOCHS = 15
HERE = "A small CNN on 10,000 pictures of Fashion-MNIST, 15 epochs, for ResNet-50 on ImageNet"
TASK = f"{IMAGES}@10000"
MARGIN = 0.005
"""Half a point, within which a loss of accuracy does not matter."""
BITS = ("v1000", "v1001", "v1010", "v1011", "v1100", "v1101", "v1110", "v1111")


def hiding(fraction: float, bits: str = "v1111", drop_top: float = 0.0) -> str:
    """KAKURENBO or one of its ablations as on the command line."""
    names = ("move_back", "reduce_fraction", "adjust_lr")
    off = [f"{name}=false" for name, bit in zip(names, bits[2:], strict=True) if bit == "0"]
    dropped = [f"drop_top={drop_top}"] if drop_top else []
    return ":".join(["kakurenbo", f"max_fraction={fraction}", *off, *dropped])


# Table 2, its last columns: pretraining that selects, then fine-tuning that does not

PRETRAINED = "contours-digits"


@cache
def from_scratch(seed: int) -> float:
    """Accuracy downstream of a network that nothing was pretrained on, trained as the others are fine-tuned."""
    task = task_of(PRETRAINED)
    assert isinstance(task, Transfer)
    return task.downstream(task.build(seed), task.load(task.find(None)).downstream, seed)


def worth(measured: Measured, seed: int) -> float:
    """What full pretraining gains over none."""
    return metric("pretraining", FULL)(measured, seed) - from_scratch(seed)


TABLE_2 = Artefact(
    name="kakurenbo-table-2",
    paper=f"{PAPER}, appendix, table 2, the columns of DeiT",
    shows="pretraining with selection, then plain fine-tuning: accuracy downstream and what pretraining costs",
    here="A vision transformer of four layers pretrained on generated contours, 10 epochs, and fine-tuned on digits, for "
    "DeiT-Tiny on Fractal-3K, CIFAR-10 and CIFAR-100",
    parts=[
        Part(
            "pretraining",
            PRETRAINED,
            10,
            {"KAKURENBO-0.3": hiding(0.3)},
            {FULL: "95.03 (CIFAR-10), 79.69 (CIFAR-100)", "KAKURENBO-0.3": "95.28 (CIFAR-10), 79.35 (CIFAR-100)"},
            controls=("uniform",),
        )
    ],
    claims=[
        Claim(
            "accuracy downstream is within half a point of what full pretraining gives",
            minus(metric("pretraining", "KAKURENBO-0.3"), metric("pretraining", FULL)),
            above=-MARGIN,
        ),
        Claim(
            "full pretraining is worth something: accuracy downstream is above that of a network trained from scratch", worth
        ),
        Claim("pretraining costs less", minus(cost("pretraining", FULL), cost("pretraining", "KAKURENBO-0.3"))),
    ],
)


# Table 3: the maximum fraction

FRACTIONS = (0.2, 0.3, 0.4)
TABLE_3 = Artefact(
    name="kakurenbo-table-3",
    paper=f"{PAPER}, appendix, table 3",
    shows="accuracy and time at maximum fractions of 0.2, 0.3 and 0.4",
    here=HERE,
    parts=[
        Part(
            "fractions",
            TASK,
            EPOCHS,
            {f"KAKURENBO-{fraction}": hiding(fraction) for fraction in FRACTIONS},
            {
                FULL: "73.68 in 16118 s (A); 76.58 in 64060 s (B)",
                "KAKURENBO-0.2": "76.11 in 61723 s (B)",
                "KAKURENBO-0.3": "73.52 in 12984 s (A); 76.17 in 59063 s (B)",
                "KAKURENBO-0.4": "75.62 in 57582 s (B)",
            },
            controls=("uniform",),
        )
    ],
    claims=[
        *(
            Claim(
                f"at {fraction} accuracy is within half a point of full training's",
                minus(metric("fractions", f"KAKURENBO-{fraction}"), metric("fractions", FULL)),
                above=-MARGIN,
            )
            for fraction in FRACTIONS
        ),
        Claim("at 0.3 it costs less", minus(cost("fractions", FULL), cost("fractions", "KAKURENBO-0.3"))),
    ],
    seeds=(0, 1, 2, 3, 4),
)


# Table 4: the batch size

FACTORS = (1, 2, 4, 8)
PUBLISHED_4 = {1: ("73.68", "73.60"), 2: ("73.98", "73.21"), 4: ("73.59", "73.03"), 8: ("73.81", "72.84")}


def scaled(factor: int) -> str:
    """The task with batch size and learning rate so many times larger."""
    return TASK if factor == 1 else f"{IMAGES}-x{factor}@10000"


TABLE_4 = Artefact(
    name="kakurenbo-table-4",
    paper=f"{PAPER}, appendix, table 4",
    shows="accuracy as the batch grows and the learning rate with it, at a maximum fraction of 0.4",
    here=f"{HERE}; batches of 64, 128, 256 and 512",
    parts=[
        Part(
            f"batch x{factor}",
            scaled(factor),
            EPOCHS,
            {"KAKURENBO-0.4": hiding(0.4)},
            dict(zip((FULL, "KAKURENBO-0.4"), PUBLISHED_4[factor], strict=True)),
        )
        for factor in FACTORS
    ],
    claims=[
        Claim(
            f"with batches {factor} times as large accuracy is within a point of full training's",
            minus(metric(f"batch x{factor}", "KAKURENBO-0.4"), metric(f"batch x{factor}", FULL)),
            above=-2 * MARGIN,
        )
        for factor in FACTORS
    ],
)


# Table 5: the ablations

PUBLISHED_5 = ("72.25", "73.08", "72.81", "73.27", "72.37", "73.09", "72.96", "73.60")


def gains(bit: int) -> Value:
    """What one of the components adds, in the mean over the pairs of variants that differ in it alone; 1: MB, 2: RF, 3: LR."""
    pairs = [(bits, bits[: bit + 1] + "1" + bits[bit + 2 :]) for bits in BITS if bits[bit + 1] == "0"]
    return mean_of([minus(metric("ablations", present), metric("ablations", absent)) for absent, present in pairs])


TABLE_5 = Artefact(
    name="kakurenbo-table-5",
    paper=f"{PAPER}, appendix, table 5",
    shows="what hiding (HE), moving back (MB), reducing the fraction (RF) and the learning rate (LR) contribute, F = 0.4",
    here=HERE,
    parts=[
        Part(
            "ablations",
            TASK,
            EPOCHS,
            {bits: hiding(0.4, bits) for bits in BITS},
            {FULL: "73.68", **dict(zip(BITS, PUBLISHED_5, strict=True))},
        )
    ],
    claims=[
        Claim("hiding alone (v1000) loses accuracy", minus(metric("ablations", FULL), metric("ablations", "v1000"))),
        Claim("adjusting the learning rate gains, in the mean of four pairs", gains(3)),
        Claim("reducing the fraction gains, in the mean of four pairs", gains(2)),
        Claim("moving back gains, in the mean of four pairs", gains(1)),
        Claim(
            "with all of them (v1111) accuracy is within half a point of full training's",
            minus(metric("ablations", "v1111"), metric("ablations", FULL)),
            above=-MARGIN,
        ),
    ],
    seeds=(0, 1, 2, 3, 4),
)


# Figures 1, 2, 3 and 6 look into the runs of one setting

INSIDE = Part("inside", TASK, EPOCHS, {"KAKURENBO-0.3": hiding(0.3)})
ROW = "KAKURENBO-0.3"


def _runs(measured: Measured, row: str = ROW) -> list[Run]:
    return list(measured[INSIDE.name][row].values())


def _by_epoch(runs: Sequence[Run], name: str) -> list[float]:
    """Means over the seeds."""
    return [statistics.mean(entries) for entries in zip(*([e[name] for e in run["history"]] for run in runs), strict=True)]


def easy_late(measured: Measured, seed: int) -> float:
    """The least share of easy samples after 30 % of the epochs, over full training's epochs."""
    history = measured[INSIDE.name][FULL][seed]["history"]
    return min(entry["easy_share"] for entry in history[round(0.3 * len(history)) :])


def _figure_1(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    full, own = (_by_epoch(_runs(measured, row), "easy_share") for row in (FULL, ROW))
    rows = [[str(epoch), f"{100 * a:.1f}", f"{100 * b:.1f}"] for epoch, (a, b) in enumerate(zip(full, own, strict=True))]
    header = ["epoch", "full, %", f"{ROW}, %"]
    return [Table("Share of samples whose loss is below 5 % of the largest (mean of the seeds)", header, rows)]


FIGURE_1 = Artefact(
    name="kakurenbo-figure-1",
    paper=f"{PAPER}, appendix, figure 1",
    shows="how many samples have a small loss as training goes on",
    here=HERE,
    parts=[INSIDE],
    claims=[
        Claim(
            "after 30 % of the epochs more than half of the samples have a loss below 5 % of the largest", easy_late, above=0.5
        )
    ],
    tables=_figure_1,
)


def rank_change(measured: Measured, seed: int) -> float:
    """1 less the rank correlation of hidden samples by class, between a third of training and its end."""
    history = measured[INSIDE.name][ROW][seed]["history"]
    early, late = (history[at]["hidden_by_class"] for at in (len(history) // 3, -1))
    return 1 - float(np.corrcoef(rankdata(early), rankdata(late))[0, 1])


def _figure_2(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    history = _runs(measured)[0]["history"]
    epochs = [len(history) // 3, 2 * len(history) // 3, len(history) - 1]
    columns = []
    for epoch in epochs:
        hidden = np.array(history[epoch]["hidden_by_class"])
        columns.append([f"{count} ({rank:.0f})" for count, rank in zip(hidden, rankdata(-hidden, method="min"), strict=True)])
    rows = [[str(label), *(column[label] for column in columns)] for label in range(len(columns[0]))]
    header = ["class", *(f"epoch {epoch}" for epoch in epochs)]
    return [Table("Hidden samples by class and rank, 1 the most hidden (first seed)", header, rows)]


FIGURE_2 = Artefact(
    name="kakurenbo-figure-2",
    paper=f"{PAPER}, appendix, figure 2",
    shows="how many samples of each class are hidden, by epoch",
    here=HERE,
    parts=[INSIDE],
    claims=[
        Claim(
            "which classes are hidden most changes: rank correlation between a third of training and its end below 0.95",
            rank_change,
            above=0.05,
            scale=1,
        )
    ],
    tables=_figure_2,
)


def back_early(measured: Measured, seed: int) -> float:
    """Share of the cap that is moved back, in the first third of the epochs that hide, less that in the last third."""
    history = measured[INSIDE.name][ROW][seed]["history"][1:]
    back = [1 - entry["actual_fraction"] / entry["scheduled_fraction"] for entry in history]
    third = len(back) // 3
    return statistics.mean(back[:third]) - statistics.mean(back[-third:])


def saved_time(measured: Measured, seed: int) -> list[float]:
    """By epoch, the share of the mean CPU time of an epoch of full training that was saved."""
    own, full = (_epoch_times(measured[INSIDE.name][row][seed]) for row in (ROW, FULL))
    baseline = statistics.mean(full)
    return [1 - seconds / baseline for seconds in own]


def _epoch_times(run: Run) -> list[float]:
    ends = [0.0, *(entry["cpu_s"] for entry in run["history"])]
    return [end - start for start, end in pairwise(ends)]


def below_hidden(measured: Measured, seed: int) -> float:
    """Mean share hidden less the mean share of time saved, over the epochs that hide."""
    hidden = [entry["actual_fraction"] for entry in measured[INSIDE.name][ROW][seed]["history"]]
    return statistics.mean(hidden[1:]) - statistics.mean(saved_time(measured, seed)[1:])


def _figure_3(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    runs = _runs(measured)
    cap, actual = (_by_epoch(runs, name) for name in ("scheduled_fraction", "actual_fraction"))
    saved = [statistics.mean(values) for values in zip(*(saved_time(measured, run["seed"]) for run in runs), strict=True)]
    rows = [
        [str(epoch), *(f"{100 * value:.1f}" for value in values)]
        for epoch, values in enumerate(zip(cap, actual, saved, strict=True))
    ]
    return [Table("Mean of the seeds", ["epoch", "cap, %", "hidden, %", "CPU time saved, %"], rows)]


FIGURE_3 = Artefact(
    name="kakurenbo-figure-3",
    paper=f"{PAPER}, appendix, figure 3",
    shows="cap, share really hidden, and time saved, by epoch",
    here=HERE,
    parts=[INSIDE],
    claims=[
        Claim("moving back matters most early in training", back_early),
        Claim("less time is saved than samples are hidden", below_hidden),
    ],
    tables=_figure_3,
)


# Figure 5: segmentation

SEGMENTATION = "relief@2400"
HERE_5 = "A U-Net on 2,400 patches of the Earth's relief, a task of our own making, 10 epochs, for DeepCAM"
VARIANTS = {"v1000": "v1000", "v1001": "v1001", "KAKURENBO": "v1111"}
DROPPED = 0.02


def _segmentation_rows() -> dict[str, str]:
    rows = {f"{name}, F = {f}": hiding(f, bits) for f in FRACTIONS for name, bits in VARIANTS.items()}
    with_drop = {
        f"{name} + DropTop, F = {f}": hiding(f, bits, DROPPED)
        for f in FRACTIONS
        for name, bits in VARIANTS.items()
        if name != "v1000"
    }
    return rows | with_drop


def _over_fractions(left: str, right: str) -> Value:
    """In the mean over the fractions."""
    pairs = [(f"{left}, F = {f}", f"{right}, F = {f}") for f in FRACTIONS]
    return mean_of([minus(metric("relief", a), metric("relief", b)) for a, b in pairs])


FIGURE_5 = Artefact(
    name="kakurenbo-figure-5",
    paper=f"{PAPER}, appendix, figure 5",
    shows="segmentation: hiding alone, with the learning rate, all of it, and with DropTop",
    here=HERE_5,
    parts=[
        Part(
            "relief",
            SEGMENTATION,
            10,
            _segmentation_rows(),
            {"KAKURENBO, F = 0.3": "77.16", "KAKURENBO + DropTop, F = 0.3": "77.37"},
        ),
        Part(
            "beside random samples",
            SEGMENTATION,
            10,
            {name: method for name, method in _segmentation_rows().items() if name.startswith("KAKURENBO, ")},
            controls=("uniform",),
        ),
    ],
    claims=[
        Claim("adjusting the learning rate gains (v1001 over v1000)", _over_fractions("v1001", "v1000")),
        Claim(
            "at F = 0.3 KAKURENBO is within half a point of full training",
            minus(metric("relief", "KAKURENBO, F = 0.3"), metric("relief", FULL)),
            above=-MARGIN,
        ),
        Claim("DropTop gains over KAKURENBO", _over_fractions("KAKURENBO + DropTop", "KAKURENBO")),
        Claim("DropTop gains over v1001", _over_fractions("v1001 + DropTop", "v1001")),
    ],
)


# Figure 6: the losses that stay

LAST = 10
"""Epochs."""
TOP = 0.02


def top_losses(run: Run) -> list[dict[str, float]]:
    """Mean loss of all samples, of the 2 % with the largest and of the others, in each of the last ten epochs."""
    table = pq.read_table(Path(run["samples"]), columns=["loss_by_epoch"])
    losses = np.stack(table["loss_by_epoch"].to_numpy(zero_copy_only=False))[:, -LAST:]
    found = []
    for column in losses.T:
        ascending = np.sort(column[np.isfinite(column)])
        cut = len(ascending) - max(1, round(TOP * len(ascending)))
        parts = {"full": ascending, "bottom": ascending[:cut], "top": ascending[cut:]}
        found.append({name: float(values.mean()) for name, values in parts.items()})
    return found


def top_stays(measured: Measured, seed: int) -> float:
    """Mean loss of the top 2 % in the last epoch over that nine epochs before, in full training."""
    losses = top_losses(measured[SEGMENTED.name][FULL][seed])
    return losses[-1]["top"] / losses[0]["top"]


def top_above(measured: Measured, seed: int) -> float:
    """Mean loss of the top 2 % over that of the others in the last epoch."""
    last = top_losses(measured[SEGMENTED.name][FULL][seed])[-1]
    return last["top"] / last["bottom"]


def _figure_6(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    losses = [top_losses(run) for run in measured[SEGMENTED.name][FULL].values()]
    epochs = list(zip(*losses, strict=True))
    rows = [
        [str(number - len(epochs)), *(f"{statistics.mean(seed[name] for seed in of_epoch):.4f}" for name in of_epoch[0])]
        for number, of_epoch in enumerate(epochs)
    ]
    return [
        Table("Mean loss, full training (mean of the seeds)", ["epoch from the end", "all", "bottom 98 %", "top 2 %"], rows)
    ]


SEGMENTED = Part("relief", SEGMENTATION, 10, {})
FIGURE_6 = Artefact(
    name="kakurenbo-figure-6",
    paper=f"{PAPER}, appendix, figure 6",
    shows="segmentation: the largest losses in the last ten epochs",
    here=HERE_5,
    parts=[SEGMENTED],
    claims=[
        Claim("the top 2 % keep over half of their loss in the last ten epochs", top_stays, above=0.5, scale=1),
        Claim("in the last epoch their loss is over three times that of the others", top_above, above=3, scale=1),
    ],
    tables=_figure_6,
)

ARTEFACTS = (TABLE_2, TABLE_3, TABLE_4, TABLE_5, FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_5, FIGURE_6)
