"""The ranks of a training run as processes of torch.distributed, and the check that all have the same settings."""

import atexit
import hashlib
import json
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from thresher.warning import warn

PATIENCE = timedelta(seconds=60)
"""Time that a rank waits for the others in a function that the loop may have called on one rank only."""
BETWEEN_LOOKS_S = 0.01
"""Seconds between two checks of a waiting rank."""
BEFORE_EXIT_S = 0.1
"""Seconds that the exit of a process waits for the threads of its process group."""


T = TypeVar("T")


class World(ABC):
    """The processes (ranks) of a training run, which all call the same functions in the same order. Rank 0 stores the records.

    Values to send may be plain values, tensors on the CPU, and dicts, lists and tuples of these.
    """

    rank: int = 0
    """Number of this process, [0, size)."""
    size: int = 1
    """Number of processes, 1 or more."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the records and makes the plans."""
        return self.rank == 0

    @abstractmethod
    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, which must have the same shape and dtype, stacked: shape (size, *shape)."""

    @abstractmethod
    def every(self, value: T) -> list[T]:
        """Returns the values of all ranks."""

    @abstractmethod
    def _broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0."""

    @abstractmethod
    def _send(self, value: Any) -> None:
        """Sends a value to rank 0."""

    @abstractmethod
    def _receive(self, rank: int) -> Any:
        """Returns the next value that another rank sends to rank 0; only rank 0 calls it."""

    def from_first(self, make: Callable[[], T]) -> T:
        """Calls a function in rank 0, and returns its result in all ranks.

        Args:
            make: Function without arguments.

        Raises:
            Exception: The function raised it in rank 0; all ranks raise it.

        Example:
            >>> ALONE.from_first(lambda: 3)
            3
        """
        if self.size == 1:
            return make()
        if self.rank:
            value, error = self._broadcast(None)
            if error is not None:
                raise error
            return value
        try:
            value = make()
        except Exception as error:
            try:
                # The other ranks already wait in a broadcast. If they did not get the error, they would wait until their group
                # times out.
                self._broadcast((None, error))
            except (pickle.PicklingError, TypeError, AttributeError):
                # An error of a class that cannot be sent. Pickling comes before sending, so the ranks still wait for a value.
                self._broadcast(
                    (None, RuntimeError(f"process 0 raised {type(error).__name__}: {error}"))
                )
            raise
        self._broadcast((value, None))
        return value

    def to_first(self, values: Iterable[T]) -> Iterator[T]:
        """Sends values to rank 0, which yields the values of all ranks, the last rank first; other ranks yield nothing.

        Rank 0 has one value at a time in memory.

        Args:
            values: Values of this rank, none of which is None.

        Example:
            >>> list(ALONE.to_first([1, 2]))
            [1, 2]
        """
        if self.rank:
            for value in values:
                self._send(value)
            self._send(None)
            return
        # Later values overwrite earlier ones in the records, so rank 0 comes last: if several ranks have a sample, the lowest
        # rank counts.
        for rank in range(self.size - 1, 0, -1):
            while (value := self._receive(rank)) is not None:
                yield value
        yield from values

    def meet(self, what: str, *, patient: bool = False) -> None:
        """Waits until all ranks have called this function; gives up after some time.

        Args:
            what: Name of what all ranks must call, for the message.
            patient: Whether to warn about missing ranks after that time and keep waiting, instead of raising an error. Default:
                False.

        Raises:
            RuntimeError: A rank did not call it in time.
        """
        # Any collective call waits for all ranks; the sum itself is not used.
        self.total(len(what))

    def share_of_mean(self, count: int, device: torch.device) -> Tensor:
        """Returns the factor by which this rank must multiply the mean over its rows, shape (), float64.

        The mean of the products over the ranks is then the mean over the rows of all ranks. The factor is size * count /
        (number of rows of all ranks).

        Args:
            count: Number of rows of this rank.
            device: Device of the result.
        """
        # In float64, which represents any number of rows exactly; float32 does so only up to 2**24.
        return torch.full(
            (), self.size * count / max(1, self.total(count)), dtype=torch.float64, device=device
        )

    def total(self, number: int) -> int:
        """Returns the sum of the numbers of all ranks.

        Args:
            number: Number of this rank.
        """
        return int(self.gather(np.array([number], dtype=np.int64)).sum())


class Alone(World):
    """The world of a training run in one process.

    Example:
        >>> ALONE.total(3), ALONE.gather(np.array([1, 2]))
        (3, array([[1, 2]]))
    """

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the values with a dimension for the only rank, shape (1, *shape)."""
        return values[None]

    def every(self, value: T) -> list[T]:
        """Returns the only value."""
        return [value]

    def _broadcast(self, value: Any) -> Any:
        return value

    def _send(self, value: Any) -> None: ...

    def _receive(self, rank: int) -> Any: ...


ALONE = Alone()
"""World of a training run in one process."""


@cache
def _let_threads_of_gloo_end() -> None:
    """Makes the exit of the process wait for the threads of gloo."""
    # These threads free the tensors of the last collective call. torch does not wait for them, and if a thread frees a tensor
    # while the interpreter shuts down, the process aborts.
    atexit.register(time.sleep, BEFORE_EXIT_S)


class ProcessWorld(World):
    """The processes of a process group of torch.distributed.

    Args:
        group: Process group; None for the default group. The backend "nccl" sends tensors from the current CUDA device, other
            backends from the CPU.

    Raises:
        RuntimeError: torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group first"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise RuntimeError(
                "`process_group` does not contain this process; pass a group that does"
            )
        self.rank = rank
        self.size = dist.get_world_size(group)
        self._group = group
        nccl = dist.get_backend(group) == "nccl"
        if not nccl:
            _let_threads_of_gloo_end()
        # nccl sends no CPU memory. The device is fixed here, because the loop may change the current device later.
        if nccl:
            self._device = torch.device("cuda", torch.cuda.current_device())
        else:
            self._device = torch.device("cpu")

    def meet(self, what: str, *, patient: bool = False) -> None:
        """Waits until all ranks have called this function, for at most `PATIENCE`; see `World`."""
        # Through the store of the process group, not by a collective call, because missing ranks may be in a collective call of
        # the training, with which this call would mix. The keys contain the number of finished meetings, so that a second
        # meeting does not find the ranks of the
        # first.
        whole: Any = dist.group.WORLD
        group: Any = self._group or whole
        store = whole.get_group_store()
        room = f"thresher/{group.group_name}/{dist.get_global_rank(group, 0)}"
        place = f"{room}/{store.add(f'{room}/over', 0)}"
        store.set(f"{place}/rank/{self.rank}", "here")
        if store.add(place, 1) == self.size:
            store.add(f"{room}/over", 1)
            store.set(f"{place}/all", "here")
            return
        end = time.monotonic() + PATIENCE.total_seconds()
        # A rank that gives up takes its count back. If all ranks have come at this moment, it is too late to give up, so it
        # continues.
        while not store.check([f"{place}/all"]):
            late = time.monotonic() > end
            missing = [
                rank
                for rank in range(self.size)
                if late and not store.check([f"{place}/rank/{rank}"])
            ]
            said = (
                f"{what} was reached in process {self.rank} of {self.size}, but not within {PATIENCE.total_seconds():g} s in "
                f"process {', '.join(map(str, missing))}."
            )
            if missing and patient:
                warn(f"{said} Still waiting: all processes must reach it.")
                end = float("inf")
            elif late and not patient and store.add(place, -1) < self.size - 1:
                raise RuntimeError(
                    f"{said} Call it in every process, even if only one writes the file. Nothing was sent, and training can "
                    "continue."
                )
            time.sleep(BETWEEN_LOOKS_S)

    def share_of_mean(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns the factor for the mean over the rows of this rank; see `World`. Never waits for the device."""
        # This runs in each step, so the number stays on the device. At least 1, because 0 / 0 is NaN if no rank keeps a row.
        rows = torch.full((), count, dtype=torch.float64, device=device)
        dist.all_reduce(rows, group=self._group)
        return self.size * count / rows.clamp(min=1)

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, which must have the same shape and dtype, stacked: shape (size, *shape)."""
        # The values are sent as bytes, because gloo does not support every dtype. They are copied, because torch warns about
        # arrays that cannot be written, such as those of np.frombuffer in `agree`.
        sent = torch.from_numpy(values.reshape(-1).view(np.uint8).copy()).to(self._device)
        every = torch.empty((self.size, len(sent)), dtype=torch.uint8, device=self._device)
        dist.all_gather(list(every.unbind()), sent, group=self._group)
        return every.cpu().numpy().reshape(-1).view(values.dtype).reshape(self.size, *values.shape)

    def every(self, value: T) -> list[T]:
        """Returns the values of all ranks."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, self._global(0), group=self._group, device=self._device)
        return box[0]

    def _send(self, value: Any) -> None:
        dist.send_object_list([value], self._global(0), group=self._group, device=self._device)

    def _receive(self, rank: int) -> Any:
        box = [None]
        dist.recv_object_list(box, self._global(rank), group=self._group, device=self._device)
        return box[0]

    def _global(self, rank: int) -> int:
        group: Any = self._group or dist.group.WORLD
        return dist.get_global_rank(group, rank)


PLAIN = (bool, int, float, str, type(None))
RANK_ATTRIBUTES = frozenset({"rank"})
"""Attributes of a sampler that differ from rank to rank."""

LONGEST = 200
"""Largest number of characters of a value in a message."""


class DisagreementError(RuntimeError):
    """The ranks of a training run have different settings; every rank raises the error, which names the settings."""


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Checks that all ranks have the same settings. If they do, each rank sends only 8 bytes.

    Args:
        world: The ranks.
        facts: Settings by name: plain values, tensors, generators, or objects with a `repr` that shows their settings.

    Raises:
        DisagreementError: A setting differs; all ranks raise it.

    Example:
        >>> agree(ALONE, {"seed": 0, "epochs": 5})
    """
    # A digest first. Only if digests differ do the ranks send the texts of their settings, for the error message.
    described_facts = {name: describe_setting(value) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(described_facts, sort_keys=True).encode()).digest()[:8]
    digests = world.gather(np.frombuffer(digest, dtype=np.int64))
    if (digests == digests[0]).all():
        return
    every = world.every(described_facts)
    # A rank may have settings that others lack, such as those of a sampler of another class.
    names = [*facts, *sorted({name for one in every for name in one} - set(facts))]
    lines = [
        f"  {_difference(name, [one.get(name, 'missing') for one in every])}" for name in names
    ]
    raise DisagreementError(
        "The processes of this run were started with different settings:\n"
        + "\n".join(line for line in lines if line.strip())
        + "\nStart all of them with the same settings."
    )


def _difference(name: str, values: Sequence[str]) -> str:
    """Returns a sentence with the values of a setting and their ranks; "" if all values are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    parts = [f"{value[:LONGEST]} on {_list_ranks(those)}" for value, those in ranks.items()]
    return f"{name} is {', and '.join(parts)}."


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"


def describe_setting(value: Any) -> str:
    """Describes a setting in a text that is the same on all ranks if the values are equal.

    Args:
        value: A plain value, a tensor, an array, a generator, a sequence or mapping of these, or any object; an object with
            the default `repr` is described by its class.

    Example:
        >>> describe_setting(torch.arange(3)), describe_setting(object())
        ('int64 of shape (3,), ab25350e', 'object')
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"Generator, {_digest(value.get_state().numpy())}"
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype} of shape {array.shape}, {_digest(array)}"
    if isinstance(value, Mapping):
        return repr({str(name): describe_setting(one) for name, one in value.items()})
    if isinstance(value, list | tuple | range):
        if len(value) > 8:
            # The texts of all ranks are sent and go into a message, so the text of a list of a million ids must be short.
            return f"{type(value).__name__} of {len(value)}, {_digest(np.frombuffer(repr(value).encode(), dtype=np.uint8))}"
        return repr([describe_setting(one) for one in value])
    # The default `repr` shows an address, which differs from process to process: only the class can be compared.
    if type(value).__repr__ is object.__repr__:
        return type(value).__name__
    return repr(value)


def _digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:8]


def sampler_facts(sampler: Any) -> dict[str, Any]:
    """Returns the settings of a sampler for `agree`, without the rank.

    Args:
        sampler: Sampler of a DataLoader.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> facts = sampler_facts(DistributedSampler(range(10), num_replicas=2, rank=1, seed=3))
        >>> facts["sampler"], facts["sampler.seed"], facts["sampler.dataset"], "sampler.rank" in facts
        ('DistributedSampler', 3, 10, False)
    """
    facts: dict[str, Any] = {"sampler": type(sampler).__name__}
    for name, value in sorted(getattr(sampler, "__dict__", {}).items()):
        # Samplers keep their rank as `rank` or `_rank`.
        if name.strip("_") in RANK_ATTRIBUTES:
            continue
        known = isinstance(
            value, (*PLAIN, torch.Generator, Tensor, np.ndarray, list, tuple, Mapping)
        )
        if known or isinstance(value, Sized):
            # A dataset is compared by its length: to read its samples could take as long as an epoch.
            facts[f"sampler.{name}"] = value if known else len(value)
    return facts
