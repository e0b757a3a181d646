"""What a step of full training takes, part by part, and how loading and computing overlap."""

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from thresher.cost import break_even
from thresher.experiments.advise.turns import Spent, take_turns


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of a step of full training take.

    Attributes:
        loader: Seconds to get the batch, and nothing else.
        forward: Seconds for the model and the criterion, with gradient.
        backward: Seconds for the backward pass.
        optimizer: Seconds for the optimizer step.
        scoring: Seconds for the model and the criterion in evaluation mode, without gradient.
        overlap: Share of the shorter of loading and computing that happens during the other, [0, 1]. Default: 0.
        half: Seconds to compute half a batch: forward, backward and optimizer. Default None: not measured, and taken to be half
            of `compute`.
    """

    loader: float
    forward: float
    backward: float
    optimizer: float
    scoring: float
    overlap: float = 0.0
    half: float | None = None

    @property
    def compute(self) -> float:
        """Seconds for everything but the loader."""
        return self.forward + self.backward + self.optimizer

    @property
    def full(self) -> float:
        """Seconds for a step of full training."""
        return self.step(self.compute)

    @property
    def waiting(self) -> float:
        """Share of a step in which nothing but loading happens."""
        return 1 - self.compute / self.full

    @property
    def break_even(self) -> float:
        """Share of a batch to keep below which a forward pass that only scores saves time; see `thresher.break_even`."""
        return break_even(self.scoring, max(self.compute - self.scoring, 1e-12))

    @property
    def half_share(self) -> float:
        """Time to compute half a batch as a share of that of a whole one, (0, 1]."""
        return 0.5 if self.half is None else min(1.0, self.half / self.compute)

    def step(self, compute: float, load: float = 1.0) -> float:
        """Returns the seconds of a step that loads a share of a batch, by default all of it, and computes for some seconds."""
        loader = load * self.loader
        return max(loader, compute) + (1 - self.overlap) * min(loader, compute)

    def of_smaller(self, share: float) -> float:
        """Returns the time to compute a smaller batch as a share of that of a whole one.

        It is on the line through half a batch and a whole one, and for less than half a batch at least in proportion.

        Args:
            share: Share of a batch, (0, 1].
        """
        half = self.half_share
        return max(half + (2 * share - 1) * (1 - half), 2 * share * half if share < 0.5 else 0.0)

    def as_dict(self) -> dict[str, float | None]:
        """Returns the values by name, the derived ones included."""
        derived = {name: getattr(self, name) for name in ("compute", "full", "waiting", "half_share")}
        return {**vars(self), **derived}


def median_seconds(
    sides: Mapping[str, Callable[[], Spent]], rounds: int, seed: int, *, by_cpu: Collection[str] = ()
) -> dict[str, float]:
    """Returns the median wall seconds of each side, from its ratios to the first side within a round.

    Args:
        sides: Functions that time themselves, by name; each is called once more before the rounds, to warm up.
        rounds: Number of rounds, each in an order that is drawn anew.
        seed: Random seed of the order.
        by_cpu: Names of the sides whose ratio is taken from CPU seconds, because they wait for nothing: other processes on
            the machine do not disturb it. With the first side among them, the seconds are those of an idle machine.
    """
    times = dict(zip(sides, take_turns(list(sides.values()), rounds=rounds, seed=seed), strict=True))
    first = next(iter(times.values()))

    def ratio(name: str) -> float:
        pairs = zip(times[name], first, strict=True)
        return statistics.median(a.cpu / b.cpu if name in by_cpu else a.wall / b.wall for a, b in pairs)

    baseline = statistics.median(spent.cpu if next(iter(times)) in by_cpu else spent.wall for spent in first)
    return {name: baseline * ratio(name) for name in sides}


def pace_of(seconds: Mapping[str, float]) -> Pace:
    """Derives the parts of a step from the times of growing pieces of it.

    Args:
        seconds: Times of "loader", "forward", "both" (forward and backward), "compute" (with the optimizer) and "scoring";
            of "half" (computing half a batch) where a batch has halves; and of "loop" (loading and computing) where the two can
            overlap.
    """
    loader, compute = seconds["loader"], seconds["compute"]
    forward = min(seconds["forward"], compute)
    backward = min(max(seconds["both"] - forward, 0.0), compute - forward)
    both_at_once = loader + compute - seconds.get("loop", loader + compute)
    overlap = min(1.0, max(0.0, both_at_once / min(loader, compute)))
    return Pace(loader, forward, backward, compute - forward - backward, seconds["scoring"], overlap, seconds.get("half"))
