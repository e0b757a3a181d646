"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MARGIN = 0.5
"""Same value as `comparison.summary.MARGIN`; importing that module would take longer than printing the help."""

SCRIPT_ARGUMENT = typer.Argument(
    metavar="[FILE.py:FUNCTION]", help="Your own training, as written by `thresher init`. Give either this or --task."
)
TASK_OPTION = typer.Option(
    help="Name of a built-in task: digits, fashion-mnist, cifar10, bike, text, relief, ... (the README lists all). "
    "fashion-mnist@20000 is a part with 20,000 samples."
)

ScriptArgument = Annotated[str | None, SCRIPT_ARGUMENT]
OptionalTaskOption = Annotated[str | None, TASK_OPTION]
TaskOption = Annotated[str, TASK_OPTION]
EpochsOption = Annotated[int, typer.Option(min=1, help="Number of epochs of every run.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the results. Finished runs in it are not repeated.")]
SeedsOption = Annotated[str, typer.Option(help="Random seeds, separated by commas. Every method is trained once with each.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder or file with the data, for tasks that need one.")]
JobsOption = Annotated[int, typer.Option(min=1, help="Number of processes that train side by side, with one thread each.")]


def training_of(script: str | None, task: str | None) -> str:
    """Returns the training that a command was given, either as a script or as a task.

    Args:
        script: The user's own training as FILE.py:FUNCTION.
        task: Name of a built-in task.

    Raises:
        typer.BadParameter: Both or neither was given, or the script is not of the form FILE.py:FUNCTION.
    """
    training = script or task
    if training is None or (script and task):
        raise typer.BadParameter("give either --task or your own training as FILE.py:FUNCTION")
    if script and not (script.partition(":")[2] and script.partition(":")[0].endswith(".py")):
        raise typer.BadParameter(f"write your own training as FILE.py:FUNCTION, such as my_training.py:build; got {script}")
    return training
