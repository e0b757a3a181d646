"""Epochs of loaders, plans and processes as digests: `python tests/epochs_of_today.py` writes epochs.json anew.

A digest has four parts: the ids of each process, the sizes of its batches, the losses that the run returns (they hold the
weights), and the random numbers that torch and the loader's generator draw after each epoch.
"""

import itertools
import json
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from thresher.loading.samplers import ShardedSampler
from thresher.methods.contract import Requirements
from thresher.plans import EpochPlan
from thresher.run import several_processes
from thresher.samplers import (
    BalancedBatchSampler,
    Grouped,
    Mixture,
    StratifiedBatchSampler,
    WeightedSampler,
)

KNOWN = Path(__file__).parent / "epochs.json"
N, BATCH, EPOCHS = 53, 6, 2
LABELS = np.arange(N) * 7 % 11 % 3
LENGTHS = np.arange(N) * 17 % 41 + 3
WEIGHTS = np.arange(N) % 5 / 2 + 0.25
DATA = TensorDataset(torch.ones(N, 1), torch.arange(N))


class Drawn(thresher.UniformSubset):
    """Draws an order that repeats samples, with weights."""

    requires = Requirements(order="plan")

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        ids = torch.randint(N, (31,), generator=generator)
        return EpochPlan(ids, weights=1 + ids / N, drawn=True)


class Smaller(thresher.UniformSubset):
    """A random subset in smaller batches."""

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        return replace(plan, weights=1 + plan.ids / N, smaller_batches=True)


class Backwards:
    """A batch sampler of one's own with `compose`."""

    def __len__(self) -> int:
        return -(-N // BATCH)

    def __iter__(self) -> Any:
        rows, ends = self.compose(np.arange(N), 0)
        return iter([rows[a:b].tolist() for a, b in itertools.pairwise(ends)])

    def compose(self, ids: Any, epoch: int, batches: int | None = None) -> Any:
        count = batches or -(-len(ids) // BATCH)
        return np.roll(ids[::-1], epoch), np.arange(count + 1) * len(ids) // count


class Odd:
    """A sampler that nobody knows."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return iter(torch.randperm(N).tolist())


PLANS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "all": (thresher.FullData, {}),
    "some": (lambda: thresher.UniformSubset(keep=0.55), {}),
    "one batch": (lambda: thresher.UniformSubset(keep=0.1), {}),
    "weights": (lambda: thresher.InfoBatch(), {}),
    "smaller": (lambda: Smaller(keep=0.55), {}),
    "drawn": (lambda: Drawn(keep=0.5), {}),
    "a row left": (lambda: thresher.UniformSubset(keep=31 / N), {"normalized": True}),
    "stratified": (thresher.FullData, {"stratify": LABELS}),
    "stratified some": (lambda: thresher.UniformSubset(keep=0.55), {"stratify": LABELS}),
    "stratified smaller": (lambda: Smaller(keep=0.55), {"stratify": LABELS}),
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


HERE = threading.local()
"""The world of each thread."""

Place = dict[str, int]
"""Arguments `num_replicas` and `rank` of a sampler."""


def of_sampler(make: Callable[[Place], Any]) -> Callable[[Place, bool], DataLoader[Any]]:
    return lambda place, drop_last: DataLoader(
        DATA, BATCH, sampler=make(place), drop_last=drop_last
    )


def of_batches(make: Callable[..., Any]) -> Callable[[Place, bool], DataLoader[Any]]:
    return lambda place, drop_last: DataLoader(
        DATA, batch_sampler=make(drop_last=drop_last, **place)
    )


def dealt_batches(make: Callable[[], Any]) -> Callable[[Place, bool], DataLoader[Any]]:
    """A loader as accelerate prepares it."""

    def build(place: Place, drop_last: bool) -> DataLoader[Any]:
        from accelerate.data_loader import BatchSamplerShard

        batches = BatchSampler(make(), BATCH, drop_last)
        return DataLoader(
            DATA, batch_sampler=BatchSamplerShard(batches, place["num_replicas"], place["rank"])
        )

    return build


COMPOSERS = {
    "balanced": lambda **given: BalancedBatchSampler(LABELS, BATCH, **given),
    "mixture": lambda **given: Mixture(LABELS, BATCH, {0: 3, 1: 2, 2: 1.5}, **given),
    "strata": lambda **given: StratifiedBatchSampler(LABELS, BATCH, **given),
    "by length": lambda **given: Grouped(LENGTHS, BATCH, **given),
    "by tokens": lambda **given: Grouped(LENGTHS, max_tokens=120, **given),
}
ALONE: dict[str, Callable[[Place, bool], DataLoader[Any]]] = {
    "shuffle": lambda _, drop_last: DataLoader(DATA, BATCH, shuffle=True, drop_last=drop_last),
    "generator": lambda _, drop_last: DataLoader(
        DATA, BATCH, shuffle=True, drop_last=drop_last, generator=seeded()
    ),
    "sequential": of_sampler(lambda _: SequentialSampler(DATA)),
    "own generator": of_sampler(lambda _: RandomSampler(DATA, generator=seeded())),
    "replacement": of_sampler(lambda _: RandomSampler(DATA, replacement=True)),
    "subset": of_sampler(lambda _: SubsetRandomSampler(range(0, N, 2))),
    "weights of torch": of_sampler(lambda _: WeightedRandomSampler(WEIGHTS.tolist(), N)),
    "unknown": of_sampler(lambda _: Odd()),
    "weighted": of_sampler(lambda _: WeightedSampler(WEIGHTS)),
    "weighted, apart": of_sampler(
        lambda _: WeightedSampler(WEIGHTS, num_samples=40, replacement=False)
    ),
    "own composer": lambda _, __: DataLoader(DATA, batch_sampler=Backwards()),  # pyright: ignore
}
SHARED: dict[str, Callable[[Place, bool], DataLoader[Any]]] = {
    "distributed": of_sampler(lambda place: DistributedSampler(DATA, **place, seed=3)),
    "distributed, in order": of_sampler(
        lambda place: DistributedSampler(DATA, **place, shuffle=False)
    ),
    "distributed, dropping": of_sampler(
        lambda place: DistributedSampler(DATA, **place, drop_last=True)
    ),
    "Shuffle": of_sampler(lambda place: thresher.Shuffle(DATA, seed=2, **place)),
    "Shuffle, dropping": of_sampler(
        lambda place: thresher.Shuffle(DATA, seed=2, drop_last=True, **place)
    ),
    **{name: of_batches(make) for name, make in COMPOSERS.items()},
}
DEALT: dict[str, Callable[[Place, bool], DataLoader[Any]]] = {
    "accelerate": dealt_batches(lambda: RandomSampler(DATA, generator=seeded())),
    "trainer": of_sampler(
        lambda place: ShardedSampler(
            RandomSampler(DATA, generator=seeded()), **place, drop_last=False
        )
    ),
}


def cases() -> dict[str, tuple[Any, str, int, bool]]:
    """Returns loader, plan, number of processes and drop_last of each case by name."""
    loaders = {1: {**ALONE, **SHARED}, 2: {**SHARED, **DEALT}, 4: {**SHARED, **DEALT}}
    return {
        f"{loader}; {plan}; {size}{'; drop_last' * drop_last}": (make, plan, size, drop_last)
        for size, of_size in loaders.items()
        for loader, make in of_size.items()
        for plan in PLANS
        for drop_last in (False, True)
    }


def train(world: Any, make: Any, plan: str, drop_last: bool, stop: int | None = None) -> Any:
    """Trains two epochs, and returns the ids of the batches of each epoch, the losses and the random numbers drawn after each epoch.

    Args:
        world: The processes.
        make: Function that makes the loader.
        plan: Name of the plan.
        drop_last: Whether the loader drops a last batch.
        stop: Number of the batch of the last epoch after which the run is saved, and another one goes on. Fewer than
            this epoch has.
    """
    method, given = PLANS[plan]
    settings = dict(given)
    normalized = settings.pop("normalized", False)
    place = {"num_replicas": world.size, "rank": world.rank}

    def attach() -> Any:
        HERE.world = world
        layers = [nn.Linear(1, N)] + [nn.BatchNorm1d(N)] * normalized
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = make(place, drop_last)
        return SimpleNamespace(
            run=thresher.attach(
                method(),
                loader=loader,
                criterion=lambda outputs, targets: outputs[:, 0] * 0 + targets,
                model=model,
                optimizer=optimizer,
                epochs=EPOCHS,
                process_group="threads" if world.size > 1 else None,
                **settings,
            ),
            optimizer=optimizer,
            generator=getattr(loader.sampler, "generator", None) or loader.generator,
        )

    here = attach()
    batches: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    losses: list[float] = []
    draws: list[Any] = []
    for epoch in range(EPOCHS):
        count = 0
        again = stop is not None and epoch == EPOCHS - 1
        while True:
            left = False
            for x, y in here.run.loader:
                loss = here.run.criterion(here.run.model(x), y)
                loss.backward()
                here.optimizer.step()
                batches[epoch].append(y.tolist())
                losses.append(round(loss.item(), 5))
                count += 1
                if again and count == stop:
                    left = True
                    break
            if not left:
                break
            again = False
            state = here.run.state_dict()
            here = attach()
            here.run.load_state_dict(state, restore_rng=world.size == 1)
        drawn = [] if world.size > 1 else [torch.rand(()).item()]
        if here.generator is not None:
            drawn.append(torch.rand((), generator=here.generator).item())
        draws.append(drawn)
    return batches, losses, draws


def result(name: str, stop: int | None = None) -> list[Any]:
    """Returns what `train` returns, for each process; or the error that it raises."""
    from threaded_world import ThreadWorld, on_ranks
    from thresher.distributed.world import ALONE as ONE

    make, plan, size, drop_last = cases()[name]
    torch.manual_seed(7)
    threads = patch.object(several_processes, "ProcessWorld", lambda group: HERE.world)
    with warnings.catch_warnings(), threads:
        warnings.simplefilter("ignore")
        if size == 1:
            return [train(ONE, make, plan, drop_last, stop)]

        def work(world: ThreadWorld) -> Any:
            return train(world, make, plan, drop_last, stop)

        return on_ranks(size, work)


def digest(name: str) -> str:
    """Returns the digest of a case: ids, sizes of batches, losses and random numbers; or the error."""
    try:
        processes = result(name)
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error).__name__
    ids = [[[*itertools.chain(*epoch)] for epoch in batches] for batches, _, _ in processes]
    sizes = [[[*map(len, epoch)] for epoch in batches] for batches, _, _ in processes]
    losses = [losses for _, losses, _ in processes]
    draws = [draws for _, _, draws in processes]
    return " ".join(
        f"{zlib.crc32(json.dumps(part).encode()):08x}" for part in (ids, sizes, losses, draws)
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    KNOWN.write_text(json.dumps({name: digest(name) for name in cases()}, indent=0) + "\n")
