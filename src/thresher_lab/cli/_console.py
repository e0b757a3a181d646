"""The console, and the tables, options and arguments that several commands share."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 120
"""Width in columns where the output is not a terminal, and COLUMNS is not set."""

LEAST_NAME = 16
"""Columns that the names in a table have at least."""


STANDARD_OUTPUT = Path("-")
"""Path that stands for the standard output."""


def open_console(*, to_stderr: bool = False) -> "Console":
    """Returns a console as wide as the terminal or COLUMNS says, else `PLAIN_WIDTH` columns wide.

    Args:
        to_stderr: Whether it prints to the standard error, so that the standard output is free for JSON. Default: False.
    """
    from rich.console import Console

    console = Console(stderr=to_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def announcer(command: str, *, quiet: bool = False) -> Callable[[str], None]:
    """Returns a function that prints to the standard error what a command does now, and how long that takes at most.

    Args:
        command: Name of the command, which stands before each line.
        quiet: Whether the function prints nothing. Default: False.
    """
    return lambda line: None if quiet else typer.echo(f"{command}: {line}", err=True)


def write_result(path: Path, content: Any) -> None:
    """Writes the result of a command as JSON.

    Args:
        path: File; `STANDARD_OUTPUT` for the standard output.
        content: Plain values.
    """
    from thresher_lab.training.store import write_json

    if path == STANDARD_OUTPUT:
        typer.echo(json.dumps(content, indent=1, default=repr))
    else:
        write_json(path, content)


def print_table(console: "Console", table: "Table") -> None:
    """Prints a table; where the console is too narrow for its columns, each row as lines, the heading before each cell.

    Args:
        console: Console to print to.
        table: Table whose first column names the rows.
    """
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.text import Text

    unlimited = console.options.update(max_width=1_000_000)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    if table.title is not None:
        console.print(table.title, markup=False, highlight=False)
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(f"\n{name}", markup=False, highlight=False)
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell:
                console.print(Padding(Text(f"{heading}: {cell}"), (0, 0, 0, 4)))


def percent(share: float) -> str:
    """Returns a share as percent with two decimals."""
    return f"{100 * share:.2f} %"


def targets_table(measured: dict[str, Any]) -> "Table":
    """Returns the table of cost and CPU time to each target, as shares of what full training took to the same target.

    Args:
        measured: Result of `comparison.time_to_target.measure`.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title="cost and CPU time to reach an error of",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("\nmethod", overflow="fold", min_width=LEAST_NAME)
    table.add_column("error at\nthe end", justify="right", no_wrap=True)
    for target in measured["targets"]:
        table.add_column(
            f"{percent(target['error'])} ({target['factor']:g}x)\ncost, CPU, seeds",
            justify="right",
            no_wrap=True,
        )
    for arm in measured["arms"]:
        cells = [_target_cell(reached) for reached in arm["reached"]]
        table.add_row(arm["method"], percent(arm["error"]), *cells)
    return table


def _target_cell(reached: dict[str, Any]) -> str:
    seeds = f"{reached['seeds']}/{reached['of']}"
    if reached["cost_to_full"] is None:
        return f"not reached, {seeds}"
    return f"{reached['cost_to_full']:.2f}, {reached['cpu_to_full']:.2f}, {seeds}"


SCRIPT_ARGUMENT = typer.Argument(
    metavar="TASK|FILE.py:FUNCTION",
    help="Name of a built-in task, such as digits or fashion-mnist@20000 (docs/compare.md lists all; the number takes a part "
    "of the samples), or your own training, as written by `thresher init`.",
)
TASK_OPTION = typer.Option(help="Name of a built-in task, in place of the argument TASK.")

ScriptArgument = Annotated[str | None, SCRIPT_ARGUMENT]
OptionalTaskOption = Annotated[str | None, TASK_OPTION]
EpochsOption = Annotated[int, typer.Option(min=1, help="Number of epochs of every run.")]
OutOption = Annotated[
    Path, typer.Option(help="Folder for the results. Finished runs in it are not repeated.")
]
SeedsOption = Annotated[
    str,
    typer.Option(
        help="Random seeds, such as 0,1,2 or 0-9. Every method is trained once with each."
    ),
]
DataOption = Annotated[
    Path | None, typer.Option(help="Folder or file with the data, for tasks that need one.")
]
JobsOption = Annotated[
    int,
    typer.Option(min=1, help="Number of processes that train side by side, with one thread each."),
]
TOGETHER_JOBS_HELP = (
    "Number of processes that train side by side, with one thread each. Default: 2. Under torchrun or accelerate launch all "
    "processes train each run together instead."
)
TogetherJobsOption = Annotated[int | None, typer.Option(min=1, help=TOGETHER_JOBS_HELP)]
BATCH_HELP = (
    "Number of samples of one forward and backward pass of a recipe, over all processes. Default: that of the recipe. The "
    "learning rate is scaled to the samples of a step."
)
ACCUMULATE_HELP = "Number of batches of a recipe whose gradients are added up before each step. Default: that of the recipe."
BatchSizeOption = Annotated[int | None, typer.Option(min=1, help=BATCH_HELP)]
AccumulateOption = Annotated[int | None, typer.Option(min=1, metavar="K", help=ACCUMULATE_HELP)]


DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Device to train on, such as cpu, cuda or cuda:1. Default: what accelerate chooses."
    ),
]
RAY_HELP = (
    "Train the runs on a cluster of Ray: auto (the one of this machine), HOST:PORT, or local (a new one). Without an address: "
    "the cluster of RAY_ADDRESS or of this machine, else a new one."
)
RayOption = Annotated[str | None, typer.Option("--ray", metavar="[ADDRESS]", help=RAY_HELP)]
GpusOption = Annotated[
    float, typer.Option(min=0, help="GPUs of a run with --ray, such as 0.25 for four runs on each.")
]
CpusOption = Annotated[int, typer.Option(min=1, help="CPUs of a run with --ray.")]
JsonOption = Annotated[
    Path | None,
    typer.Option(help="File to write the result to as JSON; - for the standard output."),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the result without the progress.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Overwrite the file of --out, if it is there.")
]


def use_device(device: str | None) -> None:
    """Has this process, and those that it starts, train on a device.

    Args:
        device: Name of the device; None leaves the choice to accelerate.

    Raises:
        ValueError: There is no such device.
    """
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # The first sentence of torch's reason; the others are about its build.
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"--device {device}: {reason}; `--device cpu` always works") from None
    os.environ["ACCELERATE_TORCH_DEVICE"] = device


def check_new(out: Path, *, force: bool) -> None:
    """Refuses to overwrite a file, and a folder in which no file can be written, before hours of training.

    Args:
        out: Path of the file to write.
        force: Whether the file may be overwritten.

    Raises:
        ValueError: The file is there, or its folder cannot be written.
    """
    if out.exists() and not force:
        raise ValueError(
            f"--out {out} is there already: give another file, or --force to overwrite it"
        )
    folder = out.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from None


def training_of(script: str | None, task: str | None) -> str:
    """Returns the training that a command was given, as its argument or as the option --task.

    Args:
        script: Name of a built-in task, or the user's own training as FILE.py:FUNCTION.
        task: Name of a built-in task.

    Raises:
        typer.BadParameter: Both or neither was given, or a file was given without a function.
    """
    training = script or task
    if training is None or (script and task):
        raise typer.BadParameter(
            "give the name of a task, or your own training as FILE.py:FUNCTION, once"
        )
    path, _, function = training.rpartition(":")
    if training.endswith(".py") or (path.endswith(".py") and not function):
        raise typer.BadParameter(
            f"write your own training as FILE.py:FUNCTION, such as my_training.py:build; got {training}"
        )
    return training
