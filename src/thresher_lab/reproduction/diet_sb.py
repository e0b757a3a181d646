"""Diet Selective-Backprop: what the claims on the panels of its poster measure, and the tables and pictures of its samples."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import rankdata

from thresher.scores import Scores
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    PageTable,
    PartResults,
    RunsByPart,
    RunsByRow,
)
from thresher_lab.tasks.pictures import contact_sheet, png_base64, training_images

SB_ROW = "SB 50%"
OVERLAP_SHARES = (0.1, 0.25, 0.5, 0.75)
LOWEST_COUNT = 20
SampleMask = NDArray[np.bool_]


def least(values: NDArray[Any], share: float) -> SampleMask:
    """Returns a mask of the share of the samples with the smallest values; ties go to the lower id."""
    order = np.argsort(values, kind="stable")
    marked = np.zeros(len(order), dtype=np.bool_)
    marked[order[: round(share * len(order))]] = True
    return marked


def overlap_of_least(a: NDArray[Any], b: NDArray[Any], share: float) -> float:
    """Returns the share of the samples lowest in one that are also lowest in the other; `share` is expected by chance."""
    return float((least(a, share) & least(b, share)).sum() / least(a, share).sum())


def el2n_scores(runs: RunsByRow, seed: int) -> NDArray[np.float64]:
    """Returns the EL2N scores with the architecture of a part, of the set for a seed, shape (N,)."""
    return Scores.load(Path(runs[FULL_ROW][seed]["scores"])).values.double().numpy()


def times_trained(runs: RunsByRow, seed: int) -> NDArray[np.int64]:
    """Returns how often Selective-Backprop trained on each sample, shape (N,)."""
    return _column(runs, seed, "trained")


def _column(runs: RunsByRow, seed: int, name: str) -> NDArray[np.int64]:
    return pq.read_table(Path(runs[SB_ROW][seed]["samples"]), columns=[name])[name].to_numpy()


# Panels (c) and (d): overlaps


def architectures_overlap(measured: RunsByPart, seed: int, share: float) -> float:
    """Returns the overlap of the samples of lowest EL2N with both architectures."""
    one, other = (el2n_scores(runs, seed) for runs in measured.values())
    return overlap_of_least(one, other, share)


def least_used_overlap(runs: RunsByRow, seed: int, share: float) -> float:
    """Returns the overlap of the samples that Selective-Backprop trains on least with those of lowest EL2N."""
    return overlap_of_least(times_trained(runs, seed), el2n_scores(runs, seed), share)


def panel_c(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the overlap of the samples that are pruned with both architectures, by the share pruned."""
    rows = []
    for share in OVERLAP_SHARES:
        overlap = statistics.mean(
            architectures_overlap(measured, seed, share) for seed in measured["cnn"][FULL_ROW]
        )
        rows.append([f"{share:.0%}", f"{overlap:.3f}", f"{share:.3f}"])
    title = "Samples pruned by EL2N with both architectures (mean of the sets of scores)"
    return [PageTable(title, ["share pruned", "overlap", "by chance"], rows)]


def panel_d(measured: RunsByPart, _: PartResults) -> list[PageTable]:
    """Returns the overlap of the samples that are trained on least with those of lowest EL2N, by the share of the samples."""
    rows = []
    for share in OVERLAP_SHARES:
        overlaps = (
            statistics.mean(least_used_overlap(runs, seed, share) for seed in runs[SB_ROW])
            for runs in measured.values()
        )
        rows.append([f"{share:.0%}", *(f"{value:.3f}" for value in overlaps), f"{share:.3f}"])
    names = {"cnn": ", CNN", "mlp": ", perceptron"} if len(measured) > 1 else {"cnn": ""}
    header = ["share", *(f"overlap{names[part]}" for part in measured), "by chance"]
    title = "Samples trained on least by Selective-Backprop and lowest in EL2N (mean of the seeds)"
    return [PageTable(title, header, rows)]


# Panels (e) and (f): the samples of lowest rank


def combined_ranks(runs: RunsByRow, seed: int) -> NDArray[Any]:
    """Returns the sum of the rank by EL2N and the rank by times trained, shape (N,)."""
    return rankdata(el2n_scores(runs, seed)) + rankdata(times_trained(runs, seed))


RANKS = {"EL2N": el2n_scores, "combined rank": combined_ranks}
"""Functions that return the rank of each sample, by their names in claims and tables."""


def lowest(runs: RunsByRow, seed: int, by: str) -> NDArray[np.int64]:
    """Returns the ids of the samples of lowest rank, a name of `RANKS`."""
    return np.argsort(RANKS[by](runs, seed), kind="stable")[:LOWEST_COUNT]


def concentration(runs: RunsByRow, seed: int, by: str) -> float:
    """Returns the share of the three commonest classes among the samples of lowest rank."""
    counts = np.bincount(_column(runs, seed, "target")[lowest(runs, seed, by)])
    return float(np.sort(counts)[-3:].sum() / LOWEST_COUNT)


def lowest_table(measured: RunsByPart, _: PartResults, by: str) -> list[PageTable]:
    """Returns one table with the samples of lowest rank of the first seed."""
    runs = measured["cnn"]
    first = next(iter(runs[FULL_ROW]))
    labels = _column(runs, first, "target")
    ids = lowest(runs, first, by)
    counts = np.bincount(labels[ids], minlength=int(labels.max()) + 1)
    rows = [["ids", ", ".join(map(str, ids))], ["of each class", ", ".join(map(str, counts))]]
    return [PageTable(f"Lowest {by} (first seed)", ["", ""], rows)]


def lowest_picture(measured: RunsByPart, by: str) -> dict[str, str]:
    """Returns one picture of the samples of lowest rank of the first seed."""
    runs = measured["cnn"]
    images = training_images("mnist-5k")
    assert images is not None
    ids = lowest(runs, next(iter(runs[FULL_ROW])), by)
    return {f"Lowest {by} (first seed)": png_base64(contact_sheet(images[ids]))}
