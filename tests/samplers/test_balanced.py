"""`BalancedBatchSampler`: equal shares of all classes, or K samples of each of P classes; every sample in its turn."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from thresher.samplers import BalancedBatchSampler

LABELS = np.repeat([0, 1, 2, 7], [5, 40, 3, 102])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 6, 17, 150, 200])
def test_equal_shares(batch_size):
    """In each batch within one row, and in each epoch within one batch; a batch begins with any class."""
    sampler = BalancedBatchSampler(LABELS, batch_size)
    for _ in range(3):
        batches, total = list(sampler), Counter()
        assert len(batches) == len(sampler) == -(-150 // batch_size) and {*map(len, batches)} == {
            batch_size
        }
        for batch in batches:
            found = np.bincount(LABELS[batch], minlength=8)[[0, 1, 2, 7]]
            assert found.max() - found.min() <= 1
            total.update(LABELS[batch].tolist())
        assert max(total.values()) - min(total[label] for label in (0, 1, 2, 7)) <= 1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 9),
    st.booleans(),
)
def test_classes_and_samples(sizes, classes, rows, seed, drop_last):
    """P different classes with K rows each, and every sample of a class before one comes again, over all epochs."""
    classes, labels = min(classes, len(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    sampler = BalancedBatchSampler(
        labels, classes_per_batch=classes, samples_per_class=rows, seed=seed, drop_last=drop_last
    )
    seen = [
        Counter(dict.fromkeys(np.flatnonzero(labels == kind).tolist(), 0))
        for kind in range(len(sizes))
    ]
    for _ in range(3):
        drawn = Counter(dict.fromkeys(range(len(sizes)), 0))
        for batch in sampler:
            kinds = labels[batch].reshape(classes, rows)
            assert (kinds == kinds[:, :1]).all() and len({*kinds[:, 0].tolist()}) == classes
            drawn.update(kinds[:, 0].tolist())
            for i in batch:
                seen[labels[i]][i] += 1
            # Within a batch the order is another one, where no sample is to come twice.
            assert all(
                max(counts.values()) - min(counts.values()) <= 1 + (rows > 1) for counts in seen
            )
        assert max(drawn.values()) - min(drawn.values()) <= 1


@given(st.integers(2, 30), st.integers(1, 10), st.integers(0, 99))
def test_few_samples_come_twice_in_a_batch(size, rows, seed):
    """Only where a round ends with the epoch, or where a class has fewer samples than rows."""
    labels = np.repeat([0, 1], size)
    batches = list(
        BalancedBatchSampler(
            labels, batch_size=2 * min(rows, size // 2), classes_per_batch=2, seed=seed
        )
    )
    assert all(len({*batch}) == len(batch) for batch in batches[:-2])


def test_orders_depend_on_seed_and_epoch_alone():
    settings = {"classes_per_batch": 3, "samples_per_class": 2}
    sampler = BalancedBatchSampler([str(label) for label in LABELS], **settings)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    epochs = [list(sampler) for _ in range(4)]
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and (np.random.get_state()[1] == before[1]).all()
    )
    assert len({str(batches) for batches in epochs}) == 4
    for epoch in (3, 0, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == epochs[epoch]
    fresh = BalancedBatchSampler(torch.from_numpy(LABELS), **settings)
    fresh.set_epoch(2)
    assert list(fresh) == epochs[2]
    assert list(BalancedBatchSampler(LABELS, seed=1, **settings)) != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers):
    loader = DataLoader(
        range(150), batch_sampler=BalancedBatchSampler(LABELS, 8), num_workers=workers
    )
    expected = BalancedBatchSampler(LABELS, 8)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == list(expected)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_processes_goes_on(after, drop_last):
    def shares(replicas):
        settings = {"num_replicas": replicas, "drop_last": drop_last}
        return [BalancedBatchSampler(LABELS, 8, rank=rank, **settings) for rank in range(replicas)]

    whole = list(shares(1)[0])
    two = shares(2)
    passes = [iter(part) for part in two]
    seen = [next(batches) for _ in range(3) for batches in passes]
    state = json.loads(json.dumps(two[1].state_dict()))
    assert state == two[0].state_dict()
    assert {
        "seed": 0,
        "samples": 150,
        "epoch": 0,
        "consumed": 6,
        "batch_size": 8,
    }.items() <= state.items()
    rest = shares(after)
    for part in rest:
        part.load_state_dict(state)
    parts = [list(part) for part in rest]
    seen += [batch for batches in zip(*parts, strict=True) for batch in batches]
    left = (len(whole) - 6) // after * after if drop_last else -(-(len(whole) - 6) // after) * after
    assert seen == list(itertools.islice(itertools.cycle(whole), 6 + left))


def test_one_sample_and_more_processes_than_batches():
    assert list(BalancedBatchSampler([3], 2)) == [[0, 0]]
    parts = [BalancedBatchSampler([3, 4], 2, num_replicas=3, rank=rank) for rank in range(3)]
    assert [sorted(*part) for part in parts] == [[0, 1]] * 3
    assert list(BalancedBatchSampler([3, 4], 3, drop_last=True)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give `batch_size`, or two of"),
        ({"classes_per_batch": 2}, "give `batch_size`, or two of"),
        ({"samples_per_class": 2}, "give `batch_size`, or two of"),
        ({"batch_size": 0}, "`batch_size` must be 1 or more, got 0"),
        (
            {"batch_size": 4, "samples_per_class": -1},
            "`samples_per_class` must be 1 or more, got -1",
        ),
        (
            {"batch_size": 4, "samples_per_class": 3},
            r"must be classes_per_batch \* samples_per_class, got 4, None and 3",
        ),
        (
            {"batch_size": 2, "classes_per_batch": 3},
            r"must be classes_per_batch \* samples_per_class, got 2, 3 and None",
        ),
        ({"batch_size": 2, "classes_per_batch": 2, "samples_per_class": 2}, "got 2, 2 and 2"),
        (
            {"classes_per_batch": 5, "samples_per_class": 1},
            "have 4 classes, but a batch should have 5: pass a smaller",
        ),
        (
            {"batch_size": 4, "rank": 1},
            "BalancedBatchSampler: give `num_replicas` and `rank` together",
        ),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(LABELS, **settings)


def test_labels_and_states_that_are_refused():
    with pytest.raises(ValueError, match="labels must have shape"):
        BalancedBatchSampler([], 2)
    with pytest.raises(ValueError, match="has batch_size=2, but this sampler has 4"):
        BalancedBatchSampler(LABELS, 4).load_state_dict(
            BalancedBatchSampler(LABELS, 2).state_dict()
        )
