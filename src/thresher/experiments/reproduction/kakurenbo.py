"""KAKURENBO: tables 2 to 5 of its appendix and other methods; `kakurenbo_inside` and `kakurenbo_relief` have the figures."""

import math
from functools import cache
from statistics import fmean

from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.reproduction.artefact import (
    FULL_ROW,
    HALF_A_POINT,
    Artefact,
    ArtefactPart,
    Claim,
    RunsByPart,
    SeedValue,
    cost,
    cpu,
    mean_of,
    metric,
    minus,
)
from thresher.experiments.tasks.contours import Transfer

KAKURENBO_PAPER = "KAKURENBO (arXiv 2310.10102)"
FASHION_PREFIX = "fashion-mnist-small"
FASHION_EPOCHS = 15
FASHION_SETUP = "A small CNN on 10,000 images of Fashion-MNIST, 15 epochs, for ResNet-50 on ImageNet"
FASHION_TASK = f"{FASHION_PREFIX}@10000"
SECOND_TASK, SECOND_EPOCHS = f"{FASHION_PREFIX}-b@10000", 25
SECOND_SETUP = (
    f"{FASHION_SETUP} (A); random views of the images, parts of which are erased, a small weight decay and {SECOND_EPOCHS} "
    "epochs for the setting (B)"
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
    name="kakurenbo-table-2",
    paper=f"{KAKURENBO_PAPER}, appendix, table 2, the columns of DeiT",
    shows="pretraining with selection, then plain fine-tuning: downstream accuracy and cost of pretraining",
    here="A vision transformer of four layers pretrained on generated contours, 10 epochs, and fine-tuned on digits, for "
    "DeiT-Tiny on Fractal-3K, CIFAR-10 and CIFAR-100",
    parts=[
        ArtefactPart(
            "pretraining",
            PRETRAINING_TASK,
            10,
            {"KAKURENBO-0.3": hiding(0.3)},
            {FULL_ROW: "95.03 (CIFAR-10), 79.69 (CIFAR-100)", "KAKURENBO-0.3": "95.28 (CIFAR-10), 79.35 (CIFAR-100)"},
            controls=("uniform",),
        )
    ],
    claims=[
        Claim(
            "downstream accuracy is within half a point of that after full pretraining",
            minus(metric("pretraining", "KAKURENBO-0.3"), metric("pretraining", FULL_ROW)),
            above=-HALF_A_POINT,
        ),
        Claim(
            "full pretraining helps: downstream accuracy is above that of a network trained from scratch",
            pretraining_gain,
        ),
        Claim(
            "pretraining costs less", minus(cost("pretraining", FULL_ROW), cost("pretraining", "KAKURENBO-0.3")), counted=True
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
        dict(zip((FULL_ROW, "KAKURENBO-0.3"), published, strict=True)),
    )
    for name, task, epochs, published in (
        ("ResNet-8", "fashion-mnist-resnet8@4000", 10, ("74.89 (ResNet-50)", "75.15")),
        ("CNN, recipe A", FASHION_TASK, FASHION_EPOCHS, ("73.68 (ResNet-50 A)", "73.52")),
        ("CNN, recipe B", SECOND_TASK, SECOND_EPOCHS, ("76.58 (ResNet-50 B)", "76.62; 76.17 in table 3")),
        ("perceptron", "mnist-5k-mlp", 20, ("76.63 (EfficientNet-b3)", "76.23")),
        ("CNN on digits", "mnist-5k", 20, ("77.49 (WideResNet-28-10)", "77.21")),
    )
]
KAKURENBO_NETWORKS = Artefact(
    name="kakurenbo-table-2-networks",
    paper=f"{KAKURENBO_PAPER}, appendix, table 2, the columns of ImageNet-1K and CIFAR-100",
    shows="accuracy of several networks and recipes with a maximum fraction of 0.3",
    here=f"{SECOND_SETUP}; ResNet-8 on 4,000 images of Fashion-MNIST; a perceptron and a CNN on 4,000 digits of MNIST. Each "
    "stands for a column of the paper, which its numbers name",
    parts=NETWORK_PARTS,
    claims=[
        claim
        for part in NETWORK_PARTS
        for claim in (
            Claim(
                f"{part.name}: accuracy is within half a point of full training's",
                minus(metric(part.name, "KAKURENBO-0.3"), metric(part.name, FULL_ROW)),
                above=-HALF_A_POINT,
            ),
            Claim(f"{part.name}: it takes less CPU time", minus(cpu(part.name, FULL_ROW), cpu(part.name, "KAKURENBO-0.3"))),
        )
    ],
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
KAKURENBO_TABLE_3 = Artefact(
    name="kakurenbo-table-3",
    paper=f"{KAKURENBO_PAPER}, appendix, table 3",
    shows="accuracy and time at maximum fractions of 0.2, 0.3 and 0.4, with two recipes",
    here=SECOND_SETUP,
    parts=RECIPE_PARTS,
    claims=[
        *(
            Claim(
                f"{part.name}: at {fraction}, accuracy is within half a point of full training's",
                minus(metric(part.name, f"KAKURENBO-{fraction}"), metric(part.name, FULL_ROW)),
                above=-HALF_A_POINT,
            )
            for part in RECIPE_PARTS
            for fraction in FRACTIONS
        ),
        *(
            Claim(
                f"{part.name}: at 0.3, it takes less CPU time",
                minus(cpu(part.name, FULL_ROW), cpu(part.name, "KAKURENBO-0.3")),
            )
            for part in RECIPE_PARTS
        ),
    ],
    seeds=(0, 1, 2, 3, 4),
)


# Table 4: the batch size

BATCH_FACTORS = (1, 2, 4, 8)
PUBLISHED_BY_FACTOR = {1: ("73.68", "73.60"), 2: ("73.98", "73.21"), 4: ("73.59", "73.03"), 8: ("73.81", "72.84")}


def scaled_task(factor: int) -> str:
    """Returns the task with batch size and learning rate multiplied by `factor`."""
    return FASHION_TASK if factor == 1 else f"{FASHION_PREFIX}-x{factor}@10000"


KAKURENBO_TABLE_4 = Artefact(
    name="kakurenbo-table-4",
    paper=f"{KAKURENBO_PAPER}, appendix, table 4",
    shows="accuracy as the batch size and the learning rate grow together, at a maximum fraction of 0.4",
    here=f"{FASHION_SETUP}; batches of 64, 128, 256 and 512",
    parts=[
        ArtefactPart(
            f"batch x{factor}",
            scaled_task(factor),
            FASHION_EPOCHS,
            {"KAKURENBO-0.4": hiding(0.4)},
            dict(zip((FULL_ROW, "KAKURENBO-0.4"), PUBLISHED_BY_FACTOR[factor], strict=True)),
        )
        for factor in BATCH_FACTORS
    ],
    claims=[
        Claim(
            f"with batches {factor} times as large, accuracy is within a point of full training's",
            minus(metric(f"batch x{factor}", "KAKURENBO-0.4"), metric(f"batch x{factor}", FULL_ROW)),
            above=-2 * HALF_A_POINT,
        )
        for factor in BATCH_FACTORS
    ],
)


# Table 5: the ablations

PUBLISHED_BY_VARIANT = ("72.25", "73.08", "72.81", "73.27", "72.37", "73.09", "72.96", "73.60")
ABLATION_TASK, ABLATION_EPOCHS = "mnist-5k-noisy", 20
ABLATION_SETUP = (
    "A small CNN on 4,000 digits of MNIST, every fifth of which has a wrong label, 20 epochs, for networks on ImageNet: "
    "without wrong labels, every candidate is right and confident, and no sample is moved back"
)


def gains(bit: int) -> SeedValue:
    """Returns what one component adds, in the mean over the pairs of variants that differ in this component alone.

    Args:
        bit: Number of the component: 1 for moving back, 2 for reducing the fraction, 3 for the learning rate.
    """
    pairs = [(bits, bits[: bit + 1] + "1" + bits[bit + 2 :]) for bits in VARIANT_BITS if bits[bit + 1] == "0"]
    return mean_of([minus(metric("ablations", present), metric("ablations", absent)) for absent, present in pairs])


def moved_back(measured: RunsByPart, seed: int) -> float:
    """Returns the smallest share of the samples that a variant with moving back moves back, in the mean over the epochs."""
    runs = [measured["ablations"][bits][seed] for bits in VARIANT_BITS if bits[2] == "1"]
    samples = runs[0]["cost"]["full_forward"] / ABLATION_EPOCHS
    return min(fmean(entry["moved_back"] / samples for entry in run["history"]) for run in runs)


def gain_of_moving_back(measured: RunsByPart, seed: int) -> float:
    """Returns what moving back adds; NaN, which judges nothing, where some variant moves no sample back."""
    return gains(1)(measured, seed) if moved_back(measured, seed) > 0 else math.nan


KAKURENBO_TABLE_5 = Artefact(
    name="kakurenbo-table-5",
    paper=f"{KAKURENBO_PAPER}, appendix, table 5",
    shows="what hiding (HE), moving back (MB), reducing the fraction (RF) and the learning rate (LR) contribute, F = 0.4",
    here=ABLATION_SETUP,
    parts=[
        ArtefactPart(
            "ablations",
            ABLATION_TASK,
            ABLATION_EPOCHS,
            {bits: hiding(0.4, bits) for bits in VARIANT_BITS},
            {FULL_ROW: "73.68", **dict(zip(VARIANT_BITS, PUBLISHED_BY_VARIANT, strict=True))},
        )
    ],
    claims=[
        Claim("hiding alone (v1000) loses accuracy", minus(metric("ablations", FULL_ROW), metric("ablations", "v1000"))),
        Claim("adjusting the learning rate gains accuracy, in the mean of four pairs", gains(3)),
        Claim("reducing the fraction gains accuracy, in the mean of four pairs", gains(2)),
        Claim("every variant with MB moves samples back, as a share of all samples in the mean over the epochs", moved_back),
        Claim("moving back gains accuracy, in the mean of four pairs", gain_of_moving_back),
        Claim(
            "with all of them (v1111), accuracy is within half a point of full training's",
            minus(metric("ablations", "v1111"), metric("ablations", FULL_ROW)),
            above=-HALF_A_POINT,
        ),
    ],
    seeds=(0, 1, 2, 3, 4),
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
    paper=f"{KAKURENBO_PAPER}, appendix E, and the comparisons of its main text",
    shows="accuracy and time of KAKURENBO, importance sampling (ISWR), hiding by forgetting events (FORGET), "
    "Selective-Backprop by epoch (EpochSB) and GradMatch",
    here=f"{FASHION_SETUP}. FORGET begins after a fifth of the epochs; GradMatch chooses every five epochs",
    parts=[ArtefactPart("others", FASHION_TASK, FASHION_EPOCHS, OTHER_ROWS)],
    claims=[
        Claim(
            "importance sampling with replacement (ISWR) does not speed up training: it takes over 95 % of its CPU time",
            cpu("others", "ISWR"),
            above=0.95,
        ),
        Claim(
            "KAKURENBO takes less CPU time than full training", minus(cpu("others", FULL_ROW), cpu("others", "KAKURENBO-0.3"))
        ),
        Claim(
            "KAKURENBO is within half a point of full training",
            minus(metric("others", "KAKURENBO-0.3"), metric("others", FULL_ROW)),
            above=-HALF_A_POINT,
        ),
        *(
            Claim(
                f"KAKURENBO is at least as good as {row}, within half a point",
                minus(metric("others", "KAKURENBO-0.3"), metric("others", row)),
                above=-HALF_A_POINT,
            )
            for row in list(OTHER_ROWS)[1:]
        ),
    ],
)

KAKURENBO_TABLES = (
    KAKURENBO_TABLE_2,
    KAKURENBO_NETWORKS,
    KAKURENBO_TABLE_3,
    KAKURENBO_TABLE_4,
    KAKURENBO_TABLE_5,
    OTHER_METHODS,
)
