"""Forgetting against whole histories that are counted by hand, epoch after epoch; the worked vectors; a real training."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import EpochPlan, Forgetting
from thresher.records import Records
from thresher.rng import seeded
from thresher.scores.forgetting import events_in_turns

CPU = torch.device("cpu")


def counted(history: list[bool]) -> int:
    """Times that right was followed by wrong."""
    return sum(before and not after for before, after in pairwise(history))


class Online:
    """A training that is made up: who is right is decided beforehand, and only who is seen is recorded."""

    def __init__(self, method: Forgetting, n: int, epochs: int, key: int) -> None:
        self.method, self.n, self.epochs, self.key = method, n, epochs, key
        self.records = Records(method.columns(), n, CPU)
        self.histories: list[list[bool]] = [[] for _ in range(n)]

    def plan(self, epoch: int) -> EpochPlan:
        plan = self.method.plan_epoch(
            self.records, epoch=epoch, epochs=self.epochs, generator=seeded(self.key, epoch)
        )
        plan.check(self.n)
        self.records.remember(plan.remember)
        return plan

    def see(self, ids: list[int], right: np.ndarray) -> None:
        for i in ids:
            self.histories[i].append(bool(right[i]))
        if ids:
            self.records.write(torch.tensor(ids), {"correct": torch.from_numpy(right[ids])})

    def order(self) -> list[float | None]:
        """What the counts should be; None for samples that must not be hidden."""
        found: list[float | None] = []
        for history in self.histories:
            never = not any(history)
            found.append(
                None
                if not history or (never and self.method.never_learned == "keep")
                else counted(history)
            )
        return found


VECTORS = {"a": "011010", "b": "111111", "c": "000000", "d": "001111", "e": "101010"}


def of_vectors(method: Forgetting) -> Online:
    online = Online(method, 5, 100, 0)
    for epoch in range(6):
        online.see(list(range(5)), np.array([word[epoch] == "1" for word in VECTORS.values()]))
    return online


def test_worked_vectors() -> None:
    online = of_vectors(Forgetting())
    assert events_in_turns(online.records["forgetting"]).tolist() == [2, 0, 0, 0, 3]


@pytest.mark.parametrize(
    ("never_learned", "hidden", "among"),
    [
        ("keep", 1, "bd"),
        ("keep", 2, "bd"),
        ("keep", 3, "bda"),
        ("keep", 4, "bdae"),
        ("cut", 1, "bcd"),
        ("cut", 2, "bcd"),
        ("cut", 3, "bcd"),
        ("cut", 4, "bcda"),
    ],
)
def test_the_order_in_which_the_vectors_go(never_learned: str, hidden: int, among: str) -> None:
    """Original: b and d, a, e, then c; KAKURENBO: b, c and d tie."""
    online = of_vectors(Forgetting(fraction=hidden / 5, start=6, never_learned=never_learned))
    gone = set()
    for key in range(40):
        plan = online.method.plan_epoch(online.records, epoch=6, epochs=100, generator=seeded(key))
        assert plan.refresh is not None and len(plan.refresh) == hidden
        gone |= {"abcde"[i] for i in plan.refresh.tolist()}
    assert gone == set(among)


@over_instances(depth(range(36), range(120)))
def test_agrees_with_the_histories(number: int) -> None:
    r = np.random.default_rng(number)
    n = 1 if number % 12 == 0 else int(r.integers(2, 50))
    fraction = str(r.choice(["0", "0.1", "0.29", "0.5", "0.9", "0.99"]))
    start = float(r.choice([0, 1, 3, 0.3]))
    hide, never_learned = str(r.choice(["each_epoch", "once"])), str(r.choice(["keep", "cut"]))
    method = Forgetting(float(fraction), int(start) if start >= 1 else start, hide, never_learned)
    online, epochs = Online(method, n, 10, number), 10
    skill = r.random(n) ** 0.5
    skill[r.random(n) < 0.2] = 0
    first = max(1, math.ceil(Fraction("0.3") * epochs) if start == 0.3 else int(start))
    unseen = set(
        np.flatnonzero(r.random(n) < 0.1).tolist()
    )  # a loop that breaks out of its epochs never gets to them
    gone: set[int] = set()
    for epoch in range(epochs):
        plan = online.plan(epoch)
        kept = set(plan.ids.tolist())
        hidden = set(range(n)) - kept
        if epoch < first:
            assert not hidden and plan.refresh is None and plan.facts["scheduled_fraction"] == 0
        elif hide == "once" and gone:
            assert hidden == gone
        else:
            order = online.order()
            may_go = [i for i in range(n) if order[i] is not None]
            assert len(hidden) == min(math.floor(Fraction(fraction) * n), len(may_go), n - 1)
            assert hidden <= set(may_go)
            most = max((order[i] for i in hidden), default=-1)
            assert all(order[i] >= most for i in may_go if i not in hidden)
            gone = hidden
        if epoch >= first:
            assert (None if plan.refresh is None else set(plan.refresh.tolist())) == (
                None if hide == "once" else hidden
            )
            assert plan.facts["scheduled_fraction"] == float(fraction)
            assert plan.facts["actual_fraction"] == pytest.approx(len(hidden) / n)
        assert plan.weights is None and plan.lr_scale == 1 and not plan.drawn
        right = r.random(n) < skill
        online.see(sorted(kept - unseen), right)
        online.see([] if plan.refresh is None else plan.refresh.tolist(), right)
    told = events_in_turns(online.records["forgetting"]).tolist()
    assert told == [counted(history) for history in online.histories]


def test_hidden_samples_return() -> None:
    """Those forgotten while they are hidden have one event more than the others, and change places with them."""
    online = Online(Forgetting(fraction=0.5, start=1), 4, 40, 3)
    everyone, right = [0, 1, 2, 3], np.array([True] * 4)
    online.see(everyone, right)
    pairs = set()
    for epoch in range(1, 39, 2):
        first = online.plan(epoch).refresh
        for number in (epoch, epoch + 1):
            plan = online.plan(number)
            assert plan.refresh is not None
            assert first is not None
            assert number == epoch or plan.ids.tolist() == first.tolist()
            hidden = plan.refresh.tolist()
            online.see(everyone, np.array([i not in hidden for i in everyone]))
            online.see(everyone, right)
        pairs.add(tuple(first.tolist()))
    assert len(pairs) > 3  # who goes first among equals is drawn


@pytest.mark.parametrize("hide", ["each_epoch", "once"])
def test_in_a_training(hide: str) -> None:
    """The counts are those of the predictions that the loop made, and of the refresh."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=draws)
    y = (x[:, 0] + 0.7 * torch.randn(80, generator=draws) > 0).long()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=draws)
    run = thresher.attach(
        Forgetting(fraction=0.4, start=0.5, hide=hide),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=8,
    )
    histories: list[list[bool]] = [[] for _ in range(80)]
    kept = []
    for _ in range(8):
        plan = run.plan
        kept.append(len(plan.ids))
        for inputs, targets in run.loader:
            outputs = run.model(inputs)
            for i, hit in zip(
                run.ids.tolist(), (outputs.argmax(1) == targets).tolist(), strict=True
            ):
                histories[i].append(hit)
            optimizer.zero_grad()
            run.criterion(outputs, targets).backward()
            optimizer.step()
        for i in [] if plan.refresh is None else plan.refresh.tolist():
            histories[i].append(bool(model(x[i]).argmax() == y[i]))
    told = events_in_turns(run.records["forgetting"])
    assert told.tolist() == [counted(history) for history in histories]
    assert told.sum() > 10
    assert kept == [80] * 4 + [48] * 4
    assert run.cost.refresh == (4 * 32 if hide == "each_epoch" else 0)
