"""The order of one process, dealt out to several."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thresher
from thresher import ShardedSampler


@given(st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_it_deals_as_a_distributed_sampler_does(n, size, drop_last):
    for rank in range(size):
        expected = DistributedSampler(range(n), size, rank, shuffle=False, drop_last=drop_last)
        own = ShardedSampler(range(n), size, rank, drop_last=drop_last)
        if n >= size:
            assert list(own) == list(expected) and len(own) == n // size + (
                not drop_last and n % size > 0
            )


def test_each_pass_is_the_next_order_of_the_whole():
    shuffled = torch.utils.data.RandomSampler(range(9), generator=torch.Generator().manual_seed(0))
    again = torch.utils.data.RandomSampler(range(9), generator=torch.Generator().manual_seed(0))
    part = ShardedSampler(shuffled, 2, 1, drop_last=True)
    assert [list(part), list(part)] == [list(again)[1:8:2], list(again)[1:8:2]]


def test_a_part_of_an_order_is_refused_in_one_process():
    data = TensorDataset(torch.zeros(8, 2), torch.arange(8) % 2)
    loader = DataLoader(data, 2, sampler=ShardedSampler(range(8), 2, 0, drop_last=False))
    with pytest.raises(
        ValueError,
        match="has a ShardedSampler for 2 processes, but there is no process group of several",
    ):
        thresher.attach(
            thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), epochs=1
        )
