"""Losses that are not finite are counted and named in pieces."""

import pytest
import torch

from thresher.run import history as module
from thresher.run.history import not_finite


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("places", [[], [0], [2, 3, 4], [1, 8, 12, 15, 16, 19], list(range(20))])
def test_they_are_counted_and_the_first_are_named(monkeypatch, piece, places):
    monkeypatch.setattr(module, "LOOKED_AT", piece)
    losses = torch.rand(20)
    losses[5::7] = -torch.inf  # never seen
    losses[places] = torch.tensor([torch.nan, torch.inf]).repeat(10)[: len(places)]
    count, first = not_finite(losses)
    assert count == len(places) and first.tolist() == places[:5]


def test_no_samples():
    assert not_finite(torch.empty(0))[0] == 0
