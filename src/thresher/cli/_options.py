"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MARGIN = 0.5
"""Same value as `comparison.summary.MARGIN`; importing that module would take longer than printing the help."""

SCRIPT_ARGUMENT = typer.Argument(
    metavar="TASK|FILE.py:FUNCTION",
    help="Name of a built-in task, such as digits or fashion-mnist@20000 (docs/compare.md lists all; the number takes a part "
    "of the samples), or your own training, as written by `thresher init`.",
)
TASK_OPTION = typer.Option(help="Name of a built-in task, in place of the argument TASK.")

ScriptArgument = Annotated[str | None, SCRIPT_ARGUMENT]
OptionalTaskOption = Annotated[str | None, TASK_OPTION]
EpochsOption = Annotated[int, typer.Option(min=1, help="Number of epochs of every run.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the results. Finished runs in it are not repeated.")]
SeedsOption = Annotated[str, typer.Option(help="Random seeds, separated by commas. Every method is trained once with each.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder or file with the data, for tasks that need one.")]
JobsOption = Annotated[int, typer.Option(min=1, help="Number of processes that train side by side, with one thread each.")]


JsonOption = Annotated[Path | None, typer.Option(help="File to write the result to as JSON; - for the standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result without the progress.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the file of --out, if it is there.")]


def check_new(out: Path, *, force: bool) -> None:
    """Refuses to overwrite a file.

    Args:
        out: Path of the file to write.
        force: Whether the file may be overwritten.

    Raises:
        ValueError: The file is there.
    """
    if out.exists() and not force:
        raise ValueError(f"--out {out} is there already: give another file, or --force to overwrite it")


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
        raise typer.BadParameter("give the name of a task, or your own training as FILE.py:FUNCTION, once")
    path, _, function = training.rpartition(":")
    if training.endswith(".py") or (path.endswith(".py") and not function):
        raise typer.BadParameter(f"write your own training as FILE.py:FUNCTION, such as my_training.py:build; got {training}")
    return training
