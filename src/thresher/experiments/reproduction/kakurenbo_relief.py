"""KAKURENBO: figures 5 and 6 of its appendix, which are about segmentation."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from thresher.experiments.comparison.summary import RunDict
from thresher.experiments.reproduction.artefact import (
    FULL_ROW,
    HALF_A_POINT,
    Artefact,
    ArtefactPart,
    Claim,
    PageTable,
    RunsByPart,
    SeedValue,
    mean_of,
    metric,
    minus,
)
from thresher.experiments.reproduction.kakurenbo import FRACTIONS, KAKURENBO_PAPER, hiding

SEGMENTATION = "relief@2400"
RELIEF_SETUP = "A U-Net on 2,400 patches of the Earth's relief, a task of this library, 10 epochs, for DeepCAM"
SEGMENTATION_VARIANTS = {"v1000": "v1000", "v1001": "v1001", "KAKURENBO": "v1111"}
DROP_TOP = 0.02


def _segmentation_rows() -> dict[str, str]:
    rows = {f"{name}, F = {f}": hiding(f, bits) for f in FRACTIONS for name, bits in SEGMENTATION_VARIANTS.items()}
    with_drop = {
        f"{name} + DropTop, F = {f}": hiding(f, bits, DROP_TOP)
        for f in FRACTIONS
        for name, bits in SEGMENTATION_VARIANTS.items()
        if name != "v1000"
    }
    return rows | with_drop


def _over_fractions(left: str, right: str) -> SeedValue:
    """Returns the difference of two variants, in the mean over the fractions."""
    pairs = [(f"{left}, F = {f}", f"{right}, F = {f}") for f in FRACTIONS]
    return mean_of([minus(metric("relief", a), metric("relief", b)) for a, b in pairs])


KAKURENBO_FIGURE_5 = Artefact(
    name="kakurenbo-figure-5",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 5",
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
            {name: method for name, method in _segmentation_rows().items() if name.startswith("KAKURENBO, ")},
            controls=("uniform",),
        ),
    ],
    claims=[
        Claim("adjusting the learning rate gains accuracy (v1001 over v1000)", _over_fractions("v1001", "v1000")),
        Claim(
            "at F = 0.3, KAKURENBO is within half a point of full training",
            minus(metric("relief", "KAKURENBO, F = 0.3"), metric("relief", FULL_ROW)),
            above=-HALF_A_POINT,
        ),
        Claim("DropTop gains accuracy over KAKURENBO", _over_fractions("KAKURENBO + DropTop", "KAKURENBO")),
        Claim("DropTop gains accuracy over v1001", _over_fractions("v1001 + DropTop", "v1001")),
    ],
)


# Figure 6: the losses that stay

LAST_EPOCHS = 10
"""Number of epochs that the figure shows."""
TOP_SHARE = 0.02


def top_losses(run: RunDict) -> list[dict[str, float]]:
    """Returns the mean loss of all samples, of the 2 % with the largest losses and of the others, for the last ten epochs."""
    table = pq.read_table(Path(run["samples"]), columns=["loss_by_epoch"])
    losses = np.stack(table["loss_by_epoch"].to_numpy(zero_copy_only=False))[:, -LAST_EPOCHS:]
    found = []
    for column in losses.T:
        ascending = np.sort(column[np.isfinite(column)])
        cut = len(ascending) - max(1, round(TOP_SHARE * len(ascending)))
        parts = {"full": ascending, "bottom": ascending[:cut], "top": ascending[cut:]}
        found.append({name: float(values.mean()) for name, values in parts.items()})
    return found


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
        [str(number - len(epochs)), *(f"{statistics.mean(seed[name] for seed in of_epoch):.4f}" for name in of_epoch[0])]
        for number, of_epoch in enumerate(epochs)
    ]
    return [
        PageTable("Mean loss, full training (mean of the seeds)", ["epoch from the end", "all", "bottom 98 %", "top 2 %"], rows)
    ]


SEGMENTED_PART = ArtefactPart("relief", SEGMENTATION, 10, {})
KAKURENBO_FIGURE_6 = Artefact(
    name="kakurenbo-figure-6",
    paper=f"{KAKURENBO_PAPER}, appendix, figure 6",
    shows="segmentation: the largest losses in the last ten epochs",
    here=RELIEF_SETUP,
    parts=[SEGMENTED_PART],
    claims=[
        Claim("the top 2 % keep over half of their loss in the last ten epochs", top_stays, above=0.5, scale=1),
        Claim("in the last epoch, their loss is over three times that of the others", top_above, above=3, scale=1),
    ],
    tables=_figure_6,
)

KAKURENBO_RELIEF_FIGURES = (KAKURENBO_FIGURE_5, KAKURENBO_FIGURE_6)
