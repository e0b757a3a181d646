"""The computed shuffle: one to one, the same in pieces, and as random as a shuffle that is drawn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from depth import depth
from helpers import over_instances
from thresher.permutation import MOST, Permutation


@over_instances(
    depth([*range(65), *range(65, 4000, 97), *range(4090, 4102), 4999, 5000], range(5001))
)
def test_every_id_comes_once(n):
    order = Permutation(n, seed=n, epoch=n % 7)
    ids = order.piece(0, n)
    assert ids.dtype == np.int64 and np.array_equal(np.sort(ids), np.arange(n))
    assert np.array_equal(order.places_of(ids), np.arange(n))


LARGE = [int(n) for n in np.random.default_rng(0).integers(5_000, 10**12, 7)]
LARGE += [int(10**e) for e in np.random.default_rng(1).uniform(4, 12, 3)]


@pytest.mark.parametrize("n", [*LARGE, 10**12, 2**40, 2**32 - 1, 2**32, 2**32 + 1, MOST])
def test_every_place_of_a_large_order_has_one_id(n):
    """Two places with one id would both be its place."""
    order, rng = Permutation(n, seed=1, epoch=2), np.random.default_rng(n % 2**32)
    seen = set()
    for begin in (0, n // 3, n // 2 + 1, n - 1000):
        ids = order.piece(begin, begin + 1000)
        assert ids.min() >= 0 and ids.max() < n
        assert np.array_equal(order.places_of(ids), np.arange(begin, begin + 1000))
        seen |= set(ids.tolist())
    assert len(seen) == 4 * 1000
    ids = rng.integers(0, n, 20)
    assert [
        order.piece(place, place + 1).item() for place in order.places_of(ids).tolist()
    ] == ids.tolist()


@settings(max_examples=depth(20, 200))
@given(
    st.integers(1, 3000) | st.integers(131_000, 132_000),
    st.integers(0, 2**70),
    st.integers(0, 10**6),
    st.data(),
)
def test_a_piece_is_the_same_however_it_is_cut(n, seed, epoch, data):
    begin = data.draw(st.integers(0, n))
    end, step = data.draw(st.integers(begin, n)), data.draw(st.integers(1, 9))
    order = Permutation(n, seed, epoch)
    whole = order.piece(0, n)
    assert np.array_equal(order.piece(begin, end, step), whole[begin:end:step])
    assert np.array_equal(Permutation(n, seed, epoch).piece(begin, end), whole[begin:end])


def test_seeds_epochs_and_sizes_have_other_orders():
    keys = [
        (n, seed, epoch)
        for n in (999, 1000)
        for seed in (0, 1, -1, 2**63 + 5)
        for epoch in range(4)
    ]
    orders = {Permutation(*key).piece(0, 50).tobytes() for key in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Permutation(-1, 0, 0), "`n` must be a number of ids from 0 to 2.62, got -1"),
        (lambda: Permutation(MOST + 1, 0, 0), "`n` must be a number of ids from 0 to 2.62"),
        (
            lambda: Permutation(9, 0, 0).piece(3, 10),
            "0 <= begin <= end <= 9, step >= 1; got 3, 10, 1",
        ),
        (lambda: Permutation(9, 0, 0).piece(-1, 3), "got -1, 3, 1"),
        (lambda: Permutation(9, 0, 0).piece(4, 3), "got 4, 3, 1"),
        (lambda: Permutation(9, 0, 0).piece(1, 3, 0), "got 1, 3, 0"),
        (lambda: Permutation(9, 0, 0).places_of(np.array([0, 9])), r"within \[0, 9\), got 0 to 9"),
        (lambda: Permutation(9, 0, 0).places_of(np.array([-1])), r"within \[0, 9\), got -1 to -1"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Ten statistics of a shuffle. Each returns a p-value; they are combined over epochs. Those of the committed rounds and of
# torch.randperm must not be small, and those of three rounds are: each of the ten sees that three are too few.

PARTS, BATCH = 64, 128


def two_sided(p):
    return min(1.0, 2 * min(p, 1 - p))


def fits(counts, expected, freedom):
    return two_sided(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), freedom))


def independent(one, other):
    """Whether two numbers below `PARTS`, each as often as every other, depend on one another."""
    counts = np.bincount(one * PARTS + other, minlength=PARTS**2)
    return fits(counts, len(one) / PARTS**2, (PARTS - 1) ** 2)


def parts(numbers):
    return numbers * PARTS // len(numbers)


def places_of(ids):
    places = np.empty_like(ids)
    places[ids] = np.arange(len(ids))
    return places


def ascents(ids):
    n = len(ids)
    z = (np.count_nonzero(ids[1:] > ids[:-1]) - (n - 1) / 2) / math.sqrt((n + 1) / 12)
    return 2 * stats.norm.sf(abs(z))


def distances(numbers):
    """Two uniform numbers are at a distance of less than u in a share 2u - u^2 of the cases."""
    ends = np.linspace(0, 1, 101)
    counts, _ = np.histogram(np.abs(np.diff(numbers)) / len(numbers), ends)
    return fits(counts, np.diff(2 * ends - ends**2) * (len(numbers) - 1), 99)


def classes_in_batches(ids):
    """Samples are sorted by ten classes: a batch has a hypergeometric number of each."""
    n, whole = len(ids), len(ids) // BATCH * BATCH
    classes = (ids[:whole] * 10 // n).reshape(-1, BATCH)
    counts = np.stack([(classes == c).sum(1) for c in range(10)], 1)
    spread = ((counts - BATCH / 10) ** 2 / (BATCH / 10)).sum() / (1 - (BATCH - 1) / (n - 1))
    return two_sided(stats.chi2.sf(spread, 9 * len(counts)))


def pairs_in_a_batch(ids):
    """The samples 2i and 2i + 1, such as two parts of one image, are in one batch as often as chance has it."""
    n, batches = len(ids), places_of(ids) // BATCH
    together, expected = (
        np.count_nonzero(batches[:-1:2] == batches[1::2]),
        (n // 2) * (BATCH - 1) / (n - 1),
    )
    return min(
        1.0,
        2 * min(stats.poisson.sf(together - 1, expected), stats.poisson.cdf(together, expected)),
    )


STATISTICS = {
    "part of the place and of the id": lambda ids: independent(
        parts(np.arange(len(ids))), parts(ids)
    ),
    "parts of consecutive ids": lambda ids: independent(parts(ids)[:-1], parts(ids)[1:]),
    "parts of ids a batch apart": lambda ids: independent(parts(ids)[:-BATCH], parts(ids)[BATCH:]),
    "low bits of consecutive ids": lambda ids: independent(ids[:-1] % PARTS, ids[1:] % PARTS),
    "low bits of the place and of the id": lambda ids: independent(
        np.arange(len(ids)) % PARTS, ids % PARTS
    ),
    "ascents": ascents,
    "distances of consecutive ids": distances,
    "distances of the places of consecutive ids": lambda ids: distances(places_of(ids)),
    "classes in batches": classes_in_batches,
    "pairs in a batch": pairs_in_a_batch,
}


def drawn(n, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).numpy()


def made(rounds=None):
    return lambda n, epoch: Permutation(n, seed=0, epoch=epoch, rounds=rounds).piece(0, n)


def p_values(order, n, epochs):
    orders = [order(n, epoch) for epoch in range(epochs)]
    found = {name: [max(1e-300, of(ids)) for ids in orders] for name, of in STATISTICS.items()}
    return {name: stats.combine_pvalues(values).pvalue for name, values in found.items()}


@pytest.mark.parametrize(
    "n", depth([2**15, 50_000], [5_000, 2**13, 2**15, 50_000, 2**17 + 1, 300_007])
)
@pytest.mark.parametrize("order", [made(), drawn], ids=["computed", "drawn"])
def test_an_order_is_random(order, n):
    small = {name: p for name, p in p_values(order, n, 24).items() if p < 1e-3}
    assert not small


def test_three_rounds_are_too_few_by_each_statistic():
    assert len(STATISTICS) == 10
    passed = {name: p for name, p in p_values(made(rounds=3), 2**15, 96).items() if p > 1e-12}
    assert not passed


@pytest.mark.parametrize("n", depth([5, 10, 16], [2, 3, 5, 8, 10, 12, 16, 33, 100]))
def test_few_ids_are_in_random_order(n):
    """Over the epochs every place has every id equally often, and so are the steps from the first id to the second."""
    epochs = depth(600, 4000)
    orders = np.stack([Permutation(n, 3, epoch).piece(0, n) for epoch in range(epochs)])
    counts = np.stack([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    assert fits(counts, epochs / n, (n - 1) ** 2) > 1e-3
    if n > 2:
        steps = np.bincount((orders[:, 1] - orders[:, 0]) % n, minlength=n)[1:]
        assert fits(steps, epochs / (n - 1), n - 2) > 1e-3
