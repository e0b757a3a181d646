"""States of several processes that do not fit; those that do are in integration/test_training_in_processes.py."""

import pytest
import torch

from threaded_world import on_ranks
from thresher.loading.packed_plan import PackedPlan
from thresher.plans import EpochPlan
from thresher.run.checkpoint import SAMPLES, OtherProcesses


def state(**other):
    own = {
        "n": 8,
        "rows": 4,
        "samples": 4,
        "cost": dict.fromkeys(SAMPLES, 2),
        "active": True,
        "shuffle": None,
    }
    return own | {"waiting": {"ids": torch.empty(0, dtype=torch.int64)}} | other


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state(rows=3)] * 3, "3 processes have trained on 9 rows"),
        (
            [state(rows=8, waiting={"ids": torch.tensor([1])})] * 3,
            "had chosen rows that were not trained on yet",
        ),
    ],
)
def test_refused(states, message):
    with pytest.raises(ValueError, match=message):
        on_ranks(2, lambda world: OtherProcesses(states, None, world))


def test_one_process_goes_on_with_an_order_that_was_drawn():
    plan = PackedPlan.of(EpochPlan(torch.tensor([1, 1, 2]), drawn=True), 8).state_dict()
    states = [state(shuffle={"sampler": "DistributedSampler"})] * 2
    (found,) = on_ranks(1, lambda world: OtherProcesses(states, plan, world).state())
    assert (found["rows"], found["samples"], found["cost"]["forward"]) == (8, 8, 4)


def test_one_process_goes_on_with_a_shuffle_only():
    states = [state(shuffle={"sampler": "DistributedSampler"})] * 2
    with pytest.raises(
        ValueError, match="can continue it only if the sampler of its loader is a thresher.Shuffle"
    ):
        on_ranks(1, lambda world: OtherProcesses(states, None, world))
