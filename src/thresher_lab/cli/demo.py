"""`thresher demo`: a comparison on real data in a few minutes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thresher_lab.cli._comparison import run_and_print
from thresher_lab.cli._console import OutOption, QuietOption, open_console

DEMO_TASK = "mnist-5k-hard"
DEMO_METHODS = "winnow"
DEMO_EPOCHS = 8
DEMO_SEEDS = "0,1,2,3,4,5,6,7,8,9"
DEMO_CONTROLS = ("shorter@time", "smaller")
NEXT_COMMANDS = """
Do not use it if fewer epochs do as well, as on an easy task. See it on plain digits:
thresher compare mnist-5k --epochs 20 --methods winnow --controls shorter@time,smaller

Next, on a training of your own. The first command writes my_training.py, in which you put your model, data and loss:
thresher init
thresher advise my_training.py:build --budget 0.5"""
"""Last lines of the demo."""


def demo(
    out: OutOption = Path("runs/demo"),
    *,
    until: Annotated[
        Literal["decided"] | None, typer.Option(help="Stop when every verdict is decided.")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare Winnow at half of the cost with full training, smaller batches, and fewer epochs in the same time.

    They train on 4,000 digits of MNIST, turned and shifted at random; every fifth has a wrong label.
    """
    settings = {"jobs": 2, "controls": DEMO_CONTROLS, "until_decided": until is not None}
    results = run_and_print(
        DEMO_TASK, DEMO_METHODS, DEMO_SEEDS, DEMO_EPOCHS, out, quiet=quiet, **settings
    )
    console = open_console()
    if results is not None:
        console.print(f"\n{wrong_labels_found(results, out)}", markup=False, highlight=False)
    console.print(NEXT_COMMANDS, markup=False, highlight=False)


def wrong_labels_found(results: Mapping[str, Any], folder: Path) -> str:
    """Returns how many of the suspected labels are wrong, as a sentence.

    Args:
        results: Content of results.json of a comparison on `DEMO_TASK`.
        folder: Folder of the comparison.
    """
    from thresher_lab.report.loading import runs_by_method
    from thresher_lab.tasks.images import WRONG_LABELS, mnist_5k
    from thresher_lab.training.samples import MOST_SUSPECTS, read_history, suspects

    right = mnist_5k().train.tensors[1].numpy()
    counts = []
    for run in runs_by_method(dict(results))[DEMO_METHODS]:
        history = read_history(folder / run["samples"])
        rows = suspects(history)
        assert history.targets is not None  # a task with classes
        counts.append(int((history.targets[rows] != right[history.ids[rows]]).sum()))
    fewest = min(counts)
    most = max(counts)
    number = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"Wrong labels found on the way: of the {MOST_SUSPECTS} samples with the largest mean loss under Winnow, {number} have "
        f"a wrong label, with each seed. The demo has made {WRONG_LABELS:.0%} of the training labels wrong, and no test label. "
        "The report shows some under Labels to check."
    )
