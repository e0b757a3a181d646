"""Rows of several candidate batches: parts of a batch without one entry per sample are never taken from another batch."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import thresher
from threaded_world import on_ranks
from thresher.loading.row_buffer import RowBuffer
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
    [(sequence_first, r"`batch\[0\]`, of shape \(5, 8, 3\),"), (packed, r"`batch\[0\].data`, of shape \(40, 3\),")],
)
def test_parts_without_a_sample_dimension_are_not_joined_with_rows_of_other_batches(collate, part):
    run, _ = attach(collate, forward_passes="twice")
    with pytest.raises(ValueError, match=f"{part} .*not the same in every batch.*batch_first=True.*forward_passes='once'"):
        next(iter(run.loader))


def test_the_way_out_works():
    def batch_first(samples):
        x, y = sequence_first(samples)
        return x.transpose(0, 1), y

    run, optimizer = attach(batch_first, forward_passes="twice", forward=lambda model, b: (model(b[0].transpose(0, 1)), b[1]))
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


@pytest.mark.parametrize("constant", [torch.tensor([1.0, float("nan"), 3]), 7, "en", None, {"a": [torch.ones(2), 3]}, object()])
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
    assert [calls for *_, calls in found] == [len(KEPT[0])] * 2  # once per candidate batch, and never to take one


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
