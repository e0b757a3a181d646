"""Trainings with `attach` that several processes run together, and the same ones in one process.

`integration/test_training_in_processes.py` starts the processes once and compares what they return.
"""

import datetime
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import clock_cases
import thresher
from depth import depth
from subset_cases import trace_once_per_architecture
from thresher.distributed import world as worlds
from thresher.methods.contract import Requirements
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import Column
from thresher.subset import SubsetBackward

N, BATCH, EPOCHS = depth(1281, 2561), 64, 4
STEPS = N // (2 * BATCH)
"""Number of steps of an epoch of two processes."""
SEED = 3


def samples(n: int = N) -> TensorDataset:
    """Three classes, in double precision."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


class Above(thresher.BigLoss):
    """A batch method that keeps the rows with a loss above 0.9: each process another number, or none."""

    def count(self, n: int) -> int | None:
        return None

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return BatchPlan((signals["loss"] > 0.9).nonzero().flatten()), dict(state)


class Tossed(Above):
    """A batch method that keeps each row with probability 0.5, and needs no losses for it."""

    requires: Any = Requirements()

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return BatchPlan(
            (torch.rand(len(signals["id"]), generator=generator) < 0.5).nonzero().flatten()
        ), dict(state)


class Smaller(thresher.UniformSubset):
    """A random subset in smaller batches, in the order of the sampler."""

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        return replace(plan, smaller_batches=True)


class Trained(thresher.UniformSubset):
    """A method whose column has the name of the run's own counts."""

    def columns(self) -> dict[str, Column]:
        return {"trained": Column(torch.float32, signal="loss", merge="sum")}


METHODS: dict[str, Callable[[], Any]] = {
    "FullData": thresher.FullData,
    "UniformSubset": lambda: thresher.UniformSubset(keep=0.5),
    "InfoBatch": thresher.InfoBatch,
    "Kakurenbo": lambda: thresher.Kakurenbo(max_fraction=0.4),
    "smaller batches": lambda: Smaller(keep=0.5),
    "Forgetting": lambda: thresher.Forgetting(fraction=0.3, start=1),
    "InfoBatch, target": lambda: thresher.InfoBatch(target=0.2),
    "Ucb": thresher.Ucb,
    "GradMatch": lambda: thresher.GradMatch(keep=0.3, every=1, first=1),
    "Rcap": thresher.Rcap,
    "by chance": lambda: Above(keep=0.5),
    "Trained": lambda: Trained(keep=0.5),
    "a share": lambda: 0.5,
}
"""Methods of which several processes make the training of one process, as long as batches are full."""


OWN_ORDER: dict[str, Callable[[], Any]] = {
    "ImportanceSampling": lambda: thresher.ImportanceSampling(keep=0.7, weights="unbiased"),
}
"""Methods that draw the order of training. The loss of a sample that two processes trained on is that of one of them."""


PLANNED = [
    (name, kind)
    for name in METHODS
    for kind in ("DistributedSampler", "Shuffle")
    if kind == "Shuffle" or name in depth(("FullData", "Kakurenbo", "by chance"), tuple(METHODS))
    if kind == "Shuffle"
    or name != "a share"  # a DistributedSampler of one process is no plain shuffle
]
"""Methods with the samplers of the loaders that they plan for."""
PREPARED = depth(("Kakurenbo",), ("UniformSubset", "Kakurenbo", "InfoBatch", "smaller batches"))
"""Methods beside loaders that accelerate prepared."""


def loader_of(
    kind: str, rank: int, size: int, data: Any, *, drop_last: bool = True
) -> DataLoader[Any]:
    """A loader that deals out its samples; for fewer processes than there are, it has larger batches."""
    batch, alone = BATCH * WORLD[0] // size, size == 1
    if kind == "DistributedSampler":
        sampler: Any = DistributedSampler(data, size, rank, seed=SEED, drop_last=drop_last)
        return DataLoader(data, batch, sampler=sampler, drop_last=drop_last)
    if kind == "Shuffle":
        sampler = thresher.Shuffle(data, SEED, num_replicas=size, rank=rank, drop_last=drop_last)
        return DataLoader(data, batch, sampler=sampler, drop_last=drop_last)
    seedable, generator = kind == "accelerate, seedable", torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    if alone and seedable:
        return DataLoader(
            data, batch, sampler=reseeded(data, generator=generator), drop_last=drop_last
        )
    plain = DataLoader(data, batch, shuffle=True, drop_last=drop_last, generator=generator)
    settings = DataLoaderConfiguration(use_seedable_sampler=seedable)
    return plain if alone else Accelerator(cpu=True, dataloader_config=settings).prepare(plain)


def reseeded(data: Any, generator: torch.Generator) -> RandomSampler:
    """The order of accelerate's seedable sampler, whose generator is seeded anew by `set_epoch`."""
    sampler = RandomSampler(data, generator=generator)
    sampler.set_epoch = lambda epoch: generator.manual_seed(SEED + epoch)  # pyright: ignore[reportAttributeAccessIssue]
    return sampler


WORLD = [2]
"""Number of processes."""


@dataclass
class OptimizerState:
    """The state of an optimizer, for torch.distributed.checkpoint: one that has not stepped has no tensors to load into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Training:
    """One training, with a run or without.

    Args:
        loader: The user's loader.
        rank: Number of this process.
        size: Number of processes.
        method: The method; None trains without a run.
        group: Process group; None for that of all processes.
        settings: Further arguments of `attach`.
    """

    def __init__(
        self,
        loader: Any,
        rank: int,
        size: int,
        method: Any = None,
        group: Any = None,
        **settings: Any,
    ) -> None:
        self.user, self.rank = loader, rank
        self.plain = network()
        self.model: Any = (
            DistributedDataParallel(self.plain, process_group=group) if size > 1 else self.plain
        )
        self.syncs: list[int] = []
        """Numbers of the gradients that were averaged, each time that some were."""
        if size > 1 and group is None:
            self.model.register_comm_hook(self.syncs, _noted)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)
        self.run: Any = None
        if method is not None:
            self.run = thresher.attach(
                method,
                loader=loader,
                model=self.model,
                criterion=nn.CrossEntropyLoss(),
                optimizer=self.optimizer,
                epochs=EPOCHS,
                process_group=group,
                **settings,
            )
        self.seen: list[list[Tensor]] = []

    def epoch(
        self,
        number: int,
        *,
        every: int = 1,
        stop: int | None = None,
        after_step: Callable[[int], Any] = lambda step: None,
    ) -> None:
        """Trains one epoch, or its first steps."""
        sampler = getattr(self.user, "sampler", None)
        if isinstance(sampler, DistributedSampler) or (
            self.model is self.plain and hasattr(sampler, "set_epoch")
        ):
            sampler.set_epoch(number)
        run, batches = self.run, list[Tensor]()
        criterion = nn.CrossEntropyLoss() if run is None else run.criterion
        loader = self.user if run is None else run.loader
        for step, (x, y) in enumerate(loader):
            batches.append(y.sum() + x[:, 2] if run is None else run.ids.clone())
            steps = (step + 1) % every == 0
            with nullcontext() if steps or self.model is self.plain else self.model.no_sync():
                criterion((self.model if run is None else run.model)(x), y).backward()
            if steps:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if run is not None and self.rank == 0:
                _ = run.progress, run.plan, run.cost.steps, repr(run)  # one process alone may look
                with suppress(TypeError):  # the length is not known
                    len(run.loader)
            after_step(step)
            if step + 1 == stop:
                break
        self.seen.append(batches)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has, each part with `state_dict` and `load_state_dict`."""
        return {
            "run": self.run,
            "model": self.plain,
            "optimizer": OptimizerState(self.plain, self.optimizer),
        }

    def found(self) -> dict[str, Any]:
        """What is compared."""
        run = self.run
        weights = [p.detach().clone() for p in self.plain.parameters()]
        found = {"weights": weights, "seen": self.seen, "syncs": len(self.syncs)}
        if run is None:
            return found
        keeper = self.rank == 0
        return found | {
            "records": {name: column.clone() for name, column in run.records.items()}
            if keeper
            else {},
            "trained": run.trained.clone() if keeper else None,
            "history": [_of_all(entry) for entry in run.history],
            "forward": run.cost.forward,
        }


def _noted(syncs: list[int], bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    syncs.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]


PER_PROCESS = ("forward", "backward", "refresh", "scoring", "full_forward", "full_backward")
IN_THE_BATCH = ("candidates", "selected", "actual_fraction")


def _of_all(entry: dict[str, Any]) -> dict[str, Any]:
    """The part of an entry of the history that is of all processes."""
    own = PER_PROCESS + (IN_THE_BATCH if "candidates" in entry else ())
    return {name: entry[name] for name in entry if name not in own}


def trained(
    loader: Any, rank: int, size: int, method: Any = None, **settings: Any
) -> dict[str, Any]:
    """What a whole training gives."""
    training = Training(loader, rank, size, method, **settings)
    for number in range(EPOCHS):
        training.epoch(number)
    return training.found()


# Cases; each runs in every process


WHOLE: dict[str, Any] = {}
"""What `plans` has found, in this process."""


def plans(rank: int, size: int) -> dict[str, Any]:
    """Trainings that are those of one process."""
    WHOLE.update(
        {
            f"{name}, {kind}": trained(loader_of(kind, rank, size, samples()), rank, size, make())
            for name, kind in [*PLANNED, *((name, "Shuffle") for name in OWN_ORDER)]
            for make in [(METHODS | OWN_ORDER)[name]]
        }
    )
    return dict(WHOLE)


def observed(rank: int, size: int) -> dict[str, Any]:
    """The data map of a training with a method beside it, which process 0 has."""
    training = Training(
        loader_of("Shuffle", rank, size, samples()),
        rank,
        size,
        METHODS["InfoBatch"](),
        observe=True,
    )
    for number in range(EPOCHS):
        training.epoch(number)
    return {} if rank else dict(training.run.data_map())


def nothing_left_out(rank: int, size: int) -> dict[str, Any]:
    """Whether FullData is the loop without a run, bit for bit: weights, and how often gradients were averaged."""
    found = {}
    for kind in ("DistributedSampler", "Shuffle", "accelerate", "accelerate, seedable"):
        for n, drop_last, every in (
            (520, True, 1),
            (519, False, 4),
            *depth((), ((517, True, 4), (517, False, 1))),
        ):
            pair = []
            for method in (None, thresher.FullData()):
                training = Training(
                    loader_of(kind, rank, size, samples(n), drop_last=drop_last), rank, size, method
                )
                for number in range(2):
                    training.epoch(number, every=every)
                steps = [len(batches) for batches in training.seen]
                pair.append((training.found()["weights"], [*steps, training.syncs]))
            (plain, steps), (own, own_steps) = pair
            same = all(torch.equal(one, other) for one, other in zip(plain, own, strict=True))
            found[f"{kind}, {n}, {drop_last}, {every}"] = same and steps == own_steps
    return found


def prepared(rank: int, size: int) -> dict[str, Any]:
    """Epochs over loaders that accelerate prepared: the ids of each step, and the weights."""
    found = {}
    for kind in ("accelerate", "accelerate, seedable"):
        for name in PREPARED:
            found[f"{name}, {kind}"] = trained(
                loader_of(kind, rank, size, samples()), rank, size, METHODS[name]()
            )
    return found


def in_the_batch(rank: int, size: int) -> dict[str, Any]:
    """Methods that choose in the batch: weights are the same in all processes, and so is the number of steps."""
    found, by_chance, fixed = (
        {},
        thresher.SelectiveBackprop(beta=1),
        thresher.SelectiveBackprop(keep=0.5),
    )
    for name, method, drop_last in (
        ("once", by_chance, True),
        ("twice", fixed, True),
        ("twice by chance", by_chance, True),
        ("twice by chance, smaller last batch", by_chance, False),
        ("twice by chance, beside a plan", [thresher.UniformSubset(keep=0.8), by_chance], True),
    ):
        loader, passes = (
            loader_of("DistributedSampler", rank, size, samples(), drop_last=drop_last),
            name.split()[0],
        )
        found[name] = trained(loader, rank, size, method, forward_passes=passes)
    return found


FURTHER = ("twice by chance", "ImportanceSampling", "a share")


def resumed(rank: int, size: int) -> dict[str, bool]:
    """Whether a run that goes on in the middle of an epoch has the weights and records of one that was not disturbed."""
    found = {}
    names = ("Kakurenbo", "smaller batches", "InfoBatch", "by chance")
    for kind, some in (
        ("DistributedSampler", depth(names[:1], names)),
        ("Shuffle", (*depth(("Kakurenbo", "smaller batches", "by chance"), names), *FURTHER)),
    ):
        for name in some:
            more = {"forward_passes": "twice"} if name == "twice by chance" else {}
            make = (METHODS | OWN_ORDER).get(name, lambda: thresher.SelectiveBackprop(beta=1))
            whole = WHOLE.get(f"{name}, {kind}") or trained(
                loader_of(kind, rank, size, samples()), rank, size, make(), **more
            )
            first = Training(loader_of(kind, rank, size, samples()), rank, size, make(), **more)
            first.epoch(0)
            first.epoch(1, stop=2)  # with two passes, an epoch may have three batches
            torch.save(
                [first.run.state_dict(), first.model.state_dict(), first.optimizer.state_dict()],
                f"state.{rank}",
            )
            second = Training(loader_of(kind, rank, size, samples()), rank, size, make(), **more)
            state, model, optimizer = torch.load(f"state.{rank}", weights_only=True)
            second.model.load_state_dict(model)
            second.optimizer.load_state_dict(optimizer)
            second.run.load_state_dict(state)
            for number in range(1, EPOCHS):
                second.epoch(number)
            found[f"{name}, {kind}"] = _equal(second.found(), whole)
    return found


RESHARDED = depth(
    ("Kakurenbo", "smaller batches"), ("Kakurenbo", "smaller batches", "InfoBatch", "UniformSubset")
)
ROWS = 192
"""Rows of a step of all processes together, which 1, 2, 3 and 4 processes share equally."""


def resharded(rank: int, size: int) -> dict[str, Any]:
    """A training that is interrupted in the middle of an epoch, and goes on with as many processes, and with fewer."""
    found = {}
    for name in RESHARDED:
        training = Training(shared_out(rank, size), rank, size, METHODS[name]())
        training.epoch(0)
        training.epoch(1, stop=3)
        before = (
            {}
            if rank
            else {column: values.clone() for column, values in training.run.records.items()}
        )
        checkpoint.save(training.parts(), checkpoint_id=f"checkpoint-{name}")
        found[f"{name}, as it was"] = all(
            torch.equal(before[column], training.run.records[column]) for column in before
        )
        for fewer in range(size, 0, -1):
            group = distributed.new_group(list(range(fewer)))
            if rank < fewer:
                found[f"{name}, {fewer}"] = gone_on(f"checkpoint-{name}", name, rank, fewer, group)
            distributed.barrier()
    return found


GROWN = depth(
    ("Kakurenbo", "ImportanceSampling"), ("Kakurenbo", "smaller batches", "ImportanceSampling")
)


def begun_alone(folder: str) -> None:
    """Trainings that one process without a group interrupts in the middle of an epoch."""
    for name in GROWN:
        training = Training(shared_out(0, 1), 0, 1, (METHODS | OWN_ORDER)[name]())
        training.epoch(0)
        training.epoch(1, stop=3)
        checkpoint.save(training.parts(), checkpoint_id=f"{folder}/alone-{name}")


def grown(rank: int, size: int) -> dict[str, Any]:
    """The rest of what one process has begun, in all processes."""
    return {name: gone_on(f"alone-{name}", name, rank, size) for name in GROWN}


def shared_out(rank: int, size: int) -> DataLoader[Any]:
    data = samples()
    sampler = thresher.Shuffle(data, SEED, num_replicas=size, rank=rank, drop_last=True)
    return DataLoader(data, ROWS // size, sampler=sampler, drop_last=True)


def gone_on(
    folder: str, name: str, rank: int = 0, size: int = 1, group: Any = None
) -> dict[str, Any]:
    """The rest of the training that was interrupted, in these processes; without a group in one."""
    training = Training(shared_out(rank, size), rank, size, (METHODS | OWN_ORDER)[name](), group)
    checkpoint.load(training.parts(), checkpoint_id=folder, process_group=group)
    for number in range(1, EPOCHS):
        training.epoch(number)
    return training.found()


def _equal(own: dict[str, Any], whole: dict[str, Any]) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(own["weights"], whole["weights"], strict=True))
    same = same and all(
        torch.equal(own["records"][name], whole["records"][name]) for name in whole["records"]
    )
    trained = own["trained"] is whole["trained"] is None or torch.equal(
        own["trained"], whole["trained"]
    )
    return same and trained and own["history"] == whole["history"]


def one_file(rank: int, size: int) -> dict[str, Any]:
    """A training that goes on, between epochs, from what process 0 alone has saved with torch.save."""
    first = Training(shared_out(rank, size), rank, size, METHODS["Kakurenbo"]())
    first.epoch(0)
    states = [part.state_dict() for part in (first.run, first.plain, first.optimizer)]
    if rank == 0:
        torch.save(states, "one-file")
    distributed.barrier()
    return from_one_file("one-file", rank, size)


def from_one_file(file: str, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """The rest of the training."""
    training = Training(shared_out(rank, size), rank, size, METHODS["Kakurenbo"]())
    states = torch.load(file, weights_only=True)
    for part, state in zip((training.run, training.plain, training.optimizer), states, strict=True):
        part.load_state_dict(state)
    for number in range(1, EPOCHS):
        training.epoch(number)
    return training.found()


class Fails(thresher.UniformSubset):
    """A method whose second plan fails, in the process that makes it."""

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        if epoch:
            raise LookupError("no plan")
        return super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)


def errors(rank: int, size: int) -> dict[str, str]:
    """Messages about what only process 0 has, and of an error in process 0."""
    training, found = (
        Training(loader_of("Shuffle", rank, size, samples(260)), rank, size, Fails(), observe=True),
        {},
    )
    for name in ("records", "trained", "data_map"):
        try:
            value = getattr(training.run, name)
            found[name] = str(len(value() if callable(value) else value))
        except RuntimeError as error:
            found[name] = str(error)
    try:
        training.epoch(0)
    except LookupError as error:
        found["plan"] = str(error)
    training.run.detach(together=False)
    return found


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples(8)


def refusals(rank: int, size: int) -> dict[str, str]:
    """Messages of what is refused."""
    data, group = samples(), {"num_replicas": size, "rank": rank}

    def dealt(**other: Any) -> Any:
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, **(group | other)))

    part = Subset(data, range(8 + 8 * rank))
    first = rank == 0
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "shuffle=True": (thresher.FullData(), DataLoader(data, BATCH, shuffle=True), {}),
        "another rank": (thresher.FullData(), dealt(rank=(rank + 1) % size), {}),
        "another group": (thresher.FullData(), dealt(num_replicas=size + 1), {}),
        "over other samples": (
            thresher.FullData(),
            DataLoader(data, BATCH, sampler=DistributedSampler(range(9), **group)),
            {},
        ),
        "a stream": (thresher.BigLoss(keep=0.5), DataLoader(Stream(), BATCH), {}),
        "own order": (thresher.ImportanceSampling(), dealt(shuffle=False), {}),
        "stale losses": (
            thresher.BigLoss(keep=0.5),
            dealt(),
            {"forward_passes": thresher.Scoring(every_epochs=2)},
        ),
        "by chance without losses": (Tossed(), dealt(), {}),
        "another seed": (thresher.FullData(), dealt(), {"seed": rank}),
        "another setting": (thresher.UniformSubset(keep=0.5 if first else 0.6), dealt(), {}),
        "another size": (
            thresher.FullData(),
            DataLoader(part, BATCH, sampler=DistributedSampler(part, **group)),
            {},
        ),
        "another sampler seed": (thresher.FullData(), dealt(seed=rank), {}),
        "too few samples": (
            thresher.FullData(),
            DataLoader(samples(1), BATCH, sampler=DistributedSampler(samples(1), **group)),
            {},
        ),
    }
    found = {}
    for name, (method, loader, settings) in cases.items():
        try:
            Training(loader, rank, size, method, **settings)
            found[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found | {"another epoch": _another_epoch(rank, size)}


def _another_epoch(rank: int, size: int) -> str:
    """The message where the loop of one process sets the epoch of its sampler, and that of the others does not."""
    training = Training(
        loader_of("DistributedSampler", rank, size, samples()), rank, size, thresher.FullData()
    )
    training.user.sampler.set_epoch(rank)
    try:
        next(iter(training.run.loader))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_alone(rank: int, size: int) -> dict[str, Any]:
    """Messages where process 0 alone saves, within an epoch and between two, and whether the training is as without it."""
    found, name = {}, "Kakurenbo"
    before, worlds.PATIENCE = worlds.PATIENCE, datetime.timedelta(seconds=0.3)
    attach = thresher.attach

    def late(*given: Any, **settings: Any) -> Any:
        time.sleep(0.8 * rank)  # process 0 attaches alone, and waits for the others
        return attach(*given, **settings)

    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(thresher, "attach", late)
        training = Training(
            loader_of("Shuffle", rank, size, samples()), rank, size, METHODS[name]()
        )
        steps = itertools.count()
        last = len(training.run.loader) - 1
        hook = training.optimizer.register_step_pre_hook(
            lambda *_: time.sleep(0.8 * (next(steps) == last) * rank)
        )
        training.epoch(0)  # process 0 is at the end of the epoch alone
        hook.remove()
    found["waits"] = [str(one.message) for one in said if "Still waiting" in str(one.message)]

    def save(when: str) -> None:
        if rank == 0:
            with pytest.raises(RuntimeError) as error:
                training.run.state_dict()
            found[when] = str(error.value)

    try:
        save("between")
        training.epoch(1, after_step=lambda step: save("within") if step == 2 else None)
    finally:
        worlds.PATIENCE = before
    assert training.run.state_dict()["ranks"][rank]["epoch"] == 2
    for number in range(2, EPOCHS):
        training.epoch(number)
    whole = trained(loader_of("Shuffle", rank, size, samples()), rank, size, METHODS[name]())
    return found | {"undisturbed": _equal(training.found(), whole)}


def clocks(rank: int, size: int) -> list[tuple[clock_cases.Case, clock_cases.Clocks]]:
    """What the clocks of some trainings said after each step."""
    found = []
    for (method, settings), loop in product(CLOCKED, LOOPS):
        case = clock_cases.Case(method, settings, **loop)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append((case, clock_cases.clocks_of(case, rank, size)))
    return found


CLOCKED: list[tuple[Any, dict[str, Any]]] = [
    (0.5, {}),
    (0.5, {"spend": "steps"}),
    (0.5, {"stratify": None}),
    ("kakurenbo", {}),
    (thresher.UniformSubset(keep=0.5), {"spend": "batches"}),
    (thresher.InfoBatch(), {"stratify": "class"}),
]
LOOPS: list[dict[str, Any]] = depth(
    [{"epochs": 2, "samples": 90}],
    [
        {
            "epochs": epochs,
            "samples": samples,
            "drop_last": drop,
            "accumulate": every,
            "resume_after": resume,
        }
        for epochs, samples, drop, every, resume in product(
            (1, 3), (96, 90), (False, True), (1, 3), (None, 3)
        )
        if resume is None or every == 1
    ],
)


def left_open(rank: int, size: int) -> dict[str, Any]:
    """Loops whose last epoch is not ended by a step, and what `detach` makes of it; what one process alone may do."""
    found: dict[str, Any] = {}
    for name, every, stop in (("accumulated", 3, None), ("islice", 1, STEPS), ("break", 1, 7)):
        training = Training(
            loader_of("Shuffle", rank, size, samples()), rank, size, thresher.InfoBatch()
        )
        for number in range(EPOCHS - 1):
            training.epoch(number)
        run, batches = training.run, training.run.loader
        for step, (x, y) in enumerate(
            itertools.islice(batches, STEPS) if name == "islice" else batches
        ):
            run.criterion(run.model(x), y).backward()
            if (step + 1) % every == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()
            if step + 1 == stop:
                break
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _ = run.history
        warned = any("Call run.detach() in all processes" in str(one.message) for one in said)
        run.detach()
        found[name] = warned, torch.zeros(0) if rank else run.trained.clone(), len(run.history)
    method = Above(keep=0.5)
    training = Training(loader_of("Shuffle", rank, size, samples()), rank, size, method)
    for x, y in training.run.loader:
        outputs = training.run.model(x)
        loss = training.run.criterion(outputs, y)
        if rank == 0:
            assert (
                training.run.criterion(outputs, y).item() == loss.item()
            )  # for a log, in one process alone
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    found["weights"] = [p.detach().clone() for p in training.plain.parameters()]
    for number in range(1, EPOCHS):
        training.epoch(number)
    try:
        if rank == 0:
            len(training.run.loader)
    except RuntimeError as error:
        found["length"] = str(error)
    distributed.barrier()
    return found


CASES = (
    plans,
    observed,
    nothing_left_out,
    prepared,
    in_the_batch,
    resumed,
    resharded,
    grown,
    one_file,
    errors,
    left_open,
    clocks,
    refusals,
    one_alone,
)


def run_cases(rank: int, size: int, folder: str, names: tuple[str, ...]) -> None:
    """Runs cases in this process, and saves what they return."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    SubsetBackward._trace = trace_once_per_architecture(SubsetBackward._trace)
    WORLD[0] = size
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }  # accelerate asks for them, and uses the group below
    os.chdir(folder)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        torch.save(
            {case.__name__: case(rank, size) for case in CASES if case.__name__ in names},
            f"{folder}/{rank}",
        )
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
