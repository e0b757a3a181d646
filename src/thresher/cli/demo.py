"""`thresher demo`: a comparison on real data in a few minutes."""

from pathlib import Path
from typing import Annotated

import typer

from thresher.cli.compare import run_comparison

EPOCHS = 20
METHODS = (
    "kakurenbo,infobatch,selective_backprop:keep=0.33:forward_passes=once,selective_backprop:keep=0.33:forward_passes=twice"
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the results; finished runs in it are not repeated.")] = Path("runs/demo"),
) -> None:
    """Compare KAKURENBO, InfoBatch and Selective-Backprop with full training and controls on 5,000 digits of MNIST."""
    run_comparison("mnist-5k", METHODS, "0,1,2", EPOCHS, out, data=None, jobs=2)
