"""Workers on a cluster of Ray: each trains in an actor, and the files of a run come back with its results."""

import importlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher_lab.comparison.controls import FULL_TRAINING, Job
from thresher_lab.comparison.workers import (
    Advanced,
    Failed,
    Finished,
    Message,
    RunError,
    Slots,
    Warned,
    Workers,
)
from thresher_lab.training.store import BESIDE, RUNS, whole


@dataclass(frozen=True)
class Cluster:
    """A cluster of Ray, and what each run takes of it.

    Args:
        address: Address of its head as HOST:PORT; "auto" for the cluster that this machine belongs to, "local" for a new one
            on this machine alone. Default: the cluster of RAY_ADDRESS or of this machine, else a new one.
        gpus: GPUs of a run; a part of one lets runs share it. Default: 0, which trains on the CPU.
        cpus: CPUs of a run, 1 or more. A run trains with one thread; further CPUs are for processes that load its data.
            Default: 1.

    Raises:
        ValueError: An argument is not possible.
    """

    address: str = ""
    gpus: float = 0.0
    cpus: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"|auto|local|[^:/]+:\d+", self.address):
            raise ValueError(
                f"--ray {self.address}: give auto, local or HOST:PORT, on a machine of the cluster"
            )
        if self.gpus < 0 or self.cpus < 1 or (self.gpus > 1 and self.gpus % 1):
            raise ValueError(
                "--ray: a run takes a part of one GPU or whole ones, and one CPU or more; got "
                f"--gpus-per-run {self.gpus:g} and --cpus-per-run {self.cpus}"
            )

    def room(self, machine: dict[str, float]) -> int:
        """Returns the number of runs that a machine has room for.

        Args:
            machine: Resources of the machine by name, as Ray lists them.

        Example:
            >>> Cluster(gpus=0.25).room({"CPU": 6.0, "GPU": 1.0})
            4
        """
        runs = int(machine.get("CPU", 0) // self.cpus)
        gpus = machine.get("GPU", 0)
        if self.gpus:
            return min(
                runs, int(gpus * int(1 / self.gpus + 1e-9) if self.gpus <= 1 else gpus // self.gpus)
            )
        return runs


class RayWorkers(Slots):
    """A context in the place of `Workers`, in which actors of Ray train. A run whose actor dies is tried once more.

    Args:
        jobs: Number of runs that are trained at once; None for as many as the cluster has room for.
        cluster: The cluster.
        out: Folder of the comparison, which only this process writes to.
        settings: Further arguments of `Trainer`.

    Raises:
        ValueError: Ray is not installed, the cluster cannot be reached, or it has no room for a run.
    """

    def __init__(self, jobs: int | None, cluster: Cluster, out: Path, **settings: Any) -> None:
        self._ray = connected(cluster.address)
        room = sum(
            cluster.room(machine["Resources"]) for machine in self._ray.nodes() if machine["Alive"]
        )
        if not room:
            raise ValueError(
                f"--ray: no machine of the cluster has {cluster.cpus} CPUs and {cluster.gpus:g} GPUs for a run; give less of "
                "--cpus-per-run or --gpus-per-run"
            )
        super().__init__(min(jobs or room, room))
        takes = {
            "num_cpus": cluster.cpus,
            "num_gpus": cluster.gpus,
            "scheduling_strategy": "SPREAD",
        }
        self._actor_class = self._ray.remote(**takes)(Actor)
        self._arguments = (Path.cwd(), bool(cluster.gpus), settings)
        self._out = out
        self._died = set[str]()
        self._reached = dict[str, int]()

    def _add_worker(self) -> Any:
        self._workers.append(self._actor_class.remote(*self._arguments))
        return self._workers[-1]

    def _kill(self, worker: Any) -> None:
        self._ray.kill(worker)

    def _submit(self, worker: Any, job: Job) -> Any:
        full = f"{RUNS}/{Job.of(FULL_TRAINING, job.seed, job.rate_of_full).key}{BESIDE['samples']}"
        if job.is_control or not (self._out / full).exists():
            files = {}
        else:
            files = {full: (self._out / full).read_bytes()}
        return worker.train.options(num_returns="streaming").remote(job, files)

    def _receive(self) -> tuple[Any, Message]:
        while True:
            stream = self._ray.wait([*self._busy], num_returns=1)[0][0]
            key = self._busy[stream].key
            try:
                message, files = self._ray.get(next(stream))
            except (self._ray.exceptions.RayError, StopIteration) as error:
                return None, self._try_again(stream, error)
            if isinstance(message, Finished | Failed):
                write_files(self._out, files)
            elif isinstance(message, Advanced):
                if message.epochs <= self._reached.get(key, 0):
                    continue  # of a second try
                self._reached[key] = message.epochs
            return stream, message

    def _try_again(self, stream: Any, error: Exception) -> Warned:
        """Starts the job of an actor that died on another one, and returns a message about it.

        Raises:
            RunError: It was the second try.
        """
        job = self._busy.pop(stream)
        actor = self._used.pop(stream)
        self._workers.remove(actor)
        self._kill(actor)
        if job.key in self._died:
            raise RunError(f"{job.name}: its process died twice") from error
        self._died.add(job.key)
        self.start(job)
        return Warned(f"Warning: {job.name}: its process died, and the run is tried once more")


class Actor:
    """Trains jobs in a process of its machine, and yields the messages about each, with its files beside the last one.

    Args:
        here: Current folder of the command, for relative paths; it is used if this machine has it.
        on_gpu: Whether Ray has given the actor a GPU, or a part of one.
        settings: Further arguments of `Trainer`.
    """

    def __init__(self, here: Path, on_gpu: bool, settings: dict[str, Any]) -> None:
        if here.is_dir():
            os.chdir(here)
        if not on_gpu:
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        self._out = Path(tempfile.mkdtemp())
        self._workers = Workers(
            1, **settings, samples=self._out / RUNS, track_to=self._out / "trackers"
        )

    def train(
        self, job: Job, given: dict[str, bytes]
    ) -> Iterator[tuple[Message, dict[str, bytes]]]:
        """Trains a job.

        Args:
            job: The job.
            given: Files of other runs that it reads, by their path in the folder of the comparison.
        """
        write_files(self._out, given)
        self._workers.start(job)
        while not isinstance(message := self._workers.next_message(), Finished | Failed):
            yield message, {}
        paths = {
            path.relative_to(self._out).as_posix(): path
            for path in self._out.rglob("*")
            if path.is_file()
        }
        files = {name: path.read_bytes() for name, path in paths.items() if name not in given}
        shutil.rmtree(self._out)
        yield message, files


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files, each whole or not at all.

    Args:
        folder: Folder of the files.
        files: Contents by path in the folder.
    """
    for name, content in files.items():
        with whole(folder / name) as file:
            file.write(content)


def connected(address: str) -> Any:
    """Returns the package ray, connected to the cluster at an address.

    Args:
        address: Address as in `Cluster`.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError("--ray needs the package ray: pip install 'thresher[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(
                address or None,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            raise ValueError(f"--ray {address}: {error}") from error
    return ray
