"""The row of one method: it, its placebo and full training are trained here; the other arms are committed runs.

Full training and the method train in turns in one process, with the seeds that count, so that their times compare. Times of
committed runs are another machine's and are not used. Fewer epochs in the same time are trained here, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.league.arms import FRESH, PLACEBO, SHARE, arms, best_factor, shared
from benchmarks.league.arms import RUNS as LEAGUE_RUNS
from benchmarks.league.own import folder_of, identity_of, parse, source_of
from benchmarks.league.pooled import QUESTIONS, Trainings, failures, standardized
from benchmarks.league.ray_pool import RayPool
from benchmarks.league.table import ASKED, over_tasks, values
from benchmarks.league.tasks import TASKS, problem_of
from benchmarks.winnow.jobs import Arm, Done, Job, load, run_missing, train_arm
from thresher.methods import no_such
from thresher_lab.comparison.compare import SEEDS_OF_LENGTH
from thresher_lab.comparison.controls import (
    FULL_TRAINING,
    SAME_TIME,
    as_placebo,
    same_time_share,
    why_no_placebo_of,
)
from thresher_lab.comparison.statistics import Paired
from thresher_lab.training.specs import MethodSpec
from thresher_lab.training.store import write_json

QUICK = (
    "fashion-10k",
    "fashion-10k-noisy",
    "fashion-imbalanced",
    "bike",
    "near-duplicates",
    "fashion-augmented-10",
    "mnist-5k-mlp",
    "mnist-5k-noisy",
)
"""Tasks that are trained unless others are wanted: the fast ones whose data need no folder."""
RUNS, IDENTITY = "runs.jsonl", "method.json"
"""Files of the folder of a method: its trainings, and what they depend on."""
SEEDS = FRESH.seeds
"""Seeds that count."""
FAR_FROM_HALF = 0.05
"""Difference of a cost to that of the controls from which on the row says so."""


@cache
def committed() -> Trainings:
    """Returns the committed trainings with fresh seeds, by task and arm."""
    return values(FRESH, {**shared(), **load(LEAGUE_RUNS)})


@dataclass(frozen=True)
class Row:
    """The trainings that the row of a method needs.

    Args:
        label: The method with its settings.
        no_placebo: Why it has no placebo; "" if it has one.
        tasks: Names of the tasks.
    """

    label: str
    no_placebo: str = ""
    tasks: Sequence[str] = QUICK

    @property
    def name(self) -> str:
        """Name of the arm of the method, which no arm of the league has."""
        return f"method {self.label}"

    @property
    def arms(self) -> list[str]:
        """Names of the arms that are trained here, besides full training."""
        placebo = [] if self.no_placebo else [self.name + PLACEBO]
        return [self.name, SAME_TIME, *placebo]

    def ready(self, done: Done) -> Iterator[Job]:
        """Yields the trainings that can run now."""
        for task in self.tasks:
            for name in self.arms:
                yield from self.looks(done, task, name)
                yield from self.counted(done, task, name)

    def looks(self, done: Done, task: str, name: str) -> list[Job]:
        """Returns the trainings that the rate of an arm is chosen by; [] for a placebo, and before its share is known."""
        share = self.share(done, task, name)
        if share is None or name.endswith(PLACEBO):
            return []
        return FRESH.looks(done, task, name, share)

    def counted(self, done: Done, task: str, name: str) -> list[Job]:
        """Returns the counted trainings of an arm; [] before its rate and its share of the time are known."""
        looks = self.looks(done, task, name.removesuffix(PLACEBO))
        factor = best_factor(done, looks) if looks else None
        if factor is None:
            return []
        return [Job(task, name, looks[0].share, factor, seed) for seed in SEEDS]

    def share(self, done: Done, task: str, name: str) -> float | None:
        """Returns the share at which an arm is trained; None before it is known."""
        return self.time_share(done, task) if name == SAME_TIME else SHARE

    def time_share(self, done: Done, task: str) -> float | None:
        """Returns the share of the epochs of full training that fit into the CPU time of the method on this machine.

        The first seeds decide, as in `thresher compare`. None before their trainings are done.
        """
        jobs = self.counted(done, task, self.name)[:SEEDS_OF_LENGTH]
        if not jobs or any(job not in done for job in jobs):
            return None
        share = same_time_share(
            [done[job]["cpu_s"] for job in jobs], [done[job]["full"]["cpu_s"] for job in jobs]
        )
        return None if share is None else max(0.001, round(share, 3))


def arm_of(spec: MethodSpec, name: str) -> Arm:
    """Returns an arm that is trained here.

    Args:
        spec: The method.
        name: Name of the arm.
    """
    if name == SAME_TIME:
        return Arm(name, lambda _: FULL_TRAINING, shorter=True)
    trained = as_placebo(spec) if name.endswith(PLACEBO) else spec
    return Arm(name, lambda _: trained)


def full_job(task: str, seed: int) -> Job:
    """Returns full training, at its committed rate.

    Args:
        task: Name of the task.
        seed: Random seed.
    """
    jobs = FRESH.counted({**shared(), **load(LEAGUE_RUNS)}, task, "full")
    assert jobs is not None
    return replace(jobs[0], seed=seed)


def train_job(spec: MethodSpec, job: Job) -> dict[str, Any]:
    """Trains once; full training before or after a counted training of the method, in turns by the seed.

    Args:
        spec: The method.
        job: The training.

    Raises:
        ValueError: The method refuses the task.
    """
    try:
        arm = arm_of(spec, job.arm)
        if job.looks or job.arm != Row(spec.label).name:
            return train_arm(job, arm, problem_of(job.task))
        pair = [(job, arm), (full_job(job.task, job.seed), arms()["full"])]
        if job.seed % 2:
            pair.reverse()
        trained = {one.arm: train_arm(one, of, problem_of(one.task)) for one, of in pair}
        return {**trained[job.arm], "full": trained["full"]}
    except ValueError as error:
        remedy = f"Finished runs are kept; --without {job.task} leaves the task out"
        raise ValueError(f"{spec.label} on {job.task}: {error}. {remedy}.") from error


def held_of(row: Row, done: Done) -> Trainings:
    """Returns the trainings of the tasks that are finished: those here, and committed ones of smaller batches.

    Args:
        row: The trainings that the row needs.
        done: Results of the trainings here.
    """
    found: dict[tuple[str, str], Sequence[Mapping[str, Any]]] = {}
    for task in row.tasks:
        jobs = {name: row.counted(done, task, name) for name in row.arms}
        if all(of and all(job in done for job in of) for of in jobs.values()):
            found |= {(task, name): [done[job] for job in of] for name, of in jobs.items()}
            found[task, "full"] = [run["full"] for run in found[task, row.name]]
            found[task, "smaller"] = committed()[task, "smaller"]
    return found


def numbers(row: Row, held: Trainings) -> dict[str, Any]:
    """Returns what the method shows over the finished tasks, as `table.over_tasks` does, and on each task.

    Args:
        row: The trainings that the row needs.
        held: Result of `held_of`.
    """
    tasks = [task for task in row.tasks if (task, row.name) in held]
    controls = {SAME_TIME: SAME_TIME, "smaller": "smaller", "full": "full"}
    if not row.no_placebo:
        controls["placebo"] = row.name + PLACEBO
    differences = {
        kind: [standardized(held, task, row.name, control) for task in tasks]
        for kind, control in controls.items()
    }
    return {
        "over_tasks": {
            kind: Paired.of([one for one in of if one is not None])
            for kind, of in differences.items()
            if any(one is not None for one in of)
        },
        "tasks": {
            task: {
                "metric": fmean(run["metric"] for run in held[task, row.name]),
                "full": fmean(run["metric"] for run in held[task, "full"]),
                "cost": fmean(run["cost"]["ratio"] for run in held[task, row.name]),
                "time": fmean(run["cpu_s"] / run["full"]["cpu_s"] for run in held[task, row.name]),
                "failed": failures(held, task, row.name),
                "against": {
                    kind: Paired.of(
                        [
                            a["metric"] - b["metric"]
                            for a, b in zip(held[task, row.name], held[task, control], strict=True)
                        ]
                    )
                    for kind, control in controls.items()
                },
            }
            for task in tasks
        },
    }


def lines(row: Row, done: Done) -> list[str]:
    """Returns the row as lines of text, beside the methods of the league on the same tasks.

    Args:
        row: The trainings that the row needs.
        done: Results of the trainings here.
    """
    held = held_of(row, done)
    found = numbers(row, held)
    waiting = [task for task in row.tasks if task not in found["tasks"]]
    said = [f"Not finished yet: {', '.join(waiting)}."] if waiting else []
    if not found["tasks"]:
        return said
    of = replace(FRESH, tasks=tuple(found["tasks"]))
    of_league = {
        known["method"]: {kind: Paired(**_fields(one)) for kind, one in known["against"].items()}
        for known in over_tasks(
            of, {place: runs for place, runs in committed().items() if place[0] in of.tasks}
        )
    }
    table = [("method", *(f"to {to}" for to in ASKED.values()))]
    for name, against in ((row.label, found["over_tasks"]), *of_league.items()):
        table.append((name, *(_interval(against.get(kind)) for kind in QUESTIONS)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"Over {len(of.tasks)} tasks, in standard deviations of full training between seeds, with 95 % intervals; the rows below "
        f"{row.label} are committed:",
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        ),
        "",
        *(_task_line(task, one) for task, one in found["tasks"].items()),
        *said,
        "",
        *_notes(row, held, found["tasks"]),
    ]


def _fields(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("n", "mean", "low", "high", "spread")}


def _interval(paired: Paired | None) -> str:
    if paired is None:
        return ""
    if paired.low is None:
        return f"{paired.mean:+.1f}"
    return f"{paired.mean:+.1f} [{paired.low:+.1f}, {paired.high:+.1f}]"


def _task_line(task: str, one: Mapping[str, Any]) -> str:
    against = ", ".join(
        f"{paired.mean:+.2f} to {ASKED[kind]}" for kind, paired in one["against"].items()
    )
    failed = f", {one['failed']} of {len(SEEDS)} trainings failed" if one["failed"] else ""
    return (
        f"{task}: {one['metric']:.2f} points at {one['cost']:.2f} of the cost and {one['time']:.2f} of the CPU time{failed}; "
        f"{against}"
    )


def _notes(row: Row, held: Trainings, tasks: Mapping[str, Any]) -> list[str]:
    """Returns where each number comes from, and what limits it."""
    pairs = [
        (run["metric"], other["metric"])
        for task in tasks
        for run, other in zip(held[task, "full"], committed()[task, "full"], strict=True)
    ]
    repeated = sum(here == there for here, there in pairs)
    said = [
        "The method, its placebo, full training and fewer epochs in the same time were trained here; full training and the "
        "method in turns, so their CPU times compare. Smaller batches and the other methods are committed runs of the same seeds.",
        f"Full training here has the committed metric, digit for digit, on {repeated} of {len(pairs)} seeds.",
    ]
    if row.no_placebo:
        said.append(f"No placebo: {row.no_placebo}.")
    if repeated < len(pairs):
        said.append(
            "The committed runs are of other versions or another kind of machine: differences to them include what that changes."
        )
    far = {
        task: one["cost"] for task, one in tasks.items() if abs(one["cost"] - SHARE) > FAR_FROM_HALF
    }
    if far:
        costs = ", ".join(f"{cost:.2f} on {task}" for task, cost in far.items())
        said.append(
            f"Smaller batches cost {SHARE:g}, and the method {costs}: differences to them are not at equal cost."
        )
    return said


def run(
    text: str,
    runs: Path,
    *,
    every_task: bool = False,
    without: str = "",
    jobs: int = 2,
    cluster: Any = None,
    say: Callable[[str], None] = print,
) -> None:
    """Trains what is missing of the row of a method, and prints it.

    Args:
        text: The method, see `own.parse`.
        runs: Folder of the runs of all methods.
        every_task: Whether to train on all tasks of the league. Default: on `QUICK`.
        without: Tasks that are left out, separated by commas. Default: none.
        jobs: Number of processes that train side by side; with a cluster, of runs. Default: 2.
        cluster: Cluster of Ray that trains. Default: processes of this machine.
        say: Function that is called with a line for each training. Default: print.

    Raises:
        ValueError: The method is not valid, or refuses a task; there is no task of a name in `without`, or none is left.
    """
    spec = parse(text)
    row = Row(spec.label, why_no_placebo_of(spec), tasks_of(every_task=every_task, without=without))
    folder = folder_of(spec, runs)
    write_json(folder / IDENTITY, identity_of(spec) | {"no_placebo": row.no_placebo})
    source = source_of(spec)
    (folder / source.name).write_bytes(source.read_bytes())
    pool = None if cluster is None else RayPool(cluster)
    say(
        f"trains on {', '.join(row.tasks)}, into {folder}; if it is stopped, the same command goes on"
    )
    done = run_missing(
        row.ready, partial(train_job, spec), folder / RUNS, jobs, lambda: False, pool=pool, say=say
    )
    print("\n".join([*lines(row, done), f"The runs, which can be submitted: {folder}"]))


def tasks_of(*, every_task: bool, without: str) -> list[str]:
    """Returns the names of the tasks of a row.

    Args:
        every_task: Whether all tasks of the league are wanted, or those of `QUICK`.
        without: Tasks that are left out, separated by commas.

    Raises:
        ValueError: There is no task of a name, or none is left.
    """
    left_out = [name for name in without.split(",") if name]
    unknown = [name for name in left_out if name not in TASKS]
    if unknown:
        raise ValueError(no_such("task of the league", unknown[0], TASKS))
    tasks = [name for name in (TASKS if every_task else QUICK) if name not in left_out]
    if not tasks:
        raise ValueError("--without: no task is left")
    return tasks
