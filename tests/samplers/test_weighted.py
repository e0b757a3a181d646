"""`WeightedSampler`: as often as the weights say, in one or several processes, with changed weights, and resumed anywhere."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader

from thresher.samplers import WeightedSampler
from thresher.samplers.weighted import independent

KINDS = ("paced", True, False)
N, K = 400, 150


def skewed(n=N, seed=0):
    return np.random.default_rng(seed).random(n) ** 3


def counts(sampler, epochs=1, n=N):
    return sum(np.bincount(list(sampler), minlength=n) for _ in range(epochs))


# How often each sample comes


@pytest.mark.parametrize("k", [7, 150, 400, 1000])
def test_paced_visits_are_those_of_the_weights(k):
    """Within 1 after any number of epochs, and in each epoch the rate rounded up or down."""
    weights = skewed()
    rate, sampler, seen = k * weights / weights.sum(), WeightedSampler(weights, k), np.zeros(N)
    for epoch in range(1, 31):
        visits = counts(sampler)
        assert visits.sum() == k and ((visits == np.floor(rate)) | (visits == np.ceil(rate))).all()
        seen += visits
        assert np.abs(seen - epoch * rate).max() <= 1


def test_the_first_paced_epochs_are_no_different():
    """A sample comes at a random one of the epochs that its weight grants it: large weights do not come first."""
    weights = np.repeat([0.6, 0.2], 5000)
    sampler = WeightedSampler(weights, 4000)
    for _ in range(4):
        assert counts(sampler, n=10000)[5000:].sum() == pytest.approx(1000, abs=200)


def test_independent_draws():
    """Frequencies within 4 standard errors, of single samples and of the two halves."""
    weights, sampler = skewed(), WeightedSampler(skewed(), 100_000, replacement=True)
    p, found = weights / weights.sum(), counts(sampler, 2)
    assert (np.abs(found - 200_000 * p) <= 4.5 * np.sqrt(200_000 * p * (1 - p)) + 1).all()
    half = p[: N // 2].sum()
    assert abs(found[: N // 2].sum() - 200_000 * half) < 4 * np.sqrt(200_000 * half * (1 - half))
    ids = np.array(list(sampler))
    assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 4 / np.sqrt(len(ids))


def test_independent_draws_of_more_than_two_to_the_24_samples():
    """float32 cannot tell such ids, or their probabilities, apart."""
    weights = np.zeros(2**24 + 9)
    weights[[2**24 + 1, 2**24 + 7]] = 1e-12, 3e-12
    ids = independent(weights, 4000, np.random.default_rng(0))
    assert set(ids.tolist()) == {2**24 + 1, 2**24 + 7}
    assert abs((ids == 2**24 + 7).sum() - 3000) < 4 * np.sqrt(4000 * 3 / 16)


def test_without_replacement():
    """No sample twice, and each in its share of the epochs, also where a weight asks for more than one visit."""
    weights, k = np.concatenate([skewed(), [90.0]]), 60
    sampler, epochs = WeightedSampler(weights, k, replacement=False), 400
    found = np.zeros(N + 1)
    for _ in range(epochs):
        visits = counts(sampler, n=N + 1)
        assert visits.max() == 1 and visits.sum() == k
        found += visits
    p = np.append((k - 1) * skewed() / skewed().sum(), 1.0)
    certain = p >= 1
    assert (found[certain] == epochs).all()
    assert (
        np.abs(found - epochs * p)[~certain]
        <= 4.5 * np.sqrt(epochs * p * (1 - p).clip(0))[~certain] + 1
    ).all()


WEIGHTS = st.lists(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.3, 1e-9, 1e9]), min_size=1, max_size=12
).filter(any)


@given(
    WEIGHTS,
    st.integers(1, 20),
    st.sampled_from(KINDS),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 9),
)
@example([1.0], 1, "paced", 5, False, 0)
@example([0.0, 0.1, 0.1, 0.1], 3, False, 2, True, 0)
def test_few_samples(weights, k, kind, replicas, drop_last, seed):
    """Ties, weights of 0, one sample, more processes than samples: an epoch is complete, whatever the number of processes."""
    if kind is False:
        k = min(k, np.count_nonzero(weights))
    settings = {"replacement": kind, "seed": seed}
    whole, seen = (
        WeightedSampler(weights, k, num_replicas=1, rank=0, **settings),
        np.zeros(len(weights)),
    )
    parts = [
        WeightedSampler(
            weights, k, num_replicas=replicas, rank=rank, drop_last=drop_last, **settings
        )
        for rank in range(replicas)
    ]
    rate = k * np.array(weights) / sum(weights)
    for epoch in range(1, 5):
        order = list(whole)
        dealt = [list(part) for part in parts]
        total = k // replicas * replicas if drop_last else -(-k // replicas) * replicas
        assert [i for ids in zip(*dealt, strict=True) for i in ids] == list(
            itertools.islice(itertools.cycle(order), total)
        )
        assert len(order) == k and all(
            len(ids) == len(part) for ids, part in zip(dealt, parts, strict=True)
        )
        seen += np.bincount(order, minlength=len(weights))
        assert not seen[np.array(weights) == 0].any()
        if kind == "paced":
            assert np.abs(seen - epoch * rate).max() < 1 + 1e-4


# Orders and epochs


@pytest.mark.parametrize("kind", KINDS)
def test_orders_depend_on_seed_and_epoch_alone(kind):
    sampler = WeightedSampler(skewed(), K, replacement=kind)
    epochs = [list(sampler) for _ in range(4)]
    assert sampler.epoch == 4 and len(sampler) == K and len({*map(tuple, epochs)}) == 4
    for epoch in (2, 0, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == epochs[epoch]
    fresh = WeightedSampler(torch.from_numpy(skewed()), K, replacement=kind)
    fresh.set_epoch(3)
    assert list(fresh) == epochs[3]
    assert list(WeightedSampler(skewed(), K, replacement=kind, seed=1)) != epochs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_global_is_drawn(kind):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(WeightedSampler(skewed(), K, replacement=kind))
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and (np.random.get_state()[1] == before[1]).all()
    )


def test_the_first_orders():
    """The same on every platform."""
    first = {kind: list(WeightedSampler([1, 2, 3, 4.5, 0], 4, replacement=kind)) for kind in KINDS}
    assert first == FIRST


FIRST = {"paced": [2, 3, 1, 3], True: [2, 2, 1, 3], False: [0, 1, 3, 2]}


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers):
    loader = DataLoader(
        range(N),
        16,
        sampler=WeightedSampler(skewed(), K),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    expected, weights = WeightedSampler(skewed(), K), np.arange(N) % 2.0
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(expected)
    batches = iter(loader)
    first = next(batches)
    loader.sampler.set_weights(weights)
    order = list(expected)
    expected.set_weights(weights)
    assert torch.cat([first, *batches]).tolist() == order
    found = torch.cat(list(loader))
    assert found.tolist() == list(expected) and (found[0:] % 2 == 1).all()


# Changed weights


@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_hold_from_the_next_epoch_on(kind):
    sampler, other = (WeightedSampler(skewed(), K, replacement=kind) for _ in range(2))
    first = list(sampler)
    other.set_weights(np.ones(N))
    other.set_weights(dict(enumerate(skewed())))
    assert list(other) == first
    ids = iter(sampler)
    start = [next(ids) for _ in range(9)]
    sampler.set_weights(dict.fromkeys(range(0, N, 2), 0.0))
    assert [*start, *ids] == list(other)
    assert (np.array(list(sampler)) % 2 == 1).all()
    other.set_epoch(2)
    sampler.set_epoch(2)
    other.set_weights(dict.fromkeys(range(0, N, 2), 0.0))
    assert list(sampler) == list(other)


def test_the_pace_goes_on_with_changed_weights():
    """What weights asked for before is not forgotten: the visits are within 2 of what all weights asked for."""
    sampler, seen, asked = WeightedSampler(np.ones(N), K), np.zeros(N), np.zeros(N)
    for epoch in range(30):
        weights = skewed(seed=epoch).clip(max=0.5)
        sampler.set_weights(weights)
        asked += K * weights / weights.sum()
        seen += counts(sampler)
    assert np.abs(seen - asked).max() < 2


def test_weights_of_earlier_epochs_are_gone():
    sampler = WeightedSampler(np.ones(4))
    list(sampler)
    sampler.set_weights([1.0, 1, 1, 0])
    list(sampler)
    sampler.set_epoch(0)
    with pytest.raises(
        RuntimeError,
        match="were changed at epoch 1, and the weights of epoch 0 are no longer stored: load a state",
    ):
        list(sampler)


# Resume


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_processes_goes_on(kind, after):
    """Two processes saved it: every visit of the epoch comes, and those of the end again only to fill the last step."""

    def shares(replicas):
        return [
            WeightedSampler(skewed(), K, replacement=kind, num_replicas=replicas, rank=r)
            for r in range(replicas)
        ]

    two = shares(2)
    for part in two:
        part.set_epoch(5)
    passes = [iter(part) for part in two]
    seen = [next(ids) for _ in range(20) for ids in passes]
    states = [part.state_dict() for part in two]
    assert (
        states[0] == states[1] == json.loads(json.dumps(states[0])) and states[0]["consumed"] == 40
    )
    assert passes[0].state_dict() == states[0]
    rest = shares(after)
    for part in rest:
        part.load_state_dict(states[0])
        part.set_epoch(5)
    parts = [list(part) for part in rest]
    assert len({*map(len, parts)}) == 1
    seen += [i for ids in zip(*parts, strict=True) for i in ids]
    whole = WeightedSampler(skewed(), K, replacement=kind)
    whole.set_epoch(5)
    order = list(whole)
    assert seen[:K] == order and seen[K:] == order[: len(seen) - K] and len(seen) - K < after
    assert {part.epoch for part in rest} == {6} and rest[0].state_dict()["consumed"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_has_the_changed_weights(kind):
    def trained():
        sampler = WeightedSampler(np.ones(N), K, replacement=kind)
        list(sampler)
        for seed in range(3):
            sampler.set_weights(skewed(seed=seed))
            list(sampler)
        return sampler

    sampler = trained()
    ids = iter(sampler)
    [next(ids) for _ in range(40)]
    sampler.set_weights(skewed(seed=7))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed = WeightedSampler(np.ones(N), K, replacement=kind)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        assert list(resumed) == list(ids)
        ids = iter(sampler)


def test_a_state_between_epochs_and_after_a_drawn_ahead_one():
    sampler = WeightedSampler(skewed(), K)
    assert sampler.state_dict()["epoch"] == 0
    order = list(sampler)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (1, 0)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "consumed": 3 * 16})
    batches = list(BatchSampler(sampler, 16, drop_last=False))
    assert list(itertools.chain.from_iterable(batches)) == order[48:]


# What is refused


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: WeightedSampler([1, float("nan"), -1]),
            ValueError,
            r"got nan for sample 1 \(and 1 more",
        ),
        (lambda: WeightedSampler([1, -2.0]), ValueError, "got -2.0 for sample 1.*the weight 0"),
        (lambda: WeightedSampler([float("inf")]), ValueError, "got inf for sample 0"),
        (
            lambda: WeightedSampler([0.0, 0]),
            ValueError,
            "`weights` are all 0: give at least one sample",
        ),
        (
            lambda: WeightedSampler(3.0),
            ValueError,
            r"must have shape \(N,\), a weight per sample, got \(\)",
        ),
        (
            lambda: WeightedSampler([]),
            ValueError,
            r"`weights` must have shape \(N,\), a weight per sample, got \(0,\)",
        ),
        (
            lambda: WeightedSampler([[1.0]]),
            ValueError,
            r"must have shape \(1,\), a weight per sample, got \(1, 1\)",
        ),
        (lambda: WeightedSampler([1.0], 0), ValueError, "`num_samples` must be 1 or more, got 0"),
        (
            lambda: WeightedSampler([1.0], 0.5),
            TypeError,
            "`num_samples` must be a whole number, got 0.5",
        ),
        (
            lambda: WeightedSampler([1.0], replacement="no"),
            ValueError,
            "must be 'paced', True or False, got 'no'",
        ),
        (
            lambda: WeightedSampler([1.0, 0], replacement=False),
            ValueError,
            "`num_samples` is 2, but only 1 weights are above 0.*Pass a smaller num_samples=, or replacement='paced'",
        ),
        (
            lambda: WeightedSampler([1.0], seed=0.5),
            TypeError,
            "WeightedSampler: `seed` must be a whole number",
        ),
        (
            lambda: WeightedSampler([1.0], rank=1),
            ValueError,
            "WeightedSampler: give `num_replicas` and `rank` together",
        ),
        (
            lambda: WeightedSampler([1.0]).set_weights([1.0, 2]),
            ValueError,
            r"must have shape \(1,\).*got \(2,\)",
        ),
        (
            lambda: WeightedSampler([1.0]).set_weights({1: 2.0}),
            ValueError,
            r"has the id 1, but ids must be within \[0, 1\)",
        ),
        (lambda: WeightedSampler([1.0]).set_weights({0: 0.0}), ValueError, "are all 0"),
        (
            lambda: WeightedSampler([1.0]).load_state_dict(WeightedSampler([2.0]).state_dict()),
            ValueError,
            "the state has weights=.* Create the sampler with the same arguments",
        ),
        (
            lambda: WeightedSampler([1.0]).load_state_dict(WeightedSampler([1.0], 2).state_dict()),
            ValueError,
            "the state has num_samples=2, but this sampler has 1",
        ),
        (
            lambda: WeightedSampler([1.0]).load_state_dict(
                WeightedSampler([1.0], seed=2).state_dict()
            ),
            ValueError,
            "the state has seed=2, but this sampler has 0",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# torch.distributed


def in_two_processes(monkeypatch, gathered):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "all_gather_object", gathered)


def test_processes_are_those_of_torch_distributed(monkeypatch):
    calls = []

    def same(found, value):
        calls.append(value)
        found[:] = [value, value]

    in_two_processes(monkeypatch, same)
    sampler, order = (
        WeightedSampler(skewed(), K),
        list(WeightedSampler(skewed(), K, num_replicas=1, rank=0)),
    )
    assert len(sampler) == K // 2 and list(sampler) == order[1::2]
    list(sampler)
    sampler.set_weights({0: 1.0})
    list(sampler)
    assert [call["epoch"] for call in calls] == [0, 1, 2]
    assert calls[0]["weights"] == calls[1]["weights"] != calls[2]["weights"]


def test_a_process_with_other_weights_is_named(monkeypatch):
    def other(found, value):
        found[:] = [value, value | {"weights": 0}]

    in_two_processes(monkeypatch, other)
    with pytest.raises(
        RuntimeError, match="rank 1 differs from rank 0 in weights, .*torch.distributed.broadcast"
    ):
        list(WeightedSampler(skewed(), K))
