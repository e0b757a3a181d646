"""The methods of the league, one a family, and the trainings that it needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.kept import RESULTS, read_lines
from benchmarks.league.tasks import TASKS, UNLIKE_LENGTHS, problem_of
from benchmarks.winnow.jobs import (
    Arm,
    Design,
    Done,
    Job,
    chosen_factor,
    load,
    looks_of,
    train_arm,
)
from thresher_lab.comparison.controls import FULL_TRAINING, SAME_TIME, as_placebo
from thresher_lab.training.specs import MethodSpec, Spec

DESIGN = Design(shares=(0.5,), seeds=5, tasks=TASKS)
SHARE = 0.5
PLACEBO = " with permuted signals"
"""End of the name of a placebo."""

CONTROLS = ("uniform", "shorter", "smaller", "fewer")
"""Arms that spend the same cost without a choice."""

RUNS, TIMES = RESULTS / "league-runs.jsonl.gz", RESULTS / "league-times.jsonl"
"""Files of the trainings and of the CPU times."""
GROUPED = "full, batches by length"
"""Full training with batches of samples of similar lengths, on tasks whose samples have unlike lengths."""

BESIDE = ("full", "shorter", "selective_backprop")
"""Arms whose trainings in the finished comparison of `winnow-runs.jsonl.gz` are those of this version, too."""


@dataclass(frozen=True)
class Entry:
    """A method of the league.

    Args:
        name: Name in the table.
        family: Name of what its family has in common.
        spec: The method with its settings.
        unfit: Kinds of tasks that the method cannot be trained on, for want of classes or of one class a sample. Default: none.
    """

    name: str
    family: str
    spec: Spec
    unfit: tuple[str, ...] = ()

    def fits(self, task: str) -> bool:
        """Returns whether the method can be trained on a task."""
        return problem_of(task).kind not in self.unfit


def _of(
    name: str, family: str, *, once: bool = False, unfit: tuple[str, ...] = (), **settings: Any
) -> Entry:
    return Entry(
        name, family, MethodSpec(name, settings, {"forward_passes": "once"} if once else {}), unfit
    )


ENTRIES: Sequence[Entry] = (
    _of(
        "kakurenbo",
        "hides the easiest of an epoch",
        unfit=("values",),
        max_fraction=0.75,
        reduce_fraction=False,
    ),
    _of("winnow", "visits what the network is least certain about", share=0.5),
    _of("infobatch", "leaves out easy samples at random, weighs up", prune_fraction=0.7),
    _of("seta", "a window of losses that moves", target=0.5),
    _of("repb", "leaves out by the loss of the epoch, weighs up", target=0.5),
    _of("ies", "leaves out what changes no more", target=0.35),
    _of("order_dp", "largest losses of a random pool", keep=0.5),
    _of("ucb", "a bandit's bound on the loss", keep=0.5),
    _of("rcap", "a budget for each class", unfit=("values", "positions"), keep=0.5),
    _of("importance_sampling", "draws with replacement by loss", keep=0.5),
    _of("selective_backprop", "backpropagates large losses of the batch", once=True, keep=0.25),
    _of(
        "ada_selection",
        "mixes selectors in the batch",
        once=True,
        keep=0.25,
        importance="softmax",
        gamma=0.5,
    ),
    _of("threshold_keep", "keeps by gradient norm, without bias", once=True, keep=0.25),
    _of("div_bs", "rows of the batch that differ", once=True, keep=0.25, gradient="outputs"),
)
"""The methods, by family. Those inside the batch make one forward pass: a quarter of the rows backward is half of the cost.

InfoBatch has its largest published prune fraction. With `target=0.5` its steps are 3.5 times as large: 1 or 2 of 5 trainings on
three tasks with images failed.
"""


@cache
def arms() -> dict[str, Arm]:
    """Returns all arms by name: full training and controls, the methods, and their placebos."""
    found = {
        "full": Arm("full", lambda _: FULL_TRAINING, shares=(1.0,)),
        "smaller": _arm("smaller", MethodSpec("uniform", {"keep": SHARE}, {"spend": "batches"})),
        "shorter": Arm("shorter", lambda _: FULL_TRAINING, shorter=True),
        "uniform": _arm("uniform", MethodSpec("uniform", {"keep": SHARE})),
        "fewer": _arm("fewer", MethodSpec("uniform", {"keep": SHARE, "fixed": True})),
    }
    found[GROUPED] = Arm(GROUPED, lambda _: FULL_TRAINING, shares=(1.0,))
    found[SAME_TIME] = Arm(SAME_TIME, lambda _: FULL_TRAINING, shorter=True)
    for entry in ENTRIES:
        found.setdefault(entry.name, _arm(entry.name, entry.spec))
        if has_placebo(entry):
            name = entry.name + PLACEBO
            found[name] = replace(_arm(name, as_placebo(entry.spec)), rate_of=entry.name)
    return found


def _arm(name: str, spec: Spec) -> Arm:
    return Arm(name, lambda _: spec, shares=(SHARE,))


def arms_of(task: str) -> list[Arm]:
    """Returns the arms that are trained on a task; fewer epochs in the same time are not among them, see `same_time`."""
    unfit = {
        name
        for entry in ENTRIES
        if not entry.fits(task)
        for name in (entry.name, entry.name + PLACEBO)
    }
    unfit.add(SAME_TIME)
    if task not in UNLIKE_LENGTHS:
        unfit.add(GROUPED)
    return [arm for name, arm in arms().items() if name not in unfit]


def has_placebo(entry: Entry) -> bool:
    """Returns whether a method chooses by signals, which can be permuted."""
    try:
        as_placebo(entry.spec)
    except ValueError:
        return False
    return True


def share_of(arm: Arm) -> float:
    """Returns the share at which an arm is trained: full training at 1."""
    return arm.shares[0] if len(arm.shares) == 1 else SHARE


@cache
def times() -> dict[str, list[dict[str, list[float]]]]:
    """Returns the measured CPU times by task: for each round, the seconds of each arm; see `benchmarks.league.times`."""
    found: dict[str, list[dict[str, list[float]]]] = {}
    for line in read_lines(TIMES):
        found.setdefault(line["task"], []).append(line["cpu_s"])
    return found


def share_of_time(task: str, name: str) -> float | None:
    """Returns the CPU time of a method as a share of that of full training; None where it is not measured yet.

    Args:
        task: Name of the task.
        name: Name of the method.
    """
    rounds = [seconds for seconds in times().get(task, ()) if name in seconds]
    shares = [fmean(seconds[name]) / fmean(seconds["full"]) for seconds in rounds]
    return fmean(shares) if shares else None


def same_time(task: str, name: str) -> tuple[Arm, float] | None:
    """Returns full training for as many epochs as fit into the time of a method: an arm and its share of the epochs.

    Times are rounded to tenths of that of full training, so that methods have their control in common.

    Args:
        task: Name of the task.
        name: Name of the method.

    Returns:
        None where the time of the method is not measured yet.
    """
    measured = share_of_time(task, name)
    if measured is None:
        return None
    share = max(0.1, min(1.0, round(measured, 1)))
    own = {1.0: "full", SHARE: "shorter"}.get(share, SAME_TIME)
    return arms()[own], share


def factor_of(done: Done, task: str, arm: Arm, share: float | None = None) -> float | None:
    """Returns the factor on the rate that an arm is counted with; None before its looks are done.

    Args:
        done: Results of the trainings.
        task: Name of the task.
        arm: The arm.
        share: Share at which it is trained. Default: `share_of` it.
    """
    if arm.rate_of:
        arm = replace(arm, name=arm.rate_of, rate_of="")
    return chosen_factor(DESIGN, done, task, arm, share or share_of(arm))


def counted_jobs(done: Done, task: str, arm: Arm, share: float | None = None) -> list[Job] | None:
    """Returns the counted trainings of an arm on a task; None before its rate is chosen. The arguments are those of `factor_of`."""
    factor = factor_of(done, task, arm, share)
    if factor is None:
        return None
    return [
        Job(task, arm.name, share or share_of(arm), factor, seed) for seed in range(DESIGN.seeds)
    ]


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, fewer epochs in the same time after everything else, and placebos last."""
    for task in TASKS:
        for arm in (arm for arm in arms_of(task) if not arm.rate_of):
            yield from looks_of(DESIGN, task, arm.name, share_of(arm))
            yield from counted_jobs(done, task, arm) or ()
    for task in TASKS:
        lengths = (same_time(task, entry.name) for entry in ENTRIES if entry.fits(task))
        shares = {share for arm, share in filter(None, lengths) if arm.name == SAME_TIME}
        for share in sorted(shares):
            arm = arms()[SAME_TIME]
            yield from looks_of(DESIGN, task, SAME_TIME, share)
            yield from counted_jobs(done, task, arm, share) or ()
    for task in TASKS:
        for arm in (arm for arm in arms_of(task) if arm.rate_of):
            yield from counted_jobs(done, task, arm) or ()


@cache
def shared() -> Done:
    """Returns the committed trainings of the finished comparison that are those of the league, too."""
    done = load(RESULTS / "winnow-runs.jsonl.gz")
    return {job: result for job, result in done.items() if job.arm in BESIDE}


def run(job: Job) -> dict[str, Any]:
    """Trains once, as `train_arm` does; the result also names the method with its settings."""
    problem = problem_of(job.task, grouped=job.arm == GROUPED)
    arm = arms()[job.arm]
    return {**train_arm(job, arm, problem), "spec": arm.spec(job.share).label}
