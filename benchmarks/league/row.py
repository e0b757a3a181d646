"""The row of one method: it, its placebo and full training are trained here; the other arms are committed runs.

Full training and the method train in turns in one process, with the seeds that count, so that their times compare. Times of
committed runs are another machine's and are not used. Fewer epochs in the same time are trained here, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.league.arms import (
    CONTROLS,
    DESIGN,
    PLACEBO,
    SHARE,
    arms,
    counted_jobs,
    factor_of,
    shared,
)
from benchmarks.league.arms import RUNS as LEAGUE_RUNS
from benchmarks.league.own import folder_of, identity_of, parse, source_of
from benchmarks.league.ray_pool import RayPool
from benchmarks.league.table import far_off
from benchmarks.league.tasks import TASKS, problem_of
from benchmarks.winnow.jobs import (
    Arm,
    Done,
    Job,
    chosen_factor,
    load,
    looks_of,
    run_missing,
    train_arm,
)
from benchmarks.winnow.table import MARGIN
from thresher.methods import no_such
from thresher_lab.comparison.compare import SEEDS_OF_LENGTH
from thresher_lab.comparison.controls import CONTROLS as KINDS
from thresher_lab.comparison.controls import (
    FULL_TRAINING,
    SAME_TIME,
    as_placebo,
    same_time_share,
    why_no_placebo_of,
)
from thresher_lab.comparison.statistics import Paired, against_controls, findings
from thresher_lab.training.specs import MethodSpec
from thresher_lab.training.store import write_json

QUICK = ("fashion-10k", "fashion-10k-noisy", "fashion-imbalanced")
RUNS, IDENTITY = "runs.jsonl", "method.json"
"""Files of the folder of a method: its trainings, and what they depend on."""
SEEDS = range(DESIGN.seeds)
"""Seeds that count."""
FAR_FROM_HALF = 0.05
"""Difference of a cost to that of the controls from which on the row says so."""


@cache
def committed() -> Done:
    """Returns the committed trainings of the arms that are not trained here."""
    done = {**shared(), **load(LEAGUE_RUNS)}
    return {job: result for job, result in done.items() if job.arm in ("full", *CONTROLS)}


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
    def most(self) -> int:
        """Largest number of trainings: looks at rates, but for the placebo, and seeds that count."""
        looks = len(looks_of(DESIGN, "", "", SHARE)) * (len(self.arms) - (not self.no_placebo))
        return len(self.tasks) * (looks + len(self.arms) * len(SEEDS))

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
        return looks_of(DESIGN, task, name, share)

    def counted(self, done: Done, task: str, name: str) -> list[Job]:
        """Returns the counted trainings of an arm; [] before its rate and its share of the time are known."""
        share = self.share(done, task, name)
        if share is None:
            return []
        arm = Arm(name.removesuffix(PLACEBO), lambda _: FULL_TRAINING)
        factor = chosen_factor(DESIGN, done, task, arm, share)
        if factor is None:
            return []
        return [Job(task, name, share, factor, seed) for seed in SEEDS]

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

    def trainings(self, done: Done, task: str, name: str) -> list[Mapping[str, Any]]:
        """Returns the counted trainings of an arm that were trained here, by seed; [] if one is missing."""
        jobs = self.counted(done, task, name)
        return [done[job] for job in jobs] if all(job in done for job in jobs) else []


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
        factor = factor_of(committed(), job.task, arms()["full"])
        assert factor is not None
        pair = [(job, arm), (Job(job.task, "full", 1.0, factor, job.seed), arms()["full"])]
        if job.seed % 2:
            pair.reverse()
        trained = {one.arm: train_arm(one, of, problem_of(one.task)) for one, of in pair}
        return {**trained[job.arm], "full": trained["full"]}
    except ValueError as error:
        remedy = f"Finished runs are kept; --without {job.task} leaves the task out"
        raise ValueError(f"{spec.label} on {job.task}: {error}. {remedy}.") from error


def numbers(row: Row, done: Done) -> list[dict[str, Any]]:
    """Returns the numbers of the row by task; tasks that are not finished are left out.

    Args:
        row: The trainings that the row needs.
        done: Results of the trainings here.
    """
    own = {task: row.trainings(done, task, row.name) for task in row.tasks}
    own = {task: trainings for task, trainings in own.items() if trainings}
    full = {task: [one["full"] for one in trainings] for task, trainings in own.items()}
    to_full = {task: _difference(own[task], full[task]) for task in own}
    others = {
        (task, kind): trainings for task in own for kind, trainings in _others(row, done, task)
    }
    beside = {at: _difference(own[at[0]], trainings) for at, trainings in others.items()}
    no_loss = findings(to_full, MARGIN)
    against = against_controls(beside, MARGIN)
    return [
        {
            "task": task,
            "seeds": len(own[task]),
            "metric": fmean(one["metric"] for one in own[task]),
            "factor": row.counted(done, task, row.name)[0].factor,
            "full": fmean(one["metric"] for one in full[task]),
            "cost": Paired.of([one["cost"]["ratio"] for one in own[task]]),
            "time": Paired.of([one["cpu_s"] / one["full"]["cpu_s"] for one in own[task]]),
            "length": row.time_share(done, task),
            "to_full": to_full[task],
            "loses": no_loss[task],
            "against": {at[1]: (beside[at], against[at]) for at in beside if at[0] == task},
            "repeated": _repeated(task, full[task]),
            "off": _far_off(task, own[task], others),
        }
        for task in own
    ]


def _others(row: Row, done: Done, task: str) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yields each control of a task with its trainings, by seed; those that are not finished are left out."""
    if same_time := row.trainings(done, task, SAME_TIME):
        yield SAME_TIME, same_time
    for kind in CONTROLS:
        jobs = counted_jobs(committed(), task, arms()[kind])
        assert jobs is not None
        yield kind, [committed()[job] for job in jobs]
    if placebo := row.trainings(done, task, row.name + PLACEBO):
        yield "placebo", placebo


def _difference(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Paired:
    return Paired.of([a["metric"] - b["metric"] for a, b in zip(own, other, strict=True)])


def _repeated(task: str, full: Sequence[Mapping[str, Any]]) -> int:
    """Returns on how many seeds full training here has the committed metric, digit for digit."""
    jobs = counted_jobs(committed(), task, arms()["full"])
    assert jobs is not None
    return sum(
        one["metric"] == committed()[job]["metric"] for one, job in zip(full, jobs, strict=True)
    )


def _far_off(
    task: str,
    own: Sequence[Mapping[str, Any]],
    others: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
) -> list[str]:
    """Returns a sentence for each arm of which a training failed: it came to less than half of the median."""
    named = {"the method": own}
    named |= {KINDS[kind].words: of for (at, kind), of in others.items() if at == task}
    said = [far_off((task, name), [*trainings]) for name, trainings in named.items()]
    return [sentence for sentence in said if sentence]


def lines(row: Row, done: Done) -> list[str]:
    """Returns the row as lines of text.

    Args:
        row: The trainings that the row needs.
        done: Results of the trainings here.
    """
    found = numbers(row, done)
    said = [f"{row.label}, in points, with 95 % intervals"]
    for one in found:
        said += ["", *_task_lines(one)]
    waiting = [task for task in row.tasks if task not in {one["task"] for one in found}]
    if waiting:
        said += ["", f"Not finished yet: {', '.join(waiting)}."]
    return [*said, "", *_notes(row, found)] if found else said


def _task_lines(one: Mapping[str, Any]) -> list[str]:
    numbers = {
        "cost, share of full training": _interval(one["cost"], ".3f"),
        "CPU time, share of full training": _interval(one["time"], ".2f"),
        "difference to full training": f"{_interval(one['to_full'], '+.2f')}  {_said(one['loses'])}",
    }
    for kind, (paired, finding) in one["against"].items():
        length = f" ({one['length']:g} of the epochs)" if kind == SAME_TIME else ""
        numbers[f"to {KINDS[kind].words}{length}"] = (
            f"{_interval(paired, '+.2f')}  {_said(finding)}"
        )
    head = f"{one['task']}: {one['metric']:.2f}, full training {one['full']:.2f}, {one['seeds']} seeds, rate x {one['factor']:g}"
    said = [f"  {name:54}{number}" for name, number in numbers.items()]
    return [head, *said, *(f"  {sentence}" for sentence in one["off"])]


def _said(finding: str) -> str:
    return "cannot tell" if finding == "unclear" else finding


def _interval(paired: Paired, form: str) -> str:
    if paired.low is None or paired.high is None:
        return f"{paired.mean:{form}}"
    return f"{paired.mean:{form}} [{paired.low:{form}}, {paired.high:{form}}]"


def _notes(row: Row, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what the signal is worth, how much is corrected for, and where each number comes from."""
    placebos = [one["against"]["placebo"][1] for one in found if "placebo" in one["against"]]
    matters = f"Signal matters (better than permuted signals) on {placebos.count('better')} of {len(placebos)} tasks."
    same_time = [one["against"][SAME_TIME][1] for one in found if SAME_TIME in one["against"]]
    repeated = sum(one["repeated"] for one in found)
    seeds = sum(one["seeds"] for one in found)
    said = [
        f"No placebo: {row.no_placebo}." if row.no_placebo else matters,
        f"Better than fewer epochs in the same time on {same_time.count('better')} of {len(same_time)} tasks, worse on "
        f"{same_time.count('worse')}.",
        f"Findings are corrected by Holm over this row, and intervals are not: a finding may be open beside an interval without 0. "
        f"No loss excludes a loss of {MARGIN:g} points.",
        "The method, its placebo, full training and fewer epochs in the same time were trained here; full training and the "
        "method in turns, so their CPU times compare. The other controls are committed runs of the same seeds, and their "
        "times are not used.",
        f"Full training here has the committed metric, digit for digit, on {repeated} of {seeds} seeds.",
    ]
    if repeated < seeds:
        said.append(
            "The controls from committed runs were trained by other versions or on another kind of machine: differences to "
            "them include what that changes."
        )
    far = [one for one in found if abs(one["cost"].mean - SHARE) > FAR_FROM_HALF]
    if far:
        costs = ", ".join(f"{one['cost'].mean:.2f} on {one['task']}" for one in far)
        said.append(
            f"The committed controls cost {SHARE:g}, and the method {costs}: differences to them are not at equal cost."
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
        f"up to {row.most} trainings on {', '.join(row.tasks)}, into {folder}; the same command goes on"
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
