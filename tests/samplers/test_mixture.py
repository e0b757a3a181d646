"""`Mixture`: exact shares of the sources in every batch; every sample in its turn."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from thresher.samplers import Mixture

SOURCES = np.repeat(["code", "rare", "text"], [40, 3, 102])
WEIGHTS = {"text": 0.6, "code": 0.3, "rare": 0.1}


def test_shares_of_whole_rows_are_the_same_in_each_batch():
    """Floats as decimals: 0.3 of 20 rows are 6."""
    sampler = Mixture(SOURCES, 20, WEIGHTS)
    for _ in range(3):
        batches = [*sampler]
        assert len(batches) == len(sampler) == 8
        for batch in batches:
            assert Counter(SOURCES[batch].tolist()) == {"text": 12, "code": 6, "rare": 2}


def test_rounded_shares_add_up():
    """Worked by hand: 3/4 and 1/4 of 2 rows are 2 + 0 or 1 + 1 rows in turn, also in the next epoch."""
    sources = np.array([0] * 5 + [1] * 4)
    sampler = Mixture(sources, 2, {0: 3, 1: 1})
    counts = [int(sources[batch].sum()) for _ in range(2) for batch in sampler]
    assert counts == [0, 1] * 5


def test_every_sample_once_before_any_comes_again():
    """Worked by hand: 4 of the 5 samples of source 0 come in the first epoch of 2 batches, the fifth begins the second."""
    sources = np.array([0] * 5 + [1])
    sampler = Mixture(sources, 3, {0: 2, 1: 1})
    first, second = ([i for batch in sampler for i in batch] for _ in range(2))
    assert first.count(5) == second.count(5) == 2
    begin = {*first} - {5}
    assert len(begin) == 4 and {*second[:3]} - {5} > {*range(5)} - begin


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.floats(0.01, 1)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 20),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
)
def test_counts_and_coverage(given_sources, batch_size, seed, drop_last, fractions):
    """Rounded up or down in a batch, within one row over all batches, and no sample twice before another comes once."""
    sizes = [size for size, _, _ in given_sources]
    weights = dict(enumerate(part if fractions else whole for _, whole, part in given_sources))
    sources = np.repeat(np.arange(len(sizes)), sizes)
    sampler = Mixture(sources, batch_size, weights, seed=seed, drop_last=drop_last)
    rows = batch_size * np.array([*weights.values()]) / sum(weights.values())
    total, seen = np.zeros(len(sizes)), np.zeros(len(sources), dtype=np.int64)
    for number, batch in enumerate((batch for _ in range(3) for batch in sampler), 1):
        counts = np.bincount(sources[batch], minlength=len(sizes))
        total += counts
        np.add.at(seen, batch, 1)
        assert len(batch) == batch_size and (np.abs(counts - rows) < 1 + 1e-9).all()
        assert (np.abs(total - number * rows) < 1 + 1e-9).all()
        for source in range(len(sizes)):
            visits = seen[sources == source]
            # Within a batch, a round may begin before the last one ends.
            assert visits.max() - visits.min() <= 1 + (counts[source] > 1)


def test_orders_depend_on_seed_and_epoch_alone():
    sampler = Mixture(SOURCES, 7, WEIGHTS)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    epochs = [list(sampler) for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert len({str(batches) for batches in epochs}) == 4
    for epoch in (3, 0, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == epochs[epoch]
    # Other names in the same order, and weights with the same shares.
    numbers = np.searchsorted(["code", "rare", "text"], SOURCES)
    fresh = Mixture(torch.from_numpy(numbers), 7, {0: 3, 1: 1, 2: 6})
    fresh.set_epoch(2)
    assert list(fresh) == epochs[2]
    assert list(Mixture(SOURCES, 7, WEIGHTS, seed=1)) != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers):
    loader = DataLoader(range(145), batch_sampler=Mixture(SOURCES, 8, WEIGHTS), num_workers=workers)
    expected = Mixture(SOURCES, 8, WEIGHTS)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == list(expected)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_processes_goes_on(after, drop_last):
    def shares(replicas):
        settings = {"num_replicas": replicas, "drop_last": drop_last}
        return [Mixture(SOURCES, 7, WEIGHTS, rank=rank, **settings) for rank in range(replicas)]

    alone = shares(1)[0]
    alone.set_epoch(1)
    whole = list(alone)
    two = shares(2)
    for part in two:
        part.set_epoch(1)
    passes = [iter(part) for part in two]
    seen = [next(batches) for _ in range(3) for batches in passes]
    state = json.loads(json.dumps(two[1].state_dict()))
    assert state == two[0].state_dict()
    rest = shares(after)
    for part in rest:
        part.load_state_dict(state)
    parts = [list(part) for part in rest]
    seen += [batch for batches in zip(*parts, strict=True) for batch in batches]
    left = (len(whole) - 6) // after * after if drop_last else -(-(len(whole) - 6) // after) * after
    assert seen == list(itertools.islice(itertools.cycle(whole), 6 + left))


def test_shares_follow_the_sizes_by_default():
    sources = np.repeat(["code", "text"], [12, 4])
    assert list(Mixture(sources, 8)) == list(Mixture(sources, 8, {"code": 3, "text": 1}))


def test_few_samples():
    assert list(Mixture([3], 2, {3: 1})) == [[0, 0]]
    assert list(Mixture([3, 4], 3, {3: 1, 4: 1}, drop_last=True)) == []


@pytest.mark.parametrize(
    ("sources", "weights"),
    [
        (SOURCES, {"code": 1, "text": 1}),
        (SOURCES, {**WEIGHTS, "other": 1}),
        (SOURCES, {**WEIGHTS, "rare": 0}),
        (SOURCES, {**WEIGHTS, "rare": float("inf")}),
        (SOURCES, {**WEIGHTS, "rare": float("nan")}),
        ([0, 1], [1, 1]),
    ],
)
def test_weights_that_are_refused(sources, weights):
    with pytest.raises(ValueError, match="finite number above 0 for each of the sources"):
        Mixture(sources, 4, weights)


def test_what_else_is_refused():
    with pytest.raises(ValueError, match=r"`sources` must have shape \(N,\), got \(1, 2\)"):
        Mixture([[0, 1]], 4, {0: 1, 1: 1})
    with pytest.raises(ValueError, match="Mixture: `batch_size` must be 1 or more, got 0"):
        Mixture([0], 0, {0: 1})
    with pytest.raises(ValueError, match="has quotas=.*, but this sampler has"):
        Mixture([0, 1], 4, {0: 1, 1: 1}).load_state_dict(
            Mixture([0, 1], 4, {0: 1, 1: 3}).state_dict()
        )
