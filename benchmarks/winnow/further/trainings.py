"""The ways that were trained, their looks at the rates and their counted seeds.

All of them are compared with Winnow's first version, since removed: their trainings can be read, and not be made again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.winnow.jobs import FIRST_LOOK, Done, Job

TASKS = ("fashion-10k", "fashion-augmented-10", "fashion-10k-noisy")
BUDGET = 0.5
FACTORS = (0.6, 1.0, 1.6)
LOOKS = 2
SEEDS = 6

BASE = "winnow"
"""Name of the way that all others are compared with."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        name: Name in the table.
        of: Name of the way whose trainings it is measured in. Default "": its own.
        measure: Name of the measure that rates are chosen by, and that counts.
        attempt: Whether it is an attempt to go further than Winnow, rather than a way to compare with.
    """

    name: str
    of: str = ""
    measure: str = "metric"
    attempt: bool = True

    @property
    def trained_as(self) -> str:
        """The name of the way whose trainings it is measured in."""
        return self.of or self.name


WAYS: Sequence[Way] = (
    Way(BASE, attempt=False),
    Way("averaged uncertainty, factor 0.5"),
    Way("then in the forward pass, by grad_norm"),
    Way("share 0.35 to 0.65"),
    Way("averaged weights", of=BASE, measure="averaged"),
    Way("chosen by a small network's uncertainty"),
    Way("full", attempt=False),
    Way("full, averaged weights", of="full", measure="averaged", attempt=False),
    Way("then in the forward pass, by loss"),
    Way("smaller", attempt=False),
    Way("smaller, averaged weights", of="smaller", measure="averaged", attempt=False),
    Way("chosen by a small network's loss"),
    Way("averaged uncertainty, factor 0.8"),
    Way("share 0.65 to 0.35"),
    Way("then in the forward pass, by uncertainty"),
)
"""All ways, in the order in which they were trained."""


def ready(done: Done, tasks: Sequence[str] = TASKS) -> Iterator[Job]:
    """Yields the trainings: looks at once, and counted ones as soon as their rate is chosen.

    Args:
        done: Results of the trainings that are done.
        tasks: Names of the tasks.
    """
    for way in WAYS:
        for task in tasks:
            yield from looks_of(way, task)
            factor = chosen_factor(done, way, task)
            if factor is not None:
                yield from counted_of(way, task, factor)


def looks_of(way: Way, task: str) -> list[Job]:
    """Returns the trainings that the rate of a way is chosen by."""
    return [
        _job(way, task, factor, FIRST_LOOK + look) for factor in FACTORS for look in range(LOOKS)
    ]


def counted_of(way: Way, task: str, factor: float) -> list[Job]:
    """Returns the counted trainings of a way at a rate."""
    return [_job(way, task, factor, seed) for seed in range(SEEDS)]


def _job(way: Way, task: str, factor: float, seed: int) -> Job:
    return Job(task, way.trained_as, 1.0 if way.trained_as == "full" else BUDGET, factor, seed)


def chosen_factor(done: Done, way: Way, task: str) -> float | None:
    """Returns the factor with the best mean of the way's measure, of equally good ones the smallest; None before all looks."""
    looks = looks_of(way, task)
    if not all(job in done for job in looks):
        return None
    means = {
        factor: fmean(done[job][way.measure] for job in looks if job.factor == factor)
        for factor in FACTORS
    }
    return max(FACTORS, key=lambda factor: (means[factor], -factor))
