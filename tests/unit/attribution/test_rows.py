"""Rows of tensors as samples: layouts, and the rows that a view of a known tensor shows."""

import pytest
import torch

from thresher.attribution.rows import RowLayout


@pytest.mark.parametrize(
    ("rows", "layout"), [(5, RowLayout(6)), (13, RowLayout(6, 2)), (6, RowLayout(4, 2)), (7, RowLayout(6, None))]
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
