"""What a step of full training takes, part by part, timed in turns on batches that are prepared before."""

import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from thresher import to_device
from thresher.cost import break_even
from thresher_lab.training.loop import Clock, sizes_of


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


def time_steps(batches: Iterable[Any], act: Callable[[Any], Any], count: int) -> Spent:
    """Times a function over batches until all work is done, on the device as well.

    Args:
        batches: The batches, `count` of them.
        act: Function that is called with each batch.
        count: Number by which the times are divided.

    Returns:
        Seconds per batch.
    """
    clock = Clock()
    with clock.running():
        for batch in batches:
            act(batch)
    return Spent(clock.wall_s / count, clock.cpu_s / count)


def take_turns(
    sides: Sequence[Callable[[], Spent]],
    *,
    rounds: int,
    seed: int,
    calls: int = 1,
    warm_up: int = 1,
    last: Sequence[Callable[[], Spent] | None] = (),
) -> list[list[Spent]]:
    """Calls functions that time themselves, in turns and in an order that is drawn anew each time.

    Args:
        sides: The functions to compare.
        rounds: Number of rounds.
        seed: Random seed of the order; no global random state is used.
        calls: Number of calls of each function in a round.
        warm_up: Number of calls of each function before the first round, which are not counted.
        last: Functions that are called at the end of each round, one per side; None where a side has none.

    Returns:
        Seconds of each side in each round, summed over the calls of the round.
    """
    draw, order = random.Random(seed), list(range(len(sides)))
    for _ in range(warm_up):
        for side in sides:
            side()
    times: list[list[Spent]] = [[] for _ in sides]
    for _ in range(rounds):
        of_round: list[list[Spent]] = [[] for _ in sides]
        for _ in range(calls):
            draw.shuffle(order)
            for i in order:
                of_round[i].append(sides[i]())
        for i, finish in enumerate(last):
            if finish is not None:
                of_round[i].append(finish())
        for of_side, found in zip(times, of_round, strict=True):
            of_side.append(Spent(sum(spent.wall for spent in found), sum(spent.cpu for spent in found)))
    return times


class PreparedBatch(NamedTuple):
    """A batch that is already collated."""

    batch: Any


class PreparedBatches(Dataset[Any]):
    """A dataset of samples whose batches are already collated and on the device.

    Args:
        samples: Samples of the user's dataset.
        batches: Batches of all samples, in order.
        size: Number of samples of each batch.

    Attributes:
        times: Number of times that the same samples come, one after the other; below 1, the first of them. Default: 1.
    """

    def __init__(self, samples: Sequence[Any], batches: Sequence[Any], size: int) -> None:
        self._samples, self._batches, self._size = samples, batches, size
        self.times = 1.0

    def __len__(self) -> int:
        return round(self.times * len(self._samples))

    def __getitem__(self, i: int) -> Any:
        return self._samples[i % len(self._samples)]

    def __getitems__(self, ids: Sequence[int]) -> PreparedBatch:
        """Returns the batch that begins with the first of the ids."""
        return PreparedBatch(self._batches[ids[0] % len(self._samples) // self._size])


def prepared_loader(
    loader: DataLoader[Any], batches: int, device: torch.device, seed: int, *, halves: bool = False
) -> DataLoader[Any]:
    """Returns a loader of `PreparedBatches`, made of random samples of another loader's dataset.

    Args:
        loader: The loader whose dataset, batch size and collate function are used.
        batches: Number of batches at most; one batch of all samples where there are fewer than a batch.
        device: Device that the batches are moved to.
        seed: Random seed that decides which samples are taken.
        halves: Whether batches have half of the size. Default: False.
    """
    dataset: Any = loader.dataset
    size = min(sizes_of(loader)[1], len(dataset)) // (1 + halves)
    wanted = min(batches, len(dataset) // size) * size
    ids = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
    samples, collate = [dataset[i] for i in ids], loader.collate_fn
    prepared = [to_device(collate(samples[i : i + size]), device) for i in range(0, wanted, size)]

    def collate_or_unwrap(found: Any) -> Any:
        return found.batch if isinstance(found, PreparedBatch) else collate(found)

    return DataLoader(PreparedBatches(samples, prepared, size), batch_size=size, collate_fn=collate_or_unwrap)


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
            overlap. Without "forward" and "both", `forward` is all of it; without "scoring", it takes as long as `forward`.
    """
    loader, compute = seconds["loader"], seconds["compute"]
    forward = min(seconds.get("forward", compute), compute)
    backward = min(max(seconds.get("both", compute) - forward, 0.0), compute - forward)
    both_at_once = loader + compute - seconds.get("loop", loader + compute)
    overlap = min(1.0, max(0.0, both_at_once / min(loader, compute)))
    return Pace(
        loader, forward, backward, compute - forward - backward, seconds.get("scoring", forward), overlap, seconds.get("half")
    )


def pace_of_rounds(rounds: Sequence[Mapping[str, Spent]], *, by_cpu: bool, accumulate: int = 1) -> Pace:
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
                ratios.append(_seconds(times[name], cpu=cpu) / max(_computing(times, cpu=cpu), 1e-12))
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
