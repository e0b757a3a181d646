"""Settings of the user's DataLoader that change after `attach`: the run follows where the DataLoader would have followed."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

import thresher
from helpers import assert_same
from thresher import AttributionError

N = 40
DATA = TensorDataset(torch.arange(1.0, N * 3 + 1).view(N, 3), torch.arange(N) % 2)


def made(method=None, **settings):
    loader = DataLoader(DATA, **({"batch_size": 8, "shuffle": True} | settings))
    model = nn.Linear(3, 2)
    twice = {"forward_passes": "twice"} if isinstance(method, thresher.RandomBackprop) else {}
    run = thresher.attach(
        method or thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=3, **twice
    )
    return loader, run


def plain(samples):
    return default_collate(samples)


def zeros(samples):
    x, y = default_collate(samples)
    return torch.zeros_like(x), y


def turning(samples):
    x, y = default_collate(samples)
    return x.flip(0), y


def both(change, **settings):
    """Batches of three epochs of the unattached and of the attached loader; `change` is called before each epoch."""

    def epochs(attached):
        loader, run = made(**settings)
        torch.manual_seed(1)
        found = []
        for epoch in range(3):
            change(loader, epoch, None)
            for number, batch in enumerate(run.loader if attached else loader):
                change(loader, epoch, number)
                found.append(batch)
        return found, torch.get_rng_state()

    return epochs(True), epochs(False)


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}, {"shuffle": False}, {"collate_fn": plain}])
@pytest.mark.parametrize("within", [False, True])
def test_batch_size(settings, within):
    def change(loader, epoch, number):
        if epoch == 1 and number == (1 if within else None):
            loader.batch_sampler.batch_size = 12

    assert_same(*both(change, **settings))


def test_drop_last():
    def change(loader, epoch, number):
        loader.batch_sampler.batch_size, loader.batch_sampler.drop_last = 12, epoch == 1

    assert_same(*both(change))


@pytest.mark.parametrize("method", [thresher.UniformSubset(keep=0.5), thresher.RandomBackprop(keep=0.5)])
def test_batch_size_of_a_selection(method):
    loader, run = made(method)
    model = run.model

    def sizes():
        found = []
        for x, y in run.loader:
            run.criterion(model(x), y).backward()
            found.append(len(x))
        return found

    assert sizes() == [8, 8, 4]
    loader.batch_sampler.batch_size = 10
    assert len(run.loader) == 2
    assert sizes() == [10, 10]


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_wrong_batch_size_is_refused(size):
    loader, run = made()
    loader.batch_sampler.batch_size = size  # pyright: ignore
    with pytest.raises(ValueError, match=r"`loader\.batch_sampler\.batch_size` must be a whole number of at least 1, got"):
        iter(run.loader)
    loader.batch_sampler.batch_size = 8  # pyright: ignore
    batches = iter(run.loader)
    next(batches)
    loader.batch_sampler.batch_size = size  # pyright: ignore
    with pytest.raises(ValueError, match="must be a whole number"):
        list(batches)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],  # persistent workers keep the first one
)
def test_collate_fn(settings):
    def change(loader, epoch, number):
        if number is None:
            loader.collate_fn = [plain, zeros, default_collate][epoch]

    assert_same(*both(change, **settings))


@pytest.mark.filterwarnings("ignore:.*no loss was credited")
def test_the_check_begins_again_with_a_collate_function():
    loader, run = made(collate_fn=turning)
    x, y = next(iter(run.loader))
    with pytest.raises(AttributionError, match="collate_fn turning sorts or mixes"):
        run.criterion(run.model(x), y)
    run.loader.collate_fn = plain
    assert loader.collate_fn is plain
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y)
    loader.collate_fn = turning
    _, (x, y), *_ = iter(run.loader)
    with pytest.raises(AttributionError, match="collate_fn turning sorts or mixes"):
        run.criterion(run.model(x), y)


def test_number_of_workers():
    def change(loader, epoch, number):
        if number is None:
            loader.prefetch_factor, loader.num_workers = [(2, 1), (None, 0), (2, 1)][epoch]

    assert_same(*both(change))


def test_another_generator():
    def change(loader, epoch, number):
        if number is None:
            loader.generator = torch.Generator().manual_seed(epoch)

    assert_same(*both(change))


def test_another_sampler_is_refused():
    loader, run = made()
    first = loader.batch_sampler.sampler  # pyright: ignore
    loader.batch_sampler.sampler = SequentialSampler(DATA)  # pyright: ignore
    with pytest.raises(ValueError, match=r"changed from RandomSampler to SequentialSampler after `attach`.*run\.detach\(\)"):
        iter(run.loader)
    loader.batch_sampler.sampler = RandomSampler(DATA)  # pyright: ignore
    with pytest.raises(ValueError, match="changed from RandomSampler to RandomSampler"):
        iter(run.loader)
    loader.batch_sampler.sampler = first  # pyright: ignore
    assert len(list(run.loader)) == 5


def test_what_a_data_loader_refuses_is_refused():
    _, run = made()
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        run.loader.batch_size = 4
