"""Running a comparison with progress on the terminal, which several commands do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def run_and_print(
    task: str,
    methods: str,
    seeds: str,
    epochs: int,
    out: Path,
    *,
    json: Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> None:
    """Runs a comparison and prints its verdicts, what to do, and the paths of the report and the results.

    Of several processes that train together the first one does the latter.

    Args:
        task: Name of a task, or the user's own training as FILE.py:FUNCTION.
        methods: Methods as on the command line, separated by commas.
        seeds: Seeds as on the command line, separated by commas.
        epochs: Number of epochs of every run.
        out: Folder for the results.
        json: File for the summary as JSON; "-" for the standard output, and then nothing else is printed there.
        quiet: Whether to print no progress. Default: False.
        options: Further arguments of `comparison.compare`; `most` for the largest number of seeds, which are added until every
            verdict is decided; `factors` on the learning rate that every arm is tried with.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
        ValueError: An argument is not valid, or does not fit the others.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli._console import STANDARD_OUTPUT, open_console, write_result
    from thresher.cli._summary import print_summary
    from thresher.experiments.training.processes import own_rank
    from thresher.experiments.training.store import RESULTS
    from thresher.report.page import write_report

    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    results = run_with_progress(console, task, methods, seeds, epochs, out, quiet=quiet, **options)
    if own_rank():
        return
    print_summary(console, results)
    console.print(f"{write_report(out, options.get('data'))}\n{out / RESULTS}", markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_result(json, {name: results[name] for name in ("task", "epochs", "margin", "summary")})


def run_with_progress(
    console: "Console", task: str, methods: str, seeds: str, epochs: int, out: Path, *, quiet: bool = False, **options: Any
) -> dict[str, Any]:
    """Runs a comparison with progress on a console, and returns its results; see `run_and_print`.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
        ValueError: An argument is not valid, or does not fit the others.
        FileNotFoundError: The data is not there.
    """
    from thresher.cli._progress import progress_on
    from thresher.experiments.comparison.compare import compare
    from thresher.experiments.comparison.rate_looks import chosen_rates
    from thresher.experiments.comparison.until_decided import compare_until_decided
    from thresher.experiments.training.specs import parse_methods, parse_seeds

    run = compare_until_decided if "most" in options else compare
    with explained_interruptions(out):
        specs, numbers, factors = parse_methods(methods), parse_seeds(seeds), options.pop("factors", None)
        with progress_on(console, quiet=quiet) as watcher:
            options |= {"watcher": watcher}
            if factors:
                tries = {name: value for name, value in options.items() if name != "most"}
                options["rates"] = chosen_rates(task, specs, numbers, epochs, out, factors, **tries)
            return run(task, specs, numbers, epochs, out, **options)


@contextmanager
def explained_interruptions(folder: Path) -> Iterator[None]:
    """Prints where the finished runs are if training is interrupted or a run fails, and then ends the command.

    Args:
        folder: Folder of the finished runs.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
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
