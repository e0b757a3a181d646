"""Jobs that all processes of torchrun or accelerate launch train together, one after the other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.job import Job
from thresher.experiments.comparison.workers import Advanced, Finished, RunRefusedError, Trainer
from thresher.experiments.training.processes import of_first, own_rank


class TogetherWorkers:
    """A context in the place of `Workers`, in which several processes train each job together.

    The first process decides which job comes next; the others follow it.

    Args:
        advanced: Function that is called in the first process with a message after each epoch.
        task: Name of the task.
        epochs: Number of epochs of full training.
        folder: Folder with the data, see `Task.load`.
        samples: Folder for the histories of samples, one file per run. None, the default, writes none.
        track: Name of a tracker of accelerate. Default: None.
        track_to: Folder for a tracker that writes files.
    """

    def __init__(
        self,
        advanced: Callable[[Advanced], None],
        *,
        task: str,
        epochs: int,
        folder: Path | None,
        samples: Path | None = None,
        track: str | None = None,
        track_to: Path | None = None,
    ) -> None:
        tracking = {"trackers": track, "track_to": track_to}
        send = advanced if own_rank() == 0 else _ignore
        self._train = Trainer(send, task, epochs, folder, samples, tracking)
        self._job: Job | None = None

    def __enter__(self) -> "TogetherWorkers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tells the other processes that there is no further job; after an error they are ended with this one."""
        if kind is None and own_rank() == 0:
            of_first(None)

    @property
    def busy(self) -> bool:
        """Whether a job is in progress."""
        return self._job is not None

    @property
    def free(self) -> bool:
        """Whether a job can start."""
        return self._job is None

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
        self._job = of_first(job)

    def next_event(self) -> Finished:
        """Trains the job, and returns the message about its end.

        Raises:
            RunRefusedError: The training of the job cannot make smaller batches.
            RunValueError: The job raised another ValueError.
            RunError: The job raised another error.
        """
        assert self._job is not None
        outcome, self._job = self._train(self._job), None
        if isinstance(outcome, Finished):
            return outcome
        raise outcome.error

    def _follow(self) -> None:
        """Trains the jobs that the first process starts, until it says that there is none any more."""
        while True:
            self._job = of_first(None)
            if self._job is None:
                return
            try:
                self.next_event()
            except RunRefusedError:
                continue  # the first process leaves the job out


def _ignore(_: Any) -> None:
    """Does nothing: the first process shows the progress of all."""
