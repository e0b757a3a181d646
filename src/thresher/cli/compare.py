"""`thresher compare`: methods against full training and controls of the same cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from thresher.experiments.job import Control

PLAIN_WIDTH = 120
"""Columns of the table where there is no terminal to ask."""

TaskOption = Annotated[
    str,
    typer.Option(help="digits, mnist-5k, fashion-mnist or fashion-mnist-resnet8; fashion-mnist@20000 for a part of it."),
]
EpochsOption = Annotated[int, typer.Option(min=1, help="Epochs of every run.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the results; finished runs in it are not repeated.")]
SeedsOption = Annotated[str, typer.Option(help="Every method is trained once with each.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder with the four files of fashion-mnist.")]
JobsOption = Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")]


def compare(
    task: TaskOption,
    methods: Annotated[
        str, typer.Option(help="Such as kakurenbo:max_fraction=0.4:tau=0.5,selective_backprop:keep=0.33:forward_passes=twice.")
    ],
    epochs: EpochsOption,
    out: OutOption,
    seeds: SeedsOption = "0,1,2",
    data: DataOption = None,
    jobs: JobsOption = 2,
) -> None:
    """Train every method with every seed, full training, and controls of the same cost beside each run."""
    run_comparison(task, methods, seeds, epochs, out, data=data, jobs=jobs)


def run_comparison(task: str, methods: str, seeds: str, epochs: int, out: Path, *, data: Path | None, jobs: int) -> None:
    """Compare with progress on the terminal, then print the table and where the results are.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli.display import CAPTION, summary_table
    from thresher.experiments.job import CONTROLS
    from thresher.experiments.store import RESULTS

    console = console_of(PLAIN_WIDTH)
    results = trained(console, task, methods, seeds, epochs, out, data=data, jobs=jobs, controls=CONTROLS)
    console.print(summary_table(results))
    typer.echo(f"{CAPTION}\n{out / RESULTS}")


def console_of(plain_width: int) -> "Console":
    """The terminal, or a plain page of so many columns."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, plain_width)
    return console


def trained(
    console: "Console",
    task: str,
    methods: str,
    seeds: str,
    epochs: int,
    out: Path,
    *,
    data: Path | None,
    jobs: int,
    controls: Sequence["Control"],
) -> dict[str, Any]:
    """The results of a comparison, made with progress on the terminal.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli.display import progress_on
    from thresher.experiments.comparison import compare
    from thresher.experiments.specs import parse_methods, parse_seeds
    from thresher.experiments.workers import RunError

    try:
        specs, numbers = parse_methods(methods), parse_seeds(seeds)
        with progress_on(console) as watcher:
            return compare(task, specs, numbers, epochs, out, data=data, jobs=jobs, controls=controls, watcher=watcher)
    except RunError as error:
        typer.echo(f"{error.__cause__}\nthresher: {error}. Finished runs are kept in {out / 'runs'}.", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Finished runs are kept in {out / 'runs'}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None
