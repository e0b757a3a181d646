"""Candidate batches: a stream that a state of its own has put into the middle."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import thresher
from helpers import assert_same

N, B = 20, 4


class Stream(IterableDataset):
    """As a stream of Hugging Face `datasets`, which begins where a state says that was loaded."""

    def __init__(self):
        self._starting_state_dict = None

    def load_state_dict(self, state):
        self._starting_state_dict = state

    def __iter__(self):
        begin = (self._starting_state_dict or {"read": 0})["read"]
        return iter([(torch.tensor([float(i)]), torch.zeros(1)) for i in range(begin, N)])


def attached():
    model = nn.Linear(1, 1)
    loader = DataLoader(Stream(), B)
    return thresher.attach(
        thresher.RandomBackprop(keep=1.0),
        loader=loader,
        criterion=nn.MSELoss(),
        model=model,
        epochs=1,
    )


def test_a_stream_that_has_loaded_a_state_is_refused_where_the_run_goes_on_in_mid_epoch():
    run, other = attached(), attached()
    batches = iter(run.loader)
    for x, y in (next(batches), next(batches)):
        run.criterion(run.model(x), y).backward()
    other.load_state_dict(run.state_dict())
    other.loader.dataset.load_state_dict({"read": 2 * B})
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match="its Stream has loaded a state of its own, so samples would be skipped twice",
        ):
            iter(other.loader)
    assert torch.equal(torch.get_rng_state(), before)
    other.loader.dataset.load_state_dict(None)
    assert_same(list(other.loader), list(batches))


def test_a_run_that_begins_takes_a_stream_as_it_is():
    run = attached()
    run.loader.dataset.load_state_dict({"read": 3 * B})
    assert [x.flatten().tolist() for x, _ in run.loader] == [[12, 13, 14, 15], [16, 17, 18, 19]]


class CountingStream(IterableDataset):
    """As a stream that shuffles by the number of its epoch, which it counts itself, and can begin at a place of its own."""

    def __init__(self):
        self.epoch = self.begin = 0

    def __iter__(self):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch))[self.begin :]
        self.epoch, self.begin = self.epoch + 1, 0
        for i in order.tolist():
            yield torch.tensor([float(i)]) + 0.5 * torch.rand(1), torch.tensor(i)


def counted():
    model, loader = nn.Linear(1, N), DataLoader(CountingStream(), B)
    method = thresher.RandomBackprop(keep=1.0)
    return thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=3
    )


def interrupted_in_the_second_epoch(run):
    train(run, run.loader)
    batches = iter(run.loader)
    train(run, [next(batches), next(batches)])
    return run.state_dict(), batches


def train(run, batches):
    for x, y in batches:
        run.criterion(run.model(x), y).backward()


def test_a_resumed_stream_that_is_in_another_epoch_is_told_apart_by_its_labels():
    run, other = counted(), counted()
    state, batches = interrupted_in_the_second_epoch(run)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="begins with another batch .*such as stream.set_epoch"):
        iter(other.loader)
    other.load_state_dict(state)
    other.loader.dataset.epoch = other.epoch
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*begins with another batch")
        assert_same([y for _, y in other.loader], [y for _, y in batches])


def test_a_stream_that_ends_before_the_place_of_the_interrupted_epoch_is_refused():
    run, other = counted(), counted()
    state, _ = interrupted_in_the_second_epoch(run)
    other.load_state_dict(state)
    other.loader.dataset.epoch, other.loader.dataset.begin = 1, N - 4
    with pytest.raises(
        RuntimeError,
        match="resumes after 8 samples of an epoch, and the stream ends after 4. A resumed run",
    ):
        iter(other.loader)
