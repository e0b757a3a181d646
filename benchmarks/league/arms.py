"""The methods of the league, one a family, and the trainings that it needs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.kept import RESULTS, read_lines
from benchmarks.league.pooled import FRESH_SEEDS, METHODS
from benchmarks.league.tasks import FIRST as FIRST_PROBLEMS
from benchmarks.league.tasks import TASKS, problem_of
from benchmarks.winnow.jobs import (
    Arm,
    Design,
    Done,
    Job,
    load,
    looks_of,
    train_arm,
)
from thresher_lab.comparison.controls import FULL_TRAINING, SAME_TIME, as_placebo
from thresher_lab.training.specs import MethodSpec, Spec

DESIGN = Design(shares=(0.5,))
SHARE = 0.5
BEYOND = {0.6: (0.22, 0.36), 1.6: (2.56, 4.1)}
"""Two more factors for an arm that is best at an edge of the grid."""
PLACEBO = " with permuted signals"
"""End of the name of a placebo."""
SHORTER = "shorter@"
"""Begin of the name of fewer epochs."""

CONTROLS = ("uniform", "shorter", "smaller", "fewer")
"""Arms that spend the same cost without a choice."""

RUNS, TIMES = RESULTS / "league-runs.jsonl.gz", RESULTS / "league-times.jsonl"
"""Files of the trainings and of the CPU times."""

BESIDE = ("full", "shorter", "selective_backprop")
"""Arms whose trainings in the finished comparison of `winnow-runs.jsonl.gz` are those of the first seeds, too."""


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


@dataclass(frozen=True)
class Round:
    """The trainings of some of the methods.

    Args:
        methods: Names of the methods.
        tasks: Names of the tasks.
        controls: Names of the arms that spend the same cost without a choice.
        seeds: Seeds that count.
        beyond: More factors for an arm that is best with a factor of the grid.
    """

    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    controls: tuple[str, ...]
    seeds: range
    beyond: Mapping[float, tuple[float, ...]] = field(default_factory=dict)

    def entries(self, task: str) -> list[Entry]:
        """Returns the methods that can be trained on a task."""
        return [entry for entry in ENTRIES if entry.name in self.methods and entry.fits(task)]

    def lengths(self, task: str) -> dict[str, float]:
        """Returns the shares of the epochs that fit into the times of the methods, by the name in the table."""
        found = {same_time(task, entry.name) for entry in self.entries(task)}
        return {name_of(share): share for share in sorted(filter(None, found))}

    def looks(self, done: Done, task: str, arm: str, share: float) -> list[Job]:
        """Returns the trainings that the rate of an arm is chosen by, as far as they are known."""
        looks = looks_of(DESIGN, task, arm, share)
        factor = best_factor(done, looks)
        more = () if factor is None else self.beyond.get(factor, ())
        return looks + looks_of(replace(DESIGN, factors=more), task, arm, share)

    def counted(self, done: Done, task: str, name: str) -> list[Job] | None:
        """Returns the trainings of an arm that count; None before its rate is chosen.

        Args:
            done: Results of the trainings.
            task: Name of the task.
            name: Name of the arm in the table; that of a placebo takes the rate of its method.
        """
        share = self.share(task, name)
        looks = self.looks(done, task, arm_of(name.removesuffix(PLACEBO)), share)
        factor = best_factor(done, looks)
        if factor is None:
            return None
        return [Job(task, arm_of(name), share, factor, seed) for seed in self.seeds]

    def share(self, task: str, name: str) -> float:
        """Returns the share of the cost, or of the epochs, of an arm."""
        return 1.0 if name == "full" else self.lengths(task).get(name, SHARE)

    def missing(self, done: Done, task: str, name: str) -> Iterator[Job]:
        """Yields the trainings of an arm that can run now and were not run; the arguments are those of `counted`."""
        jobs = self.counted(done, task, name)
        if jobs is None and not name.endswith(PLACEBO):
            jobs = self.looks(done, task, arm_of(name), self.share(task, name))
        yield from (job for job in jobs or () if job not in done)

    def names(self, task: str) -> list[str]:
        """Returns the names of the arms, placebos last."""
        methods = self.entries(task)
        placebos = [entry.name + PLACEBO for entry in methods if has_placebo(entry)]
        first = ["full", *self.controls, *(entry.name for entry in methods)]
        return [*dict.fromkeys([*first, *self.lengths(task), *placebos])]


def arm_of(name: str) -> str:
    """Returns the arm of a name in the table."""
    return SAME_TIME if name.startswith(SHORTER) else name


def best_factor(done: Done, looks: Sequence[Job]) -> float | None:
    """Returns the factor with the best mean metric, the smallest of equally good ones; None before all looks are done."""
    if not all(job in done for job in looks):
        return None
    metrics: dict[float, list[float]] = {}
    for job in looks:
        metrics.setdefault(job.factor, []).append(done[job]["metric"])
    return max(metrics, key=lambda factor: (fmean(metrics[factor]), -factor))


FIRST = Round(
    tuple(entry.name for entry in ENTRIES if entry.name not in METHODS),
    tuple(problem.task.name for problem in FIRST_PROBLEMS),
    CONTROLS,
    range(5),
)
"""The first seeds, which suggested the methods of the others, and decide nothing."""
FRESH = Round(METHODS, TASKS, ("smaller",), FRESH_SEEDS, BEYOND)
"""The trainings that decide."""


@cache
def arms() -> dict[str, Arm]:
    """Returns all arms by name: full training and controls, the methods, and their placebos."""
    found = {
        "full": Arm("full", lambda _: FULL_TRAINING),
        "smaller": _arm("smaller", MethodSpec("uniform", {"keep": SHARE}, {"spend": "batches"})),
        "shorter": Arm("shorter", lambda _: FULL_TRAINING, shorter=True),
        "uniform": _arm("uniform", MethodSpec("uniform", {"keep": SHARE})),
        "fewer": _arm("fewer", MethodSpec("uniform", {"keep": SHARE, "fixed": True})),
        SAME_TIME: Arm(SAME_TIME, lambda _: FULL_TRAINING, shorter=True),
    }
    for entry in ENTRIES:
        found[entry.name] = _arm(entry.name, entry.spec)
        if has_placebo(entry):
            name = entry.name + PLACEBO
            found[name] = _arm(name, as_placebo(entry.spec))
    return found


def _arm(name: str, spec: Spec) -> Arm:
    return Arm(name, lambda _: spec)


def has_placebo(entry: Entry) -> bool:
    """Returns whether a method chooses by signals, which can be permuted."""
    try:
        as_placebo(entry.spec)
    except ValueError:
        return False
    return True


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


def same_time(task: str, name: str) -> float | None:
    """Returns the share of the epochs of full training that fit into the time of a method; None where it is not measured yet.

    Times are rounded to tenths of that of full training, so that methods have their control in common.

    Args:
        task: Name of the task.
        name: Name of the method.
    """
    measured = share_of_time(task, name)
    return None if measured is None else max(0.1, min(1.0, round(measured, 1)))


def name_of(share: float) -> str:
    """Returns the name of fewer epochs in the table, such as `shorter@0.6`; full training and half of its epochs have theirs."""
    return {1.0: "full", SHARE: "shorter"}.get(share, f"{SHORTER}{share:g}")


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, placebos of a task last."""
    for task in TASKS:
        for name in FRESH.names(task):
            yield from FRESH.missing(done, task, name)


@cache
def shared() -> Done:
    """Returns the committed trainings of the finished comparison that are those of the league, too."""
    done = load(RESULTS / "winnow-runs.jsonl.gz")
    return {job: result for job, result in done.items() if job.arm in BESIDE}


def run(job: Job) -> dict[str, Any]:
    """Trains once, as `train_arm` does; the result also names the method with its settings."""
    arm = arms()[job.arm]
    return {**train_arm(job, arm, problem_of(job.task)), "spec": arm.spec(job.share).label}
