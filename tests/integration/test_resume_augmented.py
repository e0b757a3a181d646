"""Runs over augmented data that are resumed in the middle of an epoch: the same numbers, or a warning that they are not."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from helpers import assert_same

N, B, EPOCHS = 48, 8, 2
NOT_THE_SAME = "where it was interrupted, and its dataset or collate_fn draws random numbers"


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


def train(source, stop, *, state=None, method=None, workers=0, collate=None, stay=False):
    """Trains until a number of batches in the second epoch; returns what was seen, the run, and the state to go on from.

    With `stop` = 0 the state is that between the epochs.
    """
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    net = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    data = Augmented(source)
    loader = DataLoader(
        data, B, shuffle=True, num_workers=workers, collate_fn=collate, persistent_workers=stay
    )
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
        if state is None and (run.epoch, 0) == (1, stop):
            return seen, run, {"net": net.state_dict(), "run": run.state_dict()}, data
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
    with pytest.warns(
        UserWarning, match=f"{NOT_THE_SAME} in worker processes.*save between epochs"
    ) as said:
        train(source, stop, state=state, workers=1)
    assert len([one for one in said if NOT_THE_SAME in str(one.message)]) == 1


def test_workers_that_draw_nothing_are_not_warned_about():
    compare(nothing, 2, workers=2)


@pytest.mark.parametrize("stop", [0, 2])
def test_random_numbers_of_workers_that_stay_are_warned_about_between_epochs_too(stop):
    """New workers begin with a seed, and those of the run that was saved had gone on with their random numbers."""
    *_, state, _ = train(of_torch, stop, workers=1, stay=True)
    with pytest.warns(
        UserWarning, match=f"{NOT_THE_SAME} in worker processes.*and use persistent_workers=False"
    ) as said:
        train(of_torch, stop, state=state, workers=1, stay=True)
    assert len([one for one in said if NOT_THE_SAME in str(one.message)]) == 1


@pytest.mark.parametrize("stop", [0, 2])
def test_workers_that_stay_and_draw_nothing_are_not_warned_about(stop):
    compare(nothing, stop, workers=2, stay=True)


def test_random_numbers_of_other_workers_are_the_same_between_epochs():
    compare(of_torch, 0, workers=1)


class RandomStream(IterableDataset):
    """A stream of samples that are drawn anew in each epoch."""

    def __iter__(self):
        return (torch.rand(6) for _ in range(3 * B))


def stream(stay, *, state=None):
    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    loader = DataLoader(RandomStream(), B, num_workers=1, persistent_workers=stay)
    method = thresher.RandomBackprop(keep=1.0)
    run = thresher.attach(method, loader=loader, criterion=None, model=model, epochs=EPOCHS)
    if state is not None:
        run.load_state_dict(state)
    seen = []
    while run.epoch < 2:
        for x in run.loader:
            seen.append(x)
            run.reduce(run.model(x).sum(1)).backward()
            if state is None and len(seen) == 4:
                state = run.state_dict()
    return seen, state


def test_random_numbers_of_a_stream_are_read_again_or_warned_about():
    seen, state = stream(False)
    assert_same(stream(False, state=state)[0], seen[4:])
    *_, state = stream(True)
    with pytest.warns(
        UserWarning, match=f"{NOT_THE_SAME} in worker processes.*and use persistent_workers=False"
    ):
        stream(True, state=state)


def noisy(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x * torch.rand(()), y


def test_random_numbers_of_a_collate_function_in_workers_are_warned_about():
    *_, state, _ = train(nothing, 2, workers=1, collate=noisy)
    with pytest.warns(UserWarning, match=NOT_THE_SAME):
        train(nothing, 2, state=state, workers=1, collate=noisy)


HALF = thresher.SelectiveBackprop(keep=0.75)


def test_selected_rows_that_waited_are_warned_about():
    *_, state, _ = train(of_torch, 2, method=HALF)
    assert len(state["run"]["ranks"][0]["waiting"]["ids"])
    with pytest.warns(
        UserWarning, match=f"{NOT_THE_SAME} for selected samples.*save between epochs[.]"
    ):
        train(of_torch, 2, state=state, method=HALF)


@pytest.mark.parametrize("workers", [0, 2])
def test_selected_rows_that_waited_are_the_same_where_nothing_is_drawn(workers):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NOT_THE_SAME}")
        data = compare(nothing, 2, method=HALF, workers=workers)
    assert bool(data.read_here) == (workers == 0)
