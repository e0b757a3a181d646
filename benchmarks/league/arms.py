"""The methods of the league, one a family, and the trainings that it needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.winnow.jobs import ARMS as WINNOW_ARMS
from benchmarks.winnow.jobs import (
    Arm,
    Design,
    Done,
    Job,
    chosen_factor,
    looks_of,
    train_arm,
)
from benchmarks.winnow.tasks import problem_of
from thresher_lab.comparison.controls import as_placebo
from thresher_lab.training.specs import MethodSpec, Spec

TASKS = ("fashion-10k", "fashion-10k-noisy", "fashion-imbalanced", "bike", "text")
DESIGN = Design(shares=(0.5,), seeds=5, tasks=TASKS)
SHARE = 0.5
PLACEBO = " with permuted signals"
"""End of the name of a placebo."""

CONTROLS = ("uniform", "shorter", "smaller")
"""Arms that spend the same cost without a choice."""

BESIDE = ("full", *CONTROLS, "selective_backprop")
"""Arms whose trainings are those of `benchmarks.winnow`."""


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
    _of("infobatch", "leaves out easy samples at random, weighs up", target=0.5),
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
"""The methods, by family. Those inside the batch make one forward pass: a quarter of the rows backward is half of the cost."""


@cache
def arms() -> dict[str, Arm]:
    """Returns all arms by name: those of `benchmarks.winnow`, the methods, and their placebos."""
    found = {arm.name: arm for arm in WINNOW_ARMS if arm.name in BESIDE}
    for entry in ENTRIES:
        found.setdefault(
            entry.name, Arm(entry.name, lambda _, spec=entry.spec: spec, shares=(SHARE,))
        )
        if has_placebo(entry):
            placebo = as_placebo(entry.spec)
            name = entry.name + PLACEBO
            found[name] = Arm(
                name, lambda _, spec=placebo: spec, rate_of=entry.name, shares=(SHARE,)
            )
    return found


def arms_of(task: str) -> list[Arm]:
    """Returns the arms that can be trained on a task."""
    unfit = {
        name
        for entry in ENTRIES
        if not entry.fits(task)
        for name in (entry.name, entry.name + PLACEBO)
    }
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
    return 1.0 if arm.name == "full" else SHARE


def factor_of(done: Done, task: str, arm: Arm) -> float | None:
    """Returns the factor on the rate that an arm is counted with; None before its looks are done."""
    if arm.rate_of:
        return chosen_factor(DESIGN, done, task, replace(arm, name=arm.rate_of, rate_of=""), SHARE)
    return chosen_factor(DESIGN, done, task, arm, share_of(arm))


def counted_jobs(done: Done, task: str, arm: Arm) -> list[Job] | None:
    """Returns the counted trainings of an arm on a task; None before its rate is chosen."""
    factor = factor_of(done, task, arm)
    if factor is None:
        return None
    return [
        Job(task, arm.name, share_of(arm), factor, seed)
        for seed in DESIGN.counted(problem_of(task), SHARE)
    ]


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, placebos after everything else."""
    for placebos in (False, True):
        for task in TASKS:
            for arm in (arm for arm in arms_of(task) if bool(arm.rate_of) is placebos):
                if not placebos:
                    yield from looks_of(DESIGN, task, arm.name, share_of(arm))
                yield from counted_jobs(done, task, arm) or ()


def run(job: Job) -> dict[str, Any]:
    """Trains once, as `benchmarks.winnow` does."""
    return train_arm(job, arms()[job.arm])
