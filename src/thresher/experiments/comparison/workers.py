"""Worker processes side by side, one torch thread each, that never outlive the process that started them."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.job import Job


class RunError(RuntimeError):
    """A run raised, or its process died."""


class RunValueError(ValueError):
    """A run raised ValueError: a setting that the data or the model does not allow."""


@dataclass(frozen=True)
class Advanced:
    """An epoch of a job is over."""

    job: Job
    epochs: int
    metric: float


@dataclass(frozen=True)
class Finished:
    """A job is done."""

    job: Job
    run: dict[str, Any]


@dataclass(frozen=True)
class _Failed:
    job: Job
    error: str
    user: bool
    trace: str


class Workers:
    """A context in which jobs are trained, `count` at a time.

    Args:
        count: Processes.
        task: Name of the task.
        epochs: Of full training.
        folder: Where the data lies, see `Task.load`.
        samples: Folder for the histories of samples, a file a run, see `Store.samples`. Default: none are kept.
        track: Name of a tracker of accelerate. Default: none.
        track_to: Folder for a tracker that writes files.
    """

    def __init__(
        self,
        count: int,
        *,
        task: str,
        epochs: int,
        folder: Path | None,
        samples: Path | None = None,
        track: str | None = None,
        track_to: Path | None = None,
    ) -> None:
        self._count = count
        self._arguments = (task, epochs, folder, samples, {"trackers": track, "track_to": track_to})
        self._processes: dict[Connection, Any] = {}
        self._busy: dict[Connection, Job] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop at once: what is half done is lost, what was handed over is not."""
        for process in self._processes.values():
            process.kill()
        for connection, process in self._processes.items():
            process.join()
            connection.close()
        self._processes.clear()

    @property
    def busy(self) -> bool:
        """Whether a job is in progress."""
        return bool(self._busy)

    @property
    def free(self) -> bool:
        """Whether one more job can start at once."""
        return len(self._busy) < self._count

    def start(self, job: Job) -> None:
        """Hand a job to a free process, started where there is none."""
        idle = next((connection for connection in self._processes if connection not in self._busy), None)
        connection = idle or self._spawn()
        self._busy[connection] = job
        with self._alive(connection):
            connection.send(job)

    def next_event(self) -> Advanced | Finished:
        """Wait for the next thing that happens.

        Raises:
            RunValueError: A run raised ValueError.
            RunError: A run raised anything else, or its process died.
        """
        connection: Any = wait(list(self._busy))[0]
        with self._alive(connection):
            event = connection.recv()
        if isinstance(event, _Failed):
            raise (RunValueError if event.user else RunError)(f"{event.job.name}: {event.error}") from _RemoteError(event.trace)
        if isinstance(event, Finished):
            del self._busy[connection]
        return event

    @contextmanager
    def _alive(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            process = self._processes[connection]
            process.join()
            raise RunError(f"{self._busy[connection].name}: its process died with exit code {process.exitcode}") from error

    def _spawn(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, *self._arguments))
        with _interrupts_later():
            process.start()
            self._processes[ours] = process
        theirs.close()
        return ours


class _RemoteError(Exception):
    """Shows where in its process a run failed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; processes started in here leave it to this one, which hears it afterwards.

    They inherit that it is blocked. Ignored, as they have it later, it would be lost to this one as well.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it, as the first process does, would unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_with_parent() -> None:
    """End this process when its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(
    connection: Connection, task_name: str, epochs: int, folder: Path | None, samples: Path | None, tracking: dict[str, Any]
) -> None:
    """Train job after job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _leave_with_parent()
    import torch

    from thresher.experiments.recipes.resolve import task_of
    from thresher.experiments.tasks.script import Script
    from thresher.experiments.training.loop import train

    torch.set_num_threads(1)
    task = task_of(task_name)
    load = cache(lambda: task.load(folder))

    def outcome(job: Job) -> Finished | _Failed:
        def progress(done: int, metric: float) -> None:
            connection.send(Advanced(job, done, metric))

        what = {"seed": job.seed, "epochs": epochs, "label": job.label, "share": job.share, **tracking}
        file = None if samples is None else samples / f"{job.key}.parquet"
        try:
            return Finished(job, train(task, load(), job.spec, progress=progress, samples_to=file, **what))
        except Exception as error:
            user = isinstance(error, ValueError | OSError)
            place = task.place_of(error) if isinstance(task, Script) else ""
            return _Failed(job, f"{place}{type(error).__name__}: {error}", user, traceback.format_exc())

    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            connection.send(outcome(connection.recv()))
