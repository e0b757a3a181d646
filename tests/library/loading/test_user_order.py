"""The user's sampler: which samples it yields, and what plans refer to."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from helpers import as_if_trained

N, B = 40, 4
EVEN = list(range(0, N, 2))


class Grows(Dataset):
    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i


def attach(sampler, method=None, *, data=None, with_optimizer=False, **settings):
    data = (
        TensorDataset(torch.arange(float(N)).unsqueeze(1), torch.arange(N))
        if data is None
        else data
    )
    model = nn.Linear(1, N)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method or thresher.UniformSubset(keep=0.6),
        loader=DataLoader(data, B, sampler=sampler, **settings),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=3,
    )
    return (run, optimizer) if with_optimizer else run


def epoch(run):
    ids = [i for _, y in run.loader for i in y.tolist()]
    as_if_trained(run)
    return ids


def weights(ids):
    return torch.zeros(N).index_fill_(0, torch.tensor(ids), 1.0)


SOME = {
    "subset": lambda: SubsetRandomSampler(EVEN),
    "subset, tensor": lambda: SubsetRandomSampler(torch.tensor(EVEN)),
    "list": lambda: EVEN[::-1],
    "array": lambda: SubsetRandomSampler(np.array(EVEN)),
    "weights of 0": lambda: WeightedRandomSampler(weights(EVEN), len(EVEN), replacement=False),
}


@pytest.mark.parametrize("name", SOME)
def test_fractions_are_of_the_samples_that_the_sampler_yields(name):
    run = attach(SOME[name]())
    plan = run.plan
    assert len(plan.ids) == len(run.loader) * B == 12 and set(plan.ids.tolist()) <= set(EVEN)
    assert (
        plan.facts["actual_fraction"] == pytest.approx(0.4) and "pruned_fraction" not in plan.facts
    )
    assert sorted(epoch(run)) == plan.ids.tolist()


def test_a_fraction_of_a_random_sampler_over_fewer_samples():
    for sampler in (RandomSampler(range(20)), SequentialSampler(range(20))):
        run = attach(sampler)
        assert len(epoch(run)) == 12 and int(run.plan.ids.max()) < 20


def test_kakurenbo_hides_its_share_of_a_subset():
    method = thresher.Kakurenbo(max_fraction=0.4, move_back=False, reduce_fraction=False)
    run, optimizer = attach(SubsetRandomSampler(EVEN), method, with_optimizer=True)
    hidden = []
    for _ in range(3):
        seen = 0
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            seen += len(y)
        hidden.append(len(EVEN) - seen)
    assert hidden == [0, 8, 8]
    assert run.cost.refresh == 16 and run.cost.full_forward == 3 * len(EVEN)


def test_samplers_that_draw_from_all_samples_are_as_they_were():
    for sampler in (
        RandomSampler(range(N), num_samples=20),
        WeightedRandomSampler(torch.ones(N), 20),
    ):
        assert len(attach(sampler).plan.ids) == 24


class Half(Sampler):
    """A sampler of which only the length is known."""

    def __iter__(self):
        return iter(EVEN)

    def __len__(self):
        return len(EVEN)


def test_a_share_of_samples_that_are_not_known_is_refused():
    with pytest.raises(
        ValueError,
        match=r"Half, that yields 20 of the 40 samples.*cannot find out which.*Subset\(dataset, ids\)",
    ):
        attach(Half())
    assert epoch(attach(Half(), thresher.FullData())) == EVEN


@dataclass(frozen=True)
class Keeps:
    stage = "before"

    def kept(self, n):
        return torch.arange(n // 2)


def test_pruning_beside_a_sampler_of_some_samples_is_refused():
    with pytest.raises(
        ValueError, match="Keeps chooses among all 40 samples.*sampler yields 20 of them.*Subset"
    ):
        attach(SubsetRandomSampler(EVEN), Keeps())


def test_a_sampler_that_changes_is_refused():
    sampler = SubsetRandomSampler(EVEN[:])
    run, whole = attach(sampler), attach(sampler, thresher.FullData())
    epoch(run)
    sampler.indices = [*EVEN[:-1], 39]
    with pytest.raises(
        ValueError, match="SubsetRandomSampler yields other samples than when `attach` was called"
    ):
        epoch(run)
    assert sorted(epoch(whole)) == sampler.indices


@pytest.mark.parametrize("sampler", [None, DistributedSampler(range(N), num_replicas=1, rank=0)])
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.UniformSubset(keep=0.5)])
def test_a_dataset_that_grows_is_named(method, sampler):
    data = Grows()
    run = attach(sampler, method, data=data, shuffle=None if sampler else True)
    epoch(run)
    data.n += 10
    with pytest.raises(
        ValueError,
        match=r"dataset of the loader had 40 samples when `attach` was called, but now has 50.*attach again",
    ):
        epoch(run)


@pytest.mark.parametrize(
    "method", [thresher.InfoBatch(), thresher.UniformSubset(keep=0.5), thresher.Winnow(0.5)]
)
def test_the_length_over_a_dataset_that_has_grown(method):
    data = Grows()
    run, optimizer = attach(None, method, data=data, shuffle=True, with_optimizer=True)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        optimizer.step()
    data.n += 10
    with pytest.raises(ValueError, match="had 40 samples when `attach` was called, but now has 50"):
        len(run.loader)


class Sized(Sampler):
    """Yields the size of an image beside its id, as samplers for training at several sizes do."""

    def __iter__(self):
        return ((i, 224) for i in range(N))

    def __len__(self):
        return N


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.UniformSubset(keep=0.5)])
def test_samplers_of_tuples_are_named(method):
    with pytest.raises(
        TypeError,
        match=r"Sized, that yields \(0, 224\), of type tuple. It must yield ids: whole numbers",
    ):
        epoch(attach(Sized(), method))
    with pytest.raises(TypeError, match=r"list, that yields 1.5, of type float"):
        attach([1.5, 2.5], method)


def test_ids_may_be_any_whole_numbers():
    ids = [torch.tensor(3), np.int64(7), np.uint8(1), 2]
    assert epoch(attach(ids, thresher.FullData())) == [3, 7, 1, 2]


def test_a_distributed_sampler_of_one_process():
    torch.manual_seed(0)
    sampler = DistributedSampler(range(N), num_replicas=1, rank=0, seed=3)
    reference = DistributedSampler(range(N), num_replicas=1, rank=0, seed=3)
    full, half = attach(sampler, thresher.FullData()), attach(sampler)
    for number in range(2):
        sampler.set_epoch(number)
        reference.set_epoch(number)
        assert epoch(full) == list(reference)
        kept = set(half.plan.ids.tolist())
        assert (
            len(kept) == 24
            and len(half.loader) == 6
            and epoch(half) == [i for i in reference if i in kept]
        )
