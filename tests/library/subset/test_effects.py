"""A forward that changes Python objects does so once per call of the user, and a warning names them."""

import argparse
import collections
import types
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from depth import depth
from subset_cases import numbers, wrap
from thresher.subset import subset_backward
from thresher.subset.graphs import HasEffects
from thresher.subset.side_effects import effects_undone

X = numbers(8, 3)
STEPS = 6
TABLE = {"calls": [0]}


class Statistics:
    def __init__(self) -> None:
        self.calls, self.seen, self.table = 0, [], {"calls": 0}


class Slots:
    __slots__ = ("calls",)


class Mapping(dict):
    """A mapping that has attributes, too."""


class Counting(nn.Module):
    """Counts its calls in one place; `calls` reads that place."""

    kinds = 0
    shared: list[int] = []

    def __init__(self, add) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(3, 2), [add]
        self.plain, self.logged, self.nested = 0, [], {"a": {"calls": 0}, "b": [[]]}
        self.statistics, self.slots, self.space = (
            Statistics(),
            Slots(),
            types.SimpleNamespace(calls=0),
        )
        self.counter, self.recent, self.known = (
            collections.Counter(),
            collections.deque(maxlen=50),
            set(),
        )
        self.array, self.tensor, self.tensors = (
            np.zeros(3),
            torch.zeros(2),
            (torch.zeros(2, dtype=torch.int64),),
        )
        self.mapping, self.options, self.slots.calls = Mapping(), argparse.Namespace(calls=0), 0
        self.mapping.calls = 0

    def forward(self, x):
        self.add[0](self)
        return self.linear(x)


def add_to(read, name):
    def add(m):
        setattr(read(m), name, getattr(read(m), name) + 1)

    return add, lambda m: getattr(read(m), name)


def put_in(read, key):
    def add(m):
        read(m)[key] += 1

    return add, lambda m: int(read(m)[key])


def append_to(read):
    return lambda m: read(m).append(1), lambda m: len(read(m))


PLACES = {
    "model.plain": add_to(lambda m: m, "plain"),
    "model.logged": append_to(lambda m: m.logged),
    "model.nested": put_in(lambda m: m.nested["a"], "calls"),
    "model.nested, a list": append_to(lambda m: m.nested["b"][0]),
    "model.statistics.calls": add_to(lambda m: m.statistics, "calls"),
    "model.statistics.seen": append_to(lambda m: m.statistics.seen),
    "model.statistics.table": put_in(lambda m: m.statistics.table, "calls"),
    "model.slots.calls": add_to(lambda m: m.slots, "calls"),
    "model.space.calls": add_to(lambda m: m.space, "calls"),
    "model.options.calls": add_to(lambda m: m.options, "calls"),
    "model.mapping.calls": add_to(lambda m: m.mapping, "calls"),
    "model.counter": put_in(lambda m: m.counter, "calls"),
    "model.recent": append_to(lambda m: m.recent),
    "model.known": (lambda m: m.known.add(len(m.known)), lambda m: len(m.known)),
    "model.array": put_in(lambda m: m.array, 0),
    "model.tensor": (lambda m: m.tensor.add_(1), lambda m: int(m.tensor[1])),
    "model.tensors": (lambda m: m.tensors[0].add_(1), lambda m: int(m.tensors[0][1])),
    "Counting.kinds": add_to(type, "kinds"),
    "Counting.shared": append_to(lambda m: m.shared),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_forward_changes_is_restored_and_named(place) -> None:
    add, calls = PLACES[place]
    model = Counting(add)
    before = calls(model)
    with (
        pytest.raises(HasEffects, match=f"forward changes {place.partition(',')[0]},"),
        effects_undone(model.named_modules()),
    ):
        model(X.float())
    assert calls(model) == before


@pytest.mark.parametrize(
    ("place", "hidden"),
    [*product(depth(["model.plain", "model.tensor"], [*PLACES]), [False, True])],
)
def test_calls_are_counted_once_wherever_they_are_counted(place, hidden) -> None:
    add, calls = PLACES[place]
    Counting.kinds = 0
    Counting.shared.clear()
    model = Counting(
        (lambda m: None if torch.compiler.is_compiling() else add(m)) if hidden else add
    )
    sub = wrap(model, strict=False)
    with pytest.warns(
        UserWarning, match=f"forward changes {place.partition(',')[0]}, which a traced graph"
    ) as said:
        for step in range(STEPS):
            sub(X)[[1, 2]].sum().backward()
            assert calls(model) == step + 1
    assert len(said) == 1 and sub._patience.traces <= 4


class InGlobals(nn.Linear):
    def forward(self, x):
        TABLE["calls"][0] += 1
        return super().forward(x)


def test_containers_inside_of_globals() -> None:
    TABLE["calls"][0] = 0
    sub = wrap(InGlobals(3, 2), strict=False)
    with pytest.warns(UserWarning, match="forward changes TABLE, which a traced graph"):
        for _ in range(STEPS):
            sub(X)[[1, 2]].sum().backward()
    assert TABLE["calls"] == [STEPS]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_table_that_is_made_once_is_traced_afterwards(hidden) -> None:
    def add(m):
        if "made" not in m.statistics.table and not (hidden and torch.compiler.is_compiling()):
            m.statistics.table["made"] = True

    sub = wrap(Counting(add), strict=False)
    with pytest.warns(UserWarning, match=r"forward changes model\.statistics\.table"):
        for _ in range(STEPS):
            sub(X)[[1, 2]].sum().backward()
    assert (
        sub.fallback is None and sub.wrapped.statistics.table["made"] and sub._patience.traces == 2
    )


def test_objects_that_no_forward_changes_are_as_they_were() -> None:
    model = Counting(lambda m: None)
    model.statistics.myself, model.nan, model.big = (
        model.statistics,
        np.full(2, np.nan),
        list(range(2**17)),
    )
    before, sub = dict(vars(model)), wrap(model)
    with warnings.catch_warnings(action="error"):
        for _ in range(STEPS):
            sub(X)[[1, 2]].sum().backward()
    assert list(vars(model)) == list(before) and all(
        vars(model)[name] is value for name, value in before.items()
    )
    assert sub._patience.traces == 1


def test_effects_are_undone_when_the_forward_fails_while_it_is_traced() -> None:
    def fails(m):
        m.statistics.calls += 1
        m.statistics.seen.clear()
        del m.statistics.table
        m.statistics.fresh = 1
        raise KeyboardInterrupt

    model = Counting(fails)
    model.statistics.seen.append(1)
    with pytest.raises(KeyboardInterrupt):
        subset_backward(model)(X.float())
    assert vars(model.statistics) == {"calls": 0, "seen": [1], "table": {"calls": 0}}
    model = Counting(add_to(lambda m: m.statistics, "calls")[0])
    with pytest.raises(
        RuntimeError, match=r"strict=True: its forward changes model\.statistics\.calls"
    ):
        subset_backward(model, strict=True)(X.float())
    assert model.statistics.calls == 0
