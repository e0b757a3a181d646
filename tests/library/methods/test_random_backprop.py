import math

import numpy as np
import pytest
import torch

from thresher import BatchPlan, RandomBackprop
from thresher.rng import seeded


def planned(method: RandomBackprop, ids: torch.Tensor, seed: int = 0) -> BatchPlan:
    plan, state = method.plan_batch(
        {"id": ids}, method.init_state(), step=0, generator=seeded(seed)
    )
    assert state == {}
    return plan


@pytest.mark.parametrize(
    ("n", "keep", "count"),
    [
        (10, 0.7, 7),
        (100, 0.29, 29),
        (100, 0.57, 57),
        (3, 0.5, 1),
        (3, 0.1, 1),
        (1, 0.01, 1),
        (9, 1.0, 9),
    ],
)
def test_counts(n: int, keep: float, count: int) -> None:
    plan = planned(RandomBackprop(keep), torch.arange(n))
    assert len(plan.rows) == count
    assert plan.weights is None
    assert plan.facts == pytest.approx(
        {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - count / n}
    )


def test_an_empty_batch() -> None:
    plan = planned(RandomBackprop(), torch.arange(0))
    assert len(plan.rows) == 0 and plan.facts["actual_fraction"] == 1


def test_it_needs_no_forward_pass() -> None:
    assert RandomBackprop.requires.signals == ()
    ids = torch.arange(40)
    for loss in (torch.arange(40.0), torch.full((40,), math.nan)):
        plan, _ = RandomBackprop().plan_batch(
            {"id": ids, "loss": loss}, {}, step=0, generator=seeded(0)
        )
        assert torch.equal(plan.rows, planned(RandomBackprop(), ids).rows)


def test_every_pair_of_rows_is_kept_equally_often() -> None:
    draws, n, k = 6000, 8, 3
    kept, ids = np.zeros((draws, n)), torch.tensor([3, 1, 4, 15, 9, 2, 6, 5])
    for draw in range(draws):
        kept[draw, planned(RandomBackprop(3 / 8), ids, draw).rows.numpy()] = 1
    assert (kept.sum(1) == k).all()
    together = kept.T @ kept / draws
    single, pair = k / n, k * (k - 1) / (n * (n - 1))
    for share, expected in ((np.diag(together), single), (together[~np.eye(n, dtype=bool)], pair)):
        assert np.abs(share - expected).max() < 5 * math.sqrt(expected * (1 - expected) / draws)
