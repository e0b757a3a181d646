"""Candidate batches: a stream that a state of its own has put into the middle."""

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
    return thresher.attach(thresher.RandomBackprop(keep=1.0), loader=loader, criterion=nn.MSELoss(), model=model, epochs=1)


def test_a_stream_that_has_loaded_a_state_is_refused_where_the_run_goes_on_in_mid_epoch():
    run, other = attached(), attached()
    batches = iter(run.loader)
    for x, y in (next(batches), next(batches)):
        run.criterion(run.model(x), y).backward()
    other.load_state_dict(run.state_dict())
    other.loader.dataset.load_state_dict({"read": 2 * B})
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="its Stream has loaded a state of its own, so samples would be skipped twice"):
            iter(other.loader)
    assert torch.equal(torch.get_rng_state(), before)
    other.loader.dataset.load_state_dict(None)
    assert_same(list(other.loader), list(batches))


def test_a_run_that_begins_takes_a_stream_as_it_is():
    run = attached()
    run.loader.dataset.load_state_dict({"read": 3 * B})
    assert [x.flatten().tolist() for x, _ in run.loader] == [[12, 13, 14, 15], [16, 17, 18, 19]]
