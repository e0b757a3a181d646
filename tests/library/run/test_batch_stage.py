"""Rows of batches of any shape, taken and gathered; what a batch method is asked and what is remembered of it."""

import collections
import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import thresher
from thresher import BatchPlan
from thresher.loading.row_buffer import RowBuffer, rows_of, select
from thresher.run.batch_stage import BatchStage

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
    "tuple": (lambda n: (torch.arange(n), torch.arange(n) * 2), lambda b, r: b[1].tolist() == [2 * i for i in r]),
    "dict": (lambda n: {"x": torch.arange(n), "note": "a"}, lambda b, r: b["x"].tolist() == r and b["note"] == "a"),
    "own dict": (
        lambda n: collections.OrderedDict(x=torch.arange(n), names=texts(n)),
        lambda b, r: b["names"] == [f"text {i}" for i in r] and type(b) is collections.OrderedDict,
    ),
    "named tuple": (lambda n: Pair(torch.arange(n), texts(n)), lambda b, r: b.names == [f"text {i}" for i in r]),
    "dataclass": (lambda n: Sample(torch.arange(n), texts(n)), lambda b, r: b.names == [f"text {i}" for i in r]),
    "texts in a tuple": (
        lambda n: [torch.arange(n), tuple(texts(n))],
        lambda b, r: b[1] == tuple(f"text {i}" for i in r) and b[0].tolist() == r,
    ),
    "array": (lambda n: (torch.arange(n), np.arange(n) * 3), lambda b, r: b[1].tolist() == [3 * i for i in r]),
    "images of several sizes": (
        lambda n: (images(n), [{"boxes": torch.zeros(i, 4), "id": i} for i in range(n)]),
        lambda b, r: [i.shape[1] for i in b[0]] == [i + 2 for i in r] and [t["id"] for t in b[1]] == r,
    ),
    "shared tensors": (
        lambda n: (torch.arange(n), torch.ones(3, 50), torch.tensor(7)),
        lambda b, r: b[1].shape == (3, 50) and b[2].item() == 7 and b[0].tolist() == r,
    ),
    "two of everything": (lambda n: [torch.arange(n), torch.arange(n) + 1], lambda b, r: b[1].tolist() == [i + 1 for i in r]),
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
        row_buffer.add(make(5), torch.arange(5) + 10 * number, BatchPlan(torch.tensor(rows, dtype=torch.int64)))
        while row_buffer.full:
            batch, ids, weights = row_buffer.take()
            assert weights is None
            assert right(batch, (ids % 10).tolist())
            seen.append(ids.tolist())
    assert [i for ids in seen for i in ids] + row_buffer.waiting[0].tolist() == [1, 4, 10, 20, 21, 22, 23, 24]
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
    row_buffer.add(torch.arange(4), torch.arange(4), BatchPlan(torch.tensor([1, 2]), weights=torch.tensor([0.5, 2.0])))
    row_buffer.add(torch.arange(4), torch.arange(4, 8), BatchPlan(torch.tensor([0, 3])))
    assert row_buffer.waiting[1].tolist() == [0.5, 2, 1, 1]
    batch, ids, weights = row_buffer.take()
    assert (batch.tolist(), ids.tolist(), weights.tolist()) == ([1, 2, 0], [1, 2, 4], [0.5, 2, 1])
    assert row_buffer.waiting[0].tolist() == [7]
    assert row_buffer.take()[0].tolist() == [3]


def test_padded_to_different_widths():
    row_buffer = RowBuffer(4)
    for width in (5, 7):
        row_buffer.add((torch.zeros(4, width), torch.zeros(4)), torch.arange(4), BatchPlan(torch.tensor([0, 2])))
    with pytest.raises(ValueError, match=r"shapes \[\(2, 5\), \(2, 7\)\].*one shape, or use forward_passes='once'"):
        row_buffer.take()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"count": 3}], "a batch of 4 samples has 0 parts with one entry for each sample: its rows"),
        ([torch.zeros(3)], "has 0 parts"),
        ([(torch.zeros(4), torch.zeros(4)), (torch.zeros(4), None)], "has 1 parts.*others before it had 2"),
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


@dataclass(frozen=True)
class Answer:
    plan: object
    stage = "batch"
    requires = thresher.Requirements(signals=("loss",))

    def init_state(self):
        return {"steps": torch.zeros(1)}

    def count(self, n):
        return None

    def plan_batch(self, signals, state, *, step, generator):
        return self.plan, {"steps": state["steps"] + 1}


def test_an_answer_that_is_no_plan():
    stage = BatchStage(Answer([1, 2]), seed=0)
    with pytest.raises(TypeError, match=r"Answer.plan_batch must return \(thresher.BatchPlan, state\), got list"):
        stage.plan(torch.arange(4), {"loss": torch.zeros(4)})
    assert stage.step == 0


def test_facts_are_means_and_are_told_once():
    plan = BatchPlan(torch.tensor([0, 1]), facts={"note": 0.5})
    stage = BatchStage(Answer(plan), seed=0)
    assert stage.facts() == {"candidates": 0, "selected": 0}
    for n in (4, 6):
        stage.plan(torch.arange(n), {"loss": torch.zeros(n)})
    assert stage.facts() == {"candidates": 10, "selected": 4, "note": 0.5, "actual_fraction": 0.6}
    assert stage.facts() == {"candidates": 0, "selected": 0}


def test_its_state_is_a_copy():
    stage = BatchStage(Answer(BatchPlan(torch.tensor([0]))), seed=3)
    stage.plan(torch.arange(4), {"loss": torch.zeros(4)})
    saved = stage.state_dict()
    stage.plan(torch.arange(4), {"loss": torch.zeros(4)})
    other = BatchStage(Answer(BatchPlan(torch.tensor([0]))), seed=9)
    other.load_state_dict(saved)
    assert (other.step, other.seed, other.state["steps"].item(), other.candidates) == (1, 3, 1, 4)
    assert other.facts()["selected"] == 1
    assert thresher.BatchPlan is BatchPlan
