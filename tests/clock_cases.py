"""Where the clocks of a training stand after each step, and where they should."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thresher
from thresher import methods
from thresher.scores import Scores

BATCH = 8


class Case(NamedTuple):
    """A training whose clocks are read."""

    method: Any = 0.5
    settings: dict[str, Any] = {}
    epochs: int = 2
    samples: int = 96
    drop_last: bool = False
    accumulate: int = 1
    workers: int = 0
    resume_after: int | None = None
    """Number of batches after which the training goes on in a new run that loads the state; None for never."""
    ahead: int = 0
    """Number of batches that are asked for before they are trained on."""


class Clocks(NamedTuple):
    """What the clocks said after each step: lists of lists, by epoch."""

    progress: list[list[float]]
    progress_lr: list[list[float]]
    pace: list[list[float]]
    full_steps: int
    end: float


class Training:
    """A training with a rate that each clock sets."""

    def __init__(self, case: Case, rank: int = 0, size: int = 1) -> None:
        torch.manual_seed(3)
        x = torch.randn(case.samples, 6)
        data, self.case = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1)), case
        sampler = DistributedSampler(data, size, rank) if size > 1 else None
        self.user = DataLoader(
            data,
            BATCH,
            shuffle=sampler is None,
            sampler=sampler,
            drop_last=case.drop_last,
            num_workers=case.workers,
        )
        self.model = nn.Linear(6, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1.0)
        self.run = thresher.attach(
            case.method,
            loader=self.user,
            criterion=nn.CrossEntropyLoss(),
            model=DistributedDataParallel(self.model) if size > 1 else self.model,
            optimizer=self.optimizer,
            epochs=case.epochs,
            **case.settings,
        )
        self.full_steps = case.epochs * -(-len(self.user) // case.accumulate)
        self.others = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0) for _ in range(2)]
        self.by_progress = thresher.ProgressLR(self.others[0], self.run, lambda done: done)
        paced = LambdaLR(self.others[1], lambda step: step / self.full_steps)
        self.paced = self.run.pace(paced, self.full_steps)

    def state(self) -> dict[str, Any]:
        return {
            "run": self.run.state_dict(),
            "model": self.model.state_dict(),
            "by_progress": self.by_progress.state_dict(),
            "paced": self.paced.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.run.load_state_dict(state["run"])
        self.model.load_state_dict(state["model"])
        self.by_progress.load_state_dict(state["by_progress"])
        self.paced.load_state_dict(state["paced"])

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yields batches, some of them early, and whether each is the last one."""
        batches = iter(self.run.loader)
        held = list(itertools.islice(batches, 1 + self.case.ahead))
        while held:
            # A loop that accumulates asks for the next batch to know whether this one is the last.
            if self.case.accumulate > 1 or self.case.ahead:
                held += itertools.islice(batches, 1)
            yield held.pop(0), not held
            if not held:
                held += itertools.islice(batches, 1)

    def step(self, found: list[list[float]]) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for schedule in (self.by_progress, self.paced):
            schedule.step()
        rates = [other.param_groups[0]["lr"] for other in self.others]
        for clock, value in zip(found, (self.run.progress, *rates), strict=True):
            clock.append(value)


def clocks_of(case: Case, rank: int = 0, size: int = 1) -> Clocks:
    """Trains, and returns what the clocks said."""
    training, found, done = Training(case, rank, size), [list[list[float]]() for _ in range(3)], 0
    for epoch in range(case.epochs):
        if isinstance(training.user.sampler, DistributedSampler):
            training.user.sampler.set_epoch(epoch)
        now, over = [list[float]() for _ in range(3)], False
        while not over:
            over = True
            for number, ((x, y), last) in enumerate(training.batches(), 1):
                training.run.criterion(training.run.model(x), y).backward()
                if number % case.accumulate == 0 or last:
                    training.step(now)
                done += 1
                if done == case.resume_after:
                    state = training.state()
                    training = Training(case, rank, size)
                    training.load(state)
                    over = training.run.epoch > epoch
                    break
        for clock, values in zip(found, now, strict=True):
            clock.append(values)
    return Clocks(*found, training.full_steps, training.run.progress)


def assert_right(case: Case, clocks: Clocks, *, within: int = 1, end_is_known: bool = True) -> None:
    """Asserts that each clock stands within a step, or more, of (e + i / n) / E after step i of the n steps of epoch e."""
    for name in ("progress", "progress_lr", "pace"):
        by_epoch = getattr(clocks, name)
        # A scheduler that counts the steps of full training moves by whole ones.
        grain = 1 / clocks.full_steps if name == "pace" else 0.0
        for epoch, values in enumerate(by_epoch):
            n = len(values)
            for i, value in enumerate(values, 1):
                expected = (epoch + i / n) / case.epochs
                allowed = within / (n * case.epochs) + grain + 1e-9
                assert abs(value - expected) <= allowed, (case, name, epoch, i, n, value, expected)
            assert values == sorted(values)
        if end_is_known and by_epoch[-1]:
            assert by_epoch[-1][-1] == 1.0, (case, name, by_epoch[-1])
    assert clocks.progress == clocks.progress_lr
    assert clocks.end == 1.0


SCORES = Scores(torch.arange(96), torch.linspace(0, 1, 96))
NEED: dict[str, dict[str, Any]] = {
    "prune": {"scores": SCORES, "keep": 0.75},
    "ccs": {"scores": SCORES, "keep": 0.5},
    "rho_loss": {"irreducible": SCORES},
}
METHODS: dict[str, Any] = {
    **{name: methods.create(name, **NEED.get(name, {})) for name in methods.BUILT_IN},
    "0.5": 0.5,
    "half of the samples": thresher.UniformSubset(keep=0.5),
    "from the middle on": thresher.SelectiveBackprop(keep=0.5, start=0.5),
    "pruned, then chosen": [
        methods.create("prune", **NEED["prune"]),
        thresher.SelectiveBackprop(keep=0.5),
    ],
}
"""All methods by name, and some settings."""
