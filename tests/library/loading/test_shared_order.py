"""Orders of several processes, with threads for ranks; whole trainings are in integration/test_training_in_processes.py."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from threaded_world import on_ranks
from thresher.loading.distributed_order import SharedOrder
from thresher.loading.epoch_order import IdBatchSampler, OrderPlace
from thresher.loading.held_plan import HeldPlan
from thresher.plans import EpochPlan

N = 3000


ALL = torch.arange(N)


def held(plan: EpochPlan) -> HeldPlan:
    return HeldPlan.of(plan, N)


def rows_of(
    world: Any,
    plan: EpochPlan,
    *,
    batch: int = 7,
    place: OrderPlace | None = None,
    drop_last: bool = False,
) -> Any:
    """The rows of a rank with their weights, and the plan's numbers."""
    sampler = DistributedSampler(range(N), world.size, world.rank, seed=5)
    order = SharedOrder(DataLoader(range(N), batch, sampler=sampler, drop_last=drop_last), world)  # pyright: ignore
    whole = held(plan)
    sizes = IdBatchSampler(order.sizes)
    found = order.cursor(whole, place or OrderPlace(), sizes, None)
    ids = found.order.take(N)
    return (
        ids,
        None if found.weights is None else found.weights(ids.numpy()),
        order.samples_of(whole),
        whole.rows,
        whole.refreshing(world.rank, world.size)(0, N),
    )


def whole_order() -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_plan_keeps_is_dealt_out_in_the_order_of_the_sampler(size):
    """The weights are those of the plan."""
    some = ALL[ALL % 3 != 0]
    plan = EpochPlan(some, weights=1 + some / N, refresh=ALL[ALL % 3 == 0])
    found = on_ranks(size, lambda world: rows_of(world, plan))
    kept = [i for i in whole_order() if i % 3]
    padded = [kept[k % len(kept)] for k in range(-(-len(kept) // size) * size)]
    for rank, (ids, weights, samples, count, _) in enumerate(found):
        assert ids.tolist() == padded[rank::size] and samples == len(ids) and count == len(kept)
        torch.testing.assert_close(weights, (1 + ids / N).float())
    refreshed = np.concatenate([one[-1] for one in found])
    assert refreshed.tolist() == list(range(0, N, 3))


def test_an_interrupted_epoch_goes_on_at_its_rows():
    plan = EpochPlan(ALL[::2])
    whole = on_ranks(2, lambda world: rows_of(world, plan)[0])

    def rest(world):
        loader = DataLoader(
            range(N), 7, sampler=DistributedSampler(range(N), 2, world.rank, seed=5)
        )
        order = SharedOrder(loader, world)
        order.load_state_dict({"begun": 0, "epoch": 0}, active=True, consumed=70)
        return order.cursor(
            held(plan), OrderPlace(70, 35), IdBatchSampler(order.sizes), None
        ).order.take(N)

    for own, expected in zip(on_ranks(2, rest), whole, strict=True):
        assert own.tolist() == expected[35:].tolist()


def test_another_epoch_than_the_interrupted_one():
    def begin(world):
        sampler = DistributedSampler(range(N), 2, world.rank)
        order = SharedOrder(DataLoader(range(N), 7, sampler=sampler), world)
        plan = held(EpochPlan(ALL))
        order.load_state_dict({"begun": 2, "epoch": 2}, active=True, consumed=7)
        sampler.set_epoch(3)
        order.cursor(plan, OrderPlace(7, 7), IdBatchSampler(order.sizes), None)

    with pytest.raises(
        RuntimeError,
        match=r"in the order of epoch 2 of its DistributedSampler, but the sampler is now set to epoch 3.*set_epoch\(2\)",
    ):
        on_ranks(2, begin)


def test_a_dataset_that_has_grown():
    data = list(range(N))

    def begin(world):
        order = SharedOrder(DataLoader(data, 7, sampler=DistributedSampler(data, 1, 0)), world)
        plan = held(EpochPlan(ALL))
        data.append(0)
        order.cursor(plan, OrderPlace(), IdBatchSampler(order.sizes), None)

    with pytest.raises(
        ValueError, match="had 3000 samples when `attach` was called, but now has 3001"
    ):
        on_ranks(1, begin)


def test_steps_with_other_numbers_of_rows():
    def begin(world):
        order = SharedOrder(
            DataLoader(range(N), 7, sampler=DistributedSampler(range(N), 2, world.rank)), world
        )
        plan = held(EpochPlan(ALL[::2], smaller_batches=True))
        order.load_state_dict({"begun": 0, "epoch": 0}, active=True, consumed=10)
        order.cursor(plan, OrderPlace(10, 5), IdBatchSampler(order.sizes), None)

    with pytest.raises(ValueError, match="trained on 5 rows, which does not fit"):
        on_ranks(2, begin)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_order_that_was_drawn_is_dealt_out_in_the_place_of_that_of_the_sampler(size):
    drawn = torch.randint(N, (800,), generator=torch.Generator().manual_seed(0))
    plan = EpochPlan(drawn, weights=1 + drawn / N, drawn=True)
    found = on_ranks(size, lambda world: rows_of(world, plan))
    rows = -(-800 // size)
    for rank, (ids, weights, samples, total, _) in enumerate(found):
        whole = torch.cat([drawn, drawn[: rows * size - 800]])
        assert ids.tolist() == whole[rank::size].tolist()
        torch.testing.assert_close(weights, 1 + ids / N)
        assert samples == rows and total == 800


@pytest.mark.parametrize("shuffle", [True, False])
def test_only_a_shuffle_may_be_replaced(shuffle):
    def free(world):
        sampler = DistributedSampler(range(N), world.size, world.rank, shuffle=shuffle)
        return SharedOrder(DataLoader(range(N), 7, sampler=sampler), world).is_free  # pyright: ignore

    assert on_ranks(2, free) == [shuffle] * 2
