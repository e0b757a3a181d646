"""Shards and the world of one process; worlds of several ranks are in tests/library/distributed."""

import numpy as np
import pytest
import torch

from thresher.shards import ALONE, Shard, World
from thresher.testing.threaded_world import on_ranks


def test_one_process_is_a_world():
    numbers = np.array([1, 2])
    assert ALONE.sum(numbers) is numbers and ALONE.join(numbers) is numbers and ALONE.total(3) == 3
    assert ALONE.gather(numbers).tolist() == [[1, 2]] and ALONE.exchange([numbers])[0] is numbers
    assert (ALONE.rank, ALONE.size) == (0, 1)


def test_a_world_has_its_own_calls():
    with pytest.raises(TypeError, match="abstract"):
        World()  # pyright: ignore[reportAbstractUsage]


def test_a_block_of_ids():
    shard = Shard(2, 5, 9)
    assert len(shard) == 3 and shard.ids.tolist() == [2, 3, 4] and shard.ids.dtype == torch.int64
    assert len(Shard(5, 5, 9)) == 0 and Shard(5, 5, 9).ids.shape == (0,)


def test_arrays_of_different_lengths_are_joined_along_their_last_dimension():
    found = on_ranks(3, lambda world: world.join(np.full((2, world.rank), world.rank)).tolist())
    assert found == [[[1, 2, 2], [1, 2, 2]]] * 3
