"""Values by id in the blocks of the records, and in the equal parts of a DTensor."""

from types import SimpleNamespace

import pytest
import torch

from thresher.distributed.layout import ShardLayout
from thresher.run.checkpoint import Spread
from thresher.shards import ALONE
from thresher.testing.threaded_world import on_ranks


@pytest.mark.parametrize(("n", "size"), [(20, 1), (20, 2), (17, 3), (8, 4), (1, 3), (100, 7), (64, 8)])
@pytest.mark.parametrize("ids_per_value", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.bool])
def test_there_and_back(n, size, ids_per_value, dtype):
    whole = (torch.arange(-(-n // ids_per_value)) % 3).to(dtype)
    parts = [*torch.chunk(whole, size)]

    def move(world):
        spread, given = Spread(ShardLayout(n, size, 8), world, ids_per_value), []
        world.sharded = lambda part, total: (given.append(part), whole)[1]
        block = spread.blocks[world.rank]
        saved = spread.out(whole[block.start : block.stop])
        part = whole.clone() if size == 1 else given[0]
        part.device_mesh = SimpleNamespace(size=lambda: size, get_coordinate=lambda: (world.rank,))
        back = spread._moved(part, spread.parts, spread.blocks)
        return block, part, saved, back, spread.home(whole)

    for rank, (block, part, saved, back, of_plain) in enumerate(on_ranks(size, move)):
        own = whole[block.start : block.stop]
        assert part.equal(parts[rank] if rank < len(parts) else whole[:0])
        assert back.equal(own) and of_plain.equal(own) and saved.equal(whole)


def test_what_is_no_tensor_of_all_ids_is_refused():
    spread = Spread(ShardLayout(20, 1), ALONE)
    for value in (None, [1], torch.zeros(19), torch.zeros(20, 1)):
        with pytest.raises(ValueError, match=r"a tensor of shape \(20,\) is needed for the samples, got "):
            spread.home(value)


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3)])
def test_the_part_of_another_process_is_refused(rank, size):
    saved = torch.zeros(20)
    saved.device_mesh = SimpleNamespace(size=lambda: size, get_coordinate=lambda: (rank,))  # as a DTensor has it
    with pytest.raises(
        ValueError, match=f"the part of process {rank} of {size}, and this is process 0 of 1.*distributed.checkpoint"
    ):
        Spread(ShardLayout(20, 1), ALONE).home(saved)
