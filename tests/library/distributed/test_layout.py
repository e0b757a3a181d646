"""Blocks of ids, by hand; fetching over ranks is in tests/property/test_shards.py."""

from itertools import pairwise

import numpy as np
import pytest

from thresher.distributed.layout import UNIT, ShardLayout, equal_part, to_owners
from thresher.testing.threaded_world import on_ranks


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_blocks_cover_the_ids_in_order_and_begin_at_whole_bytes(n, size):
    layout = ShardLayout(n, size, 8)
    blocks = [layout.block(rank) for rank in range(size)]
    assert [i for block in blocks for i in block] == list(range(n))
    assert all(block.start % 8 == 0 for block in blocks if block)
    assert layout.owner(np.arange(n)).tolist() == [rank for rank, block in enumerate(blocks) for _ in block]
    assert max(map(len, blocks)) <= layout.per


def test_the_default_unit():
    assert ShardLayout(10_000, 2).block(0) == range(5 * UNIT)


def test_the_shard_of_a_rank():
    layout = ShardLayout(20, 3, 8)
    shards = on_ranks(3, lambda world: layout.shard(world))
    assert [(shard.first, shard.last, shard.n, shard.world.rank) for shard in shards] == [
        (0, 8, 20, 0),
        (8, 16, 20, 1),
        (16, 20, 20, 2),
    ]


def test_samples_are_sorted_by_owner_and_keep_their_order():
    order, ends = to_owners(np.array([17, 3, 9, 1, 16]), ShardLayout(20, 3, 8))
    assert order.tolist() == [1, 3, 2, 0, 4] and ends.tolist() == [2, 3]


def test_equal_parts():
    for total in range(20):
        for size in range(1, 6):
            parts = [equal_part(total, rank, size) for rank in range(size)]
            assert parts[0][0] == 0 and parts[-1][1] == total and all(a[1] == b[0] for a, b in pairwise(parts))
            assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "`n` and `size` must be 1 or more, got 0 and 1"),
        ((5, 0), "got 5 and 0"),
        ((5, 1, 12), "`unit` must be a multiple of 8, got 12"),
        ((5, 1, 0), "`unit` must be a multiple of 8, got 0"),
    ],
)
def test_numbers_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShardLayout(*arguments)
