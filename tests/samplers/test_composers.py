"""Batch samplers that compose the batches of any samples: by themselves, and with every kind of method in a run."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import epochs_of_today as epochs
import thresher
from depth import depth
from helpers import assert_same
from threaded_world import on_ranks
from thresher.loading.composed_order import ComposedOrder
from thresher.loading.packed_plan import PackedPlan
from thresher.samplers import (
    BalancedBatchSampler,
    BatchComposer,
    Grouped,
    Mixture,
    StratifiedBatchSampler,
)
from thresher.score_table import Scores

N = 120
GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(3, 60, N)
LABELS = np.arange(N) % 5
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X[:, 0] > 0).long())
COMPOSERS = {
    "by length": lambda **given: Grouped(LENGTHS, 16, **given),
    "by tokens": lambda **given: Grouped(LENGTHS, max_tokens=400, **given),
    "stratified": lambda **given: StratifiedBatchSampler(LABELS, 16, **given),
    "balanced": lambda **given: BalancedBatchSampler(LABELS, 15, **given),
    "mixture": lambda **given: Mixture(LABELS, 16, dict(enumerate([4, 3, 1, 1, 1])), **given),
}
ONCE = [name for name in COMPOSERS if name not in ("balanced", "mixture")]
hard = settings(max_examples=depth(40, 300), deadline=None)


class Backwards:
    """A composer of one's own: no class of this library, and no numbered epochs."""

    def __len__(self):
        return 12

    def __iter__(self):
        order, ends = self.compose(np.arange(N), 0)
        return iter([order[a:b].tolist() for a, b in itertools.pairwise(ends)])

    def compose(self, ids, epoch, batches=None):
        count = batches or -(-len(ids) // 10)
        return np.roll(ids[::-1], epoch), np.arange(count + 1) * len(ids) // count


def cut(order, ends):
    return [order[a:b].tolist() for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", COMPOSERS)
def test_all_samples_are_composed_as_the_sampler_yields_them(name):
    plain = COMPOSERS[name]()
    for epoch in range(3):
        assert cut(*COMPOSERS[name]().compose(np.arange(N), epoch)) == [*plain]


@hard
@given(st.data(), st.sampled_from(ONCE), st.integers(0, 5))
def test_kept_samples_come_once(data, name, epoch):
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=1))))
    order, ends = COMPOSERS[name]().compose(kept, epoch)
    assert sorted(order.tolist()) == kept.tolist()
    assert ends[0] == 0 and ends[-1] == len(kept) and (np.diff(ends) > 0).all()


@hard
@given(st.data(), st.sampled_from(ONCE), st.integers(0, 5))
def test_smaller_batches_are_as_many_as_those_of_all_samples(data, name, epoch):
    sampler = COMPOSERS[name]()
    batches = len(sampler)
    kept = data.draw(st.sets(st.integers(0, N - 1), min_size=batches))
    order, ends = sampler.compose(np.array(sorted(kept)), epoch, batches)
    assert sorted(order.tolist()) == sorted(kept) and len(ends) == batches + 1
    assert (np.diff(ends) > 0).all()
    if name == "by tokens":
        padded = [len(one) * LENGTHS[one].max() for one in cut(order, ends)]
        assert max(padded) <= 400


def test_half_of_the_samples_take_half_of_the_tokens():
    lengths = np.exp(np.random.default_rng(1).normal(4, 0.6, 4000)).clip(5, 900).astype(int)
    sampler = Grouped(lengths, max_tokens=8000)
    kept = np.sort(np.random.default_rng(2).choice(4000, 2000, replace=False))
    order, ends = sampler.compose(kept, 0, len(sampler))
    padded = np.array([len(one) * lengths[one].max() for one in cut(order, ends)])
    assert len(padded) == len(sampler)
    assert 3600 < padded.mean() < 4400 and padded.max() < 5000


def train(sampler, method, *, epochs=3, state=None, stop=None, **options):
    """Trains, from a state on or until a batch of the second epoch; returns the ids by batch, the model and the state."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method,
        loader=DataLoader(DATA, batch_sampler=sampler),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **options,
    )
    if state is not None:
        model.load_state_dict(state["model"])
        run.load_state_dict(state["run"])
    seen = []
    while run.epoch < epochs:
        for number, (x, y) in enumerate(run.loader, 1):
            seen.append(run.ids.tolist())
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stop == (run.epoch, number):
                saved = {
                    "model": {key: value.clone() for key, value in model.state_dict().items()},
                    "run": run.state_dict(),
                }
                return seen, saved, run
    return seen, model.state_dict(), run


METHODS = {
    "kakurenbo": thresher.Kakurenbo(),
    "infobatch": thresher.InfoBatch(),
    "in the batch": thresher.SelectiveBackprop(keep=0.5),
    "rows": thresher.UniformRows(0.5),
    "half": 0.5,
}


@pytest.mark.parametrize("make", [*COMPOSERS.values(), Backwards], ids=[*COMPOSERS, "own"])
def test_full_data_trains_on_the_batches_of_the_plain_loop(make):
    plain = make()
    expected = [one for _ in range(3) for one in plain]
    seen, _, run = train(make(), thresher.FullData())
    if make is not Backwards:
        assert seen == expected
    assert seen[: len(plain)] == expected[: len(plain)] and len(run.loader) == len(plain)
    assert run.progress == 1 and run.cost.backward == sum(map(len, seen))


@pytest.mark.filterwarnings("ignore:.*kept every sample")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*ONCE, "own"])
def test_methods_go_on_within_an_epoch(name, method):
    make = COMPOSERS.get(name, Backwards)
    whole, expected, _ = train(make(), METHODS[method])
    first, state, _ = train(make(), METHODS[method], stop=(1, 3))
    second, found, _ = train(make(), METHODS[method], state=state)
    assert first + second == whole
    assert_same(found, expected)


def test_half_has_the_steps_of_full_training_and_half_of_the_rows():
    seen, _, run = train(COMPOSERS["by tokens"](), 0.5)
    assert len(seen) == 3 * len(COMPOSERS["by tokens"]())
    assert 2 * run.cost.backward == run.cost.full_backward


def test_steps_are_fewer_where_the_method_asks_for_it():
    seen, _, _ = train(COMPOSERS["by length"](), 0.5, spend="steps", epochs=1)
    assert len(seen) == 4 and max(map(len, seen)) == 16


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("size", [2, 3])
def test_processes_get_the_batches_that_the_sampler_gives_them(name, size):
    plan = PackedPlan.of(thresher.EpochPlan(torch.arange(N)), N)

    def own(world):
        sampler = COMPOSERS[name](num_replicas=size, rank=world.rank)
        order = ComposedOrder(DataLoader(DATA, batch_sampler=sampler), world)
        epoch = order.begin(plan, resumed=False)()
        assert len(order.ends(plan)) == len(epoch.ends) == order.full_batches + 1
        return [epoch.batch(number).tolist() for number in range(len(epoch))]

    for rank, found in enumerate(on_ranks(size, own)):
        assert found == [*COMPOSERS[name](num_replicas=size, rank=rank)]


@pytest.mark.parametrize("name", ["balanced", "mixture"])
def test_batches_of_one_size_are_not_made_smaller(name):
    with pytest.raises(thresher.SmallerBatchesError, match="batches of one size.*spend='steps'"):
        train(COMPOSERS[name](), 0.5)
    seen, _, run = train(COMPOSERS[name](), thresher.Kakurenbo())
    assert all(len({*LABELS[one]}) == 5 for one in seen) and not run.loader.yields_once


DROPPING = ["stratified", "mixture"]


@pytest.mark.parametrize("name", DROPPING)
def test_a_dropped_last_batch_leaves_all_samples_to_choose_from(name):
    make = COMPOSERS[name]
    seen, _, run = train(make(drop_last=True), thresher.FullData())
    assert [*map(len, seen)] == [16] * 21 and not run.audit().problems
    seen, _, _ = train(make(drop_last=True), thresher.UniformSubset(0.5))
    assert [*map(len, seen)] == [16] * 9


def test_half_of_the_rows_that_are_not_dropped():
    seen, _, run = train(COMPOSERS["stratified"](drop_last=True), 0.5)
    assert len(seen) == 21 and 2 * run.cost.backward == run.cost.full_backward


def test_an_epoch_of_less_than_a_batch_is_not_dropped():
    seen, _, _ = train(COMPOSERS["stratified"](drop_last=True), thresher.UniformSubset(0.1))
    assert [*map(len, seen)] == [12] * 3


def test_a_class_without_a_kept_sample():
    with pytest.raises(ValueError, match="every class needs a sample in each epoch"):
        COMPOSERS["balanced"]().compose(np.flatnonzero(LABELS < 4), 0)


def test_rows_of_several_batches_are_not_gathered():
    with pytest.raises(ValueError, match="no batches of Grouped. Use spend='batches'"):
        train(COMPOSERS["by length"](), thresher.UniformRows(0.5), spend="steps")


class Wrong(Backwards):
    def __init__(self, change):
        self.change = change

    def compose(self, ids, epoch, batches=None):
        return self.change(*super().compose(ids, epoch, batches))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order, ends: (order[1:], ends), "ascending ends of their batches, from 0 to 119"),
        (lambda order, ends: (order + 1, ends), "some of the ids that it was given, got others"),
    ],
)
def test_a_composer_that_answers_something_else(change, message):
    sampler = Wrong(lambda order, ends: (order, ends))
    training = DataLoader(DATA, batch_sampler=sampler)
    run = thresher.attach(
        thresher.FullData(), loader=training, criterion=nn.CrossEntropyLoss(), epochs=1
    )
    sampler.change = change
    with pytest.raises(ValueError, match=message):
        next(iter(run.loader))


def test_batches_of_too_few_rows():
    with pytest.raises(
        thresher.SmallerBatchesError, match="60 batches, and 36 samples are chosen, less than one"
    ):
        train(Grouped(LENGTHS, 2), 0.3)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("given", [{"batch_size": 16}, {"max_tokens": 4096}])
def test_balanced_steps_have_nearly_equal_tokens(size, given):
    lengths = np.exp(np.random.default_rng(0).normal(4, 0.8, 6000)).clip(4, 2000).astype(int)

    def tokens(**more):
        ranks = [
            [*Grouped(lengths, num_replicas=size, rank=rank, **given, **more)]
            for rank in range(size)
        ]
        rows = sorted(row for batches in ranks for one in batches for row in one)
        assert [*dict.fromkeys(rows)] == [*range(6000)]
        assert len({len(batches) for batches in ranks}) == 1
        padded = [[len(one) * lengths[one].max() for one in batches] for batches in ranks]
        whole = np.array(padded)[:, :-1]
        return (whole.max(0) / whole.mean(0)).mean()

    assert tokens(balance=True) <= 1.1 and tokens(balance=True) <= tokens()


def test_a_prepared_loader_says_how_many_processes_share_a_step():
    lengths = np.random.default_rng(0).integers(50, 300, 800)
    alone = Grouped(lengths, 10, balance=4, num_replicas=1, rank=0)
    batches = [*alone]
    means = [np.mean([lengths[one].max() for one in batches[i : i + 4]]) for i in range(0, 80, 4)]
    ratios = [
        max(lengths[one].max() for one in batches[i : i + 4]) / mean
        for i, mean in zip(range(0, 80, 4), means, strict=True)
    ]
    assert max(ratios) < 1.2 and sorted(row for one in batches for row in one) == [*range(800)]


def test_pruning_leaves_out_steps():
    """As with a shuffled loader: smaller batches have the steps of the samples that pruning keeps."""
    scores = Scores(torch.arange(N), torch.rand(N))
    pruned = [thresher.Prune(scores, keep=0.5), thresher.Winnow(0.5)]
    seen, _, _ = train(Grouped(LENGTHS, 10), pruned, epochs=2)
    assert len(seen) == 12 and sum(map(len, seen)) == 60


class Halves(Grouped):
    """Yields other batches than those that its base composes."""

    def __iter__(self):
        return iter([half for one in super().__iter__() for half in (one[:8], one[8:]) if half])


def test_a_subclass_with_batches_of_its_own_is_refused():
    with pytest.raises(ValueError, match="a batch_sampler, Halves: leaving out samples would"):
        train(Halves(LENGTHS, 16), thresher.FullData())


def test_a_composer_needs_a_function():
    with pytest.raises(NotImplementedError):
        BatchComposer(0, 1, 0, False).compose(np.arange(3), 0)


def test_history_has_the_tokens_of_batches_by_length() -> None:
    lengths = np.array([9, 1, 2, 8, 1, 7])
    loader = DataLoader(
        TensorDataset(torch.randn(6, 3), torch.arange(6) % 2),
        batch_sampler=Grouped(lengths, 2, window=1),
    )
    model = nn.Linear(3, 2)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=1
    )
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
    # Batches of (9, 8), (7, 2) and (1, 1).
    entry = run.history[0]
    assert (entry["tokens"], entry["padded_tokens"]) == (28, 18 + 14 + 2)
    assert "17.6% of the tokens were padding" in run.summary()


class Neighbors(BatchComposer):
    """The composer of one's own in the documentation of `BatchComposer`."""

    samples = 53

    def compose(self, ids, epoch, batches=None):
        count = batches or -(-len(ids) // 6)
        return np.roll(ids, epoch), np.arange(count + 1) * len(ids) // count


def test_a_composer_of_ones_own_has_the_batches_that_it_composes():
    sampler = Neighbors()
    assert len(sampler) == 9
    for epoch in range(2):
        rows, ends = sampler.compose(np.arange(53), epoch)
        assert [*sampler] == [rows[a:b].tolist() for a, b in itertools.pairwise(ends)]
    sampler.set_epoch(0, consumed=4)
    assert len([*sampler]) == 5
    shared = [[*Neighbors(0, 2, rank)] for rank in range(2)]
    first = [*Neighbors()]
    assert [shared[k % 2][k // 2] for k in range(10)] == [*first, first[0]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plan", ["all", "some", "a share"])
def test_a_composer_of_ones_own_in_processes_and_resumed(plan, size, monkeypatch):
    monkeypatch.setitem(epochs.PLANS, "a share", (lambda: 0.5, {}))
    monkeypatch.setitem(epochs.SHARED, "neighbors", epochs.of_batches(Neighbors))
    whole = epochs.result(f"neighbors; {plan}; {size}")
    batches = len(whole[0][0][-1])
    rows = sum(len(batch) for rank in whole for batch in rank[0][-1])
    assert batches == -(-9 // size) if plan != "some" else -(-5 // size)
    assert rows <= {"all": 60, "some": 36, "a share": 32}[plan]
    for stop in range(1, batches):
        resumed = epochs.result(f"neighbors; {plan}; {size}", stop)
        assert [rank[:2] for rank in resumed] == [rank[:2] for rank in whole]
