"""`Grouped`: similar lengths together, every sample once, and no batch above its tokens."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from thresher.samplers import Grouped

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)


def padding(batches):
    """Share of padding among the tokens of batches."""
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    return 1 - LENGTHS.sum() / padded


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(60, 200), st.integers(1, 9), st.integers(0, 9))
def test_every_sample_comes_once_within_the_tokens(lengths, most, window, seed):
    sampler, lengths = Grouped(lengths, max_tokens=most, window=window, seed=seed), np.array(lengths)
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler) and sorted(itertools.chain(*batches)) == list(range(len(lengths)))
        assert all(len(batch) * lengths[batch].max() <= most for batch in batches)


def test_little_is_padding_and_orders_are_random():
    by_rows, by_tokens = Grouped(LENGTHS, 16, window=5), Grouped(LENGTHS, max_tokens=5000, window=5)
    order = np.random.default_rng(0).permutation(1000)
    assert padding(np.split(order, range(16, 1000, 16))) > 0.4
    assert padding(by_rows) < 0.1 and padding(by_tokens) < 0.15
    first, second = list(by_rows), list(by_rows)
    assert {*map(len, first)} == {16, 8} and {*map(frozenset, first)}.isdisjoint(map(frozenset, second))
    assert np.abs(np.corrcoef([LENGTHS[batch].mean() for batch in first], range(len(first)))[0, 1]) < 0.4


@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_processes_goes_on(after):
    def shares(replicas):
        return [Grouped(LENGTHS, max_tokens=5000, num_replicas=replicas, rank=rank) for rank in range(replicas)]

    whole, two = list(shares(1)[0]), shares(2)
    passes = [iter(part) for part in two]
    seen = [next(batches) for _ in range(3) for batches in passes]
    rest = shares(after)
    for part in rest:
        part.load_state_dict(json.loads(json.dumps(two[1].state_dict())))
    seen += [batch for batches in zip(*rest, strict=True) for batch in batches]
    assert seen[: len(whole)] == whole and len(seen) - len(whole) < after


def test_in_a_loader():
    loader = DataLoader(range(1000), batch_sampler=Grouped(torch.from_numpy(LENGTHS), 16), num_workers=2)
    assert [batch.tolist() for batch in loader] == list(Grouped(LENGTHS.tolist(), 16))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either `batch_size` or `max_tokens`, got None and None"),
        ({"batch_size": 4, "max_tokens": 9}, "got 4 and 9"),
        ({"batch_size": 0}, "`batch_size` must be 1 or more, got 0"),
        ({"max_tokens": 7}, "sample 2 has length 8, above max_tokens=7"),
        ({"batch_size": 2, "lengths": [0, 1]}, "be above 0"),
        ({"batch_size": 2, "lengths": [float("nan")]}, "be above 0"),
        ({"batch_size": 2, "lengths": [[1]]}, r"have shape \(N,\).*got array\(\[\[1\]\]\)"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Grouped(**{"lengths": [1, 2, 8], **settings})
    with pytest.raises(ValueError, match="the state has window=50, but this sampler has 2"):
        Grouped([1], 1, window=2).load_state_dict(Grouped([1], 1).state_dict())
