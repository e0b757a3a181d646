"""Progress of a comparison: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thresher.cli._console import percent
from thresher.experiments.comparison.compare import Watcher
from thresher.experiments.comparison.job import Control, Job
from thresher.experiments.comparison.summary import left_out_sentence

REDRAWS_PER_SECOND = 2
"""Redraws of the bars per second; few, because drawing takes time from the training."""


@contextmanager
def progress_on(console: Console) -> Iterator[Watcher]:
    """Yields a watcher of a comparison that shows bars on a terminal, and elsewhere prints one line per finished run.

    Args:
        console: Console to print to.
    """
    if not console.is_terminal:
        yield RunLines(console)
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
    with Progress(*columns, console=console, refresh_per_second=REDRAWS_PER_SECOND, speed_estimate_period=120) as progress:
        yield RunBars(console, progress)


class RunLines(Watcher):
    """Prints one plain line per finished run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs, self._done = 0, 0

    def planned(self, runs: int, epochs: int) -> None:
        """Restarts the count, since several comparisons may follow each other."""
        self._runs, self._done = runs, 0
        self._print(f"up to {runs} runs of {epochs} epochs")

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Prints the metric of a finished run and the time that it took."""
        self._done += 1
        took = "kept from before" if reused else f"{run['wall_s']:.1f} s"
        metric = run["metric"]
        self._print(f"[{self._done}/{self._runs}] {job.name}: {metric['name']} {percent(metric['value'])}, {took}")

    def shared(self, job: Job) -> None:
        """Prints that a control serves several methods, and counts one run fewer."""
        self._runs -= 1
        self._print(f"{job.name}: a control of several methods, trained once")

    def left_out(self, method: str, control: Control, why: str) -> None:
        """Prints which control a method does not have, and why."""
        self._print(left_out_sentence({"method": method, "control": control, "why": why}))

    def dropped(self, job: Job) -> None:
        """Counts one run fewer."""
        self._runs -= 1

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class RunBars(RunLines):
    """Shows one bar for all runs and one for each run in progress, with the time left."""

    def __init__(self, console: Console, progress: Progress) -> None:
        super().__init__(console)
        self._progress = progress
        self._epochs = 0
        self._all = progress.add_task("all runs", total=None, note="")
        self._bars: dict[str, TaskID] = {}

    def planned(self, runs: int, epochs: int) -> None:
        """Sets the length of the bar of all runs."""
        super().planned(runs, epochs)
        self._epochs = epochs
        self._progress.reset(self._all, total=runs * epochs)

    def started(self, job: Job) -> None:
        """Adds the bar of a run; a shorter run shortens the bar of all runs."""
        self._bars[job.key] = self._progress.add_task(f"  {job.name}", total=job.epochs(self._epochs), note="")
        self._shorten(self._epochs - job.epochs(self._epochs))

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        """Moves the bar of the run and the bar of all runs."""
        self._progress.update(self._bars[job.key], completed=epochs, note=percent(metric))
        self._progress.advance(self._all)

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Removes the bar of the run; a run that was kept from before does not count for the time left."""
        super().finished(job, run, reused=reused)
        if reused:
            self._shorten(self._epochs)
        else:
            self._remove_bar(job)

    def shared(self, job: Job) -> None:
        """Shortens the bar of all runs by the run that is not repeated."""
        super().shared(job)
        self._shorten(self._epochs)

    def dropped(self, job: Job) -> None:
        """Removes the bar of the run, and shortens the bar of all runs by it."""
        super().dropped(job)
        self._remove_bar(job)

    def _remove_bar(self, job: Job) -> None:
        """Removes the bar of a run, and shortens the bar of all runs by the epochs that are not trained any more."""
        bar = self._bars.pop(job.key)
        [left] = [task.remaining for task in self._progress.tasks if task.id == bar]
        self._shorten(int(left or 0))
        self._progress.remove_task(bar)

    def _shorten(self, epochs: int) -> None:
        """Shortens the bar of all runs by this number of epochs."""
        self._progress.update(self._all, total=(self._progress.tasks[0].total or 0) - epochs)
