"""Diet Selective-Backprop: panels (a) to (f) and the runtime table of its poster."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import rankdata

import thresher
from thresher.scores import Scores
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
    cost,
    cost_at,
    cpu,
    metric,
    minus,
)
from thresher_lab.tasks.pictures import contact_sheet, png_base64, training_images

PAPER = "Diet Selective-Backprop (poster)"
MNIST_EPOCHS = 20
EL2N_MODELS = ("el2n", 3, 2)
"""Scores: EL2N of three models that train for two epochs; with a recipe, see `full_size.EL2N_MODELS`."""
CNN_TASK = "mnist-5k"
MLP_TASK = "mnist-5k-mlp"
MNIST_SETUP = (
    "A small CNN on 4,000 digits of MNIST for GoogLeNet and ResNet-18 on CIFAR-100; a perceptron is the second architecture. "
    "Selective-Backprop and Random-Backprop both fill up batches, so that they take as many optimizer steps"
)
POSTER_RECIPES = (
    "diet-sb-googlenet-cifar100",
    "diet-sb-resnet18-cifar100",
    "diet-sb-resnet20-cifar10",
)
DROPPED_SHARES = (0.25, 0.5, 0.75, 0.9)


def drop_by_selective_backprop(dropped: float) -> str:
    """Returns Selective-Backprop that drops a share of each batch, drawn as in Composer, which the poster uses."""
    return f"selective_backprop:keep={round(1 - dropped, 4)}:draw=true:forward_passes=twice"


def drop_by_random_backprop(dropped: float) -> str:
    """Returns Random-Backprop that drops a share of each batch, and fills up batches as Selective-Backprop does."""
    return f"random_backprop:keep={round(1 - dropped, 4)}:forward_passes=twice"


def prune_by_el2n(dropped: float) -> str:
    """Returns pruning of a share of the samples by EL2N, before training."""
    return f"prune:scores={{scores}}:keep={round(1 - dropped, 4)}"


def diet(total: float, before: float = 0.25) -> str:
    """Returns Diet Selective-Backprop: EL2N drops samples before training, and Selective-Backprop in each batch.

    Args:
        total: Share of the samples that is not trained on in an epoch, (0, 1).
        before: Part of that share that EL2N drops before training. Default: 0.25.
    """
    return f"{prune_by_el2n(before)}+{drop_by_selective_backprop(1 - thresher.keep_in_batch(before, total))}"


BOTH_STAGES = {
    "SB 50%": drop_by_selective_backprop(0.5),
    "EL2N 25%": prune_by_el2n(0.25),
    **{f"Diet-SB {total:.3g}% (25%)": diet(total / 100) for total in (50, 62.5)},
}
"""Rows of panel (b) and of the table of times."""
PANEL_A = Artefact(
    name="diet-sb-a",
    paper=f"{PAPER}, panel (a)",
    shows="accuracy of Selective-Backprop and Random-Backprop by the share dropped",
    here=MNIST_SETUP,
    parts=[
        ArtefactPart(
            "a",
            CNN_TASK,
            MNIST_EPOCHS,
            {f"SB {d:.0%}": drop_by_selective_backprop(d) for d in DROPPED_SHARES}
            | {f"Random-Backprop {d:.0%}": drop_by_random_backprop(d) for d in DROPPED_SHARES},
        )
    ],
    claims=[
        Claim(
            "when half is dropped, Random-Backprop is within half a point of Selective-Backprop",
            minus(metric("a", "Random-Backprop 50%"), metric("a", "SB 50%")),
            above=-HALF_A_POINT,
            says="(a): Random-Backprop performs on par with Selective-Backprop when 50 % are dropped",
        ),
        Claim(
            "when three quarters are dropped, Random-Backprop is within half a point of full training",
            minus(metric("a", "Random-Backprop 75%"), metric("a", FULL_ROW)),
            above=-HALF_A_POINT,
            says="Analysis: Random-Backprop can drop up to 75 % of CIFAR-100 without impacting accuracy",
        ),
        Claim(
            "when nine tenths are dropped, Selective-Backprop is better than Random-Backprop",
            minus(metric("a", "SB 90%"), metric("a", "Random-Backprop 90%")),
            says="Analysis: at higher prune rates, Selective-Backprop performs better",
        ),
    ],
    chart=TableChart("points", y="accuracy, %"),
    recipes=dict.fromkeys(POSTER_RECIPES, "a"),
)

PANEL_B = Artefact(
    name="diet-sb-b",
    paper=f"{PAPER}, panel (b)",
    shows="accuracy of EL2N, Selective-Backprop and both by the share dropped",
    here=MNIST_SETUP,
    parts=[
        ArtefactPart(
            "b",
            CNN_TASK,
            MNIST_EPOCHS,
            BOTH_STAGES
            | {"EL2N 50%": prune_by_el2n(0.5), "SB 62.5%": drop_by_selective_backprop(0.625)},
            scores=EL2N_MODELS,
        )
    ],
    claims=[
        Claim(
            "EL2N loses more than Selective-Backprop at 50 %",
            minus(metric("b", "SB 50%"), metric("b", "EL2N 50%")),
            says="Analysis: EL2N has a stronger impact on accuracy, since it removes data permanently",
        ),
        Claim(
            "Diet-SB is limited by EL2N: it is at most half a point better than EL2N 25%",
            minus(metric("b", "EL2N 25%"), metric("b", "Diet-SB 50% (25%)")),
            above=-HALF_A_POINT,
            says="(b): Diet SB seems to be limited by the performance of EL2N",
        ),
        *(
            Claim(
                f"with a backward pass {of}, Diet-SB 62.5% costs less than EL2N 25% alone",
                minus(cost_of("b", "EL2N 25%"), cost_of("b", "Diet-SB 62.5% (25%)")),
                counted=True,
                says="(b): Diet SB decreases the computation cost on top of EL2N (at 62.5 %; at 50 % it takes longer, by table "
                "1)",
            )
            for of, cost_of in (
                ("as measured here", cost),
                ("of two forward passes", partial(cost_at, backward_to_forward=2.0)),
            )
        ),
        Claim(
            "Diet-SB 62.5% takes less CPU time than EL2N 25% alone",
            minus(cpu("b", "EL2N 25%"), cpu("b", "Diet-SB 62.5% (25%)")),
            says="(b) and table 1: Diet SB is able to decrease the cost on top of EL2N (32.66 s and 35.97 s)",
            timed=True,
        ),
    ],
    chart=TableChart("points", y="accuracy, %"),
    recipes=dict.fromkeys(POSTER_RECIPES, "b"),
)


# Panels (c) to (f): which samples

SampleMask = NDArray[np.bool_]
OVERLAP_SHARES = (0.1, 0.25, 0.5, 0.75)
LOWEST_COUNT = 20
ARCHITECTURE_PARTS = [
    ArtefactPart(
        name,
        task,
        MNIST_EPOCHS,
        {"SB 50%": drop_by_selective_backprop(0.5), "EL2N 25%": prune_by_el2n(0.25)},
        scores=EL2N_MODELS,
        score_sets=True,
    )
    for name, task in (("cnn", CNN_TASK), ("mlp", MLP_TASK))
]


def least(values: NDArray[Any], share: float) -> SampleMask:
    """Returns a mask of the share of the samples with the smallest values; ties go to the lower id."""
    order = np.argsort(values, kind="stable")
    marked = np.zeros(len(order), dtype=np.bool_)
    marked[order[: round(share * len(order))]] = True
    return marked


def overlap_of_least(a: NDArray[Any], b: NDArray[Any], share: float) -> float:
    """Returns the share of the samples lowest in one that are also lowest in the other; `share` is expected by chance."""
    return float((least(a, share) & least(b, share)).sum() / least(a, share).sum())


def el2n_scores(measured: RunsByPart, part: str, seed: int) -> NDArray[np.float64]:
    """Returns the EL2N scores with the architecture of a part, of the set for a seed, shape (N,)."""
    run = measured[part][FULL_ROW][seed]
    return Scores.load(Path(run["scores"])).values.double().numpy()


def times_trained(measured: RunsByPart, part: str, seed: int) -> NDArray[np.int64]:
    """Returns how often Selective-Backprop trained on each sample, shape (N,)."""
    return pq.read_table(Path(measured[part]["SB 50%"][seed]["samples"]), columns=["trained"])[
        "trained"
    ].to_numpy()


def sample_classes(measured: RunsByPart, part: str) -> NDArray[np.int64]:
    """Returns the class of each sample, shape (N,)."""
    run = next(iter(measured[part]["SB 50%"].values()))
    return pq.read_table(Path(run["samples"]), columns=["target"])["target"].to_numpy()


def least_used_overlap(part: str, share: float) -> SeedValue:
    """Returns the overlap of the samples that Selective-Backprop trains on least with those of lowest EL2N."""
    return lambda measured, seed: overlap_of_least(
        times_trained(measured, part, seed), el2n_scores(measured, part, seed), share
    )


def architectures_overlap(share: float) -> SeedValue:
    """Returns the overlap of the samples of lowest EL2N with both architectures."""
    return lambda measured, seed: overlap_of_least(
        el2n_scores(measured, "cnn", seed), el2n_scores(measured, "mlp", seed), share
    )


def _panel_c(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    rows = []
    for share in OVERLAP_SHARES:
        overlaps = [
            architectures_overlap(share)(measured, seed) for seed in measured["cnn"][FULL_ROW]
        ]
        rows.append([f"{share:.0%}", f"{statistics.mean(overlaps):.3f}", f"{share:.3f}"])
    title = "Samples pruned by EL2N with both architectures (mean of the sets of scores)"
    return [PageTable(title, ["share pruned", "overlap", "by chance"], rows)]


def _panel_d(measured: RunsByPart, _: Mapping[str, Any]) -> list[PageTable]:
    rows = []
    for share in OVERLAP_SHARES:
        of_parts = [
            statistics.mean(
                least_used_overlap(part, share)(measured, seed) for seed in measured[part]["SB 50%"]
            )
            for part in measured
        ]
        rows.append([f"{share:.0%}", *(f"{value:.3f}" for value in of_parts), f"{share:.3f}"])
    names = {"cnn": ", CNN", "mlp": ", perceptron"} if len(measured) > 1 else {"cnn": ""}
    header = ["share", *(f"overlap{names[part]}" for part in measured), "by chance"]
    return [
        PageTable(
            "Samples trained on least by Selective-Backprop and lowest in EL2N (mean of the seeds)",
            header,
            rows,
        )
    ]


def _lowest_table(ranks: NDArray[Any], labels: NDArray[np.int64], title: str) -> PageTable:
    ids = np.argsort(ranks, kind="stable")[:LOWEST_COUNT]
    counts = np.bincount(labels[ids], minlength=int(labels.max()) + 1)
    rows = [["ids", ", ".join(map(str, ids))], ["of each class", ", ".join(map(str, counts))]]
    return PageTable(title, ["", ""], rows)


def combined_ranks(measured: RunsByPart, part: str, seed: int) -> NDArray[Any]:
    """Returns the sum of the rank by EL2N and the rank by times trained, shape (N,)."""
    return rankdata(el2n_scores(measured, part, seed)) + rankdata(
        times_trained(measured, part, seed)
    )


MakeRanks = Callable[[RunsByPart, str, int], NDArray[Any]]
"""Function that returns the rank of each sample, of a part and a seed."""


def _lowest_tables(measured: RunsByPart, ranks: MakeRanks, title: str) -> list[PageTable]:
    """Returns one table with the samples of lowest rank of the first seed."""
    first = next(iter(measured["cnn"][FULL_ROW]))
    return [
        _lowest_table(
            ranks(measured, "cnn", first), sample_classes(measured, "cnn"), f"{title} (first seed)"
        )
    ]


def _lowest_pictures(measured: RunsByPart, ranks: MakeRanks, title: str) -> dict[str, str]:
    """Returns one picture of the samples of lowest rank of the first seed."""
    first = next(iter(measured["cnn"][FULL_ROW]))
    images = training_images(CNN_TASK)
    assert images is not None
    lowest = np.argsort(ranks(measured, "cnn", first), kind="stable")[:LOWEST_COUNT]
    return {f"{title} (first seed)": png_base64(contact_sheet(images[lowest]))}


def _lowest_concentration(ranks: MakeRanks) -> SeedValue:
    return lambda measured, seed: concentration(
        ranks(measured, "cnn", seed), sample_classes(measured, "cnn")
    )


def concentration(ranks: NDArray[Any], labels: NDArray[np.int64]) -> float:
    """Returns the share of the three commonest classes among the samples of lowest rank."""
    counts = np.bincount(labels[np.argsort(ranks, kind="stable")[:LOWEST_COUNT]])
    return float(np.sort(counts)[-3:].sum() / LOWEST_COUNT)


PANEL_C = Artefact(
    name="diet-sb-c",
    paper=f"{PAPER}, panel (c)",
    shows="overlap of the samples that EL2N prunes with two architectures",
    here=MNIST_SETUP,
    parts=ARCHITECTURE_PARTS,
    claims=[
        Claim(
            "of the quarter pruned with one architecture, more than half is also pruned with the other",
            architectures_overlap(0.25),
            above=0.5,
            says="(c) and conclusion: EL2N scores can be transferable across CNN architectures (here: a CNN and a perceptron)",
        )
    ],
    tables=_panel_c,
    chart=TableChart("bars", y="overlap", x="share of the samples"),
)
PANEL_D = Artefact(
    name="diet-sb-d",
    paper=f"{PAPER}, panel (d)",
    shows="overlap of the samples that Selective-Backprop trains on least with those of lowest EL2N",
    here=MNIST_SETUP,
    parts=ARCHITECTURE_PARTS,
    claims=[
        Claim(
            f"{part}: of the quarter trained on least, more than half has the lowest EL2N",
            least_used_overlap(part, 0.25),
            above=0.5,
            says="(d): images that are least used in SB often have a low EL2N score",
        )
        for part in ("cnn", "mlp")
    ],
    tables=_panel_d,
    chart=TableChart("bars", y="overlap", x="share of the samples"),
    recipes=dict.fromkeys(POSTER_RECIPES, "cnn"),
)


def _panel_of_lowest(letter: str, of: str, ranks: MakeRanks, title: str) -> Artefact:
    """Returns the panel of the samples of lowest rank."""
    return Artefact(
        name=f"diet-sb-{letter}",
        paper=f"{PAPER}, panel ({letter})",
        shows=f"the {LOWEST_COUNT} samples of lowest {of}",
        here=MNIST_SETUP,
        parts=ARCHITECTURE_PARTS[:1],
        claims=[
            Claim(
                "they come from few classes: three of the ten classes have over three quarters of them (53.5 % by chance)",
                _lowest_concentration(ranks),
                above=0.75,
                says="Conclusion: SB and EL2N tend to pick similar sets of images from certain classes that seem to lack "
                "diversity",
            )
        ],
        tables=lambda measured, _: _lowest_tables(measured, ranks, title),
        pictures=lambda measured: _lowest_pictures(measured, ranks, title),
    )


PANEL_E = _panel_of_lowest("e", "EL2N", el2n_scores, "Lowest EL2N")
PANEL_F = _panel_of_lowest(
    "f", "combined rank in EL2N and Selective-Backprop", combined_ranks, "Lowest combined rank"
)


# The runtime table

PUBLISHED_EPOCH_SECONDS = {
    FULL_ROW: 45.77,
    "SB 50%": 43.37,
    "Random-Backprop 50%": 27.19,
    "Random-Backprop 75%": 18.83,
    "EL2N 25%": 35.97,
    "Diet-SB 50% (25%)": 37.86,
    "Diet-SB 62.5% (25%)": 32.66,
}
"""Seconds per epoch in the poster, on a T4."""
RUNTIME_TABLE = Artefact(
    name="diet-sb-runtime",
    paper=f"{PAPER}, table 1",
    shows="time per epoch of full training and of six methods",
    here=f"{MNIST_SETUP}; the times do not include the EL2N scores",
    parts=[
        ArtefactPart(
            "runtime",
            CNN_TASK,
            MNIST_EPOCHS,
            {f"Random-Backprop {d:.0%}": drop_by_random_backprop(d) for d in (0.5, 0.75)}
            | BOTH_STAGES,
            {
                row: f"{seconds} s, {seconds / PUBLISHED_EPOCH_SECONDS[FULL_ROW]:.2f} of full"
                for row, seconds in PUBLISHED_EPOCH_SECONDS.items()
            },
            scores=EL2N_MODELS,
        )
    ],
    claims=[
        Claim(
            f"{faster} takes less time than {slower}",
            minus(cpu("runtime", slower), cpu("runtime", faster)),
            says="Table 1: seconds per epoch: "
            + ", ".join(f"{seconds} ({row})" for row, seconds in PUBLISHED_EPOCH_SECONDS.items()),
            timed=True,
        )
        for slower, faster in (
            (FULL_ROW, "SB 50%"),
            ("SB 50%", "Random-Backprop 50%"),
            ("Random-Backprop 50%", "Random-Backprop 75%"),
            ("SB 50%", "Diet-SB 50% (25%)"),
            ("Diet-SB 50% (25%)", "Diet-SB 62.5% (25%)"),
            ("Diet-SB 50% (25%)", "EL2N 25%"),
        )
    ],
    recipes=dict.fromkeys(POSTER_RECIPES, "runtime"),
)
