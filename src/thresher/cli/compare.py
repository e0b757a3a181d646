"""`thresher compare`: methods against full training and controls of the same cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

MARGIN = 0.5
"""As `experiments.summary.MARGIN`, whose import would take as long as the command does to say its help."""
PLAIN_WIDTH = 120
"""Columns of the table where there is no terminal to ask."""

TASK = typer.Option(
    help="Listed in the README: digits, fashion-mnist, cifar10, bike, text, relief, ...; fashion-mnist@20000 for a part."
)
TaskOption = Annotated[str, TASK]
EpochsOption = Annotated[int, typer.Option(min=1, help="Epochs of every run.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the results; finished runs in it are not repeated.")]
SeedsOption = Annotated[str, typer.Option(help="Every method is trained once with each.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder or file with the data, for tasks that take one.")]
MarginOption = Annotated[
    float, typer.Option(help="A loss that does not matter: in points where the metric is a share, else in its own units.")
]
JobsOption = Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")]


def compare(
    *,
    script: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="Your own training, see `thresher init`; or --task.")
    ] = None,
    task: Annotated[str | None, TASK] = None,
    methods: Annotated[
        str, typer.Option(help="Such as kakurenbo:max_fraction=0.4:tau=0.5,selective_backprop:keep=0.33:forward_passes=twice.")
    ],
    epochs: EpochsOption,
    out: OutOption,
    seeds: SeedsOption = "0,1,2",
    data: DataOption = None,
    jobs: JobsOption = 2,
    margin: MarginOption = MARGIN,
    track: Annotated[
        str | None, typer.Option(help="Tell every epoch to a tracker of accelerate: tensorboard, wandb, mlflow, trackio, ...")
    ] = None,
) -> None:
    """Train every method with every seed, full training, and controls of the same cost beside each run."""
    trained_on = script or task
    if trained_on is None or (script and task):
        raise typer.BadParameter("give either --task or your own training as FILE.py:FUNCTION")
    if script and not (script.partition(":")[2] and script.partition(":")[0].endswith(".py")):
        raise typer.BadParameter(f"write your own training as FILE.py:FUNCTION, such as my_training.py:build; got {script}")
    run_comparison(trained_on, methods, seeds, epochs, out, data=data, jobs=jobs, margin=margin, track=track)


def run_comparison(task: str, methods: str, seeds: str, epochs: int, out: Path, **options: Any) -> None:
    """Compare with progress on the terminal, then print the table and where report and results are.

    Args:
        task: What is trained.
        methods: As on the command line.
        seeds: As on the command line.
        epochs: Of every run.
        out: Folder of the results.
        options: Of `comparison.compare`.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli.display import CAPTION, summary_table
    from thresher.experiments.training.store import RESULTS
    from thresher.report.page import write_report

    console = console_of(PLAIN_WIDTH)
    results = trained(console, task, methods, seeds, epochs, out, **options)
    console.print(summary_table(results))
    for row in results["summary"]:
        if row["control_of"] is None:
            console.print(row["sentence"], markup=False, highlight=False)
    typer.echo(f"\n{CAPTION}\n{write_report(out, options.get('data'))}\n{out / RESULTS}")


def console_of(plain_width: int) -> "Console":
    """The terminal, or a plain page of so many columns."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, plain_width)
    return console


def trained(console: "Console", task: str, methods: str, seeds: str, epochs: int, out: Path, **options: Any) -> dict[str, Any]:
    """The results of a comparison, made with progress on the terminal; see `run_comparison`.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli.display import progress_on
    from thresher.experiments.comparison.compare import compare
    from thresher.experiments.training.specs import parse_methods, parse_seeds

    with runs_kept_in(out / "runs"):
        specs, numbers = parse_methods(methods), parse_seeds(seeds)
        with progress_on(console) as watcher:
            return compare(task, specs, numbers, epochs, out, watcher=watcher, **options)


@contextmanager
def runs_kept_in(folder: Path) -> Iterator[None]:
    """Say where finished runs are, where training is stopped or a run fails.

    Raises:
        typer.Exit: 130 after Ctrl-C, 1 where a run failed.
    """
    from thresher.experiments.comparison.workers import RunError

    try:
        yield
    except RunError as error:
        typer.echo(f"{error.__cause__}\nthresher: {error}. Finished runs are kept in {folder}.", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Finished runs are kept in {folder}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None
