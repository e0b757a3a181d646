"""KAKURENBO: the tables and figures of its appendix."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import rankdata

from thresher_lab.comparison.summary import RunDict
from thresher_lab.recipes.running import task_of
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    HALF_A_POINT,
    Artefact,
    ArtefactPart,
    Claim,
    PageTable,
    RunsByPart,
    SeedValue,
    TableChart,
    cpu,
    mean_of,
    metric,
    minus,
)
from thresher_lab.tasks.contours import Transfer
from thresher_lab.training.samples import LOSS_BINS, mean_of_part, read_history

PAPER = "KAKURENBO (arXiv 2310.10102)"
FASHION_PREFIX = "fashion-mnist-small"
FASHION_EPOCHS = 15
FASHION_SETUP = (
    "A small CNN on 10,000 images of Fashion-MNIST, 15 epochs, for ResNet-50 on ImageNet"
)
FASHION_TASK = f"{FASHION_PREFIX}@10000"
SECOND_TASK = f"{FASHION_PREFIX}-b@10000"
SECOND_EPOCHS = 25
SECOND_SETUP = (
    f"{FASHION_SETUP} (A); random views of the images, parts of which are erased, a small weight decay and {SECOND_EPOCHS} "
    "epochs for the setting (B)"
)
OTHER_CNN = (
    "Another CNN on Fashion-MNIST (32 and 64 channels, 10 epochs, a rate of its own) loses .55 points [.35, .75]: see "
    "[results.md](results.md)."
)
VARIANT_BITS = ("v1000", "v1001", "v1010", "v1011", "v1100", "v1101", "v1110", "v1111")


def hiding(fraction: float, bits: str = "v1111", drop_top: float = 0.0) -> str:
    """Returns KAKURENBO or one of its ablations, in the form of the command line.

    Args:
        fraction: Largest fraction that is hidden, (0, 1).
        bits: Name of the variant in the paper; the digits after the first switch moving back, reducing the fraction and
            adjusting the learning rate on (1) or off (0).
        drop_top: Share of the samples with the largest losses that is left out, [0, 1). Default: 0.
    """
    names = ("move_back", "reduce_fraction", "adjust_lr")
    off = [f"{name}=false" for name, bit in zip(names, bits[2:], strict=True) if bit == "0"]
    dropped = [f"drop_top={drop_top}"] if drop_top else []
    return ":".join(["kakurenbo", f"max_fraction={fraction}", *off, *dropped])


# Table 2, the last columns: pretraining with selection, then fine-tuning without

PRETRAINING_TASK = "contours-digits"


@cache
def from_scratch(seed: int) -> float:
    """Returns the downstream accuracy of a network without pretraining, which is trained as the others are fine-tuned."""
    task = task_of(PRETRAINING_TASK)
    assert isinstance(task, Transfer)
    return task.downstream(task.build(seed), task.load(task.find(None)).downstream, seed)


def pretraining_gain(measured: RunsByPart, seed: int) -> float:
    """Returns what full pretraining gains over no pretraining."""
    return metric("pretraining", FULL_ROW)(measured, seed) - from_scratch(seed)


KAKURENBO_TABLE_2 = Artefact(
    name="kakurenbo-table-2-deit",
    paper=f"{PAPER}, appendix, table 2, the columns of DeiT",
    shows="pretraining with selection, then plain fine-tuning: downstream accuracy and cost of pretraining",
    here="A vision transformer of four layers pretrained on generated contours, 10 epochs, and fine-tuned on digits, for "
    "DeiT-Tiny on Fractal-3K, CIFAR-10 and CIFAR-100",
    parts=[
        ArtefactPart(
            "pretraining",
            PRETRAINING_TASK,
            10,
            {"KAKURENBO-0.3": hiding(0.3)},
            {
                FULL_ROW: "95.03 (CIFAR-10), 79.69 (CIFAR-100)",
                "KAKURENBO-0.3": "95.28 (CIFAR-10), 79.35 (CIFAR-100)",
            },
            controls=("uniform",),
        )
    ],
    claims=[
        Claim(
            "downstream accuracy is within half a point of that after full pretraining",
            minus(metric("pretraining", "KAKURENBO-0.3"), metric("pretraining", FULL_ROW)),
            above=-HALF_A_POINT,
            says="Table 2: 95.28 after pretraining with KAKURENBO, 95.03 without (CIFAR-10); 79.35 and 79.69 (CIFAR-100)",
        ),
        Claim(
            "full pretraining helps: downstream accuracy is above that of a network trained from scratch",
            pretraining_gain,
        ),
    ],
)


# Table 2, the other columns: networks and recipes

NETWORK_PARTS = [
    ArtefactPart(
        name,
        task,
        epochs,
        {"KAKURENBO-0.3": hiding(0.3)},
        {FULL_ROW: full, "KAKURENBO-0.3": hidden},
    )
    for name, task, epochs, (full, hidden) in (
        ("ResNet-8", "fashion-mnist-resnet8@4000", 10, ("74.89 (ResNet-50)", "75.15")),
        ("CNN, recipe A", FASHION_TASK, FASHION_EPOCHS, ("73.68 (ResNet-50 A)", "73.52")),
        (
            "CNN, recipe B",
            SECOND_TASK,
            SECOND_EPOCHS,
            ("76.58 (ResNet-50 B)", "76.62; 76.17 in table 3"),
        ),
        ("perceptron", "mnist-5k-mlp", 20, ("76.63 (EfficientNet-b3)", "76.23")),
        ("CNN on digits", "mnist-5k", 20, ("77.49 (WideResNet-28-10)", "77.21")),
    )
]
KAKURENBO_NETWORKS = Artefact(
    name="kakurenbo-table-2",
    paper=f"{PAPER}, appendix, table 2, the columns of ImageNet-1K and CIFAR-100",
    shows="accuracy of several networks and recipes with a maximum fraction of 0.3",
    here=f"{SECOND_SETUP}; ResNet-8 on 4,000 images of Fashion-MNIST; a perceptron and a CNN on 4,000 digits of MNIST. Each "
    "stands for a column of the paper, which its numbers name",
    parts=NETWORK_PARTS,
    claims=[
        Claim(
            f"{part.name}: accuracy is within half a point of full training's",
            minus(metric(part.name, "KAKURENBO-0.3"), metric(part.name, FULL_ROW)),
            above=-HALF_A_POINT,
            says="Table 2: with five networks, accuracy is from .26 points above to .40 below that of full training",
        )
        for part in NETWORK_PARTS
    ],
    beside=OTHER_CNN,
    recipes={
        "resnet50": "ResNet-8",
        "resnet50-a": "CNN, recipe A",
        "resnet50-b": "CNN, recipe B",
        "efficientnet-b3": "perceptron",
        "wrn-28-10": "CNN on digits",
    },
)


# Table 3: the maximum fraction, with two recipes

FRACTIONS = (0.2, 0.3, 0.4)
RECIPE_PARTS = [
    ArtefactPart(
        "recipe A",
        FASHION_TASK,
        FASHION_EPOCHS,
        {f"KAKURENBO-{fraction}": hiding(fraction) for fraction in FRACTIONS},
        {FULL_ROW: "73.68 in 16118 s", "KAKURENBO-0.3": "73.52 in 12984 s"},
        controls=("uniform",),
    ),
    ArtefactPart(
        "recipe B",
        SECOND_TASK,
        SECOND_EPOCHS,
        {f"KAKURENBO-{fraction}": hiding(fraction) for fraction in FRACTIONS},
        {
            FULL_ROW: "76.58 in 64060 s",
            "KAKURENBO-0.2": "76.11 in 61723 s",
            "KAKURENBO-0.3": "76.17 in 59063 s",
            "KAKURENBO-0.4": "75.62 in 57582 s",
        },
    ),
]
RECIPE_A, RECIPE_B = RECIPE_PARTS
LOSSES_BY_FRACTION = (
    (RECIPE_A, 0.3, 0.16),
    (RECIPE_B, 0.2, 0.47),
    (RECIPE_B, 0.3, 0.41),
    (RECIPE_B, 0.4, 0.96),
)
"""Points that table 3 of the paper loses, by recipe and fraction."""
SAVED_SAYS = "C.3 and table 3: the total time falls by 19.5 % (A) and 7.8 % (B) at 0.3"


def time_saved(part: str) -> SeedValue:
    """Returns the share of the CPU time that KAKURENBO saves at a maximum fraction of 0.3."""
    return lambda measured, seed: 1 - cpu(part, "KAKURENBO-0.3")(measured, seed)


KAKURENBO_TABLE_3 = Artefact(
    name="kakurenbo-table-3",
    paper=f"{PAPER}, appendix, table 3",
    shows="accuracy and time at maximum fractions of 0.2, 0.3 and 0.4, with two recipes",
    here=SECOND_SETUP,
    parts=RECIPE_PARTS,
    claims=[
        *(
            Claim(
                f"{part.name}: at {fraction}, accuracy minus that of full training",
                minus(metric(part.name, f"KAKURENBO-{fraction}"), metric(part.name, FULL_ROW)),
                above=-loss / 100,
                says="Table 3: at most .16 points are lost at 0.3 (A), and .47, .41 and .96 at 0.2, 0.3 and 0.4 (B)",
            )
            for part, fraction, loss in LOSSES_BY_FRACTION
        ),
        *(
            Claim(
                f"{part.name}: at 0.3, share of the CPU time that is saved",
                time_saved(part.name),
                above=saved,
                says=SAVED_SAYS,
                timed=True,
            )
            for part, saved in zip(RECIPE_PARTS, (0.195, 0.078), strict=True)
        ),
    ],
    beside=OTHER_CNN,
    recipes={"resnet50-a": "recipe A", "resnet50-b": "recipe B"},
)
KAKURENBO_TABLE_3_TIME = Artefact(
    name="kakurenbo-table-3-time",
    paper=f"{PAPER}, appendix, table 3: the time",
    shows="the time that a maximum fraction of 0.3 saves if a backward pass takes two forward passes, as in the paper",
    here="A small transformer on a text, 8 epochs: the backward passes of the small CNNs take one forward pass. Without moving "
    "back: of most samples less than half of the positions are right, so nearly all that are hidden would be moved back",
    parts=[ArtefactPart("text", "text@2000", 8, {"KAKURENBO-0.3": hiding(0.3, "v1011")})],
    claims=[
        Claim(
            "text: at 0.3, share of the CPU time that is saved",
            time_saved("text"),
            above=0.195,
            says=SAVED_SAYS,
            timed=True,
        )
    ],
)


# Table 4: the batch size

BATCH_FACTORS = (1, 2, 4, 8)
PUBLISHED_BY_FACTOR = {
    1: ("73.68", "73.60"),
    2: ("73.98", "73.21"),
    4: ("73.59", "73.03"),
    8: ("73.81", "72.84"),
}


def scaled_task(factor: int) -> str:
    """Returns the task with batch size and learning rate multiplied by `factor`."""
    return FASHION_TASK if factor == 1 else f"{FASHION_PREFIX}-x{factor}@10000"


KAKURENBO_TABLE_4 = Artefact(
    name="kakurenbo-table-4",
    paper=f"{PAPER}, appendix, table 4",
    shows="accuracy as the batch size and the learning rate grow together, at a maximum fraction of 0.4",
    here=f"{FASHION_SETUP}; batches of 64, 128, 256 and 512",
    parts=[
        ArtefactPart(
            f"batch x{factor}",
            scaled_task(factor),
            FASHION_EPOCHS,
            {"KAKURENBO-0.4": hiding(0.4)},
            dict(zip((FULL_ROW, "KAKURENBO-0.4"), PUBLISHED_BY_FACTOR[factor], strict=True)),
            batch=factor,
        )
        for factor in BATCH_FACTORS
    ],
    claims=[
        Claim(
            f"batch x{factor}: accuracy is within a point of full training's",
            minus(
                metric(f"batch x{factor}", "KAKURENBO-0.4"), metric(f"batch x{factor}", FULL_ROW)
            ),
            above=-2 * HALF_A_POINT,
            says="C.3: large batches keep the accuracy or lose a trivial part, up to .97 points in table 4",
        )
        for factor in BATCH_FACTORS
    ],
    recipes={"resnet50-a": tuple(f"batch x{factor}" for factor in BATCH_FACTORS)},
)


# Table 5: the ablations; moving back on wrong labels, the learning rate and the fraction on clean data

PUBLISHED_BY_VARIANT = ("72.25", "73.08", "72.81", "73.27", "72.37", "73.09", "72.96", "73.60")
ABLATION_TASK = "mnist-5k-noisy"
ABLATION_EPOCHS = 20
ABLATION_SETUP = (
    "A small CNN on 4,000 digits of MNIST, every fifth of which has a wrong label, 20 epochs, for networks on ImageNet: "
    "with this network and no wrong labels, every candidate is right and confident, and no sample is moved back"
)
CLEAN_SETUP = (
    "A small CNN on 10,000 images of Fashion-MNIST and a perceptron on 4,000 digits of MNIST, each at the learning rate with "
    "which full training is best (of 1/8, 1/4, 1/2, 1 and 2 times the rate of the task, with one other seed), and at half of "
    "it, for networks on ImageNet. Labels are clean: a higher rate fits wrong ones"
)
CLEAN_PARTS = {
    "CNN": (FASHION_TASK, FASHION_EPOCHS),
    "CNN, half the rate": (f"{FASHION_PREFIX}-slow@10000", FASHION_EPOCHS),
    "perceptron": ("mnist-5k-mlp", 20),
    "perceptron, half the rate": ("mnist-5k-mlp-slow", 20),
}


def gains(part: str, bit: int) -> SeedValue:
    """Returns what one component adds, in the mean over the pairs of variants that differ in this component alone.

    Args:
        part: Name of the part.
        bit: Number of the component: 1 for moving back, 2 for reducing the fraction, 3 for the learning rate.
    """
    pairs = [
        (bits, bits[: bit + 1] + "1" + bits[bit + 2 :])
        for bits in VARIANT_BITS
        if bits[bit + 1] == "0"
    ]
    return mean_of(
        [minus(metric(part, present), metric(part, absent)) for absent, present in pairs]
    )


def moved_back(measured: RunsByPart, seed: int) -> float:
    """Returns the smallest share of the samples that a variant with moving back moves back, in the mean over the epochs."""
    runs = [measured["ablations"][bits][seed] for bits in VARIANT_BITS if bits[2] == "1"]
    samples = runs[0]["cost"]["full_forward"] / ABLATION_EPOCHS
    return min(fmean(entry["moved_back"] / samples for entry in run["history"]) for run in runs)


def gain_of_moving_back(measured: RunsByPart, seed: int) -> float:
    """Returns what moving back adds; NaN, which judges nothing, where some variant moves no sample back."""
    return gains("ablations", 1)(measured, seed) if moved_back(measured, seed) > 0 else math.nan


def _ablations(name: str, task: str, epochs: int) -> ArtefactPart:
    rows = {bits: hiding(0.4, bits) for bits in VARIANT_BITS}
    published = dict(zip(VARIANT_BITS, PUBLISHED_BY_VARIANT, strict=True))
    return ArtefactPart(name, task, epochs, rows, {FULL_ROW: "73.68", **published})


def _component_claims(part: str) -> list[Claim]:
    return [
        Claim(
            f"{part}: adjusting the learning rate gains accuracy, in the mean of four pairs",
            gains(part, 3),
            says="C.4: LR improves the accuracy significantly, by .46 to .83 (here: by more than 0)",
        ),
        Claim(
            f"{part}: reducing the fraction gains accuracy, in the mean of four pairs",
            gains(part, 2),
            says="C.4: all combinations with RF are better than those without it (here: on average)",
        ),
        Claim(
            f"{part}: with all of them (v1111), accuracy is within half a point of full training's",
            minus(metric(part, "v1111"), metric(part, FULL_ROW)),
            above=-HALF_A_POINT,
            says="C.4: with all strategies accuracy is very close to the baseline (73.6 and 73.68)",
        ),
    ]


MOVING_BACK_SAYS = "C.4: MB also improves the accuracy, by a little (72.81 to 72.96)"
KAKURENBO_TABLE_5 = Artefact(
    name="kakurenbo-table-5",
    paper=f"{PAPER}, appendix, table 5: HE, RF and LR",
    shows="what hiding (HE), reducing the fraction (RF) and the learning rate (LR) contribute, F = 0.4",
    here=CLEAN_SETUP,
    parts=[_ablations(name, *setup) for name, setup in CLEAN_PARTS.items()],
    claims=[
        claim
        for part in CLEAN_PARTS
        for claim in (
            Claim(
                f"{part}: hiding alone (v1000) loses accuracy",
                minus(metric(part, FULL_ROW), metric(part, "v1000")),
                says="C.4: with HE alone, accuracy degrades slightly (73.68 to 72.25)",
            ),
            *_component_claims(part),
        )
    ],
    seeds=tuple(range(8)),
    beside="Hiding takes fewer steps. The adjusted rate is to make up for them: it may gain only where a higher rate would.",
    recipes={"resnet50-a": "CNN"},
)
KAKURENBO_TABLE_5_MOVING_BACK = Artefact(
    name="kakurenbo-table-5-moving-back",
    paper=f"{PAPER}, appendix, table 5: MB",
    shows="what moving back (MB) contributes, F = 0.4",
    here=ABLATION_SETUP,
    parts=[_ablations("ablations", ABLATION_TASK, ABLATION_EPOCHS)],
    claims=[
        Claim(
            "every variant with MB moves samples back, as a share of all samples in the mean over the epochs",
            moved_back,
        ),
        Claim(
            "moving back gains accuracy, in the mean of four pairs",
            gain_of_moving_back,
            says=MOVING_BACK_SAYS,
        ),
    ],
    beside="A higher rate fits wrong labels: adjusting the learning rate loses here, which the paper did not try.",
)
KAKURENBO_TABLE_5_HURT = Artefact(
    name="kakurenbo-table-5-hurt",
    paper=f"{PAPER}, appendix, table 5, where hiding hurts",
    shows="what the components win back where hiding alone loses more than a point, F = 0.4",
    here="A small transformer on a text, 8 epochs, for networks on ImageNet: the first task that was tried, with other seeds, "
    "on which hiding alone loses more than a point",
    parts=[_ablations("text", "text@2000", 8)],
    claims=[
        Claim(
            "text: hiding alone (v1000) loses more than a point",
            minus(metric("text", FULL_ROW), metric("text", "v1000")),
            above=0.01,
        ),
        Claim(
            "text: moving back gains accuracy, in the mean of four pairs",
            gains("text", 1),
            says=MOVING_BACK_SAYS,
        ),
        *_component_claims("text"),
    ],
    beside="Moving back takes back nearly all hidden samples of this task, of which few are right in half of their positions: "
    "the variants with it are almost full training, as their cost shows.",
)


# The methods that the paper compares with

OTHER_ROWS = {
    "KAKURENBO-0.3": hiding(0.3),
    "ISWR": "importance_sampling",
    "FORGET-0.3": "forgetting:fraction=0.3:start=0.2",
    "EpochSB": "epoch_selective_backprop:beta=1.0",
    "GradMatch-0.7": "grad_match:keep=0.7:every=5",
}
OTHER_METHODS = Artefact(
    name="kakurenbo-others",
    paper=f"{PAPER}, appendix E",
    shows="accuracy and time of KAKURENBO, importance sampling (ISWR), hiding by forgetting events (FORGET), "
    "Selective-Backprop by epoch (EpochSB) and GradMatch",
    here=f"{FASHION_SETUP}. FORGET begins after a fifth of the epochs; GradMatch chooses every five epochs",
    parts=[ArtefactPart("others", FASHION_TASK, FASHION_EPOCHS, OTHER_ROWS)],
    claims=[
        Claim(
            "importance sampling with replacement (ISWR) does not speed up training: it takes over 95 % of its CPU time",
            cpu("others", "ISWR"),
            above=0.95,
            says="Appendix E: importance sampling with replacement does not speed up training on large data (here: small)",
            timed=True,
        ),
        Claim(
            "GradMatch with as many epochs: its accuracy is below that of full training",
            minus(metric("others", FULL_ROW), metric("others", "GradMatch-0.7")),
            says="Appendix E: GRAD-MATCH often needs more epochs to converge to the accuracy of the baseline",
        ),
    ],
    beside="The table with the numbers of these methods is in the paper's main text, which was not available: the other rows "
    "of the table below are ours alone.",
    recipes={"resnet50-a": "others", "wrn-28-10": "others"},
)


INSIDE_PART = ArtefactPart("inside", FASHION_TASK, FASHION_EPOCHS, {"KAKURENBO-0.3": hiding(0.3)})
HIDING_ROW = "KAKURENBO-0.3"


def _runs_of_row(measured: RunsByPart, row: str = HIDING_ROW) -> list[RunDict]:
    return list(measured[INSIDE_PART.name][row].values())


def _means_by_epoch(runs: Sequence[RunDict], name: str) -> list[float]:
    """Returns the means over the runs of a value of the history, one per epoch."""
    return [
        statistics.mean(entries)
        for entries in zip(*([e[name] for e in run["history"]] for run in runs), strict=True)
    ]


def easy_late(measured: RunsByPart, seed: int) -> float:
    """Returns the smallest share of easy samples in an epoch of full training, after 30 % of the epochs."""
    history = measured[INSIDE_PART.name][FULL_ROW][seed]["history"]
    return min(entry["easy_share"] for entry in history[round(0.3 * len(history)) :])


def _figure_1(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    full, own = (
        _means_by_epoch(_runs_of_row(measured, row), "easy_share") for row in (FULL_ROW, HIDING_ROW)
    )
    rows = [
        [str(epoch), f"{100 * a:.1f}", f"{100 * b:.1f}"]
        for epoch, (a, b) in enumerate(zip(full, own, strict=True))
    ]
    header = ["epoch", "full, %", f"{HIDING_ROW}, %"]
    return [
        _loss_histogram(_runs_of_row(measured, FULL_ROW)),
        PageTable(
            "Share of samples whose loss is below 5 % of the largest (mean of the seeds)",
            header,
            rows,
        ),
    ]


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


KAKURENBO_FIGURE_1 = Artefact(
    name="kakurenbo-figure-1",
    paper=f"{PAPER}, appendix, figure 1",
    shows="how many samples have a small loss, by epoch",
    here=FASHION_SETUP,
    parts=[INSIDE_PART],
    claims=[
        Claim(
            "after 30 % of the epochs, more than half of the samples have a loss below 5 % of the largest",
            easy_late,
            above=0.5,
            says="C.1: from epoch 30 of 100 on, more than 50 % of the samples have a loss below 5 % of the highest",
        )
    ],
    tables=_figure_1,
    chart=TableChart("bars", y="share of samples, %", tables=[0]),
    recipes={"resnet50-a": "inside"},
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
        columns.append(
            [
                f"{count} ({rank:.0f})"
                for count, rank in zip(hidden, rankdata(-hidden, method="min"), strict=True)
            ]
        )
    rows = [
        [str(label), *(column[label] for column in columns)] for label in range(len(columns[0]))
    ]
    header = ["class", *(f"epoch {epoch}" for epoch in epochs)]
    return [
        PageTable(
            "Hidden samples by class, with the rank of the class, 1 for the most hidden samples (first seed)",
            header,
            rows,
        )
    ]


KAKURENBO_FIGURE_2 = Artefact(
    name="kakurenbo-figure-2",
    paper=f"{PAPER}, appendix, figure 2",
    shows="how many samples of each class are hidden, by epoch",
    here=FASHION_SETUP,
    parts=[INSIDE_PART],
    claims=[
        Claim(
            "1 minus the rank correlation of the classes by hidden samples, between a third of training and its end",
            rank_change,
            above=0.05,
            scale=1,
            says="C.1: the hidden samples change from epoch to epoch; fewer of one class are hidden, and more of another",
        )
    ],
    tables=_figure_2,
    chart=TableChart("bars", y="hidden samples"),
    recipes={"resnet50-a": "inside"},
)


# Figure 3: the share that is hidden, on the task of table 5, where samples are moved back

EVOLUTION_PART = ArtefactPart(
    "evolution", ABLATION_TASK, ABLATION_EPOCHS, {HIDING_ROW: hiding(0.3)}
)


def back_early(measured: RunsByPart, seed: int) -> float:
    """Returns the share moved back of what may be hidden, in the first third of the epochs that hide, minus the last third."""
    history = measured[EVOLUTION_PART.name][HIDING_ROW][seed]["history"][1:]
    back = [1 - entry["actual_fraction"] / entry["scheduled_fraction"] for entry in history]
    third = len(back) // 3
    return statistics.mean(back[:third]) - statistics.mean(back[-third:])


def saved_time(measured: RunsByPart, seed: int) -> list[float]:
    """Returns for each epoch the CPU time saved, as a share of the mean CPU time of an epoch of full training."""
    own, full = (
        _epoch_times(measured[EVOLUTION_PART.name][row][seed]) for row in (HIDING_ROW, FULL_ROW)
    )
    baseline = statistics.mean(full)
    return [1 - seconds / baseline for seconds in own]


def _epoch_times(run: RunDict) -> list[float]:
    ends = [0.0, *(entry["cpu_s"] for entry in run["history"])]
    return [end - start for start, end in pairwise(ends)]


def below_hidden(measured: RunsByPart, seed: int) -> float:
    """Returns the mean share hidden minus the mean share of time saved, over the epochs that hide."""
    hidden = [
        entry["actual_fraction"]
        for entry in measured[EVOLUTION_PART.name][HIDING_ROW][seed]["history"]
    ]
    return statistics.mean(hidden[1:]) - statistics.mean(saved_time(measured, seed)[1:])


def _figure_3(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    runs = list(measured[EVOLUTION_PART.name][HIDING_ROW].values())
    cap, actual = (
        _means_by_epoch(runs, name) for name in ("scheduled_fraction", "actual_fraction")
    )
    saved = [
        statistics.mean(values)
        for values in zip(*(saved_time(measured, run["seed"]) for run in runs), strict=True)
    ]
    rows = [
        [str(epoch), *(f"{100 * value:.1f}" for value in values)]
        for epoch, values in enumerate(zip(cap, actual, saved, strict=True))
    ]
    return [
        PageTable(
            "Mean of the seeds",
            ["epoch", "largest share, %", "hidden, %", "CPU time saved, %"],
            rows,
        )
    ]


KAKURENBO_FIGURE_3 = Artefact(
    name="kakurenbo-figure-3",
    paper=f"{PAPER}, appendix, figure 3",
    shows="largest share, share that is hidden, and time saved, by epoch",
    here=ABLATION_SETUP,
    parts=[EVOLUTION_PART],
    claims=[
        Claim(
            "the share moved back of what may be hidden is larger in the first third of the epochs than in the last",
            back_early,
            says="C.2: moving back mostly matters at the beginning of training",
        ),
        Claim(
            "less time is saved than samples are hidden, which is less than the maximum",
            below_hidden,
            says="C.2: the speedup follows the trend of the hiding rate and does not reach the maximum rate",
            timed=True,
        ),
    ],
    tables=_figure_3,
    chart=TableChart("lines", y="%"),
    recipes={"efficientnet-b3": "evolution"},
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
    for part, of_part in measured.items():
        runs = {row: list(of_part[row].values()) for row in (FULL_ROW, HIDING_ROW)}
        name = runs[FULL_ROW][0]["metric"]["name"]
        columns = [_means_by_epoch(runs[row], of) for of in (name, "cpu_s") for row in runs]
        shown = sorted({round(at) for at in np.linspace(0, len(columns[0]) - 1, SHOWN_EPOCHS)})
        rows = [
            [
                str(at),
                *(f"{100 * column[at]:.2f}" for column in columns[:2]),
                *(f"{column[at]:.1f}" for column in columns[2:]),
            ]
            for at in shown
        ]
        header = ["epoch", *(f"{row}, {of}" for of in (f"{name}, %", "CPU s") for row in runs)]
        tables.append(PageTable(f"{part}, mean of the seeds", header, rows))
    return tables


KAKURENBO_FIGURE_4 = Artefact(
    name="kakurenbo-figure-4",
    paper=f"{PAPER}, appendix, figure 4",
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
                says="C.3 and figure 4: the method is stable with both recipes; .2 and .41 points are lost",
            ),
            Claim(
                f"{part.name}: it takes less CPU time",
                minus(cpu(part.name, FULL_ROW), cpu(part.name, HIDING_ROW)),
                says="C.3 and figure 4: there is a speedup with both recipes",
                timed=True,
            ),
        )
    ],
    tables=_figure_4,
    chart=TableChart(
        "lines",
        y="accuracy, %",
        x="CPU seconds",
        columns=[f"{row}, accuracy, %" for row in (FULL_ROW, HIDING_ROW)],
        over=[f"{row}, CPU s" for row in (FULL_ROW, HIDING_ROW)],
    ),
    recipes={"resnet50-a": "recipe A", "resnet50-b": "recipe B"},
)


SEGMENTATION = "relief@2400"
RELIEF_SETUP = (
    "A U-Net on 2,400 patches of the Earth's relief, a task of this library, 10 epochs, for DeepCAM"
)
SEGMENTATION_VARIANTS = {"v1000": "v1000", "v1001": "v1001", "KAKURENBO": "v1111"}
DROP_TOP = 0.02


def _segmentation_rows() -> dict[str, str]:
    return {
        f"{name}{added}, F = {f}": hiding(f, bits, dropped)
        for added, dropped, left_out in (("", 0.0, ""), (" + DropTop", DROP_TOP, "v1000"))
        for f in FRACTIONS
        for name, bits in SEGMENTATION_VARIANTS.items()
        if name != left_out
    }


def _over_fractions(left: str, right: str) -> SeedValue:
    """Returns the difference of two variants, in the mean over the fractions."""
    pairs = [(f"{left}, F = {f}", f"{right}, F = {f}") for f in FRACTIONS]
    return mean_of([minus(metric("relief", a), metric("relief", b)) for a, b in pairs])


KAKURENBO_FIGURE_5 = Artefact(
    name="kakurenbo-figure-5",
    paper=f"{PAPER}, appendix, figure 5",
    shows="segmentation: hiding alone, with the adjusted learning rate, with all components, and with DropTop",
    here=RELIEF_SETUP,
    parts=[
        ArtefactPart(
            "relief",
            SEGMENTATION,
            10,
            _segmentation_rows(),
            {"KAKURENBO, F = 0.3": "77.16", "KAKURENBO + DropTop, F = 0.3": "77.37"},
        ),
        ArtefactPart(
            "beside random samples",
            SEGMENTATION,
            10,
            {
                name: method
                for name, method in _segmentation_rows().items()
                if name.startswith("KAKURENBO, ")
            },
            controls=("uniform",),
        ),
    ],
    claims=[
        Claim(
            "relief: adjusting the learning rate gains accuracy (v1001 over v1000)",
            _over_fractions("v1001", "v1000"),
            says="Appendix D: LR improves the accuracy significantly, at F from .2 to .4 (here: on average, by more than 0)",
        ),
        Claim(
            "relief: at F = 0.3, KAKURENBO is within half a point of full training",
            minus(metric("relief", "KAKURENBO, F = 0.3"), metric("relief", FULL_ROW)),
            above=-HALF_A_POINT,
            says="Appendix D: with all components the accuracy is very close to the baseline",
        ),
        Claim(
            "relief: DropTop gains accuracy over KAKURENBO",
            _over_fractions("KAKURENBO + DropTop", "KAKURENBO"),
            says="Appendix D: DropTop raises 77.16 to 77.37 at F = .3 (here: on average over F)",
        ),
        Claim(
            "relief: DropTop gains accuracy over v1001",
            _over_fractions("v1001 + DropTop", "v1001"),
            says="Appendix D: DropTop raises v1001 by .82 (here: on average over F, by more than 0)",
        ),
    ],
    chart=TableChart("points", y="mean IoU, %", tables=[0]),
    recipes={"deepcam": "relief"},
)


# Figure 6: the losses that stay

LAST_EPOCHS = 10
"""Number of epochs that the figure shows."""


def top_losses(run: RunDict) -> list[dict[str, float]]:
    """Returns the mean loss of all samples, of the 2 % with the largest losses and of the others, for the last ten epochs."""
    losses = read_history(Path(run["samples"])).losses[:, -LAST_EPOCHS:]
    parts = {
        name: mean_of_part(losses, part)
        for name, part in (("full", "all"), ("bottom", "bottom"), ("top", "top"))
    }
    return [dict(zip(parts, means, strict=True)) for means in zip(*parts.values(), strict=True)]


def top_stays(measured: RunsByPart, seed: int) -> float:
    """Returns the mean loss of the top 2 % in the last epoch over that nine epochs earlier, in full training."""
    losses = top_losses(measured[SEGMENTED_PART.name][FULL_ROW][seed])
    return losses[-1]["top"] / losses[0]["top"]


def top_above(measured: RunsByPart, seed: int) -> float:
    """Returns the mean loss of the top 2 % over that of the other samples, in the last epoch of full training."""
    last = top_losses(measured[SEGMENTED_PART.name][FULL_ROW][seed])[-1]
    return last["top"] / last["bottom"]


def _figure_6(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    losses = [top_losses(run) for run in measured[SEGMENTED_PART.name][FULL_ROW].values()]
    epochs = list(zip(*losses, strict=True))
    rows = [
        [
            str(number - len(epochs)),
            *(f"{statistics.mean(seed[name] for seed in of_epoch):.4f}" for name in of_epoch[0]),
        ]
        for number, of_epoch in enumerate(epochs)
    ]
    return [
        PageTable(
            "Mean loss, full training (mean of the seeds)",
            ["epoch from the end", "all", "bottom 98 %", "top 2 %"],
            rows,
        )
    ]


SEGMENTED_PART = ArtefactPart("relief", SEGMENTATION, 10, {})
KAKURENBO_FIGURE_6 = Artefact(
    name="kakurenbo-figure-6",
    paper=f"{PAPER}, appendix, figure 6",
    shows="segmentation: the largest losses in the last ten epochs",
    here=RELIEF_SETUP,
    parts=[SEGMENTED_PART],
    claims=[
        Claim(
            "the top 2 % keep over half of their loss in the last ten epochs",
            top_stays,
            above=0.5,
            scale=1,
            says="Appendix D: the largest losses do not fall significantly in the last epochs (here: in all ten)",
        ),
        Claim(
            "in the last epoch, their loss is over three times that of the others",
            top_above,
            above=3,
            scale=1,
            says="Appendix D: they remain substantially above those of the other samples",
        ),
    ],
    tables=_figure_6,
    chart=TableChart("lines", y="mean loss"),
    recipes={"deepcam": "relief"},
)
