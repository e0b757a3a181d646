"""Buffers during own passes: which model gives them to the other processes."""

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thresher.passes.extra_passes import share_buffers

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_are_shared_where_ddp_shares_them(monkeypatch, shared):
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    model.broadcast_buffers = shared
    calls = []
    monkeypatch.setattr(model, "_sync_buffers", lambda: calls.append(1))
    share_buffers(model)
    share_buffers(None)  # a model that is not in DistributedDataParallel
    assert calls == [1] * shared
