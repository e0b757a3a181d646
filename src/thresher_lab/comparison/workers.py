"""Trains the jobs of a comparison in processes of this machine: side by side, or each job in all processes of torchrun together.

`comparison.ray_workers` trains them on a cluster.
"""

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

import thresher
from thresher_lab.comparison.controls import FULL_TRAINING, Job
from thresher_lab.training.processes import of_first, own_rank
from thresher_lab.training.store import BESIDE
from thresher_lab.training.trainable import Training

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables of workers that the user has not set. They stop torch from writing that it measures memory."""

LOOK_S = 0.05
"""Seconds between two checks for messages of the processes."""

PACKAGES = (Path(thresher.__file__).parent, Path(__file__).parents[1])
"""Folders of the library and of the laboratory."""


class RunError(RuntimeError):
    """A run raised an error, or its process died."""


class RunValueError(ValueError):
    """A run raised ValueError: the data or the model does not allow a setting."""


class RunRefusedError(RunValueError):
    """A run was refused because its training cannot make smaller batches; nothing was trained.

    Args:
        job: The job.
        why: Message of the error that refused it.

    Attributes:
        job: The job.
        why: Message of the error that refused it.
    """

    def __init__(self, job: Job, why: str) -> None:
        super().__init__(f"{job.name}: {why}")
        self.job = job
        self.why = why


@dataclass(frozen=True)
class Advanced:
    """The message of a worker that an epoch of a job is over.

    Args:
        job: The job.
        epochs: Number of epochs that are over.
        metric: Value of the metric after the last of them.
    """

    job: Job
    epochs: int
    metric: float


@dataclass(frozen=True)
class Warned:
    """The message of a worker that something warned in its process.

    Args:
        text: The warning, with its place where that is not in Thresher.
        run: Name of the run that was trained then; "" where none was.
    """

    text: str
    run: str = ""


@dataclass(frozen=True)
class Finished:
    """The message of a worker that a job is done.

    Args:
        job: The job.
        run: Results of the run, see `training.loop.train`.
    """

    job: Job
    run: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The message of a worker that a job raised an error, and what to raise for it.

    Args:
        job: The job.
        why: Message of the error.
        kind: Error to raise.
        trace: Traceback as a text.
    """

    job: Job
    why: str
    kind: type[RunError | RunValueError]
    trace: str

    @property
    def error(self) -> RunError | RunValueError:
        """The error that is raised where the comparison runs; the traceback is that of the job."""
        refused = issubclass(self.kind, RunRefusedError)
        if refused:
            error = self.kind(self.job, self.why)
        else:
            error = self.kind(f"{self.job.name}: {self.why}")
        error.__cause__ = RuntimeError(f"\n{self.trace}")
        return error


Message = Advanced | Warned | Finished | Failed


class Slots:
    """The jobs in progress, each in a worker of its own; the base of all kinds of workers.

    Args:
        count: Number of jobs that can be in progress at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[Any] = []
        self._busy: dict[Any, Job] = {}
        self._used: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills all workers: jobs in progress are lost, events that were returned are not."""
        for worker in self._workers:
            self._kill(worker)

    @property
    def busy(self) -> bool:
        """Whether a job is in progress."""
        return bool(self._busy)

    @property
    def free(self) -> bool:
        """Whether one more job can start at once."""
        return len(self._busy) < self._count

    def start(self, job: Job) -> None:
        """Starts a job in an idle worker, or in a new one if none is idle."""
        idle = [worker for worker in self._workers if worker not in self._used.values()]
        worker = idle[0] if idle else self._add_worker()
        slot = self._submit(worker, job)
        self._busy[slot] = job
        self._used[slot] = worker

    def next_event(self) -> Advanced | Warned | Finished:
        """Waits for the next message of a worker and returns it.

        Raises:
            RunRefusedError: The training of a run cannot make smaller batches. Other runs go on.
            RunValueError: A run raised another ValueError.
            RunError: A run raised another error, or its process died.
        """
        message = self.next_message()
        if isinstance(message, Failed):
            raise message.error
        return message

    def next_message(self) -> Message:
        """Waits for the next message of a worker and returns it, including messages of failed runs."""
        slot, message = self._receive()
        if not isinstance(message, Advanced | Warned):
            del self._busy[slot]
            self._used.pop(slot, None)
        return message

    def _add_worker(self) -> Any:
        """Adds a worker to `_workers`, and returns it."""
        raise NotImplementedError

    def _submit(self, worker: Any, job: Job) -> Any:
        """Starts a job in a worker, and returns a slot: the object that stands for the job while it is in progress."""
        raise NotImplementedError

    def _receive(self) -> tuple[Any, Message]:
        """Waits for the next message of a worker, and returns the slot of its job and the message."""
        raise NotImplementedError

    def _kill(self, worker: Any) -> None:
        """Ends a worker at once."""


class Workers(Slots):
    """A context in which processes of this machine train jobs, `count` at a time.

    Args:
        count: Number of processes.
        settings: Further arguments of `Trainer`.
    """

    def __init__(self, count: int, **settings: Any) -> None:
        super().__init__(count)
        self._context = multiprocessing.get_context("spawn")
        self._messages, writer = self._context.Pipe(duplex=False)
        self._arguments = (writer, self._context.RLock(), settings)

    def _add_worker(self) -> ProcessPoolExecutor:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        # One process each: if it dies, no other run is lost, and the executor tells which run was.
        worker = ProcessPoolExecutor(1, self._context, _prepare_process, self._arguments)
        self._workers.append(worker)
        # In a thread of its own, in which Ctrl-C cannot interrupt the start; see `_start_process`.
        thread = threading.Thread(target=_start_process, args=(worker,))
        thread.start()
        thread.join()
        return worker

    def _submit(self, worker: ProcessPoolExecutor, job: Job) -> Any:
        try:
            return worker.submit(_train, job)
        except BrokenExecutor as error:
            raise _died(worker, job) from error

    def _receive(self) -> tuple[Any, Message]:
        while True:
            done = wait(self._busy, LOOK_S, FIRST_COMPLETED).done
            # A process sends the messages of a job before its result.
            if self._messages.poll():
                return None, self._messages.recv()
            for future in done:
                try:
                    return future, future.result()
                except BrokenExecutor as error:
                    raise _died(self._used[future], self._busy[future]) from error

    def _kill(self, worker: ProcessPoolExecutor) -> None:
        # Executors have no public function for it before Python 3.14.
        for process in [*(worker._processes or {}).values()]:
            process.kill()
        worker.shutdown()


def _start_process(worker: ProcessPoolExecutor) -> None:
    """Starts the process of a worker, in a thread of its own.

    Ctrl-C in a terminal sends SIGINT to all processes. The new process inherits the mask of this thread, which blocks SIGINT,
    and then ignores the signal (`_prepare_process`). KeyboardInterrupt is raised in the main thread only, so the start is not
    interrupted halfway.
    """
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # the first process would start it, and that unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    worker.submit(os.getpid)  # any call starts the process


def _died(worker: ProcessPoolExecutor, job: Job) -> RunError:
    [process] = worker._processes.values()
    worker.shutdown()  # its thread waits for the process, and then the exit code is known
    return RunError(f"{job.name}: its process died with exit code {process.exitcode}")


def _leave_with_parent() -> None:
    """Ends this process when its parent process has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _prepare_process(connection: Connection, lock: Any, settings: dict[str, Any]) -> None:
    """Prepares a new process of `Workers` for its jobs; the process ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _leave_with_parent()
    import torch

    torch.set_num_threads(1)
    owner = os.getpid()
    usual = warnings.showwarning

    def send(message: Message) -> None:
        # Pickled outside of the lock: objects that are freed now may warn.
        pickled = ForkingPickler.dumps(message)
        with lock:
            connection.send_bytes(pickled)

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
    ) -> None:
        if os.getpid() == owner:
            send(Warned(warning_text(message, category, filename, lineno), trainer.run))
        else:  # a process that loads data has no part in the connection
            usual(message, category, filename, lineno, *rest)

    warnings.showwarning = show
    trainer = Trainer(send, **settings)
    _PROCESS.train = trainer


_PROCESS = threading.local()
"""Holds the trainer of a process of `Workers`."""


def _train(job: Job) -> Finished | Failed:
    return _PROCESS.train(job)


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int
) -> str:
    """Returns a warning as people read it: with its place, unless it is one of Thresher about the training.

    Args:
        message: The warning.
        category: Its class.
        filename: File that it names.
        lineno: Line that it names.
    """
    if category is UserWarning and any(map(Path(filename).is_relative_to, PACKAGES)):
        return f"Warning: {message}"
    return f"{category.__name__} at {filename}:{lineno}: {message}"


class Trainer:
    """Trains jobs of one task in this process.

    Args:
        send: Function that is called with a message after each epoch.
        task: Name of the task.
        epochs: Number of epochs of full training.
        folder: Folder with the data, see `Task.load`.
        samples: Folder for the histories of samples, one file per run, see `Store.runs`. None, the default, writes none.
        tracking: Arguments of `train` for trackers.
    """

    def __init__(
        self,
        send: Callable[[Advanced], None],
        task: str,
        epochs: int,
        folder: Path | None,
        samples: Path | None = None,
        **tracking: Any,
    ) -> None:
        from thresher_lab.recipes.running import task_of

        self._send = send
        self._task = task_of(task)
        self._epochs = epochs
        self._folder = folder
        self._samples = samples
        self._tracking = tracking
        self.run = ""
        """Name of the run that is trained, for messages."""

    @cached_property
    def _data(self) -> Any:
        return self._task.load(self._folder)

    def rehearse(self, job: Job) -> None:
        """Refuses a job that cannot be trained, without training it.

        Args:
            job: The job.

        Raises:
            ValueError: The training or the method is refused.
        """
        from thresher_lab.training.loop import rehearse

        rehearse(self._task, self._data, job.spec, seed=job.seed, epochs=self._epochs)

    def __call__(self, job: Job) -> Finished | Failed:
        """Trains a job, and returns the message about its end."""
        from thresher import SmallerBatchesError
        from thresher_lab.tasks.script import Script, takes_overrides
        from thresher_lab.training.loop import train

        self.run = job.name

        def progress(done: int, metric: float) -> None:
            self._send(Advanced(job, done, metric))

        try:
            train_once: Any = partial(train, self._task)
            if takes_overrides(self._data):
                from thresher_lab.training.trainers import train_by_trainer

                train_once = train_by_trainer
            with warnings.catch_warnings():
                # What Thresher warns of is about settings that the user has not chosen.
                if job.is_control:
                    warnings.filterwarnings(
                        "ignore", category=UserWarning, module=r"thresher(_lab)?\."
                    )
                run = train_once(
                    self._data,
                    job.spec,
                    seed=job.seed,
                    epochs=self._epochs,
                    label=job.label,
                    share=job.share,
                    rate=job.rate,
                    progress=progress,
                    samples_to=self._beside(job, "samples"),
                    on_end=partial(self._write_shown, job),
                    **self._tracking,
                )
                return Finished(job, run)
        except (Exception, SystemExit) as error:
            if isinstance(error, SmallerBatchesError):
                return Failed(job, str(error), RunRefusedError, traceback.format_exc())
            kind = RunValueError if isinstance(error, ValueError | OSError) else RunError
            place = self._task.place_of(error) if isinstance(self._task, Script) else ""
            return Failed(
                job, f"{place}{type(error).__name__}: {error}", kind, traceback.format_exc()
            )

    def _beside(self, job: Job, kind: str) -> Path | None:
        if self._samples is None:
            return None
        return self._samples / f"{job.key}{BESIDE[kind]}"

    def _write_shown(self, job: Job, training: Training) -> None:
        """Writes what the samples that stand out in a run look like, where its training can show them; not for controls."""
        file = self._beside(job, "samples")
        shown = self._beside(job, "shown")
        if file is None or shown is None or own_rank():
            return
        shown.unlink(
            missing_ok=True
        )  # of a run that did not finish, of a script that has changed since
        if training.show is None or job.is_control:
            return
        from thresher_lab.training.samples import read_history
        from thresher_lab.training.shown import ids_to_show, write_shown

        full = self._beside(Job.of(FULL_TRAINING, job.seed, job.rate_of_full), "samples")
        history = read_history(file)
        write_shown(
            shown,
            training.show,
            ids_to_show(history, read_history(full) if full and full.exists() else None),
        )


class TogetherWorkers(Slots):
    """A context in the place of `Workers`, in which several processes train each job together.

    The first process decides which job comes next; the others follow it.

    Args:
        advanced: Function that is called in the first process with a message after each epoch.
        settings: Further arguments of `Trainer`.
    """

    def __init__(self, advanced: Callable[[Advanced], None], **settings: Any) -> None:
        super().__init__(1)
        self._train = Trainer(advanced if own_rank() == 0 else lambda _: None, **settings)

    def __exit__(self, *error: object) -> None:
        """Tells the other processes that there is no further job. After an error, they end with this process."""
        if not any(error) and own_rank() == 0:
            of_first(None)

    def leads(self, jobs: Sequence[Job]) -> bool:
        """Checks jobs before anything is trained or written; in all processes but the first one, trains what that starts.

        Args:
            jobs: Jobs that will be trained.

        Returns:
            Whether this is the first process; the others return when there is no further job.

        Raises:
            ValueError: A training or a method is refused.
            RunError: A job raised an error.
            RunValueError: A job raised a ValueError.
        """
        for job in jobs:
            self._train.rehearse(job)
        if own_rank():
            self._follow()
        return own_rank() == 0

    def start(self, job: Job) -> None:
        """Tells all processes which job comes next."""
        self._busy[0] = of_first(job)

    def _receive(self) -> tuple[Any, Message]:
        """Trains the job, and returns the message about its end."""
        return 0, self._train(self._busy[0])

    def _follow(self) -> None:
        """Trains the jobs that the first process starts, until it says that there is none any more."""
        while (job := of_first(None)) is not None:
            self._busy[0] = job
            with suppress(RunRefusedError):  # the first process leaves the job out
                self.next_event()
