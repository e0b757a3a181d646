"""The ranks of a training as processes of torch.distributed, and the check that all have the same settings."""

import atexit
import hashlib
import json
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from thresher.shards import World
from thresher.warning import warn

PATIENCE = timedelta(seconds=60)
"""Time that a rank waits for the others if the loop may have called only one rank."""
BETWEEN_LOOKS_S = 0.01
"""Seconds between two checks of a waiting rank."""
BEFORE_EXIT_S = 0.1
"""Seconds that the exit of a process waits for the threads of its process group."""


class CountedWorld(World):
    """A world that counts its calls and their bytes.

    Args:
        rank: Number of this rank, [0, size).
        size: Number of ranks, 1 or more.

    Attributes:
        calls: Number of calls by name: "sum", "gather" and "exchange".
        traffic: Received bytes by the name of the call, including the own part; for "sum", the bytes of the array.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes that this rank has received in all calls together."""
        return self.traffic.total()

    def reset(self) -> None:
        """Sets the counts to 0."""
        self.calls.clear()
        self.traffic.clear()

    def sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sum over all ranks of arrays of one shape."""
        self._count("sum", numbers.nbytes)
        return self._sum(np.ascontiguousarray(numbers))

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, which have one shape and dtype: shape (size, *shape)."""
        self._count("gather", values.nbytes * self.size)
        return self._gather(np.ascontiguousarray(values))

    def exchange(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Sends one array to each rank, and returns those that were sent to this one; shape (any,), all of one dtype."""
        if len(parts) != self.size:
            raise ValueError(f"exchange: `parts` must have one array for each of {self.size} ranks, got {len(parts)}")
        got = self._exchange([np.ascontiguousarray(part) for part in parts])
        self._count("exchange", sum(part.nbytes for part in got))
        return got

    def _count(self, name: str, size: int) -> None:
        self.calls[name] += 1
        self.traffic[name] += size

    @abstractmethod
    def _sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]: ...

    @abstractmethod
    def _gather(self, values: NDArray[Any]) -> NDArray[Any]: ...

    @abstractmethod
    def _exchange(self, parts: list[NDArray[Any]]) -> list[NDArray[Any]]: ...


@cache
def _let_threads_of_gloo_end() -> None:
    """Makes the exit of the process wait for the threads of gloo."""
    # These threads free the tensors of the last collective call. torch does not wait for them, and one that frees a tensor
    # while the interpreter is torn down aborts the process.
    atexit.register(time.sleep, BEFORE_EXIT_S)


class ProcessWorld(CountedWorld):
    """The processes of a process group of torch.distributed.

    Args:
        group: Process group; None for the default group. The backend "nccl" sends tensors from the current CUDA device, other
            backends from the CPU.

    Raises:
        RuntimeError: torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
        rank = dist.get_rank(group)
        if rank < 0:
            raise RuntimeError("`process_group` is a group that this process is not in")
        super().__init__(rank, dist.get_world_size(group))
        self._group = group
        nccl = dist.get_backend(group) == "nccl"
        if not nccl:
            _let_threads_of_gloo_end()
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def meet(self, what: str, *, patient: bool = False) -> None:
        """Waits for all ranks, `PATIENCE` at most; see `World`."""
        # Over the store, because ranks that are not here may be in a collective call of the training, which would mix with one.
        # The number of meetings that are over is in the keys, so that a second meeting does not find the ranks of the first.
        whole: Any = dist.group.WORLD
        group: Any = self._group or whole
        store, room = whole.get_group_store(), f"thresher/{group.group_name}/{dist.get_global_rank(group, 0)}"
        place = f"{room}/{store.add(f'{room}/over', 0)}"
        store.set(f"{place}/rank/{self.rank}", "here")
        if store.add(place, 1) == self.size:
            store.add(f"{room}/over", 1)
            store.set(f"{place}/all", "here")
            return
        end = time.monotonic() + PATIENCE.total_seconds()
        # A rank that gives up takes its count back. If all have come in this moment, it is too late to give up, and it goes on.
        while not store.check([f"{place}/all"]):
            late = time.monotonic() > end
            missing = [rank for rank in range(self.size) if late and not store.check([f"{place}/rank/{rank}"])]
            said = (
                f"{what} was reached in process {self.rank} of {self.size}, and not within {PATIENCE.total_seconds():g} s in "
                f"{', '.join(map(str, missing))}."
            )
            if missing and patient:
                warn(f"{said} It is waited for: all processes must reach it.")
                end = float("inf")
            elif late and not patient and store.add(place, -1) < self.size - 1:
                raise RuntimeError(
                    f"{said} Each process holds a part of the run: call it in every process, also "
                    "where one alone writes the file. Nothing was sent to the others, and the training can go on."
                )
            time.sleep(BETWEEN_LOOKS_S)

    def share_of_mean(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns the factor of a mean over rows of this rank; see `World`. Never waits for the device."""
        # It runs in each step, so the number stays on the device. At least 1 row: 0 / 0 would be NaN if no rank keeps one.
        rows = torch.full((), count, dtype=torch.float64, device=device)
        dist.all_reduce(rows, group=self._group)
        return self.size * count / rows.clamp(min=1)

    def sharded(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """Returns a DTensor with the part of this rank; see `World`."""
        from torch.distributed.device_mesh import DeviceMesh  # a second to import, for those who save
        from torch.distributed.tensor import DTensor, Shard

        group: Any = self._group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, part.device.type)
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size([total]), stride=(1,))

    def _sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        tensor = torch.from_numpy(numbers.copy()).to(self._device)
        dist.all_reduce(tensor, group=self._group)
        return tensor.cpu().numpy()

    def _gather(self, values: NDArray[Any]) -> NDArray[Any]:
        own = self._bytes_of(values)
        every = torch.empty((self.size, len(own)), dtype=torch.uint8, device=self._device)
        dist.all_gather(list(every.unbind()), own, group=self._group)
        return every.cpu().numpy().reshape(-1).view(values.dtype).reshape(self.size, *values.shape)

    def _exchange(self, parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
        # As bytes, because rows of records are arrays with a dtype of their own, which torch does not have.
        dtype = parts[0].dtype
        sent = torch.tensor([part.nbytes for part in parts], device=self._device)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=self._group)
        sizes = arriving.tolist()
        outgoing = self._bytes_of(np.concatenate(parts))
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, outgoing, sizes, sent.tolist(), group=self._group)
        return [piece.view(dtype) for piece in np.split(received.cpu().numpy(), np.cumsum(sizes)[:-1])]

    def _bytes_of(self, values: NDArray[Any]) -> torch.Tensor:
        """Returns an array as bytes on the device of the group, because gloo does not know every dtype."""
        return torch.from_numpy(values.reshape(-1).view(np.uint8).copy()).to(self._device)


PLAIN = (bool, int, float, str, type(None))
OWN = frozenset({"rank"})
"""Attributes of a sampler that differ from rank to rank."""

LONGEST = 200
"""Largest number of characters of a value in a message."""


class DisagreementError(RuntimeError):
    """The ranks of a training have different settings; every rank raises the error, which names the settings."""


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Checks that all ranks have the same settings, with 16 bytes per rank if they do.

    Args:
        world: The ranks.
        facts: Settings by name: plain values, tensors, generators, or objects with a `repr` that shows their settings.

    Raises:
        DisagreementError: A setting differs; all ranks raise it.

    Example:
        >>> from thresher.testing.threaded_world import on_ranks
        >>> on_ranks(2, lambda world: agree(world, {"seed": 0, "epochs": 5 + world.rank}))
        Traceback (most recent call last):
        thresher.distributed.world.DisagreementError: The processes of this training were started with different settings:
          epochs is 5 on rank 0, and 6 on rank 1.
        Start all of them with the same settings.
    """
    # A digest first: only if it differs are the texts sent, from which every rank names the difference.
    own = json.dumps({name: described(value) for name, value in facts.items()}, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(own).digest()[:8], dtype=np.int64)
    found = world.gather(np.append(digest, len(own)))
    if (found == found[0]).all():
        return
    ends = np.cumsum(found[:, 1]).tolist()
    texts = np.split(world.join(np.frombuffer(own, dtype=np.uint8)), ends[:-1])
    every = [json.loads(text.tobytes()) for text in texts]
    names = [*facts, *sorted({name for one in every for name in one} - set(facts))]
    lines = [f"  {_difference(name, [one.get(name, 'missing') for one in every])}" for name in names]
    raise DisagreementError(
        "The processes of this training were started with different settings:\n"
        + "\n".join(line for line in lines if line.strip())
        + "\nStart all of them with the same settings."
    )


def _difference(name: str, values: Sequence[str]) -> str:
    """Returns the values of a setting with their ranks; "" if all values are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    parts = [f"{value[:LONGEST]} on {_named(those)}" for value, those in ranks.items()]
    return f"{name} is {', and '.join(parts)}."


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"


def described(value: Any) -> str:
    """Returns a text that is equal for equal values.

    Args:
        value: A plain value, a tensor, an array, a generator, a sequence or mapping of these, or any object; an object without
            a `repr` of its own is described by its class.

    Example:
        >>> described(torch.arange(3)), described(object())
        ('int64 of shape (3,), ab25350e', 'object')
    """
    # The default `repr` shows an address, which differs from process to process; the class is all that can be compared.
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"Generator, {_digest(value.get_state().numpy())}"
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype} of shape {array.shape}, {_digest(array)}"
    if isinstance(value, Mapping):
        return repr({str(name): described(one) for name, one in value.items()})
    if isinstance(value, list | tuple | range):
        if len(value) > 8:
            return f"{type(value).__name__} of {len(value)}, {_digest(np.frombuffer(repr(value).encode(), dtype=np.uint8))}"
        return repr([described(one) for one in value])
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


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
        if name.strip("_") in OWN:
            continue
        known = isinstance(value, (*PLAIN, torch.Generator, Tensor, np.ndarray, list, tuple, Mapping))
        if known or isinstance(value, Sized):
            facts[f"sampler.{name}"] = value if known else len(value)
    return facts
