"""What ranks know of a plan: who is kept, with which weight, and who is refreshed, without the records of the others."""

import tracemalloc

import numpy as np
import pytest
import torch

from depth import depth
from shard_cases import assert_one_plan, hard_columns, planned, planned_part, records_of
from thresher import EpochPlan, EpochSelectiveBackprop, FullData, InfoBatch, Kakurenbo, UniformSubset
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder, RankOrder
from thresher.distributed.plan import HeldPlan, part_of_plan
from thresher.selection import ids_of
from thresher.shards import ALONE
from thresher.testing.threaded_world import on_ranks

N = 300
ORDER = np.random.default_rng(1).permutation(N)


def shared(method, size, look, *, n=N, columns=None):
    """What a function of the shared plan of each rank returns, and the plan of one process."""
    records = records_of(method, hard_columns(n, 3) if columns is None else columns)
    layout = ShardLayout(n, size, 8)

    def plan(world):
        return look(HeldPlan.of(planned_part(method, records, layout.shard(world)), layout, world), world)

    return on_ranks(size, plan), planned(method, records)


METHODS = [
    FullData(), Kakurenbo(), InfoBatch(), InfoBatch(0.3, rescale="ratio"), UniformSubset(0.3), EpochSelectiveBackprop(beta=2)
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 60])
def test_every_rank_knows_the_plan_of_one_process(method, size):
    def look(plan, world):
        kept = np.flatnonzero(plan.keeps(np.arange(N)))
        some = np.random.default_rng(world.rank).choice(kept, 20)
        weights = plan.weights(some)
        return plan.rows, plan.refreshed, kept, some, weights, torch.from_numpy(plan.refreshing()(0, N)), plan.everything

    found, whole = shared(method, size, look)
    weight_of = dict(
        zip(whole.ids.tolist(), [1.0] * len(whole.ids) if whole.weights is None else whole.weights.tolist(), strict=True)
    )
    for rows, refreshed, kept, some, weights, _, everything in found:
        assert kept.tolist() == whole.ids.tolist() and rows == len(kept) and everything == (rows == N)
        assert refreshed == (0 if whole.refresh is None else len(whole.refresh))
        assert (weights is None) == (whole.weights is None)
        assert weights is None or (weights.dtype == torch.float32 and weights.tolist() == [weight_of[i] for i in some.tolist()])
    refresh = [one[5] for one in found]
    assert torch.equal(torch.cat(refresh), torch.empty(0, dtype=torch.int64) if whole.refresh is None else whole.refresh)
    assert max(map(len, refresh)) - min(map(len, refresh)) <= 1


@pytest.mark.parametrize(
    ("method", "gathers"),
    [(FullData(), 0), (UniformSubset(0.3), 1), (Kakurenbo(), 1)],
    ids=lambda v: str(v)[:9],
)
def test_one_bit_per_sample_travels_or_none(method, gathers):
    layout, records = ShardLayout(N, 3, 8), records_of(method, hard_columns(N, 3))

    def look(world):
        part = planned_part(method, records, layout.shard(world))
        world.reset()
        plan = HeldPlan.of(part, layout, world)
        plan.weights(plan.plan().ids.numpy())
        plan.refreshing()
        return world.traffic["gather"], world.calls["exchange"]

    assert on_ranks(3, look) == [(3 * layout.per // 8 * gathers, 0)] * 3


def test_each_rank_knows_the_weights_of_all_kept_samples():
    layout = ShardLayout(40, 3, 8)

    def look(world):
        ids = layout.shard(world).ids[::2]
        plan = HeldPlan.of(EpochPlan(ids, weights=ids / 2), layout, world)
        return plan.weights(np.array([38, 2, 20])[: world.rank + 1])

    assert [found.tolist() for found in on_ranks(3, look)] == [[19.0], [19.0, 1.0], [19.0, 1.0, 10.0]]


def test_samples_to_refresh_that_are_not_the_others():
    layout = ShardLayout(20, 2, 8)

    def look(world):
        own = layout.shard(world).ids
        plan = HeldPlan.of(EpochPlan(own[::2], refresh=own[::4]), layout, world)
        return plan.refreshing()(0, N).tolist(), plan.refreshed

    assert on_ranks(2, look) == [([0, 4], 5), ([8, 12, 16], 5)]


def test_the_plan_of_all_samples_is_cut_into_parts():
    plan = EpochPlan(
        torch.tensor([0, 3, 4, 9]),
        weights=torch.arange(4.0),
        refresh=torch.tensor([1, 8]),
        remember={"weight": torch.arange(10.0)},
        facts={"kept": 4},
    )
    layout = ShardLayout(10, 2, 8)
    for part, ids, refresh in zip(
        on_ranks(2, lambda w: part_of_plan(plan, layout.shard(w))), ([0, 3, 4], [9]), ([1], [8]), strict=True
    ):
        assert part.ids.tolist() == ids and part.refresh.tolist() == refresh
        assert part.weights.tolist() == [{0: 0, 3: 1, 4: 2, 9: 3}[i] for i in ids]
        assert len(part.remember["weight"]) == (8 if ids[0] == 0 else 2) and part.facts == {"kept": 4}
    bare = part_of_plan(EpochPlan(torch.tensor([0, 9])), layout.shard(on_ranks(2, lambda world: world)[1]))
    assert bare.ids.tolist() == [9] and bare.weights is None and bare.refresh is None


@pytest.mark.parametrize("size", depth([1, 2, 4], [1, 2, 3, 4, 8, 16]))
def test_the_batches_of_the_ranks_are_those_of_one_process(size):
    """An epoch as a training has it: 24 rows in each step of all ranks together, the same samples for each number of ranks."""
    batch = 24 // size if 24 % size == 0 else 24

    def look(plan, world):
        order = KeptOrder(lambda begin, end: ORDER[begin:end], N, plan.keeps, world, 64)
        rows = RankOrder(order.take, len(order), world)
        return [rows.take(begin, begin + batch) for begin in range(0, len(rows), batch)]

    found, whole = shared(Kakurenbo(), size, look)
    kept = ORDER[np.isin(ORDER, whole.ids.numpy())]
    kept = np.concatenate([kept, kept[: -len(kept) % size]])
    for step, parts in enumerate(zip(*found, strict=True)):
        assert np.stack(parts, axis=1).reshape(-1).tolist() == kept[step * batch * size : (step + 1) * batch * size].tolist()


def test_values_are_found_without_ids():
    """In one process: weights by the place among those that are kept, for a plan of some samples, of all, and of drawn ones."""
    layout = ShardLayout(40, 1)
    for ids in (torch.arange(0, 40, 3), torch.arange(40)):
        held = HeldPlan.of(EpochPlan(ids, weights=ids / 2), layout, ALONE)
        assert torch.equal(held.weights(ids.flip(0).numpy()), ids.flip(0) / 2)
    ids = torch.tensor([7, 3, 7, 30])
    held = HeldPlan.of(EpochPlan(ids, weights=ids / 2, refresh=torch.tensor([1, 5]), drawn=True), layout, ALONE)
    assert held.weights(np.array([30, 7])).tolist() == [15.0, 3.5] and held.rows == 4 and not held.everything
    assert held.refreshing()(0, 9).tolist() == [1, 5] and held.plan().ids.tolist() == ids.tolist()


@pytest.mark.parametrize("method", [Kakurenbo(), InfoBatch()], ids=["kakurenbo", "infobatch"])
def test_the_part_of_a_rank_comes_back(method):
    found, whole = shared(method, 3, lambda plan, world: plan.plan())
    assert_one_plan(found, whole)


def test_what_one_process_holds_of_a_plan():
    """A quarter of a byte per sample where refreshed samples are the others; ids would take eight."""
    n = 1_000_000
    hidden = np.random.default_rng(0).random(n) < 0.3
    plan = EpochPlan(ids_of(~hidden), refresh=ids_of(hidden))
    tracemalloc.start()
    held = HeldPlan.of(plan, ShardLayout(n, 1), ALONE)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= 0.3 * n and peak <= n
    assert held.refreshed == hidden.sum() and np.array_equal(held.refreshing()(0, n), np.flatnonzero(hidden))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_that_was_drawn_is_whole_on_each_rank(size):
    """Its ids are the order of all ranks, so that no weight has to be asked for; the refresh is shared out."""
    ids, layout = torch.tensor([7, 299, 7, 0, 150]), ShardLayout(N, size, 8)
    weights = torch.tensor([2.0, 1.0, 2.0, 0.5, 4.0])
    plan = EpochPlan(ids, drawn=True, weights=weights, refresh=torch.arange(0, N, 2), remember={"x": torch.arange(N)})

    def look(world):
        part = part_of_plan(plan, layout.shard(world))
        held = HeldPlan.of(part, layout, world)
        found = held.weights(np.array([150, 7]))
        block = layout.block(world.rank)
        assert part.remember["x"].tolist() == [*block] and not held.everything
        return held.rows, held.refreshed, held.own.ids.tolist(), found, held.refreshing()(0, N)

    every = on_ranks(size, look)
    for rows, refreshed, order, found, _ in every:
        assert (rows, refreshed, order, found.tolist()) == (5, N // 2, ids.tolist(), [4, 2])
    assert np.concatenate([one[-1] for one in every]).tolist() == [*range(0, N, 2)]
