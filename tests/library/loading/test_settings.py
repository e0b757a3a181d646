"""Settings of the user's DataLoader: the rebuilt loader has them, and a change after `attach` is refused by name."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import thresher

N = 40
DATA = TensorDataset(torch.arange(1.0, N * 3 + 1).view(N, 3), torch.arange(N) % 2)


def made(**settings):
    loader = DataLoader(DATA, **({"batch_size": 8, "shuffle": True} | settings))
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(3, 2),
        epochs=3,
    )
    return loader, run


def plain(samples):
    return default_collate(samples)


CHANGES = {
    "batch_sampler.batch_size": 12,
    "batch_sampler.drop_last": True,
    "batch_sampler.sampler": SequentialSampler(DATA),
    "collate_fn": plain,
    "num_workers": 1,
    "generator": torch.Generator(),
    "timeout": 3,
    "worker_init_fn": plain,
    "pin_memory": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_until_it_is_put_back(name):
    loader, run = made()
    of, _, attribute = name.rpartition(".")
    owner = loader.batch_sampler if of else loader
    before = getattr(owner, attribute)
    setattr(owner, attribute, CHANGES[name])
    with pytest.raises(
        ValueError, match=rf"`loader\.{name}` was changed from .* after `attach`.*run\.detach\(\)"
    ):
        iter(run.loader)
    setattr(owner, attribute, before)
    assert len(list(run.loader)) == 5


def test_another_sampler_of_the_same_kind_is_refused():
    loader, run = made()
    loader.batch_sampler.sampler = RandomSampler(DATA)  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"`loader\.batch_sampler\.sampler` was changed from RandomSampler to RandomSampler",
    ):
        iter(run.loader)


def test_a_change_by_the_runs_loader_is_one_of_the_users_loader():
    loader, run = made()
    run.loader.collate_fn = plain
    assert loader.collate_fn is plain
    with pytest.raises(ValueError, match=r"`loader\.collate_fn` was changed"):
        iter(run.loader)


def test_attached_again_the_new_settings_hold():
    loader, run = made()
    run.detach()
    loader.batch_sampler.batch_size = 20  # pyright: ignore
    again = thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3
    )
    assert [len(y) for _, y in again.loader] == [20, 20]


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_wrong_batch_size_is_refused(size):
    loader = DataLoader(DATA, 8)
    loader.batch_sampler.batch_size = size  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"`loader\.batch_sampler\.batch_size` must be a whole number of at least 1, got",
    ):
        thresher.attach(
            thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3
        )


def test_the_rebuilt_loader_has_all_settings():
    given = {
        "num_workers": 1,
        "collate_fn": plain,
        "timeout": 5,
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    loader, run = made(**given, drop_last=True)
    rebuilt, own = (thresher.loader_settings(one) for one in (run.loader.reader.loader, loader))
    assert rebuilt.pop("collate_fn").collate is own.pop("collate_fn") is plain
    assert rebuilt == own and own.items() >= (given.items() - {("collate_fn", plain)})


def test_what_a_data_loader_refuses_is_refused():
    _, run = made()
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        run.loader.batch_size = 4
