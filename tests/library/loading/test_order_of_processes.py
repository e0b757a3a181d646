"""Orders of several processes, with threads for ranks; whole trainings are in integration/test_training_in_processes.py."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from threaded_world import on_ranks
from thresher.loading.epoch import Epoch
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.sampler_order import SamplerOrder, is_free
from thresher.plans import EpochPlan

N = 3000


ALL = torch.arange(N)


def held(plan: EpochPlan) -> PackedPlan:
    return PackedPlan.of(plan, N)


def rows_of(world: Any, plan: EpochPlan, *, batch: int = 7) -> Any:
    """The rows of a rank with their weights, and the plan's numbers."""
    sampler = DistributedSampler(range(N), world.size, world.rank, seed=5)  # pyright: ignore
    order = SamplerOrder(DataLoader(range(N), batch, sampler=sampler), world)  # pyright: ignore
    whole = held(plan)
    epoch = made(order, whole)
    ids = torch.from_numpy(epoch.ids[: epoch.ends[-1]]).long()
    weights = None if epoch.weights is None else epoch.weights[ids]
    return ids, weights, whole.rows, whole.refresh_ids(world.rank, world.size)


def made(order: SamplerOrder, plan: PackedPlan, *, resumed: bool = False) -> Epoch:
    make = order.begin(plan, resumed=resumed)
    assert callable(make)
    return make()


def whole_order() -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_plan_keeps_is_dealt_out_in_the_order_of_the_sampler(size):
    """The weights are those of the plan."""
    some = ALL[ALL % 3 != 0]
    plan = EpochPlan(some, weights=1 + some / N, refresh=ALL[ALL % 3 == 0])
    found = on_ranks(size, lambda world: rows_of(world, plan))
    kept = [i for i in whole_order() if i % 3]
    padded = [kept[k % len(kept)] for k in range(-(-len(kept) // size) * size)]
    for rank, (ids, weights, count, _) in enumerate(found):
        assert ids.tolist() == padded[rank::size] and count == len(kept)
        torch.testing.assert_close(weights, (1 + ids / N).float())
    refreshed = torch.cat([one[-1] for one in found])
    assert refreshed.tolist() == list(range(0, N, 3))


def test_an_interrupted_epoch_is_made_again():
    plan = held(EpochPlan(ALL[::2]))

    def both(world):
        sampler = DistributedSampler(range(N), 2, world.rank, seed=5)
        order = SamplerOrder(DataLoader(range(N), 7, sampler=sampler), world)
        first = made(order, plan).ids
        order.load_state_dict({"begun": 0, "epoch": 0}, active=True, consumed=70)
        return first.tolist() == made(order, plan, resumed=True).ids.tolist()

    assert on_ranks(2, both) == [True, True]


def test_another_epoch_than_the_interrupted_one():
    def begin(world):
        sampler = DistributedSampler(range(N), 2, world.rank)
        order = SamplerOrder(DataLoader(range(N), 7, sampler=sampler), world)
        order.load_state_dict({"begun": 2, "epoch": 2}, active=True, consumed=7)
        sampler.set_epoch(3)
        order.begin(held(EpochPlan(ALL)), resumed=True)

    with pytest.raises(
        RuntimeError,
        match=r"in the order of epoch 2 of its DistributedSampler, but the sampler is now set to epoch 3.*set_epoch\(2\)",
    ):
        on_ranks(2, begin)


def test_a_dataset_that_has_grown():
    def begin(world):
        data = list(range(N))
        sampler = DistributedSampler(data, 2, world.rank)
        order = SamplerOrder(DataLoader(data, 7, sampler=sampler), world)
        data.append(0)
        order.begin(held(EpochPlan(ALL)), resumed=False)

    with pytest.raises(
        ValueError, match="had 3000 samples when `attach` was called, but now has 3001"
    ):
        on_ranks(2, begin)


@pytest.mark.parametrize("size", [2, 3])
def test_an_order_that_was_drawn_is_dealt_out_in_the_place_of_that_of_the_sampler(size):
    drawn = torch.randint(N, (800,), generator=torch.Generator().manual_seed(0))
    plan = EpochPlan(drawn, weights=1 + drawn / N, drawn=True)
    found = on_ranks(size, lambda world: rows_of(world, plan))
    rows = -(-800 // size)
    for rank, (ids, weights, total, _) in enumerate(found):
        whole = torch.cat([drawn, drawn[: rows * size - 800]])
        assert ids.tolist() == whole[rank::size].tolist()
        torch.testing.assert_close(weights, 1 + ids / N)
        assert len(ids) == rows and total == 800


@pytest.mark.parametrize("shuffle", [True, False])
def test_only_a_shuffle_may_be_replaced(shuffle):
    sampler = DistributedSampler(range(N), 2, 0, shuffle=shuffle)  # pyright: ignore
    assert is_free(DataLoader(range(N), 7, sampler=sampler)) == shuffle  # pyright: ignore
