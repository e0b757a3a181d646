"""`thresher compare`: methods against full training and random subsets of the same cost."""

from pathlib import Path
from typing import Annotated

import typer

PLAIN_WIDTH = 120
"""Columns of the table where there is no terminal to ask."""


def compare(
    task: Annotated[str, typer.Option(help="digits, mnist-5k, fashion-mnist or fashion-mnist-resnet8.")],
    methods: Annotated[str, typer.Option(help="Such as kakurenbo,infobatch or kakurenbo:max_fraction=0.4:tau=0.5.")],
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of every run.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; finished runs in it are not repeated.")],
    seeds: Annotated[str, typer.Option(help="Every method is trained once with each.")] = "0,1,2",
    data: Annotated[Path | None, typer.Option(help="Folder with the four files of fashion-mnist.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")] = 2,
) -> None:
    """Train every method with every seed, full training, and a random subset of the same cost beside each run."""
    run_comparison(task, methods, seeds, epochs, out, data=data, jobs=jobs)


def run_comparison(task: str, methods: str, seeds: str, epochs: int, out: Path, *, data: Path | None, jobs: int) -> None:
    """Compare with progress on the terminal, then print the table and where the results are.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    try:
        _run(task, methods, seeds, epochs, out, data, jobs)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Finished runs are kept in {out / 'runs'}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None


def _run(task: str, methods: str, seeds: str, epochs: int, out: Path, data: Path | None, jobs: int) -> None:
    from rich.console import Console

    from thresher.cli.display import CAPTION, progress_on, summary_table
    from thresher.experiments.comparison import compare
    from thresher.experiments.specs import parse_methods, parse_seeds
    from thresher.experiments.store import RESULTS
    from thresher.experiments.workers import RunError

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    specs, numbers = parse_methods(methods), parse_seeds(seeds)
    try:
        with progress_on(console) as watcher:
            results = compare(task, specs, numbers, epochs, out, data=data, jobs=jobs, watcher=watcher)
    except RunError as error:
        typer.echo(f"{error.__cause__}\nthresher: {error}. Finished runs are kept in {out / 'runs'}.", err=True)
        raise typer.Exit(1) from None
    console.print(summary_table(results))
    typer.echo(f"{CAPTION}\n{out / RESULTS}")
