"""What a collate function remembers between calls is the same, whether its batches are checked or not."""

import collections
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import assert_same
from thresher import AttributionError
from thresher.loading.held_state import held_state, put_back

N, B = 64, 4
STEP = 0
TABLE = {"sizes": collections.deque([1, 2, 3])}


def scaled(batch, number):
    return torch.stack([x for x, _ in batch]) * (1 + number // 6), torch.stack([y for _, y in batch])


def closure():
    n = 0

    def collate(batch):
        nonlocal n
        n += 1
        return scaled(batch, n)

    return collate


def of_globals():
    global STEP
    STEP = 0

    def collate(batch):
        global STEP
        STEP += 1
        return scaled(batch, STEP)

    return collate


def helper_counts(counts):
    counts.append(len(counts))
    return counts[-1]


def with_helper():
    counts = []
    return lambda batch: scaled(batch, helper_counts(counts))


def on_itself():
    def collate(batch):
        vars(collate)["n"] += 1
        return scaled(batch, vars(collate)["n"])

    vars(collate)["n"] = 0
    return collate


def with_default():
    def collate(batch, seen=collections.Counter()):  # noqa: B006
        seen["batches"] += 1
        return scaled(batch, seen["batches"])

    for seen in collate.__defaults__ or ():
        seen.clear()
    return collate


def rotating():
    TABLE["sizes"] = collections.deque([1, 20, 30])

    def collate(batch):
        TABLE["sizes"].rotate(1)
        return scaled(batch, TABLE["sizes"][0])

    return collate


class Schedule:
    __slots__ = ("array", "n", "seen", "tensor")

    def __init__(self):
        self.n, self.seen, self.tensor, self.array = [0], set(), torch.zeros(1), np.zeros(1)

    def step(self):
        self.n[0] += 1
        self.seen.add(self.n[0])
        self.tensor += 1
        self.array += 1
        return len(self.seen) + int(self.tensor) + int(self.array[0])


class Shared:
    n = 0


def of_a_class():
    Shared.n = 0

    def collate(batch):
        Shared.n += 1
        return scaled(batch, Shared.n)

    return collate


class Deep:
    def __init__(self):
        self.schedule = Schedule()

    def __call__(self, batch):
        self.last = self.schedule.step()
        return scaled(batch, self.last)

    def method(self, batch):
        return self(batch)


COLLATES = {
    "closure": closure,
    "globals": of_globals,
    "helper": with_helper,
    "attribute of a function": on_itself,
    "default": with_default,
    "class": of_a_class,
    "rotating": rotating,
    "object": Deep,
    "method": lambda: Deep().method,
    "partial": lambda: partial(Deep.__call__, Deep()),
}


def run_of(loader):
    return thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=nn.Linear(3, 2), epochs=2, seed=0
    )


@pytest.mark.parametrize("name", COLLATES)
def test_batches_are_those_of_the_plain_loader(name):
    def epochs(attached):
        data = TensorDataset(torch.arange(1.0, N * 3 + 1).view(N, 3), torch.arange(N) % 2)
        loader = DataLoader(data, B, collate_fn=COLLATES[name]())
        if not attached:
            return [batch for _ in range(2) for batch in loader]
        run = run_of(loader)
        found = [batch for _ in range(2) for batch in run.loader]
        assert run.loader.unknown_rows.reason is None
        return found

    assert_same(epochs(True), epochs(False))


@pytest.mark.parametrize("make", [itertools.count, lambda: (n for n in range(99))])
def test_a_collate_function_with_an_iterator_is_called_once(make):
    numbers, model = make(), nn.Linear(3, 2)
    data = TensorDataset(torch.randn(N, 3), torch.arange(N) % 2)
    run = run_of(DataLoader(data, B, collate_fn=lambda batch: scaled(batch, next(numbers))))
    _, (x, y), *_ = run.loader
    assert next(numbers) == N // B
    with pytest.raises(AttributionError, match=r"keeps an iterator \((count|generator)\).*Keep the position as a number"):
        run.criterion(model(x), y)


def test_objects_of_other_packages_are_left_alone():
    counter = nn.Linear(1, 1)
    vars(counter)["n"] = 0

    def collate():
        vars(counter)["n"] += 1

    before = held_state(collate)
    collate()
    put_back(before)
    assert vars(counter)["n"] == 1
