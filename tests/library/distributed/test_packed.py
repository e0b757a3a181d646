"""A plan with bits in place of ids: nothing of it is lost, and what a damaged state would be is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thresher import EpochPlan
from thresher.distributed.plan import PackedPlan
from thresher.shards import ALONE, Shard
from thresher.testing.check import comparable_plan


@given(st.data(), st.integers(1, 100), st.integers(0, 40), st.booleans())
def test_a_plan_comes_back(data, n, first, valued):
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    shard, ids = Shard(first, first + n, 200, ALONE), torch.from_numpy(np.flatnonzero(kept) + first)
    values = torch.rand(len(ids)) if valued else None
    plan = EpochPlan(
        ids,
        weights=values,
        refresh=torch.from_numpy(np.flatnonzero(~kept)[::2] + first) if valued else None,
        lr_scale=1.5,
        facts={"fraction": 0.5},
        smaller_batches=True,
        note="a note",
    )
    found = PackedPlan.of(plan, shard)
    assert found.ids.dtype == torch.uint8 and len(found.ids) == -(-n // 8) and found.kept == len(ids)
    assert comparable_plan(found.unpacked(shard)) == comparable_plan(plan)
    saved = PackedPlan(**found.state_dict())
    assert comparable_plan(saved.unpacked(shard)) == comparable_plan(plan)


def test_ids_that_were_drawn_stay_ids():
    plan = EpochPlan(torch.tensor([4, 1, 4]), weights=torch.tensor([2.0, 1, 2]), refresh=torch.tensor([0, 3]), drawn=True)
    found = PackedPlan.of(plan, Shard.whole(5))
    assert found.ids is plan.ids and found.kept == 3
    assert comparable_plan(found.unpacked(Shard.whole(5))) == comparable_plan(plan)


@pytest.mark.parametrize("name", ["ids", "refresh"])
@pytest.mark.parametrize("bits", [torch.tensor([3, 0], dtype=torch.uint8), torch.tensor([1, 2])])
def test_other_numbers_of_bits_are_refused(name, bits):
    packed = PackedPlan.of(EpochPlan(torch.tensor([1, 3])), Shard.whole(5))
    with pytest.raises(ValueError, match=f"`{name}` must be one bit for each of 5 samples, a torch.uint8 tensor of shape"):
        replace(packed, **{name: bits}).unpacked(Shard.whole(5))


def test_bits_beyond_the_samples_are_refused():
    packed = PackedPlan.of(EpochPlan(torch.tensor([1, 3])), Shard.whole(5))
    plan = replace(packed, ids=torch.tensor([255], dtype=torch.uint8)).unpacked(Shard.whole(5))
    with pytest.raises(ValueError, match=r"must be within \[0, 5\)"):
        plan.check(5)
