"""Diet Selective-Backprop: panels (a) to (f) and the runtime table of its poster."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import rankdata

import thresher
from thresher.experiments.reproduction.artefact import (
    FULL,
    Artefact,
    Claim,
    Measured,
    Part,
    Table,
    Value,
    cost,
    cpu,
    metric,
    minus,
)
from thresher.scores import Scores

PAPER = "Diet Selective-Backprop (poster)"
EPOCHS = 20
SCORES = ("el2n", 3, 2)
"""EL2N of three models trained for two epochs."""
CNN, MLP = "mnist-5k", "mnist-5k-mlp"
MARGIN = 0.005
HERE = "A small CNN on 4,000 digits of MNIST for GoogLeNet and ResNet-18 on CIFAR-100; a perceptron is the second architecture"
PRUNED = (0.25, 0.5, 0.75, 0.9)


def selective(dropped: float) -> str:
    """Selective-Backprop that drops a share of each batch, as the poster's, which is Composer's, draws it."""
    return f"selective_backprop:keep={round(1 - dropped, 4)}:draw=true:forward_passes=twice"


def random(dropped: float) -> str:
    """Random-Backprop."""
    return f"random_backprop:keep={round(1 - dropped, 4)}"


def el2n(dropped: float) -> str:
    """EL2N before training."""
    return f"prune:scores={{scores}}:keep={round(1 - dropped, 4)}"


def diet(total: float, before: float = 0.25) -> str:
    """Both; a share of all samples is dropped by EL2N, and of each batch what makes the total."""
    return f"{el2n(before)}+{selective(1 - thresher.keep_in_batch(before, total))}"


PANEL_A = Artefact(
    name="diet-sb-a",
    paper=f"{PAPER}, panel (a)",
    shows="accuracy of Selective-Backprop and Random-Backprop by the share dropped",
    here=HERE,
    parts=[
        Part(
            "a",
            CNN,
            EPOCHS,
            {f"SB {d:.0%}": selective(d) for d in PRUNED} | {f"Random-Backprop {d:.0%}": random(d) for d in PRUNED},
        )
    ],
    claims=[
        Claim(
            "dropping half, Random-Backprop is within half a point of Selective-Backprop",
            minus(metric("a", "Random-Backprop 50%"), metric("a", "SB 50%")),
            above=-MARGIN,
        ),
        Claim(
            "dropping three quarters, Random-Backprop is within half a point of full training",
            minus(metric("a", "Random-Backprop 75%"), metric("a", FULL)),
            above=-MARGIN,
        ),
        Claim(
            "dropping nine tenths, Selective-Backprop is better than Random-Backprop",
            minus(metric("a", "SB 90%"), metric("a", "Random-Backprop 90%")),
        ),
    ],
    seeds=(0, 1, 2, 3, 4),
)

PANEL_B = Artefact(
    name="diet-sb-b",
    paper=f"{PAPER}, panel (b)",
    shows="accuracy of EL2N, Selective-Backprop and both by the share dropped",
    here=HERE,
    parts=[
        Part(
            "b",
            CNN,
            EPOCHS,
            {
                "EL2N 25%": el2n(0.25),
                "EL2N 50%": el2n(0.5),
                "SB 50%": selective(0.5),
                "SB 62.5%": selective(0.625),
                "Diet-SB 50% (25%)": diet(0.5),
                "Diet-SB 62.5% (25%)": diet(0.625),
            },
            scores=SCORES,
        )
    ],
    claims=[
        Claim("EL2N loses more than Selective-Backprop at 50 %", minus(metric("b", "SB 50%"), metric("b", "EL2N 50%"))),
        Claim(
            "Diet-SB is limited by EL2N: it is no better than EL2N 25%",
            minus(metric("b", "EL2N 25%"), metric("b", "Diet-SB 50% (25%)")),
        ),
        Claim("Diet-SB costs less than EL2N alone", minus(cost("b", "EL2N 25%"), cost("b", "Diet-SB 62.5% (25%)"))),
    ],
    seeds=(0, 1, 2, 3, 4),
)


# Panels (c) to (f): which samples

Marks = NDArray[np.bool_]
SHARES = (0.1, 0.25, 0.5, 0.75)
LOWEST = 20
BOTH = [
    Part("cnn", CNN, EPOCHS, {"SB 50%": selective(0.5), "EL2N 25%": el2n(0.25)}, scores=SCORES),
    Part("mlp", MLP, EPOCHS, {"SB 50%": selective(0.5), "EL2N 25%": el2n(0.25)}, scores=SCORES),
]


def least(values: NDArray[Any], share: float) -> Marks:
    """The share of the samples with the smallest values; ties go to the lower id."""
    order = np.argsort(values, kind="stable")
    marked = np.zeros(len(order), dtype=np.bool_)
    marked[order[: round(share * len(order))]] = True
    return marked


def overlap(a: NDArray[Any], b: NDArray[Any], share: float) -> float:
    """Share of the samples lowest in one that are also lowest in the other; by chance it is `share`."""
    return float((least(a, share) & least(b, share)).sum() / least(a, share).sum())


def scores_of(measured: Measured, part: str) -> NDArray[np.float64]:
    """EL2N of a part's architecture."""
    run = next(iter(measured[part][FULL].values()))
    return Scores.load(Path(run["scores"])).values.double().numpy()


def trained(measured: Measured, part: str, seed: int) -> NDArray[np.int64]:
    """How often Selective-Backprop trained on each sample."""
    return pq.read_table(Path(measured[part]["SB 50%"][seed]["samples"]), columns=["trained"])["trained"].to_numpy()


def labels_of(measured: Measured, part: str) -> NDArray[np.int64]:
    """Class of each sample."""
    run = next(iter(measured[part]["SB 50%"].values()))
    return pq.read_table(Path(run["samples"]), columns=["target"])["target"].to_numpy()


def used_least(part: str, share: float) -> Value:
    """Overlap of what Selective-Backprop trains on least with the lowest EL2N."""
    return lambda measured, seed: overlap(trained(measured, part, seed), scores_of(measured, part), share)


def _panel_c(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    cnn, mlp = scores_of(measured, "cnn"), scores_of(measured, "mlp")
    rows = [[f"{share:.0%}", f"{overlap(cnn, mlp, share):.3f}", f"{share:.3f}"] for share in SHARES]
    return [Table("Pruned by EL2N of both architectures", ["share pruned", "overlap", "by chance"], rows)]


def _panel_d(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    rows = []
    for share in SHARES:
        of_parts = [
            statistics.mean(used_least(part, share)(measured, seed) for seed in measured[part]["SB 50%"])
            for part in ("cnn", "mlp")
        ]
        rows.append([f"{share:.0%}", *(f"{value:.3f}" for value in of_parts), f"{share:.3f}"])
    header = ["share", "overlap, CNN", "overlap, perceptron", "by chance"]
    return [Table("Trained on least by Selective-Backprop and lowest in EL2N (mean of the seeds)", header, rows)]


def _lowest(ranks: NDArray[Any], labels: NDArray[np.int64], title: str) -> Table:
    ids = np.argsort(ranks, kind="stable")[:LOWEST]
    counts = np.bincount(labels[ids], minlength=int(labels.max()) + 1)
    rows = [["ids", ", ".join(map(str, ids))], ["of each class", ", ".join(map(str, counts))]]
    return Table(title, ["", ""], rows)


def combined(measured: Measured, part: str) -> NDArray[Any]:
    """Rank by EL2N and rank by times trained, in the mean over the seeds, added up."""
    times = np.mean([trained(measured, part, seed) for seed in measured[part]["SB 50%"]], axis=0)
    return rankdata(scores_of(measured, part)) + rankdata(times)


def concentration(ranks: NDArray[Any], labels: NDArray[np.int64]) -> float:
    """Share of the three commonest classes among the lowest."""
    counts = np.bincount(labels[np.argsort(ranks, kind="stable")[:LOWEST]])
    return float(np.sort(counts)[-3:].sum() / LOWEST)


PANEL_C = Artefact(
    name="diet-sb-c",
    paper=f"{PAPER}, panel (c)",
    shows="overlap of what EL2N prunes with two architectures",
    here=HERE,
    parts=BOTH,
    claims=[
        Claim(
            "of the quarter pruned with one architecture more than half is pruned with the other (one pair of scores)",
            lambda measured, _: overlap(scores_of(measured, "cnn"), scores_of(measured, "mlp"), 0.25),
            above=0.5,
        )
    ],
    tables=_panel_c,
)
PANEL_D = Artefact(
    name="diet-sb-d",
    paper=f"{PAPER}, panel (d)",
    shows="overlap of what Selective-Backprop trains on least with the lowest EL2N",
    here=HERE,
    parts=BOTH,
    claims=[
        Claim(f"{part}: of the quarter trained on least more than half is lowest in EL2N", used_least(part, 0.25), above=0.5)
        for part in ("cnn", "mlp")
    ],
    tables=_panel_d,
)
PANEL_E = Artefact(
    name="diet-sb-e",
    paper=f"{PAPER}, panel (e)",
    shows=f"the {LOWEST} samples of lowest EL2N",
    here=HERE,
    parts=BOTH[:1],
    claims=[
        Claim(
            "they come from few classes: three of ten have over half of them (one set of scores)",
            lambda measured, _: concentration(scores_of(measured, "cnn"), labels_of(measured, "cnn")),
            above=0.5,
        )
    ],
    tables=lambda measured, _: [_lowest(scores_of(measured, "cnn"), labels_of(measured, "cnn"), "Lowest EL2N")],
)
PANEL_F = Artefact(
    name="diet-sb-f",
    paper=f"{PAPER}, panel (f)",
    shows=f"the {LOWEST} samples of lowest combined rank in EL2N and Selective-Backprop",
    here=HERE,
    parts=BOTH[:1],
    claims=[
        Claim(
            "they come from few classes: three of ten have over half of them",
            lambda measured, _: concentration(combined(measured, "cnn"), labels_of(measured, "cnn")),
            above=0.5,
        )
    ],
    tables=lambda measured, _: [_lowest(combined(measured, "cnn"), labels_of(measured, "cnn"), "Lowest combined rank")],
)


# The runtime table

SECONDS = {
    FULL: 45.77,
    "SB 50%": 43.37,
    "Random-Backprop 50%": 27.19,
    "Random-Backprop 75%": 18.83,
    "EL2N 25%": 35.97,
    "Diet-SB 50% (25%)": 37.86,
    "Diet-SB 62.5% (25%)": 32.66,
}
"""An epoch, on a T4."""
RUNTIME = Artefact(
    name="diet-sb-runtime",
    paper=f"{PAPER}, table 1",
    shows="time of an epoch of seven ways to train",
    here=f"{HERE}; what EL2N's scores took is not in the times",
    parts=[
        Part(
            "runtime",
            CNN,
            EPOCHS,
            {
                "SB 50%": selective(0.5),
                "Random-Backprop 50%": random(0.5),
                "Random-Backprop 75%": random(0.75),
                "EL2N 25%": el2n(0.25),
                "Diet-SB 50% (25%)": diet(0.5),
                "Diet-SB 62.5% (25%)": diet(0.625),
            },
            {row: f"{seconds} s, {seconds / SECONDS[FULL]:.2f} of full" for row, seconds in SECONDS.items()},
            scores=SCORES,
        )
    ],
    claims=[
        Claim(f"{faster} takes less time than {slower}", minus(cpu("runtime", slower), cpu("runtime", faster)))
        for slower, faster in (
            (FULL, "SB 50%"),
            ("SB 50%", "Random-Backprop 50%"),
            ("Random-Backprop 50%", "Random-Backprop 75%"),
            ("SB 50%", "Diet-SB 50% (25%)"),
            ("Diet-SB 50% (25%)", "Diet-SB 62.5% (25%)"),
            ("Diet-SB 50% (25%)", "EL2N 25%"),
        )
    ],
    seeds=(0, 1, 2, 3, 4),
)

ARTEFACTS = (PANEL_A, PANEL_B, PANEL_C, PANEL_D, PANEL_E, PANEL_F, RUNTIME)
