import math

import numpy as np
import pytest
import torch

from thresher import EpochPlan, UniformSubset
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def planned(method: UniformSubset, n: int, epoch: int, seed: int = 0) -> EpochPlan:
    records = Records(method.columns(), n, CPU)
    return method.plan_epoch(records, epoch=epoch, epochs=10, generator=seeded(seed, epoch))


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
    plan = planned(UniformSubset(keep), n, 0)
    assert len(plan.ids) == count
    assert plan.facts["scheduled_fraction"] == pytest.approx(1 - keep)
    assert plan.facts["actual_fraction"] == pytest.approx(1 - count / n)
    assert plan.weights is None and plan.refresh is None and plan.lr_scale == 1 and not plan.drawn


def test_every_epoch_is_fresh_the_first_included() -> None:
    plans = [tuple(planned(UniformSubset(0.5), 40, epoch).ids.tolist()) for epoch in range(100)]
    assert len(set(plans)) == 100
    assert len(plans[0]) == 20


def test_every_pair_of_samples_is_kept_equally_often() -> None:
    draws, n, k = 6000, 8, 3
    kept = np.zeros((draws, n))
    for draw in range(draws):
        kept[draw, planned(UniformSubset(3 / 8), n, 0, draw).ids.numpy()] = 1
    assert (kept.sum(1) == k).all()
    together = kept.T @ kept / draws
    single, pair = k / n, k * (k - 1) / (n * (n - 1))
    for share, expected in ((np.diag(together), single), (together[~np.eye(n, dtype=bool)], pair)):
        assert np.abs(share - expected).max() < 5 * math.sqrt(expected * (1 - expected) / draws)


def epochs_of(method: UniformSubset, seed: int) -> list[list[int]]:
    records, found = Records(method.columns(), 40, CPU), []
    for epoch in range(5):
        plan = method.plan_epoch(records, epoch=epoch, epochs=5, generator=seeded(seed, epoch))
        records.remember(plan.remember)
        found.append(plan.ids.tolist())
    return found


def test_a_fixed_subset_is_that_of_the_first_epoch_in_all_epochs() -> None:
    found = epochs_of(UniformSubset(0.29, fixed=True), 0)
    assert found == [planned(UniformSubset(0.29), 40, 0).ids.tolist()] * 5 and len(found[0]) == 11
    assert epochs_of(UniformSubset(0.29, fixed=True), 1)[0] != found[0]


def test_a_setting_out_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="`fixed` must be True or False, got 'yes'"):
        UniformSubset(0.5, fixed="yes")  # pyright: ignore[reportArgumentType]


def test_losses_do_not_matter() -> None:
    method, records = UniformSubset(0.5), Records(UniformSubset().columns(), 40, CPU)
    before = method.plan_epoch(records, epoch=1, epochs=10, generator=seeded(0, 1)).ids.tolist()
    records["loss"].copy_(torch.arange(40.0))
    records["loss"][3] = math.nan
    assert (
        method.plan_epoch(records, epoch=1, epochs=10, generator=seeded(0, 1)).ids.tolist()
        == before
    )
