"""`thresher init`: a file to put one's own training in."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer


def init(
    path: Annotated[Path, typer.Argument(help="The file to write; one that is there is left alone.")] = Path("my_training.py"),
) -> None:
    """Write a commented file to compare methods on your own training."""
    template = files("thresher.experiments.tasks").joinpath("template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template.replace("{path}", path.name))
    except FileExistsError:
        raise ValueError(f"{path} is there already; give another name") from None
    typer.echo(f"{path}\nthresher compare {path}:build --methods kakurenbo,infobatch --epochs 10 --out runs/{path.stem}")
