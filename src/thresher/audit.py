"""`audit`: which samples a loader yields, how often, in which order, in which process, and after a resume."""

import copy
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from thresher import rng
from thresher.samplers.epochs import EpochSampler

IdLists = list[list[int]]
BeginEpoch = Callable[[Any, int], object]
"""Function `(loader, epoch)` that a training calls before an epoch, such as to call `set_epoch` of the sampler."""

NAMED = 5
"""Largest number of ids that a line names."""
DIVIDE = "pass sampler=DistributedSampler(dataset), or use accelerator.prepare(loader)"
FEW = 10
"""Number of samples below which two shuffled orders may well be equal."""
WORKERS = 2
"""Number of worker processes that are compared with none."""
POLL = 0.1
"""Seconds to wait for one of several processes before looking at the next."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        problems: Sentences on samples that are lost or repeated by mistake, each with the code that helps.
        notes: Sentences on behavior that may be intended, such as `drop_last`.
        facts: Samples, batches and rows, a line each.

    Example:
        >>> print(Audit(["sample 3 never comes"], [], ["4 samples"]))
        4 samples
        PROBLEM: sample 3 never comes
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        problems = [f"PROBLEM: {one}" for one in self.problems]
        notes = [f"note: {one}" for one in self.notes]
        return "\n".join([*self.facts, *problems, *notes])


class _Ids(Dataset[int]):
    """A dataset whose samples are their own indices."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> int:
        return int(i)


def _as_list(ids: Any) -> Any:
    return torch.as_tensor(ids)


def _of_ids(loader: Any, workers: int | None = None) -> Any:
    """Returns a copy of a loader that yields ids, so that no sample is read."""
    made = copy.copy(loader)
    # DataLoader refuses new attributes after its creation, and this is a copy that only the audit uses.
    own = vars(made)
    if "base_dataloader" in own:
        own["base_dataloader"] = _of_ids(loader.base_dataloader, workers)
        return made
    own["dataset"] = _Ids(len(loader.dataset))
    own["collate_fn"] = _as_list
    own["worker_init_fn"] = None
    if workers is not None:
        own["num_workers"] = workers
        own["prefetch_factor"] = 2 if workers else None
        own["persistent_workers"] = False
    return made


def _sampler_of(loader: Any) -> Any:
    """Returns the sampler with numbered epochs of a loader; None if it has none of this library."""
    for one in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(one, EpochSampler):
            return one
    return None


def may_repeat(loader: Any) -> bool:
    """Whether a loader draws samples more or less often on purpose."""
    batches = loader.batch_sampler
    for one in (batches, getattr(batches, "sampler", None), loader.sampler):
        if getattr(one, "replacement", False) or hasattr(one, "weights"):
            return True
        if getattr(one, "once", True) is False:
            return True
    return False


class _Reader:
    """Reads the ids of a loader, epoch by epoch, as a training would.

    Args:
        make: Function that makes the loader.
        begin_epoch: Function that is called before each epoch; None for none.
        seed: Seed of the global random states.
        workers: Number of workers. Default: that of the loader.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        begin_epoch: BeginEpoch | None,
        seed: int = 0,
        workers: int | None = None,
    ) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - samplers of users draw from this state
        self.loader = make()
        _check_kind(self.loader)
        self._begin_epoch = begin_epoch
        self.ids = _of_ids(self.loader, workers)

    def begin(self, epoch: int) -> Iterator[list[int]]:
        """Returns the batches of an epoch."""
        if self._begin_epoch is not None:
            self._begin_epoch(self.loader, epoch)
        return map(_flat, iter(self.ids))

    def epochs(self, count: int) -> list[IdLists]:
        """Returns the batches of the first epochs."""
        return [[*self.begin(epoch)] for epoch in range(count)]


def _flat(batch: Any) -> list[int]:
    return torch.as_tensor(batch).reshape(-1).tolist()


def _counts(batches: IdLists, n: int) -> NDArray[np.int64]:
    rows = [row for one in batches for row in one]
    return np.bincount(np.array(rows, dtype=np.int64), minlength=n)


def _some(ids: Any) -> str:
    shown = ", ".join(str(int(one)) for one in ids[:NAMED])
    return f"{shown}, ..." if len(ids) > NAMED else shown


def audit(
    loader: Any,
    *,
    epochs: int = 3,
    world: int | Sequence[int] | None = None,
    resume: bool = True,
    begin_epoch: BeginEpoch | None = None,
    announce: Callable[[str], object] | None = None,
) -> Audit:
    """Checks which samples a loader yields, without training and without reading a sample.

    It iterates the loader, in one process and in several, and looks for samples that never come or come twice, epochs with the
    same order, processes that share samples or have unlike numbers of batches, and what a resume repeats or leaves out.

    Args:
        loader: A DataLoader over a map-style dataset, also of torchdata, accelerate, Lightning or Transformers; or, better, a
            function without arguments that makes it, which is called for each check. A loader itself is iterated, so that its
            sampler moves on, and neither several processes nor a resume are checked.
        epochs: Number of epochs, 2 or more. Default: 3.
        world: Number of processes, or several such numbers. Several processes need a function at the top level of a module.
            Default: 1 and 2, where it is only noted if the loader is not divided, so that each process would train on all
            samples.
        resume: Whether to save and load the state of the loader, or of its sampler from `thresher.samplers`. Default: True.
        begin_epoch: Function `(loader, epoch)` that your training calls before each epoch. Default: none.
        announce: Function that is called with a line about each part that begins. Default: none.

    Returns:
        The problems, which are empty for a loader that is right, and notes. Printed, it has a line for each.

    Raises:
        TypeError: The loader is no DataLoader with a map-style dataset.
        ValueError: `epochs` is below 2.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(10))
        >>> audit(lambda: DataLoader(data, 3, shuffle=True), world=(1,)).problems
        []
        >>> print(audit(lambda: DataLoader(data, 3, sampler=[0, 1, 2, 2]), world=(1,)).problems[0])
        1 samples come twice in an epoch: 2. Look for repeated ids in the sampler
    """
    if epochs < 2:
        raise ValueError(f"audit: `epochs` must be 2 or more, got {epochs}")
    found = Audit()
    announce = announce or str
    is_made = callable(loader) and not isinstance(loader, DataLoader)
    made: Callable[[], Any] = loader if is_made else lambda: loader  # pyright: ignore[reportAssignmentType]
    sizes = (1, 2) if world is None else world
    if isinstance(sizes, int):
        sizes = [sizes]
    if 1 in sizes or not is_made:
        with rng.undisturbed(torch.device("cpu"), []), _process_group(made):
            announce(f"reading the ids of {epochs} epochs")
            reader = _Reader(made, begin_epoch)
            alone = reader.epochs(epochs)
            _check_alone(found, reader.loader, alone)
            if is_made:
                announce("reading again with another random state and with workers")
                _check_states(found, made, begin_epoch, alone)
                if resume:
                    announce("resuming in the middle and at the ends of an epoch")
                    _check_resume(found, made, begin_epoch)
    for size in sizes:
        if size > 1 and is_made:
            announce(f"reading {epochs} epochs in {size} processes")
            ranks = _read_processes(found, made, begin_epoch, epochs, size)
            _check_processes(found, ranks, must_divide=world is not None)
    return found


@contextmanager
def _process_group(make: Callable[[], Any]) -> Iterator[None]:
    """Gives a process group of one process to a loader that cannot be made without any, such as by DistributedSampler."""
    if not distributed.is_initialized():
        try:
            make()
        except ValueError:
            with tempfile.TemporaryDirectory() as folder:
                store = f"file://{folder}/store"
                distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
                try:
                    yield
                finally:
                    distributed.destroy_process_group()
            return
    yield


def _check_kind(loader: Any) -> None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"audit: `loader` must be a DataLoader over a map-style dataset, or a function that makes one, got "
            f"{type(loader).__name__}"
        )


def _check_alone(found: Audit, loader: Any, epochs: list[IdLists]) -> None:
    n = len(loader.dataset)
    rows = sum(map(len, epochs[0]))
    found.facts.append(f"{n:,} samples; {len(epochs[0]):,} batches and {rows:,} rows an epoch")
    counts = [_counts(one, n) for one in epochs]
    missing = [np.flatnonzero(one == 0) for one in counts]
    never = np.flatnonzero(np.sum(counts, axis=0) == 0)
    # Fewer than one batch is what drop_last leaves out, another part in each epoch.
    largest = max(map(len, epochs[0]), default=0)
    dropped = all(len(one) < largest for one in missing)
    if may_repeat(loader):
        found.notes.append(f"the sampler draws with weights or repeats: {len(never)} never came")
    else:
        twice = max((np.flatnonzero(one > 1) for one in counts), key=len)
        worst = max(range(len(epochs)), key=lambda epoch: len(missing[epoch]))
        if len(twice):
            found.problems.append(
                f"{len(twice)} samples come twice in an epoch: {_some(twice)}. Look for repeated ids in the sampler"
            )
        if len(never) and not (dropped and _drops(loader)):
            found.problems.append(
                f"{len(never)} of {n} samples never come in {len(epochs)} epochs: {_some(never)}. Look at the sampler's ids"
            )
        elif len(missing[worst]) and dropped and _drops(loader):
            found.notes.append(
                f"an epoch leaves out {len(missing[worst])} samples, as drop_last asks"
            )
        elif len(missing[worst]):
            found.problems.append(
                f"{len(missing[worst])} of {n} samples do not come in epoch {worst}: {_some(missing[worst])}. Look at the "
                "sampler's ids"
            )
    for first in range(len(epochs)):
        for second in range(first + 1, len(epochs)):
            if epochs[first] and epochs[first] == epochs[second] and n >= FEW:
                # Nobody expects another order of a loader that does not shuffle.
                asked = type(_order_of(loader)) is SequentialSampler
                where = found.notes if asked else found.problems
                where.append(_same_order(loader, epochs, first, second))
                return


def _order_of(loader: Any) -> Any:
    """Returns the sampler that decides on the order; a batch sampler without a sampler decides itself."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return getattr(batches, "sampler", batches)


def _drops(loader: Any) -> bool:
    batches = loader.batch_sampler
    return bool(getattr(batches, "drop_last", False) or getattr(loader, "drop_last", False))


def _same_order(loader: Any, epochs: list[IdLists], first: int, second: int) -> str:
    if all(one == epochs[0] for one in epochs):
        same = "all epochs have the same order"
    else:
        same = f"epochs {first} and {second} have the same order"
    sampler = _order_of(loader)
    if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True):
        name = "batch_sampler" if sampler is loader.batch_sampler else "sampler"
        return f"{same}. Call loader.{name}.set_epoch(epoch) before each epoch"
    return f"{same}. Pass shuffle=True, or a sampler that shuffles"


def _check_states(
    found: Audit, make: Callable[[], Any], begin_epoch: BeginEpoch | None, alone: list[IdLists]
) -> None:
    """Notes whether the order depends on global random states, and whether it depends on the number of workers."""
    other = _Reader(make, begin_epoch, seed=1).epochs(1)[0]
    if other != alone[0]:
        found.notes.append("the order depends on the global random state: seed it")
    orders = [_Reader(make, begin_epoch, workers=count).epochs(2) for count in (0, WORKERS)]
    if orders[0] != orders[1]:
        found.notes.append(f"with {WORKERS} workers the order differs from that without workers")


def _check_resume(found: Audit, make: Callable[[], Any], begin_epoch: BeginEpoch | None) -> None:
    """Checks what a training that was interrupted at the start, in the middle and at the end of its second epoch goes on with."""
    batches = len(_Reader(make, begin_epoch).epochs(1)[0])
    for place in sorted({0, batches // 2, batches}):
        first = _Reader(make, begin_epoch)
        first.epochs(1)
        ahead = first.begin(1)
        begun = [next(ahead) for _ in range(place)]
        state = _save(first, 1, begun)
        if state is None:
            found.notes.append(
                "the loader has no state_dict, so that an interrupted epoch begins again. torchdata's StatefulDataLoader, a "
                "sampler of thresher.samplers or run.state_dict() save the position"
            )
            return
        expected = [*ahead] or [*first.begin(2)]
        second = _Reader(make, begin_epoch)
        _load(second, state)
        # A loop that resumes at the end of an epoch begins the next one.
        following = place == batches
        again = [*second.begin(1 + following)]
        if following and not again:
            again = [*second.begin(2)]
        if again != expected:
            _name_difference(found, place, batches, begun, expected, again)
            return


def _save(reader: _Reader, epoch: int, begun: IdLists) -> Any:
    sampler = _sampler_of(reader.loader)
    if sampler is None:
        # A loader of accelerate has the function without the state.
        with suppress(AttributeError):
            return copy.deepcopy(reader.ids.state_dict())
        return None
    by_batch = sampler is reader.loader.batch_sampler
    items = len(begun) if by_batch else sum(map(len, begun))
    whole = items >= len(sampler)
    # The workers of a DataLoader fetch ahead: the position is counted here, as docs/samplers.md says.
    position = {"epoch": epoch + whole, "consumed": 0 if whole else items * sampler.dealing()[0]}
    return {**sampler.state_dict(), **position}


def _load(reader: _Reader, state: Any) -> None:
    sampler = _sampler_of(reader.loader)
    (reader.ids if sampler is None else sampler).load_state_dict(state)


def _name_difference(
    found: Audit, place: int, batches: int, begun: IdLists, expected: IdLists, again: IdLists
) -> None:
    wanted = {row for one in expected for row in one}
    got = {row for one in again for row in one}
    seen = {row for one in begun for row in one}
    where = f"a resume after {place} of {batches} batches"
    if wanted - got:
        found.problems.append(
            f"{where} leaves out {len(wanted - got)} samples: {_some(sorted(wanted - got))}. Save the state after the batch "
            "that was trained on, and call set_epoch before load_state_dict"
        )
    elif got - wanted:
        found.problems.append(
            f"{where} repeats {len(got & seen)} samples: {_some(sorted(got - wanted))}. Load the state of the loader, too"
        )
    else:
        found.problems.append(
            f"{where} has another order. Give the sampler a seed or the loader a generator whose state is saved"
        )


# Several processes


Rank = tuple[list[IdLists], bool, int]
"""The epochs of a process, whether its loader repeats samples on purpose, and the number of samples."""


@contextmanager
def _as_torchrun(rank: int, size: int, port: int) -> Iterator[None]:
    """Sets the environment variables of a rank, from which accelerate and others learn that there are several processes."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # A machine may have fewer devices than there are processes.
    settings = variables | address | {"ACCELERATE_USE_CPU": "true"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update({name: str(value) for name, value in settings.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _read_rank(_: int, rank: int, folder: str, pickled: bytes, epochs: int) -> None:
    """Reads the epochs of one process, and writes them."""
    make, begin_epoch = pickle.loads(pickled)
    if not distributed.is_initialized():  # accelerate has done so if the module of `make` uses it
        distributed.init_process_group("gloo")
    reader = _Reader(make, begin_epoch)
    found = reader.epochs(epochs), may_repeat(reader.loader), len(reader.loader.dataset)
    torch.save(found, Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def _read_processes(
    found: Audit,
    make: Callable[[], Any],
    begin_epoch: BeginEpoch | None,
    epochs: int,
    size: int,
) -> list[Rank]:
    """Returns what each of several processes reads; [] if the function that makes the loader cannot be sent to them."""
    try:
        pickled = pickle.dumps((make, begin_epoch))
    except (pickle.PicklingError, AttributeError, TypeError):
        found.notes.append(
            f"{size} processes were not checked: they need a function at the top level of a module"
        )
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                # Before the process imports the script, which may create an Accelerator.
                with _as_torchrun(rank, size, port):
                    arguments = (rank, folder, pickled, epochs)
                    started.append(spawn(_read_rank, arguments, nprocs=1, join=False))
            running = started
            while running:
                running = [context for context in running if not context.join(POLL)]
        finally:
            for context in started:
                context.processes[0].terminate()
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(size)]


def _check_processes(found: Audit, ranks: Sequence[Rank], *, must_divide: bool) -> None:
    if not ranks:
        return
    size = len(ranks)
    epochs = len(ranks[0][0])
    n = ranks[0][2]
    drawn = np.sum([_counts(rank[0][0], n) > 0 for rank in ranks], axis=0)
    undivided = not ranks[0][1] and (drawn == size).sum() > n / 2
    if undivided and not must_divide:
        found.notes.append(
            f"{size} processes would each train on all samples: {DIVIDE}. One process needs nothing"
        )
        return
    for epoch in range(epochs):
        problem = _compare_ranks([rank[0][epoch] for rank in ranks], n, repeats=ranks[0][1])
        if problem:
            found.problems.append(f"{size} processes, epoch {epoch}: {problem}")
            return
    orders = [[rank[0][epoch] for rank in ranks] for epoch in range(epochs)]
    if any(one == other for one, other in pairwise(orders)) and n >= FEW:
        found.problems.append(
            f"{size} processes: two epochs have the same order. Call loader.sampler.set_epoch(epoch) before each epoch"
        )
    found.facts.append(f"{size} processes: {len(orders[0][0]):,} batches each")


def _compare_ranks(ranks: list[IdLists], n: int, *, repeats: bool) -> str:
    """Returns what is wrong with an epoch of several processes; "" if nothing is."""
    size = len(ranks)
    steps = [len(one) for one in ranks]
    if len({*steps}) > 1:
        return (
            f"unlike numbers of batches, {steps}: the process with fewer stops, and the others wait. Use DistributedSampler "
            "or accelerator.prepare with even_batches=True"
        )
    if repeats:
        return ""
    counts = np.sum([_counts(one, n) for one in ranks], axis=0)
    never = np.flatnonzero(counts == 0)
    shared = int((counts > 1).sum())
    # The first samples come again, or the last are left out, to give the processes equal parts.
    batch = max((len(one) for rank in ranks for one in rank), default=1)
    if shared >= size * batch or (shared and (counts > 1).all()):
        return f"{shared} of {n} samples come in more than one process: {DIVIDE}"
    if len(never) >= size * batch or (len(never) and shared):
        return f"{len(never)} samples come in no process: {_some(never)}. Give all processes the same seed and data"
    return ""


def audit_counts(
    counts: torch.Tensor, complete: int, partial: int = 0, *, every: bool, dropped: int = 0
) -> Audit:
    """Checks how often each sample was trained on; see `Run.audit`.

    Args:
        counts: Number of times that each sample was trained on, shape (N,), integers.
        complete: Number of complete epochs.
        partial: Number of epochs that the loop left early or is in. Default: 0.
        every: Whether each sample should have been trained on once an epoch.
        dropped: Number of samples that `drop_last` leaves out of an epoch. Default: 0.

    Example:
        >>> print(audit_counts(torch.tensor([2, 2, 1]), 2, every=True))
        3 samples, trained on 1 to 2 times in 2 complete epochs
        PROBLEM: 1 of 3 samples were trained on less often than once a complete epoch: 2. Look for ids and batches left out
    """
    low = counts.min().item()
    high = counts.max().item()
    unfinished = f" and {partial} that are not" if partial else ""
    found = Audit(
        facts=[
            f"{len(counts):,} samples, trained on {low} to {high} times in {complete} complete epochs{unfinished}"
        ]
    )
    numbers = counts.numpy()
    never = np.flatnonzero(numbers == 0)
    rare = np.flatnonzero(numbers < complete)
    often = np.flatnonzero(numbers > complete + partial)
    lacking = np.sum(complete - numbers[rare])
    if 0 < lacking <= complete * dropped:
        found.notes.append(f"an epoch leaves out {dropped} samples, as drop_last asks")
        rare = rare[:0]
    if len(never) and not (every and len(rare)):
        found.notes.append(f"{len(never)} samples were never trained on: {_some(never)}")
    if not every:
        return found
    for ids, how, look in (
        (
            rare,
            "less often than once a complete",
            "Look for ids and batches left out",
        ),
        (
            often,
            "more often than once an",
            "Look for repeated ids, and for a resume that starts an epoch over",
        ),
    ):
        if len(ids):
            found.problems.append(
                f"{len(ids)} of {len(counts)} samples were trained on {how} epoch: {_some(ids)}. {look}"
            )
    return found
