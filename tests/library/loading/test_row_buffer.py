"""Rows of batches of any shape, taken and gathered: parts without one entry per sample are never taken from another batch."""

import collections
import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import thresher
from threaded_world import on_ranks
from thresher.loading.row_buffer import RowBuffer, rows_of, select
from thresher.plans import BatchPlan
from thresher.trees import differing_part

N, B, T, F, C = 48, 8, 5, 3, 3


class Recurrent(nn.Module):
    """A recurrent network over (T, B, F) inputs or packed sequences."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(F, 4), nn.Linear(4, C)

    def forward(self, x):
        return self.head(self.body(x)[1][0])


def sequence_first(samples):
    return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples])


def packed(samples):
    return pack_sequence([x for x, _ in samples]), torch.stack([y for _, y in samples])


def attach(collate, method=None, **settings):
    data = TensorDataset(torch.randn(N, T, F), torch.arange(N) % C)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method or thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(data, B, shuffle=True, collate_fn=collate),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
        **settings,
    )
    return run, optimizer


@pytest.mark.parametrize(
    ("collate", "part"),
    [
        (sequence_first, r"`batch\[0\]`, of shape \(5, 8, 3\),"),
        (packed, r"`batch\[0\].data`, of shape \(40, 3\),"),
    ],
)
def test_parts_without_a_sample_dimension_are_not_joined_with_rows_of_other_batches(collate, part):
    run, _ = attach(collate, forward_passes="twice")
    with pytest.raises(
        ValueError,
        match=f"{part} .*not the same in every batch.*batch_first=True.*forward_passes='once'",
    ):
        next(iter(run.loader))


def test_the_way_out_works():
    def batch_first(samples):
        x, y = sequence_first(samples)
        return x.transpose(0, 1), y

    run, optimizer = attach(
        batch_first,
        forward_passes="twice",
        forward=lambda model, b: (model(b[0].transpose(0, 1)), b[1]),
    )
    for x, y in run.loader:
        run.criterion(run.model(x.transpose(0, 1)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.cost.backward == N // 2


def batch(first, constant):
    return {"x": torch.arange(float(first), first + 4), "all": constant}


def chosen(*rows, **settings):
    return BatchPlan(torch.tensor(rows), **settings)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.ones(3), torch.ones(3).double()),
        (torch.ones(3), torch.ones(2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(3), None),
        (7, 8),
        ("en", "de"),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
        ([torch.ones(3)], (torch.ones(3),)),
        ({"a": 1}, {"b": 1}),
        (torch.ones(3).numpy(), 2 * torch.ones(3).numpy()),
        (object(), object()),
    ],
)
def test_parts_that_differ_are_refused_where_rows_are_joined_or_left_out(one, two):
    joins = RowBuffer(4)
    joins.add(batch(0, one), torch.arange(4), chosen(1, 2))
    with pytest.raises(ValueError, match=r"`batch\['all'\]"):
        joins.add(batch(4, two), torch.arange(4, 8), chosen(0, 3))
    alone = RowBuffer(None)
    alone.add(batch(0, one), torch.arange(4), chosen(1, 2))
    alone.take()
    with pytest.raises(ValueError, match=r"`batch\['all'\]"):
        alone.add(batch(4, two), torch.arange(4, 8), chosen(0, 3))


@pytest.mark.parametrize(
    "constant",
    [torch.tensor([1.0, float("nan"), 3]), 7, "en", None, {"a": [torch.ones(2), 3]}, object()],
)
def test_parts_that_are_equal_in_every_batch_may_pass(constant):
    buffer = RowBuffer(4)
    for first in (0, 4):
        copied = constant.clone() if isinstance(constant, torch.Tensor) else constant
        buffer.add(batch(first, copied), torch.arange(first, first + 4), chosen(1, 2))
    joined, ids, _ = buffer.take()
    assert joined["x"].tolist() == ids.tolist() == [1, 2, 5, 6]
    assert differing_part(joined["all"], constant) is None


def test_whole_batches_keep_parts_of_their_own():
    """As while a method does not choose yet: nothing is joined, so each batch may have its own."""
    buffer = RowBuffer(4)
    for first in (0, 4, 8):
        buffer.add(batch(first, first), torch.arange(first, first + 4), chosen(0, 1, 2, 3))
        whole, ids, _ = buffer.take()
        assert (whole["all"], ids[0]) == (first, first)
    with pytest.raises(ValueError, match=r"`batch\['all'\]`"):
        buffer.add(batch(12, 12), torch.arange(12, 16), chosen(0))


KEPT = [(3, 0, 4, 2, 1), (1, 2, 0, 4, 4)]
"""Rows that each rank keeps of its candidate batches."""


def filled(world):
    """Ids of the batches that a rank takes, the last one smaller, and those of the rows that still wait."""
    buffer, batches = RowBuffer(4, world), list[list[int]]()
    for number, rows in enumerate(KEPT[world.rank]):
        ids = torch.arange(4) + 10 * number
        buffer.add(ids, ids, BatchPlan(torch.arange(rows)))
        while buffer.full:
            batches.append(buffer.take()[1].tolist())
    if buffer.rows:
        batches.append(buffer.take()[1].tolist())
    return batches, buffer.waiting[0].tolist(), world.gathers


def test_ranks_that_keep_other_numbers_of_rows_make_equal_batches():
    """Rank 0 has 3, 3, 7, 9, 10 rows, rank 1 has 1, 3, 3, 7, 11: a rank that has a full batch waits for the other."""
    found = on_ranks(2, filled)
    assert [[len(batch) for batch in batches] for batches, *_ in found] == [[4, 4, 2], [4, 4, 2]]
    assert [rows for _, rows, _ in found] == [[], [43]]
    assert found[0][0] == [[0, 1, 2, 20], [21, 22, 23, 30], [31, 40]]
    assert [calls for *_, calls in found] == [
        len(KEPT[0])
    ] * 2  # once per candidate batch, and never to take one


def test_a_rank_without_rows_leaves_no_smaller_batch():
    def rows(world):
        buffer = RowBuffer(4, world)
        buffer.add(torch.arange(4), torch.arange(4), BatchPlan(torch.arange(3 * world.rank)))
        return buffer.rows, len(buffer.waiting[0])

    assert on_ranks(2, rows) == [(0, 0), (0, 3)]


def test_rows_that_waited_when_a_run_was_saved_are_counted_by_all_ranks():
    def rows(world):
        buffer = RowBuffer(4, world)
        if world.rank:
            buffer.put(torch.arange(4), torch.arange(4), None)
        buffer.count()
        found = [buffer.rows]
        buffer.add(torch.arange(4), torch.arange(4), BatchPlan(torch.arange(2)))
        return [*found, buffer.rows, len(buffer.waiting[0])]

    assert on_ranks(2, rows) == [[0, 2, 2], [0, 2, 6]]


# Batches of any shape

Pair = collections.namedtuple("Pair", "x names")


@dataclass
class Sample:
    x: torch.Tensor
    names: list


def texts(n):
    return [f"text {i}" for i in range(n)]


def images(n, size=lambda i: i + 2):
    return [torch.full((1, size(i)), float(i)) for i in range(n)]


SHAPES = {
    "tensor": (lambda n: torch.arange(n), lambda b, r: b.tolist() == r),
    "tuple": (
        lambda n: (torch.arange(n), torch.arange(n) * 2),
        lambda b, r: b[1].tolist() == [2 * i for i in r],
    ),
    "dict": (
        lambda n: {"x": torch.arange(n), "note": "a"},
        lambda b, r: b["x"].tolist() == r and b["note"] == "a",
    ),
    "own dict": (
        lambda n: collections.OrderedDict(x=torch.arange(n), names=texts(n)),
        lambda b, r: b["names"] == [f"text {i}" for i in r] and type(b) is collections.OrderedDict,
    ),
    "named tuple": (
        lambda n: Pair(torch.arange(n), texts(n)),
        lambda b, r: b.names == [f"text {i}" for i in r],
    ),
    "dataclass": (
        lambda n: Sample(torch.arange(n), texts(n)),
        lambda b, r: b.names == [f"text {i}" for i in r],
    ),
    "texts in a tuple": (
        lambda n: [torch.arange(n), tuple(texts(n))],
        lambda b, r: b[1] == tuple(f"text {i}" for i in r) and b[0].tolist() == r,
    ),
    "array": (
        lambda n: (torch.arange(n), np.arange(n) * 3),
        lambda b, r: b[1].tolist() == [3 * i for i in r],
    ),
    "images of several sizes": (
        lambda n: (images(n), [{"boxes": torch.zeros(i, 4), "id": i} for i in range(n)]),
        lambda b, r: (
            [i.shape[1] for i in b[0]] == [i + 2 for i in r] and [t["id"] for t in b[1]] == r
        ),
    ),
    "shared tensors": (
        lambda n: (torch.arange(n), torch.ones(3, 50), torch.tensor(7)),
        lambda b, r: b[1].shape == (3, 50) and b[2].item() == 7 and b[0].tolist() == r,
    ),
    "two of everything": (
        lambda n: [torch.arange(n), torch.arange(n) + 1],
        lambda b, r: b[1].tolist() == [i + 1 for i in r],
    ),
}
shapes = pytest.mark.parametrize(("make", "right"), SHAPES.values(), ids=SHAPES)


@shapes
@pytest.mark.parametrize("n", [4, 9])
def test_rows_of_any_batch(make, right, n):
    rows = [1, 3]
    assert right(select(make(n), torch.tensor(rows), n), rows)


@shapes
@pytest.mark.parametrize("size", [None, 3, 4])
def test_gathered_in_order(make, right, size):
    """Rows of several batches, one of which is chosen as a whole and one that gives a single row."""
    row_buffer, flags = RowBuffer(size), [[1, 4], [0], [0, 1, 2, 3, 4], []]
    seen = []
    for number, rows in enumerate(flags):
        row_buffer.add(
            make(5), torch.arange(5) + 10 * number, BatchPlan(torch.tensor(rows, dtype=torch.int64))
        )
        while row_buffer.full:
            batch, ids, weights = row_buffer.take()
            assert weights is None
            assert right(batch, (ids % 10).tolist())
            seen.append(ids.tolist())
    assert [i for ids in seen for i in ids] + row_buffer.waiting[0].tolist() == [
        1,
        4,
        10,
        20,
        21,
        22,
        23,
        24,
    ]
    if size is None:
        assert seen == [[1, 4], [10], [20, 21, 22, 23, 24]]
    else:
        assert all(len(ids) == size for ids in seen)
    row_buffer.clear()
    assert not row_buffer.rows
    assert not len(row_buffer.waiting[0])


def test_lists_of_two_and_batches_of_two():
    """`[x, y]` of a last batch of two is no list of samples, texts beside them are."""
    batch = [torch.arange(2), (torch.arange(2), torch.arange(2)), ("a", "b")]
    chosen = select(batch, torch.tensor([1]), 2)
    assert chosen[0].tolist() == [1]
    assert [t.tolist() for t in chosen[1]] == [[1], [1]]
    assert chosen[2] == ("b",)


def test_weights_go_with_their_rows():
    row_buffer = RowBuffer(3)
    row_buffer.add(
        torch.arange(4),
        torch.arange(4),
        BatchPlan(torch.tensor([1, 2]), weights=torch.tensor([0.5, 2.0])),
    )
    row_buffer.add(torch.arange(4), torch.arange(4, 8), BatchPlan(torch.tensor([0, 3])))
    assert row_buffer.waiting[1].tolist() == [0.5, 2, 1, 1]
    batch, ids, weights = row_buffer.take()
    assert (batch.tolist(), ids.tolist(), weights.tolist()) == ([1, 2, 0], [1, 2, 4], [0.5, 2, 1])
    assert row_buffer.waiting[0].tolist() == [7]
    assert row_buffer.take()[0].tolist() == [3]


def test_padded_to_different_widths():
    row_buffer = RowBuffer(4)
    for width in (5, 7):
        row_buffer.add(
            (torch.zeros(4, width), torch.zeros(4)),
            torch.arange(4),
            BatchPlan(torch.tensor([0, 2])),
        )
    with pytest.raises(
        ValueError, match=r"shapes \[\(2, 5\), \(2, 7\)\].*one shape, or use spend='batches'"
    ):
        row_buffer.take()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            [{"count": 3}],
            "a batch of 4 samples has these parts with one entry for each sample: none. Rows cannot be chosen",
        ),
        ([torch.zeros(3)], "for each sample: none"),
        (
            [(torch.zeros(4), torch.zeros(4)), (torch.zeros(4), None)],
            "sample: Tensor; others before it had Tensor, Tensor",
        ),
        ([torch.zeros(4), [0, 1, 2, 3]], "for each sample: list; others before it had Tensor"),
    ],
)
def test_batches_whose_rows_cannot_be_told(batches, message):
    row_buffer = RowBuffer(100)
    with pytest.raises(ValueError, match=message):
        for batch in batches:
            row_buffer.add(batch, torch.arange(4), BatchPlan(torch.tensor([0])))


def test_a_candidate_batch_is_let_go():
    """What waits are the chosen rows alone."""
    row_buffer, batch = RowBuffer(10), torch.zeros(8, 3)
    gone = weakref.ref(batch)
    row_buffer.add({"x": batch}, torch.arange(8), BatchPlan(torch.tensor([1])))
    del batch
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.tensor(1.0), torch.zeros(4)), 4),
        ({"x": torch.zeros(5), "y": [1]}, 5),
        ([["a", "b"], 1], 2),
    ],
)
def test_rows_of_a_batch(batch, n):
    assert rows_of(batch) == n


def test_rows_that_cannot_be_counted():
    with pytest.raises(ValueError, match="a batch of dict has no tensor with a sample dimension"):
        rows_of({"x": 3})
