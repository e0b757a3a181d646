"""Ranks that are threads of this process: code for shards is tried with any number of ranks, without starting processes."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from thresher.distributed.world import CountedWorld

T = TypeVar("T")

PATIENCE = 60.0
"""Number of seconds that a rank waits for the others, by default."""


class LeftAloneError(RuntimeError):
    """Another rank has failed, or did not come to a call within the time that a rank waits."""


class Round:
    """One call of all ranks.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.values: dict[int, Any] = {}
        self.calls: set[str] = set()
        self.answer: Callable[[], Any] = _left_alone
        """Function that returns the result, or raises the error, of the call."""
        self.doors = [threading.Lock() for _ in range(size)]
        for door in self.doors:
            door.acquire()

    def finish(self, combine: Callable[[list[Any]], Any]) -> None:
        """Makes the result of the values of all ranks, and lets the ranks go on with it."""
        if len(self.calls) > 1:
            error = RuntimeError(f"the ranks are in different calls: {', '.join(sorted(self.calls))}")
            self.answer = lambda: _fail(error)
        else:
            result = combine([self.values[rank] for rank in range(len(self.doors))])
            self.answer = lambda: result
        self.open()

    def open(self) -> None:
        """Lets the ranks go on."""
        for door in self.doors:
            door.release()


def _fail(error: BaseException) -> NoReturn:
    raise error


def _left_alone() -> NoReturn:
    raise LeftAloneError("another rank has failed, or did not come to this call")


class Meeting:
    """Where the threads of a world meet.

    Args:
        size: Number of ranks.
        patience: Number of seconds that a rank waits for the others before it gives up.
    """

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self._size, self._patience = size, patience
        self._lock = threading.Lock()
        self._round = Round(size)
        self._is_over = False

    def agree(self, rank: int, call: str, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Returns what a function makes of the values of all ranks; it is called once.

        Args:
            rank: Number of the rank.
            call: Description of the call, the same on all ranks.
            value: Value of this rank.
            combine: Function of the values in the order of the ranks.

        Raises:
            RuntimeError: The ranks are in different calls, with which processes would wait for ever or mix up their data.
            LeftAloneError: Another rank has failed, or did not come.
        """
        with self._lock:
            here = self._round
            here.values[rank] = value
            here.calls.add(call)
            complete = len(here.values) == self._size and not self._is_over
            if complete:
                self._round = Round(self._size)
        if complete:
            here.finish(combine)
        elif not self._is_over and not here.doors[rank].acquire(timeout=self._patience):
            self.leave()
        return here.answer()

    def leave(self) -> None:
        """Lets the ranks that wait fail, since one will not come."""
        with self._lock:
            first, self._is_over = not self._is_over, True
            if first:
                self._round.open()


class ThreadWorld(CountedWorld):
    """One rank of a world of threads; what it receives is read-only.

    Args:
        rank: Number of the rank.
        size: Number of ranks.
        meeting: Where the ranks meet.
    """

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting

    def _sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        call = f"sum of {numbers.dtype} of shape {numbers.shape}"
        return self._meeting.agree(self.rank, call, numbers, lambda every: _sealed(np.sum(every, axis=0)))

    def _gather(self, values: NDArray[Any]) -> NDArray[Any]:
        call = f"gather of {values.dtype} of shape {values.shape}"
        return self._meeting.agree(self.rank, call, values, lambda every: _sealed(np.stack(every)))

    def _exchange(self, parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
        call = f"exchange of {parts[0].dtype}"
        every = self._meeting.agree(self.rank, call, parts, lambda every: every)
        return [_sealed(sent[self.rank].copy()) for sent in every]


def _sealed(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def on_ranks(size: int, function: Callable[[ThreadWorld], T], *, patience: float = PATIENCE) -> list[T]:
    """Calls a function on every rank of a world of threads.

    Args:
        size: Number of ranks, 1 or more.
        function: Function of the world of a rank.
        patience: Number of seconds that a rank waits for the others before it gives up.

    Returns:
        Results in the order of the ranks.

    Raises:
        BaseException: The error of the lowest rank that failed by itself.

    Example:
        >>> on_ranks(3, lambda world: world.total(world.rank))
        [3, 3, 3]
    """
    meeting = Meeting(size, patience)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank, size, meeting))
        except BaseException as error:
            errors[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = [rank for rank, error in errors.items() if not isinstance(error, LeftAloneError)]
        raise errors[min(own or errors)]
    return [results[rank] for rank in range(size)]
