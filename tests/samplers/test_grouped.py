"""`Grouped`: similar lengths together, every sample once, and no batch above its tokens."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from thresher.samplers import Grouped

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)


class Indexed:
    """Rows that numbers do not find, as in a pandas Series or DataFrame after a filter."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, name):
        raise KeyError(name)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.rows, dtype)


def padding(batches, lengths=LENGTHS):
    """Share of padding among the tokens of batches."""
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    return 1 - lengths.sum() / padded


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=50),
    st.integers(60, 200),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_every_sample_comes_once_within_the_tokens(lengths, most, window, seed):
    sampler, lengths = (
        Grouped(lengths, max_tokens=most, window=window, seed=seed),
        np.array(lengths),
    )
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler) and sorted(itertools.chain(*batches)) == list(
            range(len(lengths))
        )
        assert all(len(batch) * lengths[batch].max() <= most for batch in batches)


def test_little_is_padding_and_orders_are_random():
    by_rows, by_tokens = Grouped(LENGTHS, 16, window=5), Grouped(LENGTHS, max_tokens=5000, window=5)
    order = np.random.default_rng(0).permutation(1000)
    assert padding(np.split(order, range(16, 1000, 16))) > 0.4
    assert padding(by_rows) < 0.1 and padding(by_tokens) < 0.15
    first, second = list(by_rows), list(by_rows)
    assert {*map(len, first)} == {16, 8} and {*map(frozenset, first)}.isdisjoint(
        map(frozenset, second)
    )
    assert (
        np.abs(np.corrcoef([LENGTHS[batch].mean() for batch in first], range(len(first)))[0, 1])
        < 0.4
    )


@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_processes_goes_on(after):
    def shares(replicas):
        return [
            Grouped(LENGTHS, max_tokens=5000, num_replicas=replicas, rank=rank)
            for rank in range(replicas)
        ]

    whole, two = list(shares(1)[0]), shares(2)
    passes = [iter(part) for part in two]
    seen = [next(batches) for _ in range(3) for batches in passes]
    rest = shares(after)
    for part in rest:
        part.load_state_dict(json.loads(json.dumps(two[1].state_dict())))
    seen += [batch for batches in zip(*rest, strict=True) for batch in batches]
    assert seen[: len(whole)] == whole and len(seen) - len(whole) < after


def test_in_a_loader():
    loader = DataLoader(
        range(1000), batch_sampler=Grouped(torch.from_numpy(LENGTHS), 16), num_workers=2
    )
    assert [batch.tolist() for batch in loader] == list(Grouped(LENGTHS.tolist(), 16))


def test_lengths_with_an_index_of_their_own():
    assert Grouped(Indexed(LENGTHS), 16).lengths.tolist() == LENGTHS.tolist()


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
        Grouped([1], 1, window=2).load_state_dict(Grouped([1], 1, window=50).state_dict())
    with pytest.raises(ValueError, match="the state has lengths="):
        Grouped([1, 2], 1).load_state_dict(Grouped([2, 1], 1).state_dict())


def by_length(lengths, rows, generator):
    """The batches of `group_by_length` of Transformers."""
    ids = generator.permutation(len(lengths))
    together = rows * min(50, max(1, len(lengths) // (rows * 4)))
    parts = np.split(ids, range(together, len(ids), together))
    whole = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    return np.split(whole, range(rows, len(whole), rows))


def sentences(n):
    """Lengths of sentences, 3 to 256, and the generator that drew them."""
    generator = np.random.default_rng(n)
    return np.minimum(generator.lognormal(3.3, 0.6, n).astype(int) + 3, 256), generator


@pytest.mark.parametrize("n", [200, 500, 1000, 2000, 5000])
@pytest.mark.parametrize("tokens", [False, True])
def test_small_data_is_grouped_as_well(n, tokens):
    lengths, generator = sentences(n)
    sampler = Grouped(lengths, max_tokens=600) if tokens else Grouped(lengths, 16)
    first, second = list(sampler), list(sampler)
    assert padding(first, lengths) <= 1.3 * padding(by_length(lengths, 16, generator), lengths)
    assert (
        len({*map(frozenset, first)} & {*map(frozenset, second)}) <= 2
    )  # such as the one of a last, smaller window


def row(n):
    """The row of the table of padding in docs/samplers.md for `n` samples."""
    lengths, generator = sentences(n)
    batches = {
        "random": np.split(generator.permutation(n), range(16, n, 16)),
        "group_by_length": by_length(lengths, 16, generator),
        "rows": list(Grouped(lengths, 16)),
        "tokens": list(Grouped(lengths, max_tokens=600)),
    }
    return (
        f"| {n:,} | "
        + " | ".join(f"{100 * padding(batches[name], lengths):.0f} %" for name in batches)
        + " |"
    )


def test_the_table_of_padding():
    page = Path(__file__).resolve().parents[2] / "docs" / "samplers.md"
    rows = [row(n) for n in (200, 1000, 5000, 50_000)]
    assert "\n".join(rows) in page.read_text(encoding="utf-8"), rows
