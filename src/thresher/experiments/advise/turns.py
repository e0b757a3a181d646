"""Times several things in turns, so that what disturbs the machine for a while disturbs all of them alike."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from thresher.experiments.training.loop import Clock


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
