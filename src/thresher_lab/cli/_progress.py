"""Progress of a comparison: bars on a terminal, plain lines elsewhere."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from thresher_lab.cli._console import percent
from thresher_lab.comparison.compare import Watcher
from thresher_lab.comparison.controls import Control, Job
from thresher_lab.comparison.summary import left_out_sentence

REDRAWS_PER_SECOND = 2
"""Redraws of the bars per second; few, because drawing takes time from the training."""


HEARTBEAT_S = 60.0
"""Seconds between the lines that say how far it is, where there is no terminal."""
WIDE = 100
"""Columns of a terminal from which the metric and the time that has passed are shown beside the bars."""


@contextmanager
def progress_on(console: Console, *, quiet: bool = False, brief: bool = False) -> Iterator[Watcher]:
    """Yields a watcher of a comparison that shows bars on a terminal.

    Elsewhere it prints one line per finished run, and each minute one that says how far it is.

    Args:
        console: Console to print to.
        quiet: Whether to print no progress, only warnings and what is left out. Default: False.
        brief: Whether to leave out the lines of finished runs. Default: False.
    """
    if quiet:
        yield Remarks(console)
        return
    shown = console.is_terminal
    bars = Progress(
        *_columns(console.width),
        console=console,
        expand=True,
        disable=not shown,
        refresh_per_second=REDRAWS_PER_SECOND,
        speed_estimate_period=3600,
    )
    with bars as progress:
        watcher = RunProgress(console, progress, brief=brief)
        with nullcontext() if shown else _each(HEARTBEAT_S, watcher.beat):
            yield watcher


def _columns(width: int) -> list[ProgressColumn]:
    """Returns columns that are whole at any width from 60, but for the name of the run, which gives way."""
    name = TextColumn(
        "{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    counts = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9))
    left = [TextColumn("left"), TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7))]
    if width < WIDE:
        return [name, BarColumn(8), counts, *left]
    return [
        name,
        BarColumn(30),
        counts,
        TextColumn("epochs {task.fields[note]}"),
        TimeElapsedColumn(),
        *left,
    ]


def _shown(metric: float) -> str:
    """Returns a metric in percent where it can be a share, and else as it is."""
    return percent(metric) if 0 <= metric <= 1 else f"{metric:.4g}"


@contextmanager
def _each(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Calls a function in regular intervals, in a thread of its own, until the block is left."""
    over = Event()

    def beat() -> None:
        while not over.wait(seconds):
            call()

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Remarks(Watcher):
    """Prints what changes the meaning of the results: which controls are left out, and warnings.

    Args:
        console: Console to print to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()

    def left_out(self, method: str, control: Control, why: str) -> None:
        """Prints which control a method does not have, and why."""
        self._once(left_out_sentence({"method": method, "control": control, "why": why}))

    def warned(self, text: str, run: str) -> None:
        """Prints a warning once, with the first of the runs that it comes from; other numbers in it make no other warning."""
        self._once(
            f"{text} (first in the run {run})" if run else text, key=re.sub(r"\d+", "0", text)
        )

    def _once(self, text: str, *, key: str = "") -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            self._print(text)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class RunProgress(Remarks):
    """Also prints one line per finished run, and keeps one bar for all runs and one for each run in progress.

    Args:
        console: Console to print to.
        progress: The bars.
        brief: Whether to leave out the lines of finished runs. Default: False.
    """

    def __init__(self, console: Console, progress: Progress, *, brief: bool = False) -> None:
        super().__init__(console)
        self._progress = progress
        self._brief = brief
        self._runs = 0
        self._done = 0
        self._epochs = 0
        self._all = progress.add_task("all runs", total=None, note="")
        self._bars: dict[str, TaskID] = {}

    def planned(self, runs: int, epochs: int, look: float | None = None) -> None:
        """Restarts the counts, since several comparisons may follow each other."""
        self._runs = runs
        self._done = 0
        self._epochs = epochs
        if look is None:
            tried = ""
        else:
            tried = f"learning rate times {look:g}, tried on seeds that do not count: "
        self._print(f"{tried}up to {runs} runs of {epochs} epochs")
        self._progress.reset(self._all, total=runs * epochs)

    def started(self, job: Job) -> None:
        """Adds the bar of a run; a shorter run shortens the bar of all runs."""
        self._bars[job.key] = self._progress.add_task(
            f"  {job.name}", total=job.epochs(self._epochs), note=""
        )
        self._shorten(self._epochs - job.epochs(self._epochs))

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        """Moves the bar of the run and the bar of all runs."""
        self._progress.update(self._bars[job.key], completed=epochs, note=_shown(metric))
        self._progress.advance(self._all)

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Prints the metric of a finished run and its time; one that was kept from before does not count for the time left."""
        self._done += 1
        took = "kept from before" if reused else f"{run['wall_s']:.1f} s"
        metric = run["metric"]
        if not self._brief:
            self._print(
                f"[{self._done}/{self._runs}] {job.name}: {metric['name']} {_shown(metric['value'])}, {took}"
            )
        if reused:
            self._shorten(self._epochs)
        else:
            self._remove_bar(job)

    def shared(self, job: Job) -> None:
        """Prints that a control serves several methods, and counts one run fewer."""
        self._runs -= 1
        self._print(f"{job.name}: a control of several methods, trained once")
        self._shorten(self._epochs)

    def dropped(self, job: Job) -> None:
        """Counts one run fewer, and removes its bar."""
        self._runs -= 1
        self._remove_bar(job)

    def beat(self) -> None:
        """Prints how far it is, and about how long it will take."""
        whole = self._progress.tasks[0]
        if whole.total is None:
            self._print("nothing is trained yet: the data and the task are being read")
            return
        left = "not known before the first epoch is over"
        if whole.completed:
            left = f"about {timedelta(seconds=round((whole.elapsed or 0) / whole.completed * (whole.remaining or 0)))}"
        self._print(
            f"{self._done} of {self._runs} runs done, {whole.completed:g} of {whole.total:g} epochs; time left: {left}"
        )

    def _remove_bar(self, job: Job) -> None:
        """Removes the bar of a run, and shortens the bar of all runs by the epochs that are not trained any more."""
        bar = self._bars.pop(job.key)
        [left] = [task.remaining for task in self._progress.tasks if task.id == bar]
        self._shorten(int(left or 0))
        self._progress.remove_task(bar)

    def _shorten(self, epochs: int) -> None:
        """Shortens the bar of all runs by this number of epochs."""
        self._progress.update(self._all, total=(self._progress.tasks[0].total or 0) - epochs)
