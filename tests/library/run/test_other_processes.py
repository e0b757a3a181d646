"""States of several processes that do not fit; those that do are in integration/test_training_in_processes.py."""

from types import SimpleNamespace

import pytest
import torch

from threaded_world import on_ranks
from thresher.loading.held_plan import HeldPlan
from thresher.plans import EpochPlan
from thresher.run.checkpoint import OtherProcesses

LOADER = SimpleNamespace(order=SimpleNamespace(sizes=SimpleNamespace(batch_size=4)))


def state(**other):
    own = {"n": 8, "stayed": 4, "active": True, "shuffle": None}
    return own | {"waiting": {"ids": torch.empty(0, dtype=torch.int64)}} | other


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state(stayed=3)] * 4, "4 processes .* on 12 rows .* batches of 4 rows"),
        ([state(stayed=3)] * 3, "3 processes have trained on 9 rows"),
        (
            [state(stayed=8, waiting={"ids": torch.tensor([1])})] * 3,
            "had chosen rows that were not trained on yet",
        ),
    ],
)
def test_refused(states, message):
    with pytest.raises(ValueError, match=message):
        on_ranks(2, lambda world: OtherProcesses(states, None, world, LOADER))  # pyright: ignore[reportArgumentType]


def test_one_process_does_not_go_on_with_an_order_that_was_drawn():
    plan = HeldPlan.of(EpochPlan(torch.tensor([1, 1, 2]), drawn=True), 8).state_dict()
    states = [state(shuffle={"sampler": "Shuffle"})] * 2
    with pytest.raises(ValueError, match="in the middle of an epoch whose order was drawn"):
        on_ranks(1, lambda world: OtherProcesses(states, plan, world, LOADER))  # pyright: ignore[reportArgumentType]


def test_one_process_goes_on_with_a_shuffle_only():
    states = [state(shuffle={"sampler": "DistributedSampler"})] * 2
    with pytest.raises(
        ValueError, match="can continue it only if the sampler of its loader is a thresher.Shuffle"
    ):
        on_ranks(1, lambda world: OtherProcesses(states, None, world, LOADER))  # pyright: ignore[reportArgumentType]
