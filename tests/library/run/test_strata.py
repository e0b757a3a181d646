"""Plans in stratified order: every row once, weights with their rows, ranks alike; what cannot be stratified is refused."""

import re
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from thresher.plans import EpochPlan
from thresher.run.strata import Strata, _deal

CRITERION = nn.CrossEntropyLoss()


def data(n: int = 100, classes: int = 5) -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=numbers), torch.arange(n) % classes)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def attach(method, loader=None, **settings):
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data(), 10, shuffle=True) if loader is None else loader
    given_ = {
        "model": model,
        "optimizer": optimizer,
        "criterion": CRITERION,
        "epochs": 4,
        **settings,
    }
    return thresher.attach(method, loader=loader, **given_)


def trained(run, optimizer) -> list[list[int]]:
    batches = []
    for inputs, targets in run.loader:
        batches.append(run.ids_of(inputs).tolist())
        optimizer.zero_grad()
        run.criterion(run.model(inputs), targets).backward()
        optimizer.step()
    return batches


def epochs_of(
    method, count: int = 2, dataset=None, loader=None, **settings
) -> list[list[list[int]]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = (
        DataLoader(data() if dataset is None else dataset, 10, shuffle=True)
        if loader is None
        else loader
    )
    given_ = {
        "model": model,
        "optimizer": optimizer,
        "criterion": CRITERION,
        "epochs": count,
        **settings,
    }
    run = thresher.attach(method, loader=loader, **given_)
    return [trained(run, optimizer) for _ in range(count)]


class Recording(TensorDataset):
    """A dataset whose classes can be known from the criterion only."""

    def __init__(self, held: TensorDataset) -> None:
        super().__init__(*held.tensors[:1])
        self.held = held

    def __getitem__(self, index):
        return self.held[index]


def test_full_training_in_stratified_batches_has_every_sample_once():
    for batches in epochs_of(thresher.FullData(), stratify="class"):
        assert sorted(chain(*batches)) == list(range(100))
        assert [np.bincount(np.array(batch) % 5).tolist() for batch in batches] == [[2] * 5] * 10


def test_classes_are_recorded_where_the_dataset_holds_none():
    first, second = epochs_of(thresher.FullData(), dataset=Recording(data()), stratify="class")
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(100))
    assert [np.bincount(np.array(batch) % 5).tolist() for batch in second] == [[2] * 5] * 10
    assert [np.bincount(np.array(batch) % 5, minlength=5).tolist() for batch in first] != [
        [2] * 5
    ] * 10


def test_several_labels_per_sample_are_no_class():
    dataset = TensorDataset(data().tensors[0], torch.eye(5)[data().tensors[1]])
    with pytest.warns(
        UserWarning, match="stratify='class': the dataset stores no classes.*Pass stratify=labels"
    ):
        epochs_of(
            thresher.FullData(),
            2,
            dataset=dataset,
            stratify="class",
            criterion=nn.BCEWithLogitsLoss(),
        )


def test_labels_may_be_given_and_a_sampler_of_batches_is_recognized():
    labels = [number // 50 for number in range(100)]
    for settings in ({"stratify": labels}, {}):
        sampler = thresher.StratifiedBatchSampler(labels, 10)
        loader = DataLoader(data(), batch_sampler=sampler) if not settings else None
        for batches in epochs_of(thresher.FullData(), loader=loader, **settings):
            assert [np.bincount(np.array(batch) // 50).tolist() for batch in batches] == [
                [5, 5]
            ] * 10


def test_without_it_the_order_is_that_of_the_loader():
    plain = epochs_of(thresher.FullData())
    assert epochs_of(thresher.FullData(), stratify=None) == plain
    assert epochs_of(thresher.UniformSubset(keep=0.5)) == epochs_of(
        thresher.UniformSubset(keep=0.5), stratify=None
    )


def test_a_share_is_stratified_and_that_of_full_training_is_not():
    first, *_, last = epochs_of(0.5)
    assert first != epochs_of(0.5, stratify=None)[0]
    assert max(np.ptp(np.bincount(np.array(batch) % 5, minlength=5)) for batch in last) <= 2
    assert epochs_of(1.0) == epochs_of(thresher.FullData(), stratify=None)
    for batches in epochs_of(1.0, stratify="class"):
        assert [np.bincount(np.array(batch) % 5).tolist() for batch in batches] == [[2] * 5] * 10


@pytest.mark.parametrize(("spend", "steps", "rows"), [(None, 10, 5), ("steps", 5, 10)])
def test_paced_rows_come_in_smaller_batches_or_in_fewer_steps(spend, steps, rows):
    first, *_, last = epochs_of(thresher.Winnow(0.5), 4, spend=spend)
    for batches in (first, last):
        assert len(batches) == steps and len(set(chain(*batches))) == sum(map(len, batches)) == 50
    assert [len(batch) for batch in last] == [rows] * steps
    assert max(np.ptp(np.bincount(np.array(batch) % 5, minlength=5)) for batch in last) <= 4


def test_progress_counts_the_samples_of_full_training():
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data(), 10, shuffle=True)
    run = thresher.attach(
        thresher.Winnow(0.5), loader=loader, model=model, optimizer=optimizer, criterion=CRITERION, epochs=2,
        spend="steps",
    )  # fmt: skip
    seen = []
    for _ in range(2):
        assert len(run.loader) == 5
        for inputs, targets in run.loader:
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
            seen.append(run.progress)
    assert seen == pytest.approx(np.arange(1, 11) / 10)


def test_weights_stay_with_their_samples():
    weights = torch.rand(60)
    plan = EpochPlan(torch.arange(0, 120, 2), weights=weights)
    records = {"stratum": (torch.arange(120) % 7).short()}
    found = Strata().in_order(
        plan, records, np.full(6, 10), torch.Generator().manual_seed(0), ranks=1, by_rows=True
    )
    assert found.drawn and torch.equal(found.weights, weights[found.ids // 2])
    assert found.ids.sort().values.tolist() == plan.ids.tolist()


def test_a_plan_without_anything_known_stays_as_it_is():
    plan = EpochPlan(torch.arange(20))
    for records in ({}, {"stratum": torch.full((20,), -1, dtype=torch.int16)}):
        steps = np.full(2, 10)
        found = Strata().in_order(plan, records, steps, torch.Generator(), ranks=1, by_rows=True)
        assert found is plan


@given(
    st.integers(1, 200), st.integers(1, 4), st.integers(1, 16), st.booleans(), st.integers(-3, 3)
)
def test_every_row_is_dealt_once_to_any_number_of_ranks(k, ranks, size, by_rows, more):
    per_rank = max(1, -(-k // ranks) if more < 0 else k // ranks)
    steps = np.diff(np.append(np.arange(0, per_rank, size), per_rank))
    order = _deal(np.arange(k), steps * ranks, by_rows, ranks, np.random.default_rng(0))
    assert sorted(order) == list(range(k))


@given(st.integers(2, 4), st.integers(1, 8), st.integers(2, 9), st.booleans())
def test_each_rank_has_stratified_batches(ranks, size, steps, by_rows):
    k = ranks * size * steps
    labels = np.sort(np.arange(k) % 5)
    order = _deal(
        np.arange(k), np.full(steps, size * ranks), by_rows, ranks, np.random.default_rng(0)
    )
    share = np.bincount(labels, minlength=5) / k
    for rank in range(ranks):
        own = order[rank::ranks] if by_rows else order.reshape(-1, size)[rank::ranks].ravel()
        for batch in own.reshape(-1, size):
            assert np.abs(np.bincount(labels[batch], minlength=5) - size * share).max() < 2


@given(st.integers(1, 4), st.integers(1, 8), st.integers(2, 9), st.booleans())
def test_each_step_has_the_rows_of_a_step_of_one_process(ranks, size, steps, by_rows):
    rows = np.random.default_rng(1).permutation(ranks * size * steps)
    order = _deal(rows, np.full(steps, size * ranks), by_rows, ranks, np.random.default_rng(0))
    alone = _deal(rows, np.full(steps, ranks * size), True, 1, np.random.default_rng(0))
    assert np.sort(order.reshape(steps, -1)).tolist() == np.sort(alone.reshape(steps, -1)).tolist()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            thresher.FullData(),
            {"stratify": "classes"},
            "`stratify` must be 'auto', 'class', None or the class of each sample, got 'classes'",
        ),
        (
            thresher.ImportanceSampling(),
            {"stratify": "class"},
            "ImportanceSampling draws the order of training",
        ),
        (thresher.FullData(), {"stratify": [0, 1]}, "the class of each of 100 samples, got 2"),
        (thresher.FullData(), {"stratify": []}, "labels must have shape"),
    ],
)
def test_what_cannot_be_stratified_is_refused(method, settings, message):
    with pytest.raises(ValueError, match=message):
        attach(method, **settings)


def test_a_method_that_draws_an_order_declares_it():
    class Undeclared:
        stage = "epoch"

        def columns(self):
            return {}

        def plan_epoch(self, records, *, epoch, epochs, generator):
            return EpochPlan(torch.zeros(10, dtype=torch.int64), drawn=True)

    with pytest.raises(
        ValueError, match=r"stratified batches would change: declare Requirements\(order='plan'\)"
    ):
        attach(Undeclared(), stratify="class").plan  # noqa: B018


class UsersOrder(Sampler):
    def __iter__(self):
        return iter(torch.randperm(100).tolist())

    def __len__(self):
        return 100


ORDERS = {
    "sequential": {},
    "weighted": {"sampler": WeightedRandomSampler(torch.rand(100), 100)},
    "some": {"sampler": SubsetRandomSampler(range(50))},
    "own": {"sampler": UsersOrder()},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spend", [None, "steps"])
def test_an_order_of_the_users_own_is_kept_with_a_warning(order, spend):
    loader = DataLoader(data(), 10, **ORDERS[order])
    with pytest.raises(
        ValueError, match="`stratify`: .* the loader's sampler sets another order: use shuffle=True"
    ):
        attach(0.5, loader, stratify="class")
    settings = {"spend": spend, "stratify": None}
    full_size = order in ("weighted", "own")  # smaller batches need the number of rows
    if full_size:
        settings["spend"] = "steps"
    with pytest.warns(UserWarning, match="Batches are not stratified by class.*shuffle=True"):
        batches = epochs_of(0.5, loader=loader, spend=spend)
    rows = [len(batch) for epoch in batches for batch in epoch]
    again = epochs_of(0.5, loader=DataLoader(data(), 10, **ORDERS[order]), **settings)
    assert len(batches) == len(again) == 2
    if order != "weighted":
        assert rows == [len(batch) for epoch in again for batch in epoch]
    assert (max(rows) == 10) == (full_size or spend == "steps")
    assert len(epochs_of(thresher.UniformSubset(0.5), loader=loader)) == 2
    assert len(epochs_of(1.0, loader=loader)) == 2


@pytest.mark.parametrize(
    ("method", "name"),
    [(0.5, "attach(0.5)"), ("50%", "attach('50%')"), (thresher.Winnow(0.5), "Winnow")],
    ids=str,
)
def test_an_endless_sampler_has_no_share(method, name):
    """The message names what the user passed."""
    sampler = RandomSampler(data(), replacement=True, num_samples=10**10)
    message = f"`method`: {re.escape(name)} chooses once per epoch, .* of 10,000,000,000 samples"
    with pytest.raises(ValueError, match=message):
        attach(method, DataLoader(data(), 10, sampler=sampler))


def test_a_stream_has_no_order():
    with pytest.raises(ValueError, match="`loader` iterates over an IterableDataset"):
        attach(0.5, DataLoader(Stream(), 10), stratify="class")
    attach(0.5, DataLoader(Stream(), 10))


@pytest.mark.parametrize("kind", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.clone])
@pytest.mark.parametrize("method", [thresher.FullData(), 0.5])
def test_targets_of_a_regression_are_no_classes(method, kind):
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError,
        match="labels must be classes, got 100 different numbers for 100 samples. Group them",
    ):
        attach(method, stratify=kind(values))
    with pytest.raises(ValueError, match="labels must be classes"):
        thresher.StratifiedBatchSampler(kind(values), 10)


def test_numbers_of_a_few_values_are_classes():
    """Ratings in half steps, and classes as whole floats, of which each sample may have its own."""
    for values in (torch.arange(100) % 5 / 2, torch.arange(100).float()):
        run = attach(thresher.FullData(), stratify=values)
        assert run.plan.ids.sort().values.tolist() == list(range(100))


@pytest.mark.filterwarnings("ignore:stratify='class'. the dataset stores no classes")
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.Winnow(0.5)])
def test_samples_without_one_class_each_are_trained_on(method):
    """Many classes a sample, numbers, and losses that the loop computes: rows are stratified by what is known."""
    settings = {"stratify": "class"} if isinstance(method, thresher.FullData) else {}
    for targets, criterion, width in (
        (torch.randint(0, 3, (40, 6)), nn.CrossEntropyLoss(), (3, 6)),
        (torch.randint(0, 2, (40, 5)).float(), nn.BCEWithLogitsLoss(), (5,)),
    ):
        model = nn.Sequential(nn.Linear(4, int(np.prod(width))), nn.Unflatten(1, width))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(Recording(TensorDataset(torch.randn(40, 4), targets)), 8, shuffle=True)
        run = thresher.attach(
            method,
            loader=loader,
            model=model,
            optimizer=optimizer,
            criterion=criterion,
            epochs=3,
            **settings,
        )
        for _ in range(3):
            assert len(set(chain(*trained(run, optimizer)))) in (20, 40)
        assert (run.records["stratum"] == -1).all()


@pytest.mark.filterwarnings("ignore:stratify='class'. the dataset stores no classes")
def test_losses_of_the_loop_show_no_class():
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    loader = DataLoader(Recording(data()), 10, shuffle=True)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        model=model,
        criterion=CRITERION,
        epochs=2,
        stratify="class",
    )
    for _ in range(2):
        for inputs, targets in run.loader:
            run.reduce(
                nn.functional.cross_entropy(run.model(inputs), targets, reduction="none")
            ).backward()
    assert (run.records["stratum"] == -1).all()


def test_a_share_in_fewer_steps_is_the_paced_method():
    run = attach(0.5, spend="steps")
    assert run.method == thresher.Winnow(0.5) and len(run.loader) == 5
    assert attach(0.5).method == thresher.Winnow(0.5)
