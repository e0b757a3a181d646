"""Rows of tensors as samples: layouts, and the rows that a view of a known tensor shows."""

import pytest
import torch

from thresher.attribution.rows import RowLayout, Rows, TrackedTensor, YieldedBatch, memory_layout


@pytest.mark.parametrize(
    ("rows", "layout"),
    [(5, RowLayout(6)), (13, RowLayout(6, 2)), (6, RowLayout(4, 2)), (7, RowLayout(6, None))],
)
def test_losses_that_are_not_one_per_sample(rows: int, layout: RowLayout) -> None:
    message = rf"Losses of shape \({rows}, 3\) for {layout.n} samples: the first dimension must be the samples'.*run\.reduce"
    with pytest.raises(ValueError, match=message):
        layout.rows(torch.zeros(rows, 3))


def test_rows_of_a_layout() -> None:
    assert RowLayout(6).rows(torch.zeros(6)).shape == (6, 1)
    assert RowLayout(6, 2).rows(torch.zeros(12, 3)).shape == (6, 6)
    assert RowLayout(6, 2).rows(torch.zeros(6, 3)).shape == (6, 3)
    assert RowLayout(6, None).rows(torch.zeros(18)).shape == (6, 3)


def batch(n):
    return YieldedBatch(torch.arange(100, 100 + n), number=7)


def rows_of(view, tensor, n, repeat=1):
    """Start, step, number and repeats of the rows that a view shows of a tensor with known rows."""
    tracked = TrackedTensor.of(tensor, Rows(batch(n), 0, 1, n, repeat))
    found = tracked.locate(*memory_layout(view))
    return None if found is None else found[1:]


def test_rows_that_a_view_shows():
    whole = torch.zeros(6, 4, 3)
    assert rows_of(whole, whole, 6) == (0, 1, 6, 1)
    assert rows_of(whole[2:], whole, 6) == (2, 1, 4, 1)
    assert rows_of(whole[1::2], whole, 6) == (1, 2, 3, 1)
    assert rows_of(whole[3:4], whole, 6) == (3, 1, 1, 1)
    assert rows_of(whole[:, 1:3], whole, 6) == (0, 1, 6, 1)
    assert rows_of(whole.flatten(0, 1), whole, 6) == (0, 1, 6, 4)
    assert rows_of(whole.flatten(0, 1)[8:], whole, 6) == (2, 1, 4, 4)
    flat = torch.zeros(12, 3)
    assert rows_of(flat, flat, 6, repeat=2) == (0, 1, 6, 2)
    assert rows_of(flat.view(6, 2, 3)[4:], flat, 6, repeat=2) == (4, 1, 2, 1)


def test_views_that_do_not_show_whole_rows():
    whole = torch.zeros(6, 4, 3)
    assert rows_of(whole.flatten(0, 1)[:6], whole, 6) is None
    assert rows_of(whole.flatten(0, 1)[1:5], whole, 6) is None
    assert rows_of(whole.transpose(0, 1), whole, 6) is None
    assert rows_of(whole[:0], whole, 6) is None
    assert rows_of(whole, whole[2:], 4) is None
    assert rows_of(whole, whole[:3], 3) is None


def test_tensors_that_cannot_be_tracked():
    rows = Rows(batch(3), 0, 1, 3, 1)
    assert (
        TrackedTensor.of(torch.zeros(4, 3).t(), Rows(batch(3), 0, 1, 3, 1)) is None
    )  # its rows interleave
    assert TrackedTensor.of(torch.zeros(3, 2).to_sparse(), rows) is None
    assert TrackedTensor.of(torch.tensor(1.0), rows) is None
    assert memory_layout(torch.zeros(3, 0)) is None
    with torch.inference_mode():
        assert TrackedTensor.of(torch.zeros(3, 2), rows) is None


def test_ids_and_positions_of_rows():
    rows = Rows(batch(6), 1, 2, 3, 1)
    assert (
        rows.ids.tolist() == [101, 103, 105]
        and list(rows.positions()) == [1, 3, 5]
        and rows.key == (7, 1, 2, 3)
    )
