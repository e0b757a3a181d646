"""Ranks that are threads of this process: code for several processes is tried with any number of them."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from thresher.distributed.world import World

T = TypeVar("T")

PATIENCE = 60.0
"""Number of seconds that a rank waits for the others."""


class ThreadWorld(World):
    """One rank of a world of threads.

    Args:
        rank: Number of the rank.
        barrier: Barrier of all ranks.
        values: One place for each rank.
        boxes: Queue of messages from each rank to rank 0.
    """

    def __init__(
        self,
        rank: int,
        barrier: threading.Barrier,
        values: list[Any],
        boxes: list["queue.Queue[Any]"],
    ) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._values, self._boxes, self.gathers = barrier, values, boxes, 0

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        self.gathers += 1
        return np.stack(self.every(values))

    def every(self, value: T) -> list[T]:
        self._values[self.rank] = value
        self._barrier.wait(PATIENCE)
        found = list(self._values)
        self._barrier.wait(PATIENCE)
        return found

    def _broadcast(self, value: Any) -> Any:
        return self.every(value)[0]

    def _send(self, value: Any) -> None:
        self._boxes[self.rank].put(value)

    def _receive(self, rank: int) -> Any:
        return self._boxes[rank].get(timeout=PATIENCE)


def on_ranks(size: int, function: Callable[[ThreadWorld], T]) -> list[T]:
    """Calls a function of the world on every rank, and returns its results; raises the error of the lowest rank that failed."""
    barrier, values, boxes = (
        threading.Barrier(size),
        [None] * size,
        [queue.Queue() for _ in range(size)],
    )

    def work(rank: int) -> T:
        try:
            return function(ThreadWorld(rank, barrier, values, boxes))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
