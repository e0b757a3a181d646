"""Which samples stay: looked up while the mask is made."""

import pytest
import torch

from thresher.loading import kept
from thresher.loading.kept import KeptIds


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
@pytest.mark.parametrize("ids", [[0], [59], [3, 4, 5, 59], list(range(0, 60, 2)), list(range(60))])
def test_look_ups_are_right_from_the_first_to_the_last(monkeypatch, part, ids):
    monkeypatch.setattr(kept, "PART", part)
    monkeypatch.setattr(kept, "PER_ID", 0)
    found, asked = KeptIds(torch.tensor(ids), 60), torch.randperm(60, generator=torch.Generator().manual_seed(part))
    expected = torch.isin(asked, torch.tensor(ids))
    for _ in range(62 // part + 2):
        assert torch.equal(found.has(asked), expected)
        assert found.has(asked[:0]).tolist() == []


def test_many_ids_are_not_searched_for(monkeypatch):
    """An epoch that is replayed looks up all of its ids at once."""
    monkeypatch.setattr(kept, "PART", 1)
    monkeypatch.setattr(kept.np, "searchsorted", None)
    assert KeptIds(torch.arange(0, 60, 2), 60).has(torch.arange(60)).sum() == 30
