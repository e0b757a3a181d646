"""States of several processes that do not fit; those that do are in integration/test_training_in_processes.py."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import thresher
from thresher.distributed.threads import on_ranks
from thresher.run.resharding import Resharding
from thresher.run.state_checks import VERSION

LOADER = SimpleNamespace(sizes=SimpleNamespace(batch_size=4))


def state(rank, size, **other):
    ranks = {"rank": rank, "size": size}
    own = {"version": VERSION, "ranks": ranks, "n": 8, "stayed": 4, "active": True, "plan": None, "shuffle": None}
    return own | {"waiting": {"ids": torch.empty(0, dtype=torch.int64)}} | other


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        ([], ValueError, "the states of all processes, in the order of their ranks; got those of process none"),
        ([state(1, 2), state(0, 2)], ValueError, "got those of process 1 of 2, 0 of 2"),
        ([state(0, 2)], ValueError, "got those of process 0 of 2"),
        ([state(0, 2), state(1, 2, version=3)], ValueError, "the state has version 3, this is version 4"),
        ([state(0, 2), 3], TypeError, "each state must be a result of run.state_dict.., got int"),
        (
            [state(rank, 4, stayed=3) for rank in range(4)],
            ValueError,
            "4 processes .* on 12 rows .* batches of 4 rows",
        ),
        ([state(rank, 3, stayed=3) for rank in range(3)], ValueError, "3 processes have trained on 9 rows"),
        (
            [state(rank, 3, stayed=8, waiting={"ids": torch.tensor([1])}) for rank in range(3)],
            ValueError,
            "rows were chosen and not trained on yet",
        ),
    ],
)
def test_refused(states, error, message):
    with pytest.raises(error, match=message):
        on_ranks(2, lambda world: Resharding(states, world, LOADER))  # pyright: ignore[reportArgumentType]


def test_one_process_goes_on_with_a_shuffle_only():
    states = [state(rank, 2, shuffle={"sampler": "DistributedSampler"}) for rank in range(2)]
    with pytest.raises(ValueError, match="goes on there only with a thresher.Shuffle"):
        on_ranks(1, lambda world: Resharding(states, world, LOADER))  # pyright: ignore[reportArgumentType]


def test_the_state_of_one_of_several_processes():
    data = list(range(8))
    loader = DataLoader(data, 2, shuffle=True)
    run = thresher.attach(thresher.FullData(), loader=loader, criterion=torch.nn.MSELoss(), epochs=2)
    saved = run.state_dict() | {"ranks": {"rank": 1, "size": 2}}
    with pytest.raises(ValueError, match="saved by process 1 of 2, and this is process 0 of 1.*the list of the states of all"):
        run.load_state_dict(saved)
