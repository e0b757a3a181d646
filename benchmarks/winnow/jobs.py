"""What is run: one line of JSON for each training, in a file that a later call goes on with."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.kept import add_line, pack, read_lines
from benchmarks.winnow.tasks import Problem
from thresher_lab.training.loop import train
from thresher_lab.training.specs import Spec
from thresher_lab.training.trainable import Training

FIRST_LOOK = 1000
"""First seed of those that rates are chosen with, which are never counted."""

AT_ONCE = 500
"""Number of samples that are evaluated at once."""


@dataclass(frozen=True)
class Arm:
    """A way to spend a share of the cost.

    Args:
        name: Name in the table.
        spec: Function from the share to the method.
        shorter: Whether the share is one of the epochs.
        rate_of: Name of the arm whose rate is taken; "" where the arm has its own look at the grid.
        shares: Shares that the arm is run at; () for all.
    """

    name: str
    spec: Callable[[float], Spec]
    shorter: bool = False
    rate_of: str = ""
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        task: Name of the task.
        arm: Name of the arm.
        share: Share of the cost.
        factor: Factor on the rate of the task.
        seed: Random seed; seeds from `FIRST_LOOK` on are for the choice of rates.
    """

    task: str
    arm: str
    share: float
    factor: float
    seed: int

    @property
    def looks(self) -> bool:
        """Whether the training is for the choice of a rate."""
        return self.seed >= FIRST_LOOK

    def __str__(self) -> str:
        aim = "to choose the rate" if self.looks else "counted"
        return f"{self.task}, {self.arm}, share {self.share:g}, rate x {self.factor:g}, seed {self.seed}, {aim}"


@dataclass(frozen=True)
class Design:
    """How much is run.

    Args:
        factors: The grid: factors on the rate of each task.
        looks: Number of seeds that rates are chosen with.
        shares: Shares of the cost.
        seeds: Number of counted seeds.
        tasks: Names of the tasks.
    """

    factors: tuple[float, ...] = (0.6, 1.0, 1.6)
    looks: int = 2
    shares: tuple[float, ...] = (0.5, 0.35)
    seeds: int = 8
    tasks: tuple[str, ...] = ()


SHORT = Design()

Done = Mapping[Job, Mapping[str, Any]]
"""Results of the trainings that are done."""


def looks_of(design: Design, task: str, arm: str, share: float) -> list[Job]:
    """Returns the trainings that the rate of an arm is chosen by."""
    return [
        Job(task, arm, share, factor, FIRST_LOOK + look)
        for factor in design.factors
        for look in range(design.looks)
    ]


def chosen_factor(design: Design, done: Done, task: str, arm: Arm, share: float) -> float | None:
    """Returns the factor of the grid with the best mean metric on the samples for that choice; None before all looks are done.

    Of equally good factors it is the smallest one.
    """
    looks = looks_of(design, task, arm.rate_of or arm.name, 1.0 if arm.rate_of else share)
    if not all(job in done for job in looks):
        return None
    means = {
        factor: fmean(done[job]["metric"] for job in looks if job.factor == factor)
        for factor in design.factors
    }
    return max(design.factors, key=lambda factor: (means[factor], -factor))


def train_arm(job: Job, arm: Arm, problem: Problem) -> dict[str, Any]:
    """Trains an arm once, and returns the metric in points, the cost and the times.

    Args:
        job: The training.
        arm: The arm that the job names.
        problem: The task that the job names.
    """
    sets = problem.sets()
    inputs, targets = sets.choice if job.looks else sets.test
    metrics = list[float]()

    def measure(training: Training) -> None:
        batches = list(zip(inputs.split(AT_ONCE), targets.split(AT_ONCE), strict=True))
        metrics.append(100 * problem.task.evaluate(training.model, batches))

    trained = train(
        problem.at(job.factor),
        sets.data,
        arm.spec(job.share),
        seed=job.seed,
        epochs=problem.epochs,
        share=job.share if arm.shorter else 1.0,
        on_end=measure,
    )
    cost = trained["cost"]
    spent = {
        name: cost[name]
        for name in ("ratio", "forward", "backward", "full_forward", "full_backward", "steps")
    }
    return {
        "metric": metrics[0],
        "cost": spent,
        "wall_s": trained["wall_s"],
        "cpu_s": trained["cpu_s"],
    }


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the results in a file of JSON lines; {} where there is no such file."""
    return {Job(**line["job"]): line["result"] for line in read_lines(path)}


def run_missing(
    ready: Callable[[Done], Iterator[Job]],
    run: Callable[[Job], dict[str, Any]],
    path: Path,
    workers: int,
    until: Callable[[], bool],
    *,
    pool: Any = None,
    say: Callable[[str], None] = print,
) -> dict[Job, dict[str, Any]]:
    """Runs the trainings that are not in a file, adds them to it, and returns all results.

    Args:
        ready: Function of the results so far that yields the trainings that can run now.
        run: Function that trains once.
        path: File that one line is added to at the end of each training.
        workers: Number of processes, each with one thread.
        until: Function that returns whether no further training is to begin.
        pool: Executor that trains. Default: processes of this machine.
        say: Function that is called with a line for each training. Default: print.
    """
    done = load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    running: dict[Future[dict[str, Any]], Job] = {}
    spawned = get_context("spawn")
    pool = pool or ProcessPoolExecutor(
        workers, spawned, initializer=torch.set_num_threads, initargs=(1,)
    )
    with pool:
        while True:
            waiting = (
                job for job in ready(done) if job not in done and job not in running.values()
            )
            while len(running) < workers and not until() and (job := next(waiting, None)):
                running[pool.submit(run, job)] = job
            if not running:
                pack(path)
                return done
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                done[job] = future.result()
                add_line(path, {"job": asdict(job), "result": done[job]})
                say(f"{len(done):5d}  {job}: {done[job]['metric']:.2f}")
