"""Runs over augmented data that are resumed in the middle of an epoch: the same numbers, or a warning that they are not."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import assert_same

N, B, EPOCHS = 48, 8, 2
NOT_THE_SAME = "in the middle of an epoch, and its dataset or collate_fn draws random numbers"


class Augmented(TensorDataset):
    """Random numbers from one of the global generators, or from none."""

    def __init__(self, source):
        x = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
        super().__init__(x, torch.arange(N) % 4)
        self.draw = source
        self.read_here = 0

    def __getitem__(self, i):
        self.read_here += 1
        x, y = super().__getitem__(i)
        return x + self.draw(), y

    __getitems__ = None


def of_torch():
    return torch.rand(())


def of_numpy():
    return float(np.random.rand())


def of_python():
    return random.random()


def nothing():
    return 0


def train(source, stop, *, state=None, method=None, workers=0, collate=None):
    """Trains until a number of batches in the second epoch; returns what was seen, the run, and the state to go on from."""
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    net = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    data = Augmented(source)
    loader = DataLoader(data, B, shuffle=True, num_workers=workers, collate_fn=collate)
    run = thresher.attach(
        method or thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=EPOCHS,
        **({} if method is None else {"forward_passes": "twice"}),
    )
    if state is not None:
        net.load_state_dict(state["net"])
        run.load_state_dict(state["run"])
    seen = []
    while run.epoch < EPOCHS:
        for done, (x, y) in enumerate(run.loader, 1):
            seen.append(x)
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if state is None and (run.epoch, done) == (1, stop):
                return seen, run, {"net": net.state_dict(), "run": run.state_dict()}, data
    return seen, run, net.state_dict(), data


def compare(*arguments, **settings):
    whole, _, expected, _ = train(arguments[0], None, **settings)
    first, _, state, _ = train(*arguments, **settings)
    second, run, net, data = train(*arguments, state=state, **settings)
    assert_same([*first, *second], whole)
    assert_same(net, expected)
    return data


@pytest.mark.parametrize("source", [of_torch, of_numpy, of_python])
def test_without_workers_the_numbers_are_the_same(source):
    compare(source, 2)


@pytest.mark.parametrize(("source", "stop"), [(of_torch, 4), (of_numpy, 2), (of_python, 2)])
def test_random_numbers_of_workers_are_warned_about(source, stop):
    *_, state, _ = train(source, stop, workers=1)
    with pytest.warns(UserWarning, match=f"{NOT_THE_SAME} in worker processes.*save between epochs") as said:
        train(source, stop, state=state, workers=1)
    assert len([one for one in said if NOT_THE_SAME in str(one.message)]) == 1


def test_workers_that_draw_nothing_are_not_warned_about():
    compare(nothing, 2, workers=2)


def noisy(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x * torch.rand(()), y


def test_random_numbers_of_a_collate_function_in_workers_are_warned_about():
    *_, state, _ = train(nothing, 2, workers=1, collate=noisy)
    with pytest.warns(UserWarning, match=NOT_THE_SAME):
        train(nothing, 2, state=state, workers=1, collate=noisy)


HALF = thresher.SelectiveBackprop(keep=0.75)
quiet = pytest.mark.filterwarnings("ignore:.*with two forward passes it saves time")


@quiet
def test_selected_rows_that_waited_are_warned_about():
    *_, state, _ = train(of_torch, 2, method=HALF)
    assert len(state["run"]["ranks"][0]["waiting"]["ids"])
    with pytest.warns(UserWarning, match=f"{NOT_THE_SAME} for selected samples.*save between epochs[.]"):
        train(of_torch, 2, state=state, method=HALF)


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_selected_rows_that_waited_are_the_same_where_nothing_is_drawn(workers):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NOT_THE_SAME}")
        data = compare(nothing, 2, method=HALF, workers=workers)
    assert bool(data.read_here) == (workers == 0)
