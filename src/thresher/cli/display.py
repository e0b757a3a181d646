"""What a comparison looks like on a terminal, and on none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from thresher.experiments.comparison.compare import Watcher
from thresher.experiments.comparison.job import Job

REFRESH_PER_SECOND = 2
"""Seldom: drawing takes time from the training beside it."""

CAPTION = """\
cost, CPU time: shares of full training
at the cost of the method above them: uniform@, a random subset each epoch; shorter@, full data for fewer epochs
"""


@contextmanager
def progress_on(console: Console) -> Iterator[Watcher]:
    """Bars on a terminal, else a line for every run that is over."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs {task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=REFRESH_PER_SECOND, speed_estimate_period=120) as progress:
        yield Bars(console, progress)


class Lines(Watcher):
    """A plain line for every finished run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs, self._done = 0, 0

    def planned(self, runs: int, epochs: int) -> None:
        """Count anew: several comparisons may follow each other."""
        self._runs, self._done = runs, 0
        self._say(f"up to {runs} runs of {epochs} epochs")

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Say what came out."""
        self._done += 1
        took = "kept from before" if reused else f"{run['wall_s']:.1f} s"
        metric = run["metric"]
        self._say(f"[{self._done}/{self._runs}] {job.name}: {metric['name']} {percent(metric['value'])}, {took}")

    def shared(self, job: Job) -> None:
        """Say that there is one run fewer."""
        self._runs -= 1
        self._say(f"{job.name}: a control of several methods, trained once")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Bars(Lines):
    """A bar for the whole and one for each run in progress, with the time left."""

    def __init__(self, console: Console, progress: Progress) -> None:
        super().__init__(console)
        self._progress = progress
        self._epochs = 0
        self._all = progress.add_task("all runs", total=None, note="")
        self._bars: dict[str, TaskID] = {}

    def planned(self, runs: int, epochs: int) -> None:
        """Know the length of the whole."""
        super().planned(runs, epochs)
        self._epochs = epochs
        self._progress.reset(self._all, total=runs * epochs)

    def started(self, job: Job) -> None:
        """Show its bar; a run that is shorter takes less of the whole."""
        self._bars[job.key] = self._progress.add_task(f"  {job.name}", total=job.epochs(self._epochs), note="")
        self._less(self._epochs - job.epochs(self._epochs))

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        """Move its bar and that of the whole."""
        self._progress.update(self._bars[job.key], completed=epochs, note=percent(metric))
        self._progress.advance(self._all)

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Take its bar away; what was kept from before is no part of the time left."""
        super().finished(job, run, reused=reused)
        if reused:
            self._less(self._epochs)
        else:
            bar = self._bars.pop(job.key)
            [left] = [task.remaining for task in self._progress.tasks if task.id == bar]
            self._less(int(left or 0))
            self._progress.remove_task(bar)

    def shared(self, job: Job) -> None:
        """What is trained once is counted once."""
        super().shared(job)
        self._less(self._epochs)

    def _less(self, epochs: int) -> None:
        """The whole is shorter than planned."""
        self._progress.update(self._all, total=(self._progress.tasks[0].total or 0) - epochs)


def percent(share: float) -> str:
    """Two digits after the point."""
    return f"{100 * share:.2f} %"


def summary_table(results: dict[str, Any]) -> Table:
    """The summary of results.json."""
    metric = results["runs"][0]["metric"]["name"]
    seeds = len({run["seed"] for run in results["runs"]})
    title = f"{results['task']}, {results['epochs']} epochs, {seeds} seed{'s' if seeds > 1 else ''}, {results['device']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    words = [word for row in results["summary"] for word in row["method"].split()]
    table.add_column("\nmethod", min_width=max(map(len, words)))
    for heading in (f"{metric},\n%", "difference to full\n[95 % interval]", "\ncost", "CPU\ntime"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nverdict", min_width=12)
    for row in results["summary"]:
        table.add_row(
            f"  {row['method']}" if row["control_of"] else row["method"],
            _mean(row),
            _difference(row),
            f"{row['cost_ratio']:.3f}",
            f"{row['cpu_ratio']:.2f}",
            row["verdict"],
        )
    return table


def targets_table(measured: dict[str, Any]) -> Table:
    """What `time_to_target.measure` found: cost and CPU time to each target, as shares of what full training took."""
    table = Table(title="to reach an error of", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nmethod", overflow="fold")
    table.add_column("error at\nthe end", justify="right", no_wrap=True)
    for target in measured["targets"]:
        table.add_column(f"{percent(target['error'])} ({target['factor']:g}x)\ncost, CPU, seeds", justify="right", no_wrap=True)
    for arm in measured["arms"]:
        cells = [_share(reached) for reached in arm["reached"]]
        table.add_row(arm["method"], percent(arm["error"]), *cells)
    return table


def _share(reached: dict[str, Any]) -> str:
    seeds = f"{reached['seeds']}/{reached['of']}"
    if reached["cost_to_full"] is None:
        return f"not reached, {seeds}"
    return f"{reached['cost_to_full']:.2f}, {reached['cpu_to_full']:.2f}, {seeds}"


def _mean(row: dict[str, Any]) -> str:
    spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}"


def _difference(row: dict[str, Any]) -> str:
    if row["difference"] is None:
        return ""
    bounds = "" if row["ci95"] is None else " [{:+.2f}, {:+.2f}]".format(*(100 * bound for bound in row["ci95"]))
    return f"{100 * row['difference']:+.2f}{bounds}"
