"""`thresher demo`: a comparison on real data in a few minutes."""

from pathlib import Path

import typer

from thresher_lab.cli._comparison import run_and_print
from thresher_lab.cli._console import OutOption, QuietOption

DEMO_EPOCHS = 20
DEMO_METHODS = "winnow"
DEMO_CONTROLS = ("smaller", "shorter", "uniform", "placebo")
NEXT_COMMANDS = """
Next, on a training of your own. The first command writes my_training.py, in which you put your model, data and loss:
thresher init
thresher advise my_training.py:build --budget 0.5"""
"""Last lines of the demo."""


def demo(out: OutOption = Path("runs/demo"), *, quiet: QuietOption = False) -> None:
    """Compare Winnow at half of the cost with full training and four other ways to spend it, on 5,000 digits of MNIST."""
    settings = {"data": None, "jobs": 2, "controls": DEMO_CONTROLS}
    run_and_print("mnist-5k", DEMO_METHODS, "0,1,2", DEMO_EPOCHS, out, quiet=quiet, **settings)
    typer.echo(NEXT_COMMANDS)
