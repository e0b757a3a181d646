"""The form of a saved state, which does not depend on the number of processes."""

import io
from dataclasses import replace

import pytest
import torch

import thresher
from helpers import assert_same
from thresher.distributed.layout import ShardLayout
from thresher.distributed.plan import PackedPlan, part_of_plan
from thresher.plans import EpochPlan
from thresher.run.checkpoint import SavedForm, check_form
from thresher.shards import Shard
from thresher.testing.threaded_world import on_ranks

N = 2500
KEPT = torch.arange(N)[torch.rand(N, generator=torch.Generator().manual_seed(0)) < 0.6]
PLAN = EpochPlan(KEPT, lr_scale=0.5, facts={"fraction": 0.4})
PLANS = {
    "marks": PLAN,
    "weights": replace(PLAN, weights=torch.rand(len(KEPT))),
    "refresh": replace(PLAN, refresh=torch.arange(0, N, 3)),
    "smaller batches": replace(PLAN, smaller_batches=True),
    "drawn": EpochPlan(KEPT.flip(0), drawn=True, weights=torch.rand(len(KEPT)), refresh=torch.arange(0, N, 3)),
}


def form_of(world):
    return SavedForm(ShardLayout(N, world.size).shard(world))


def packed(plan, world):
    shard = ShardLayout(N, world.size).shard(world)
    return PackedPlan.of(part_of_plan(plan, shard), shard).state_dict()


def saved(size, plan=None, *, is_fresh=False):
    """What each of some processes saves."""

    def save(world):
        block = ShardLayout(N, size).block(world.rank)
        own = {"rank": world.rank, "plan": None if plan is None else packed(plan, world)}
        values = {"records": {"loss": torch.arange(N)[block].float()}, "trained": torch.arange(N)[block].int()}
        return form_of(world).made(own, values, None, is_fresh=is_fresh)

    return on_ranks(size, save)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_state_does_not_depend_on_the_number_of_processes(name, before):
    states = saved(before, PLANS[name])
    (alone,) = saved(1, PLANS[name])
    for state in states:
        check_form(state)
        assert [own["rank"] for own in state["ranks"]] == [*range(before)]
        assert_same({**state, "ranks": 0, "digest": 0}, {**alone, "ranks": 0, "digest": 0})
        assert_same(state["ranks"][0]["plan"], alone["ranks"][0]["plan"])
    file = io.BytesIO()
    torch.save(states[0], file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    def take(world):
        form = form_of(world)
        plan = form.plan(state)
        return form.joined(state, {}, plan), packed(PLANS[name], world), ShardLayout(N, world.size).block(world.rank)

    for now in (1, 2, 3, 4):
        for found, plan, block in on_ranks(now, take):
            assert_same({field: found["plan"][field] for field in plan}, plan)
            assert found["records"]["loss"].tolist() == [*block] == found["trained"].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_before_the_training_there_is_room_for_any_plan(size):
    """torch.distributed.checkpoint loads a tensor only where one of its size is."""
    whole = replace(PLAN, refresh=PLANS["refresh"].refresh, weights=PLANS["weights"].weights)
    (room, *_), (full, *_) = saved(size, PLAN, is_fresh=True), saved(size, whole)
    assert {name: part.shape for name, part in room["plan"].items()} == {n: part.shape for n, part in full["plan"].items()}
    assert {name: part.dtype for name, part in room["plan"].items()} == {n: part.dtype for n, part in full["plan"].items()}
    assert [name for name, part in saved(size, PLAN)[0]["plan"].items() if part is not None] == ["ids"]


def test_ids_that_were_drawn_stay_in_their_order():
    drawn = EpochPlan(torch.tensor([4, 4, 1]), drawn=True, weights=torch.tensor([1.0, 1.0, 2.0]))
    form = SavedForm(Shard.whole(N))
    own = {"plan": PackedPlan.of(drawn, Shard.whole(N)).state_dict()}
    state = form.made(own, {"records": {}, "trained": torch.zeros(N)}, None, is_fresh=False)
    assert set(state["plan"].values()) == {None}
    found = form.plan(state)
    assert found["ids"].tolist() == [4, 4, 1] and found["weights"].tolist() == [1, 1, 2]


def test_what_is_saved_is_a_copy():
    run = thresher.attach(
        thresher.FullData(),
        loader=torch.utils.data.DataLoader(list(range(8)), 2, shuffle=True),
        criterion=torch.nn.MSELoss(),
        epochs=2,
    )
    state = run.state_dict()
    state["plan"]["ids"].zero_()
    assert run.plan.ids.tolist() == [*range(8)]
    run.load_state_dict(saved := run.state_dict())
    saved["plan"]["ids"].zero_()
    assert run.plan.ids.tolist() == [*range(8)]
