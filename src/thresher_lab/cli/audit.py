"""`thresher audit`: checks which samples a loader yields, how often and in which process."""

import importlib
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from thresher_lab.cli._console import JsonOption, QuietOption, announcer

MOST_LINES = 15
"""Largest number of lines on the screen."""


def audit(
    script: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="Function that returns the training DataLoader, or what `build(seed)` returns.",
        ),
    ],
    *,
    epochs: Annotated[int, typer.Option(min=2, help="Number of epochs to read.")] = 3,
    world: Annotated[
        str | None,
        typer.Option(help="Numbers of processes, such as 1,2; several must divide the samples."),
    ] = None,
    json: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Check that a loader yields every sample once an epoch, in a new order, in one process; read none of them."""
    announce = announcer("audit", quiet=quiet)
    announce("loading torch, for some seconds")
    from thresher.testing import audit as audit_loader
    from thresher_lab.cli._console import open_console, write_result

    path, _, function = script.partition(":")
    if not path.endswith(".py") or not function:
        raise typer.BadParameter(
            f"give FILE.py:FUNCTION, such as training.py:loader, got {script!r}"
        )
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path}")
    file = Path(path).resolve()
    # By the name of its file, so that further processes can import it, too.
    sys.path.insert(0, str(file.parent))
    make = partial(make_loader, file.stem, function)
    sizes = None if world is None else [int(size) for size in world.split(",")]
    found = audit_loader(make, epochs=epochs, world=sizes, announce=announce)
    if json is None:
        lines = str(found).splitlines()
        console = open_console()
        for line in lines[:MOST_LINES]:
            console.print(line, markup=False, highlight=False)
    else:
        write_result(json, {"facts": found.facts, "problems": found.problems, "notes": found.notes})
    if found.problems:
        raise typer.Exit(1)


def make_loader(module: str, function: str) -> Any:
    """Returns the loader that a function of a module makes.

    Args:
        module: Name of the module.
        function: Name of the function, which takes no argument, or a seed.

    Raises:
        ValueError: The module has no such function, or it returns no DataLoader.
    """
    from torch.utils.data import DataLoader

    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"{module}.py has no function {function}")
    parameters = inspect.signature(make).parameters.values()
    needs_seed = any(one.default is one.empty for one in parameters)
    made: Any = make(0) if needs_seed else make()
    candidates = [made]
    if isinstance(made, dict):
        candidates += made.values()
    elif isinstance(made, tuple | list):
        candidates += made
    for one in candidates:
        if isinstance(one, DataLoader):
            return one
    raise ValueError(f"{module}.py:{function} must return a DataLoader, got {type(made).__name__}")
