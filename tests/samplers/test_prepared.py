"""Samplers in loaders that divide their batches themselves, and samplers that do not fit the dataset or the other processes.

Trainings in two processes are in tests/framework_processes.py.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import thresher
from depth import depth
from thresher.samplers import (
    BalancedBatchSampler,
    Grouped,
    Mixture,
    Shuffle,
    StratifiedBatchSampler,
    WeightedSampler,
)

accelerate = pytest.importorskip("accelerate.data_loader")
KINDS = {
    "Grouped by rows": lambda values, **settings: Grouped(values, 8, **settings),
    "Grouped by tokens": lambda values, **settings: Grouped(values, max_tokens=90, **settings),
    "Balanced": lambda values, **settings: BalancedBatchSampler(values % 5, 8, **settings),
    "Balanced, P x K": lambda values, **settings: BalancedBatchSampler(
        values % 2, classes_per_batch=2, samples_per_class=3, **settings
    ),
    "Mixture": lambda values, **settings: Mixture(values % 2, 8, {0: 2, 1: 1}, **settings),
    "Stratified": lambda values, **settings: StratifiedBatchSampler(values % 5, 8, **settings),
}


@given(
    st.sampled_from(list(KINDS)),
    # Of fewer samples than one step has, accelerate repeats as many as it takes.
    st.integers(32, 99),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_each_sample_comes_as_often_as_in_one_process(kind, n, world, drop_last, split, even, seed):
    values = 1 + np.arange(n) % 80
    settings = {"num_replicas": 1, "rank": 0, "drop_last": drop_last, "seed": seed}
    expected = [*KINDS[kind](values, **settings)]
    size = max(map(len, expected), default=0)
    shares = []
    for rank in range(world):
        loader = DataLoader(
            TensorDataset(torch.arange(n)), batch_sampler=KINDS[kind](values, **settings)
        )
        options = {
            "num_processes": world,
            "process_index": rank,
            "split_batches": split,
            "even_batches": even,
        }
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        if split and (batch_size is None or batch_size % world):
            with pytest.raises(ValueError, match="split_batches"):
                accelerate.prepare_data_loader(loader, **options)
            return
        prepared = accelerate.prepare_data_loader(loader, **options)
        shares.append([batch.tolist() for (batch,) in prepared])
        # accelerate counts a part of the last batch that a process may not get.
        uneven = split and not even
        assert len(shares[-1]) == len(prepared) or not expected or uneven
    found = Counter(i for batches in shares for batch in batches for i in batch)
    whole = Counter(i for batch in expected for i in batch)
    if drop_last:
        assert found <= whole and (whole - found).total() < world * max(size, 1)
    elif even:
        assert whole <= found and (found - whole).total() < world * size
    else:
        assert found == whole


def test_batch_samplers_take_the_epoch_of_the_prepared_loader():
    def prepare():
        return accelerate.prepare_data_loader(
            DataLoader(range(60), batch_sampler=Grouped(range(1, 61), 8, num_replicas=1, rank=0)),
            num_processes=2,
            process_index=0,
        )

    loader = prepare()
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    resumed = prepare()
    resumed.set_epoch(1)
    assert [batch.tolist() for batch in resumed] == epochs[1] != epochs[0]


def test_batches_that_are_not_full_are_dealt_out():
    for epoch in range(5):
        rows = set()
        for rank in range(2):
            batches = StratifiedBatchSampler(np.arange(45) % 5, 4, num_replicas=1, rank=0)
            loader = accelerate.prepare_data_loader(
                DataLoader(range(45), batch_sampler=batches), num_processes=2, process_index=rank
            )
            loader.set_epoch(epoch)
            batches.set_epoch(epoch)
            rows.update(row for batch in loader for row in batch.tolist())
        assert rows == {*range(45)}


def test_a_loop_that_began_before_set_epoch_is_refused():
    loader = DataLoader(range(60), 4, sampler=Shuffle(60), num_workers=1)
    batches = iter(loader)
    loader.sampler.set_epoch(2)
    with pytest.raises(RuntimeError, match=r"set_epoch\(2\) was called after a loop over epoch 0"):
        list(batches)
    assert len(list(loader)) == 15


class Reader(IterableDataset):
    """A dataset that loops over a sampler of its own."""

    def __len__(self):
        return 2 * 3

    def __iter__(self):
        return (i for i in [*Shuffle(3), *Shuffle(3)])


SHORT = {
    "weights": lambda n: {"sampler": WeightedSampler([1.0] * n)},
    "weights of a subset without replacement": lambda n: {
        "sampler": WeightedSampler([1.0] * n, n, replacement=False)
    },
    "Shuffle": lambda n: {"sampler": Shuffle(n)},
    **{
        kind: lambda n, make=make: {"batch_sampler": make(1 + np.arange(n) % 9)}
        for kind, make in KINDS.items()
    },
}


# torch does not finish an iterator with workers whose sampler raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("n", [10, 31])
@pytest.mark.parametrize("workers", depth([0], [0, 2]))
def test_the_number_of_samples_is_that_of_the_dataset(kind, n, workers):
    """Without the check, ten weights for thirty samples load ten of them."""
    loader = DataLoader(range(30), num_workers=workers, **SHORT[kind](n))
    with pytest.raises(
        ValueError,
        match=rf"is made for {n} samples, but the dataset of the loader has 30\. .*Subset",
    ):
        list(loader)


@pytest.mark.parametrize(
    "kind", [kind for kind in SHORT if "sampler" in SHORT[kind](9)] + ["Stratified"]
)
@pytest.mark.parametrize("n", [10, 31])
def test_a_run_checks_the_number_when_it_is_attached(kind, n):
    loader = DataLoader(range(30), **SHORT[kind](n))
    with pytest.raises(
        ValueError, match=rf"is made for {n} samples, but the dataset of the loader has 30\."
    ):
        thresher.attach(thresher.FullData(), loader=loader, criterion=None, epochs=1)


def test_a_subset_and_a_dataset_with_a_loop_of_its_own_are_loaded():
    assert (
        len(list(DataLoader(Subset(range(30), range(10)), sampler=WeightedSampler([1] * 10)))) == 10
    )
    assert len(list(DataLoader(Reader()))) == 6


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_a_stateful_loader_checks_the_number_too():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with pytest.raises(ValueError, match="made for 10 samples"):
        list(stateful(range(30), sampler=WeightedSampler([1.0] * 10)))


def other_process(monkeypatch, other):
    """Makes this process the first of two, whose second one has another sampler."""

    def gather(found, value):
        # The second process calls the same function; what it would send is recorded here.
        sent = []
        monkeypatch.setattr(distributed, "all_gather_object", lambda _, facts: sent.append(facts))
        iterator = iter(other)
        next(iterator)
        monkeypatch.setattr(distributed, "all_gather_object", gather)
        found[:] = [value, *sent]

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "all_gather_object", gather)


VALUES = 1 + np.arange(60) % 7
DIFFERENT = {
    "seed": (lambda: Shuffle(60), lambda: Shuffle(60, seed=1)),
    "samples": (lambda: Shuffle(60), lambda: Shuffle(61)),
    "drop_last": (lambda: Shuffle(60), lambda: Shuffle(60, drop_last=True)),
    "weights": (lambda: WeightedSampler(VALUES), lambda: WeightedSampler(VALUES + 1)),
    "num_samples": (lambda: WeightedSampler(VALUES, 20), lambda: WeightedSampler(VALUES, 21)),
    "lengths": (lambda: Grouped(VALUES, 8), lambda: Grouped(VALUES[::-1].copy(), 8)),
    "window": (lambda: Grouped(VALUES, 8, window=1), lambda: Grouped(VALUES, 8, window=2)),
    "labels": (
        lambda: BalancedBatchSampler(VALUES, 7),
        lambda: BalancedBatchSampler(VALUES**2 % 7, 7),
    ),
    "quotas": (
        lambda: Mixture(VALUES % 2, 7, {0: 1, 1: 2}),
        lambda: Mixture(VALUES % 2, 7, {0: 1, 1: 3}),
    ),
    "batch_size": (
        lambda: StratifiedBatchSampler(VALUES, 7),
        lambda: StratifiedBatchSampler(VALUES, 8),
    ),
    "scores": (
        lambda: StratifiedBatchSampler(VALUES, 7),
        lambda: StratifiedBatchSampler(VALUES, 7, scores=np.arange(60)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_settings_that_differ_between_processes_are_refused(name, monkeypatch):
    mine, others = DIFFERENT[name]
    other_process(monkeypatch, mine())
    next(iter(mine()))
    other_process(monkeypatch, others())
    shown = "labels" if name == "scores" else name
    with pytest.raises(
        RuntimeError,
        match=f"rank 1 differs from rank 0 in (.*, )?{shown}(,.*)?, so samples would be lost",
    ):
        next(iter(mine()))


def test_epochs_that_differ_between_processes_are_refused(monkeypatch):
    """As after a resume in one process only."""
    mine, other = Shuffle(60), Shuffle(60)
    other.set_epoch(3)
    other_process(monkeypatch, other)
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 in epoch, so"):
        next(iter(mine))


def test_labels_may_have_other_names_or_dtypes(monkeypatch):
    other_process(monkeypatch, BalancedBatchSampler([f"class {i}" for i in VALUES], 7))
    next(iter(BalancedBatchSampler(VALUES, 7)))
    other_process(monkeypatch, Grouped(torch.from_numpy(VALUES).float(), 8))
    next(iter(Grouped(VALUES.tolist(), 8)))


def test_one_process_reads_for_all(monkeypatch):
    """dispatch_batches=True: the first process loads all batches, so the sampler must not divide them."""
    loader = DataLoader(TensorDataset(torch.arange(60)), sampler=Shuffle(60))

    class DataLoaderDispatcher:
        def __iter__(self):
            yield from loader

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match="a part of a part"):
        list(DataLoaderDispatcher())
