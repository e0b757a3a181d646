"""Runs a comparison, or lists what it would train, and prints the results on a terminal of any width."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from json import loads as load_json
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from thresher_lab.cli._console import STANDARD_OUTPUT, open_console, write_result

if TYPE_CHECKING:
    from rich.console import Console

    from thresher_lab.comparison.ray_workers import Cluster


def cluster_of(ray: str | None, gpus: float, cpus: int, *, here: bool) -> "Cluster | None":
    """Returns the cluster of --ray, or None without it; `here` is whether an option asks for this machine."""
    from thresher_lab.comparison.ray_workers import Cluster

    if ray is None and (gpus, cpus) != (0, 1):
        raise ValueError("--gpus-per-run and --cpus-per-run are for --ray; without it, give --jobs")
    if ray is not None and here:
        raise ValueError(
            "--ray trains on the devices that --gpus-per-run asks for; leave out --device and --dry-run"
        )
    return None if ray is None else Cluster(ray, gpus, cpus)


def print_rate(task: str) -> str:
    """Prints the learning rate of a recipe that was changed with its batch, and returns the name of the task."""
    from thresher_lab.recipes.batches import rate_note
    from thresher_lab.recipes.running import BATCH_OF, task_of

    recipe: Any = (
        task_of(task) if BATCH_OF.fullmatch(task) else None
    )  # a script of the user's is not run here
    if getattr(recipe, "before", None) and (note := rate_note(recipe.before, recipe.settings)):
        typer.echo(note, err=True)
    return task


def print_summary(console: "Console", results: dict[str, Any]) -> None:
    """Prints the verdicts of a comparison with their numbers, and what they come to.

    Args:
        console: Console to print to, 60 columns wide or more.
        results: Content of results.json.
    """
    from thresher_lab.comparison.summary import (
        conclude,
        interval_sentences,
        length_sentences,
        rates_sentences,
        time_of,
        times_of_busy_machine,
    )

    for line in table_lines(results, console.width):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    for sentence in conclude(results).sentences:
        console.print(sentence, markup=False, highlight=False)
    notes = [
        NOTE,
        *interval_sentences(results),
        *length_sentences(results),
        *rates_sentences(results),
        *times_of_busy_machine(results),
    ]
    if any(time_of(row, results)[0] is None for row in results["summary"]):
        notes.append(TIME_UNKNOWN)
    console.print(f"\n{' '.join(notes)}\n", markup=False, highlight=False)


NOTE = (
    "Time, cost (samples in forward and backward passes) and memory of a step are shares of full training. Intervals are for "
    "one comparison; verdicts are corrected for the number of comparisons."
)
TIME_UNKNOWN = (
    "A time is unknown (?) if the machine was busy, or if the number of other runs in progress differed from that during full "
    "training."
)


def table_lines(results: dict[str, Any], width: int) -> list[str]:
    """Returns the table of verdicts: for each row its name and verdict, and below them its numbers in fixed columns.

    Args:
        results: Content of results.json.
        width: Number of columns of the terminal.
    """
    from thresher_lab.comparison.summary import is_share, time_of, training_text

    metric = results["runs"][0]["metric"]["name"]
    clock = time_of(results["summary"][0], results)[1].removesuffix(" time")
    unit = ", %" if is_share(results["runs"]) else ""
    headings = (clock, "cost", "memory", f"{metric}{unit}", "difference [95 %]")
    table = [_numbers(row, results) for row in results["summary"]]
    widths = [max(map(len, column)) for column in zip(headings, *table, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        line = "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))
        return f"    {line}".rstrip()

    lines = wrap(f"{results['task']}, {training_text(results)}", width)
    lines.append(aligned(headings))
    for row, numbers in zip(results["summary"], table, strict=True):
        indent = "  " if row["control_of"] else ""
        lines += wrap(
            f"{row['method']}: {row['verdict']}",
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
        )
        lines.append(aligned(numbers))
    return lines


def _numbers(row: dict[str, Any], results: dict[str, Any]) -> tuple[str, ...]:
    from thresher_lab.comparison.summary import difference_text, forms, time_of

    show, signed = forms(results)
    spread = "" if row["std"] is None else f" ± {show(row['std'])}"
    return (
        _share(time_of(row, results)[0]),
        f"{row['cost_ratio']:.3f}",
        _share(row.get("memory_ratio")),
        f"{show(row['mean'])}{spread}",
        difference_text(row, signed),
    )


def _share(share: float | None) -> str:
    return "?" if share is None else f"{share:.2f}"


def print_dry_run(
    task: str,
    methods: str,
    seeds: str,
    epochs: int,
    out: Path,
    *,
    json: Path | None = None,
    until_decided: bool = False,
    **options: Any,
) -> None:
    """Prints what a comparison would train, and what is finished.

    Args:
        task: Name of a task, or the user's own training as FILE.py:FUNCTION.
        methods: Methods as on the command line, separated by commas.
        seeds: Seeds as on the command line, separated by commas.
        epochs: Number of epochs of every run.
        out: Folder of the comparison.
        json: File for the result as JSON; "-" for the standard output, and then nothing else is printed there.
        until_decided: Whether training stops when every verdict is decided. Default: False.
        options: Further arguments of `dry_run`.
    """
    from thresher_lab.comparison.dry_run import dry_run
    from thresher_lab.training.specs import parse_methods, parse_seeds

    plan = dry_run(task, parse_methods(methods), parse_seeds(seeds), epochs, out, **options)
    lines = dry_run_lines(plan)
    if until_decided:
        lines.append("This is the maximum: training stops when every verdict is decided.")
    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_result(json, plan)


def dry_run_lines(plan: Mapping[str, Any]) -> list[str]:
    """Returns one line for each method and control, and then what is finished and how long the rest takes.

    Args:
        plan: Result of `comparison.dry_run.dry_run`.
    """
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for run in plan["runs"]:
        by_arm.setdefault(run["arm"], []).append(run)
    lines = []
    for arm, runs in by_arm.items():
        lengths = {run["epochs"] for run in runs if run["epochs"] is not None}
        length = f" of {max(lengths)} epochs" if lengths else ""
        indent = "  " if runs[0]["control"] else ""
        lines.append(f"{indent}{arm}: {len(runs)} runs{length}, {_finished(runs)} finished")
    lines += plan["left_out"]
    if plan["looks"]:
        lines.append(
            f"To choose the rates: {len(plan['looks'])} runs, {_finished(plan['looks'])} finished"
        )
    runs = [*plan["runs"], *plan["looks"]]
    lines.append(f"{_finished(runs)} of {len(runs)} runs are finished.")
    if _finished(runs) < len(runs):
        lines.append(_time_left(plan["seconds_left"]))
    return lines


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "The time left is unknown until a run of each line has finished."
    return f"The rest takes about {timedelta(seconds=round(seconds))}, estimated from the finished runs."


def _finished(runs: Sequence[Mapping[str, Any]]) -> int:
    return sum(run["finished"] for run in runs)


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
) -> dict[str, Any] | None:
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
        options: Further arguments of `comparison.compare`; `factors` on the learning rate that every arm is tried with;
            `brief`, whether finished runs are not listed.

    Returns:
        Content of results.json; None in all processes but the first.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
        ValueError: An argument is not valid, or does not fit the others.
        FileNotFoundError: The data is not there.
    """
    from thresher_lab.report.page import write_report
    from thresher_lab.training.processes import own_rank
    from thresher_lab.training.store import RESULTS

    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    before = found_in(out)
    data = options.get("data")

    def write_anew(goes_on: bool) -> None:
        try:
            write_report(out, data, refreshes=goes_on)
        except Exception as error:
            typer.echo(
                f"The report of the runs so far is not written: {type(error).__name__}: {error}",
                err=True,
            )

    results = run_with_progress(
        console, task, methods, seeds, epochs, out, quiet=quiet, on_results=write_anew, **options
    )
    if own_rank():
        return None
    print_summary(console, results)
    for sentence in kept_sentences(before, found_in(out)):
        console.print(f"{sentence}\n", markup=False, highlight=False)
    console.print(
        f"{write_report(out, data)}\n{out / RESULTS}", markup=False, highlight=False, soft_wrap=True
    )
    if json is not None:
        write_result(
            json, {name: results[name] for name in ("task", "epochs", "margin", "summary")}
        )
    return results


def found_in(folder: Path) -> tuple[set[str], set[str]]:
    """Returns the names of the finished runs in the folder of a comparison, and the methods that its results show."""
    from thresher_lab.training.store import RESULTS, RUNS

    runs = {path.stem for path in (folder / RUNS).glob("*.json")}
    try:
        rows = load_json((folder / RESULTS).read_text())["summary"]
        return runs, {row["method"] for row in rows if row["control_of"] is None}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # no results yet, or others than ours: there is nothing to tell of them
        return runs, set()


def kept_sentences(
    before: tuple[set[str], set[str]], after: tuple[set[str], set[str]]
) -> list[str]:
    """Returns what to know of a folder that held runs before a command: what is not shown any more, and times of then.

    Args:
        before: Result of `found_in` before the command.
        after: Result of `found_in` after it.

    Example:
        >>> kept_sentences(({"seta-seed0-1"}, {"full", "seta"}), ({"seta-seed0-1"}, {"full"}))
        ['The report no longer shows seta. The runs are kept; a command that adds seta shows them again.']
    """
    from thresher_lab.comparison.summary import listed

    said = []
    if gone := sorted(before[1] - after[1]):
        names = listed(gone)
        said.append(
            f"The report no longer shows {names}. The runs are kept; a command that adds {names} shows them again."
        )
    kept = _runs_of_full(before[0])
    if kept and after[0] - before[0]:
        said.append(
            f"{kept} of {_runs_of_full(after[0])} runs of full training are from an earlier command, and so are their CPU time "
            "and wall time. To measure all times together, choose another --out."
        )
    return said


def _runs_of_full(names: Collection[str]) -> int:
    return sum(name.startswith("full-seed") for name in names)


TRIED_RATES = "0.5,1,2"
"""Factors on the learning rate that are tried after a method has lost."""
LARGEST_SHARE = 0.9
"""Share of the cost up to which a larger one is tried after a method has lost."""


def after_a_loss(
    results: Mapping[str, Any], methods: str, given: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns what to do after a method has lost, as a sentence and as the command for it.

    The first reason for a loss is a learning rate that does not suit fewer samples; the second is a share that is too small.

    Args:
        results: Content of results.json.
        methods: Methods as on the command line.
        given: Further options of the command by name, such as `seeds`; None where an option was not given.

    Returns:
        None where no method has lost, or another one is picked, or nothing is left to try.
    """
    from thresher_lab.comparison.summary import conclude, listed
    from thresher_lab.training.specs import parse_methods

    pick = conclude(results).pick
    lost = [
        row
        for row in results["summary"]
        if row["control_of"] is None and row.get("finding") == "loses"
    ]
    if not lost or (pick is not None and pick["control_of"] is None):
        return None
    options = {name: value for name, value in given.items() if value is not None}
    names = [row["method"] for row in lost]
    if not results.get("rates"):
        texts = [spec.text for spec in parse_methods(methods) if spec.label in names]
        said = f"{listed(names)} lost at the learning rate of the training. Another rate may suit fewer samples; try that first:"
        arms = "--methods"
        value = ",".join(texts)
        options = {"rates": TRIED_RATES, **options}
    else:
        larger = round((1 + max(row["cost_ratio"] for row in lost)) / 2, 2)
        if larger > LARGEST_SHARE:
            return None
        said = f"{listed(names)} lost even at the best learning rate. Try a larger share:"
        arms = "--budget"
        value = f"{larger:g}"
    parts = [part for name, one in options.items() for part in (f"--{name}", str(one))]
    return said, shlex.join(["thresher", "compare", results["task"], arms, value, *parts])


def run_with_progress(
    console: "Console",
    task: str,
    methods: str,
    seeds: str,
    epochs: int,
    out: Path,
    *,
    quiet: bool = False,
    brief: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs a comparison with progress on a console, and returns its results; see `run_and_print`.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
        ValueError: An argument is not valid, or does not fit the others.
        FileNotFoundError: The data is not there.
    """
    from thresher_lab.cli._progress import progress_on
    from thresher_lab.comparison.compare import chosen_rates, compare
    from thresher_lab.training.specs import parse_methods, parse_seeds

    with explained_interruptions(out):
        specs = parse_methods(methods)
        numbers = parse_seeds(seeds)
        factors = options.pop("factors", None)
        with progress_on(console, quiet=quiet, brief=brief) as watcher:
            options |= {"watcher": watcher}
            if factors:
                tries = {
                    name: value
                    for name, value in options.items()
                    if name not in ("until_decided", "on_results")
                }
                options["rates"] = chosen_rates(task, specs, numbers, epochs, out, factors, **tries)
            return compare(task, specs, numbers, epochs, out, **options)


@contextmanager
def explained_interruptions(folder: Path) -> Iterator[None]:
    """Prints where the finished runs are if training is interrupted or a run fails, and then ends the command.

    Args:
        folder: Folder of the finished runs.

    Raises:
        typer.Exit: With code 130 after Ctrl-C, with code 1 if a run failed.
        ValueError: A run was refused, or failed by its data; others that are finished are kept.
    """
    from thresher_lab.comparison.workers import RunError, RunValueError
    from thresher_lab.training.store import RUNS

    try:
        yield
    except RunValueError as error:
        if not any((folder / RUNS).glob("*.json")):
            raise
        kept = f"Finished runs are kept in {folder}: mend this one, or leave out its seed or method, and the rest goes on"
        raise ValueError(f"{str(error).rstrip('.')}. {kept}.") from error
    except RunError as error:
        typer.echo(
            f"{error.__cause__}\nthresher: {error}. Finished runs are kept in {folder}.", err=True
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(
            f"\nStopped. Finished runs are kept in {folder}; the same command goes on from there.",
            err=True,
        )
        raise typer.Exit(130) from None
