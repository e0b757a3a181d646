"""Stratified batches: each sample once, classes in their share, exact resume, several processes; labels of datasets."""

from itertools import chain, cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import thresher
from thresher import StratifiedBatchSampler, labels_of
from thresher.samplers.stratified import arrange_rows, codes_of, strata_keys

CASES = st.tuples(
    st.integers(1, 300), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**31)
)
"""Number of samples, of classes and of rows of a batch, and a seed."""


def labels_for(n: int, classes: int, seed: int) -> np.ndarray:
    """Labels of very different frequencies, among which classes may be missing."""
    return (np.random.default_rng(seed).random(n) ** 3 * classes).astype(np.int64)


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def largest_gap(labels: np.ndarray, batch: list[int]) -> float:
    """The largest difference of a class's rows in a batch from its share of them."""
    share = np.bincount(labels) / len(labels)
    return np.abs(np.bincount(labels[batch], minlength=len(share)) - len(batch) * share).max()


@given(CASES)
def test_each_sample_comes_once_and_classes_have_their_share(case):
    n, classes, size, seed = case
    labels = labels_for(n, classes, seed)
    batches = list(StratifiedBatchSampler(labels, size, seed=seed))
    assert sorted(np.concatenate(batches)) == list(range(n)) and len(batches) == -(-n // size)
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    full = batches[: n // size]
    # The rows of a short last batch are taken at equal distances, which moves a share by less than a row in all batches
    assert all(largest_gap(labels, batch) < 2 + 1 / len(full) for batch in full)
    assert all(
        largest_gap(labels, joined(full[at : at + 4])) < 3 + 4 / len(full)
        for at in range(len(full) - 3)
    )


@given(CASES, st.integers(2, 4), st.booleans())
def test_processes_get_as_many_batches_and_share_all_samples(case, replicas, drop_last):
    n, classes, size, seed = case
    labels = labels_for(n, classes, seed)
    whole = list(StratifiedBatchSampler(labels, size, drop_last=drop_last, seed=seed))
    parts = [
        list(
            StratifiedBatchSampler(
                labels, size, drop_last=drop_last, seed=seed, num_replicas=replicas, rank=rank
            )
        )
        for rank in range(replicas)
    ]
    steps = len(whole) // replicas if drop_last else -(-len(whole) // replicas)
    assert joined(zip(*parts, strict=True)) == list(islice(cycle(whole), steps * replicas))
    if not drop_last and len(parts[0]) > 1:
        steps = [joined(batches) for batches in zip(*parts, strict=True)][:-1]
        assert all(largest_gap(labels, step) < 2 + replicas / 2 for step in steps)


def test_rows_of_a_class_vary_less_than_in_random_batches():
    labels = np.arange(940) % 94  # more classes than rows of a batch
    stratified = list(StratifiedBatchSampler(labels, 32))[:-1]
    order = np.random.default_rng(0).permutation(940)
    chance = [order[at : at + 32].tolist() for at in range(0, 928, 32)]

    def spread(batches: list[list[int]], together: int) -> float:
        windows = [
            joined(batches[at : at + together])
            for at in range(0, len(batches) - together + 1, together)
        ]
        return np.mean([np.bincount(labels[batch], minlength=94).var() for batch in windows])

    assert spread(stratified, 1) < 0.75 * spread(chance, 1)
    assert spread(stratified, 4) < 0.5 * spread(chance, 4)


def test_scores_are_spread_within_classes():
    labels, scores = np.arange(640) % 2, np.random.default_rng(0).permutation(640) / 640
    means = {}
    for name, given_scores in (("with", scores), ("without", None)):
        batches = list(StratifiedBatchSampler(labels, 16, scores=given_scores))
        means[name] = np.std([scores[batch].mean() for batch in batches])
    assert means["with"] < 0.3 * means["without"]


def test_every_pass_has_an_order_of_its_own_and_the_same_again():
    labels = np.arange(60) % 7
    sampler, other = (
        StratifiedBatchSampler(labels, 8, seed=3),
        StratifiedBatchSampler(labels, 8, seed=3),
    )
    first, second = list(sampler), list(sampler)
    assert first != second and sampler.epoch == 2
    other.set_epoch(1)
    assert list(other) == second
    assert list(StratifiedBatchSampler(labels, 8, seed=4)) != first


def test_rows_of_a_batch_are_in_random_order():
    labels = np.arange(64_000) % 2
    places = np.concatenate(
        [labels[batch] for batch in StratifiedBatchSampler(labels, 16)]
    ).reshape(-1, 16)
    assert (
        np.abs(places.mean(axis=0) - 0.5).max() < 0.2
    )  # a place that had one class would have a mean of 0 or 1


def test_a_saved_state_goes_on_with_the_next_batch():
    labels = np.arange(50) % 3
    sampler = StratifiedBatchSampler(labels, 8)
    list(sampler)
    batches, whole = iter(sampler), list(StratifiedBatchSampler(labels, 8, seed=0))
    seen = [next(batches) for _ in range(3)]
    resumed = StratifiedBatchSampler(labels, 8)
    resumed.load_state_dict(sampler.state_dict())
    rest = list(batches)
    assert list(resumed) == rest and len(seen) + len(rest) == len(whole)
    place = {"seed": 0, "samples": 50, "batch_size": 8, "epoch": 2, "consumed": 0}
    assert resumed.state_dict() == sampler.state_dict()
    assert place.items() <= sampler.state_dict().items()
    resumed.set_epoch(2)
    assert list(resumed) == list(sampler)


def test_a_loader_takes_it_as_any_sampler_of_batches():
    data = TensorDataset(torch.arange(30.0), torch.arange(30) % 3)
    loader = DataLoader(data, batch_sampler=StratifiedBatchSampler(labels_of(data), 6))
    counts = [torch.bincount(targets, minlength=3).tolist() for _, targets in loader]
    assert counts == [[2, 2, 2]] * 5 and len(loader) == 5


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_class_for_each_sample_one_class_and_one_sample(drop_last):
    for labels in (np.arange(10), np.zeros(10), [7]):
        sampler = StratifiedBatchSampler(labels, 4, drop_last=drop_last)
        batches = list(sampler)
        assert (
            len(batches)
            == len(sampler)
            == (len(labels) // 4 if drop_last else -(-len(labels) // 4))
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be 1 or more, got 0"),
        ({"num_replicas": 2, "rank": 2}, r"`rank` must be within \[0, num_replicas\), got 2 and 2"),
        ({"num_replicas": 5}, "`num_replicas` and `rank` together, got 5 and None"),
        ({"scores": [0.5]}, r"`scores` must have shape \(4,\), got \(1,\)"),
        ({"labels": []}, "with at least one sample"),
        ({"labels": np.zeros((2, 2, 2))}, r"got shape \(2, 2, 2\)"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StratifiedBatchSampler(**{"labels": [0, 1, 0, 1], "batch_size": 2, **arguments})


@pytest.mark.parametrize("sizes", [[3, 4, 3, 4], [3, 8, 3, 3, 4], [5, 5, 2], [1], [2, 1, 2]])
@pytest.mark.parametrize("classes", [1, 3, 50])
def test_batches_of_several_sizes_have_every_row_once(sizes, classes):
    rows = np.sort(np.random.default_rng(0).integers(0, classes, sum(sizes))) * 1000 + np.arange(
        sum(sizes)
    )
    order = arrange_rows(rows, np.array(sizes), np.random.default_rng(1))
    assert sorted(order) == sorted(rows)


def test_strata_sort_by_class_then_by_score():
    codes, scores = np.array([1, 0, 1, -1]), np.array([0.9, 0.5, -np.inf, 2.0], dtype=np.float32)
    keys = strata_keys(codes, scores)
    assert np.argsort(keys).tolist() == [3, 1, 2, 0] and keys.dtype == np.uint16
    assert strata_keys(np.array([0, 70_000]), None).tolist() == [0, 70_000]
    assert (
        strata_keys(None, np.array([0.5, 0.5])).tolist() == [0, 0]
        and strata_keys(None, None) is None
    )
    assert strata_keys(np.array([2, 2]), np.array([np.nan, np.nan])).tolist() == [0, 0]


def test_labels_are_found_where_a_dataset_holds_them():
    targets = [2, 0, 1]
    for name, labels in (("targets", targets), ("labels", np.array(targets))):
        held = type("Held", (), {"__len__": lambda _: 3, name: labels})()
        assert list(labels_of(held)) == targets
    tensors = TensorDataset(torch.rand(3, 2), torch.tensor(targets))
    assert labels_of(ConcatDataset([tensors, Subset(tensors, [1])])).tolist() == [2, 0, 1, 0]
    with pytest.raises(ValueError, match="TensorDataset has no classes in targets, labels, label"):
        labels_of(TensorDataset(torch.rand(3)))


def test_labels_of_a_column_are_found():
    class Table(dict):
        column_names = ("text", "label")

        def __len__(self) -> int:
            return 2

    assert labels_of(Table(text=["a", "b"], label=[1, 0])) == [1, 0]


def test_labels_may_be_words_or_columns():
    assert codes_of(["b", "a", "b"]).tolist() == [1, 0, 1]
    assert codes_of(torch.tensor([[0, 1], [1, 0], [0, 1]])).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "labels",
    [
        [{"cls": i % 3, "bboxes": [[0.1] * 4]} for i in range(40)],
        [[0.5] * (i % 3) for i in range(40)],
        [torch.zeros(i % 3, 4) for i in range(40)],
        [None] * 40,
        [None, "cat"] * 20,
        [f"images/{i}.jpg" for i in range(40)],
        np.array([*([[1], [2, 3]] * 20)], dtype=object),
    ],
    ids=["dicts", "lists", "boxes", "None", "some None", "files", "an array of lists"],
)
def test_what_is_no_class_of_each_sample_is_no_class(labels):
    class Boxes(TensorDataset):
        pass

    data = Boxes(torch.randn(40, 4), torch.arange(40) % 3)
    data.labels = labels
    data.tensors = (*data.tensors, torch.zeros(40, 2))  # the last tensor has no classes, either
    with pytest.raises(ValueError, match="Boxes has no classes"):
        labels_of(data)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 10, shuffle=True)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        "epochs": 2,
        "observe": True,
    }
    run = thresher.attach(0.5, loader=loader, **settings)
    for _ in range(2):
        for x, y, _ in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
    assert run.cost.ratio() < 0.8
    run.detach()
    if not isinstance(labels[0], str):
        with pytest.raises(
            ValueError, match="labels must be numbers or strings, one or several per sample, got"
        ):
            thresher.attach(0.5, loader=loader, stratify=labels, **settings)


def test_words_in_an_array_of_objects_are_classes():
    assert codes_of(np.array(["b", "a", "b"], dtype=object)).tolist() == [1, 0, 1]
