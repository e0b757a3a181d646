"""What a step of full training takes, part by part."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Spent(NamedTuple):
    """Wall and CPU time in seconds."""

    wall: float
    cpu: float


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of CPU threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    def half_share(self) -> float:
        """Time to compute half a batch as a share of that of a whole one, [0.5, 1]."""
        if self.half is None:
            return 0.5
        return min(1.0, max(0.5, self.half / self.compute))

    def step(self, compute: float, load: float = 1.0) -> float:
        """Returns the seconds of a step that loads a share of a batch, by default all of it, and computes for some seconds."""
        loader = load * self.loader
        return max(loader, compute) + (1 - self.overlap) * min(loader, compute)

    def of_smaller(self, share: float) -> float:
        """Returns the time to compute a smaller batch as a share of that of a whole one.

        It is on the line through half a batch and a whole one.

        Args:
            share: Share of a batch, (0, 1].
        """
        return 1 - 2 * (1 - share) * (1 - self.half_share)

    def as_dict(self) -> dict[str, float | None]:
        """Returns the values by name, the derived ones included."""
        derived = {
            name: getattr(self, name) for name in ("compute", "full", "waiting", "half_share")
        }
        return {**vars(self), **derived}


def pace_of_rounds(
    rounds: Sequence[Mapping[str, Spent]], *, by_cpu: bool, accumulate: int = 1
) -> Pace:
    """Returns the pace of a training: medians of the ratios to the time of computing in the same round.

    Args:
        rounds: Seconds of "forward", "backward", "optimizer", "scoring" and "loader" in each round; of "half" (computing half
            a batch) if a batch has halves; and of "loop" (loading and computing) if the two can overlap.
        by_cpu: Whether CPU seconds count for everything but the loader and the loop: other programs disturb them little.
        accumulate: Number of batches for each step of the optimizer. Default: 1.
    """

    def ratio(name: str) -> float | None:
        ratios = []
        for times in rounds:
            if name in times:
                cpu = by_cpu and name not in ("loader", "loop")
                ratios.append(
                    _seconds(times[name], cpu=cpu) / max(_computing(times, cpu=cpu), 1e-12)
                )
        return statistics.median(ratios) if ratios else None

    compute = statistics.median(_computing(times, cpu=by_cpu) for times in rounds)

    def seconds(name: str) -> float:
        return compute * (ratio(name) or 0.0)

    loader = seconds("loader")
    overlap = 0.0
    if loop := seconds("loop"):
        both_at_once = loader + compute - loop
        overlap = min(1.0, max(0.0, both_at_once / max(min(loader, compute), 1e-12)))
    return Pace(
        loader=loader,
        forward=seconds("forward"),
        backward=seconds("backward"),
        optimizer=seconds("optimizer") / accumulate,
        scoring=seconds("scoring"),
        overlap=overlap,
        half=seconds("half") or None,
    )


def _seconds(spent: Spent, *, cpu: bool) -> float:
    return spent.cpu if cpu else spent.wall


def _computing(times: Mapping[str, Spent], *, cpu: bool) -> float:
    return sum(_seconds(times[name], cpu=cpu) for name in ("forward", "backward", "optimizer"))
