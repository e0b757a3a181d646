"""`thresher demo`: wrong labels found by one training, and a comparison at half the cost, on real data in a few minutes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from thresher_lab.cli._comparison import run_and_print
from thresher_lab.cli._console import OutOption, QuietOption, open_console

DEMO_TASK = "mnist-5k-hard-x4"
DEMO_METHODS = "winnow"
DEMO_EPOCHS = 8
DEMO_SEEDS = "0,1,2,3,4,5,6,7,8,9"
QUICK_EPOCHS = 2
QUICK_SEEDS = "0"
DEMO_CONTROLS = ("shorter@time", "smaller")
SUSPECTS = 100
"""Number of samples on the sheet of suspects."""
COMPARISON_HEADING = (
    "\n2. Half the cost: Winnow, smaller batches, and fewer epochs in the same time"
)
NEXT_COMMANDS = """
Next, your own training. Fill in the file that the first command writes:
thresher init
thresher observe my_training.py:build
thresher advise my_training.py:build --budget 0.5"""
"""Last lines of the demo."""


def demo(
    out: OutOption = Path("runs/demo"),
    *,
    until: Annotated[
        Literal["decided"] | None, typer.Option(help="Stop when every verdict is decided.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Train one seed for two epochs, to try the installation."),
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Find wrong labels with one training, then compare Winnow at half the cost with full training and simple ways to save.

    The data is 4,000 digits of MNIST, turned and shifted at random; every fifth has a wrong label.
    """
    console = open_console()
    epochs = QUICK_EPOCHS if quick else DEMO_EPOCHS
    seeds = QUICK_SEEDS if quick else DEMO_SEEDS
    for line in find_wrong_labels(out, epochs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(COMPARISON_HEADING, markup=False, highlight=False)
    settings = {"jobs": 2, "controls": DEMO_CONTROLS, "until_decided": until is not None}
    run_and_print(DEMO_TASK, DEMO_METHODS, seeds, epochs, out, quiet=quiet, brief=True, **settings)
    console.print(NEXT_COMMANDS, markup=False, highlight=False)


def find_wrong_labels(folder: Path, epochs: int) -> Iterator[str]:
    """Trains the task of the demo once, with `thresher.observe`, and draws the suspects.

    Args:
        folder: Folder for the sheet.
        epochs: Length of the training.

    Yields:
        Lines on what is done, and on how many of the suspects have a wrong label.
    """
    from thresher_lab.comparison.observing import observed
    from thresher_lab.tasks.images import mnist_5k

    yield f"1. Wrong labels: one training of {epochs} epochs, with thresher.observe"
    start = time.perf_counter()
    found, _ = observed(DEMO_TASK, epochs=epochs)
    sheet = folder / "suspects.html"
    folder.mkdir(parents=True, exist_ok=True)
    found.sheet(sheet, SUSPECTS)
    seconds = time.perf_counter() - start
    wrong = found["label"] != mnist_5k().train.tensors[1].numpy()[found["id"]]
    planted = int(wrong.sum())
    share = f"{100 * wrong.mean():.0f} %"
    yield f"{planted} of {len(wrong):,} labels ({share}) were replaced by wrong ones for this demo."
    for count in (SUSPECTS, planted):
        rows = found.suspects(count)
        yield f"Of the {count} most suspicious samples, {wrong[rows].sum()} have one of these labels."
    yield f"Their pictures, with label -> predicted class: {sheet}"
    yield f"Training and drawing took {seconds:.0f} s."
