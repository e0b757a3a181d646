"""`thresher league`: the row of a method beside the committed runs of the league, in a clone of the repository."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import JobsOption, QuietOption, RayOption

ROOT = Path(__file__).resolve().parents[3]


def league(
    method: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:CLASS|METHOD",
            help="Method with its settings, such as my_method.py:MyMethod:keep=0.5.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the runs of all methods.")] = Path(
        "runs/league"
    ),
    without: Annotated[str, typer.Option(help="Tasks to leave out, separated by commas.")] = "",
    jobs: JobsOption = 2,
    ray: RayOption = None,
    *,
    every_task: Annotated[
        bool, typer.Option("--all", help="Train on all tasks, not only the quick ones.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Train a method, its placebo and full training, and compare with the committed runs of the league.

    The same command goes on where it was stopped.
    """
    from thresher_lab.cli._comparison import cluster_of, explained_interruptions

    if not (ROOT / "benchmarks" / "league").is_dir():
        raise ValueError(
            "league: the runs that it compares with are in the repository. Clone it, and install the clone: "
            "pip install -e '.[lab]'"
        )
    sys.path.insert(0, str(ROOT))
    with explained_interruptions(out):
        import_module("benchmarks.league.row").run(
            method,
            out,
            every_task=every_task,
            without=without,
            jobs=jobs,
            cluster=cluster_of(ray, 0.0, 1, here=False),
            say=(lambda _: None) if quiet else typer.echo,
        )
