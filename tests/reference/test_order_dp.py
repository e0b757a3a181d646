"""OrderDp against a transcription sample by sample, and the chance of each rank against the paper's formula."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, noted, winners
from thresher import EpochPlan, OrderDp
from thresher.methods.order_dp import NEW_SAMPLE
from thresher.records import Records
from thresher.rng import seeded


def planned(method: OrderDp, loss: list[float], key: int = 0, epoch: int = 1) -> EpochPlan:
    records = Records(method.columns(), len(loss), torch.device("cpu"))
    records["loss"].copy_(torch.tensor(loss))
    return method.plan_epoch(records, epoch=epoch, epochs=5, generator=seeded(key))


def transcribed(
    loss: list[float], keep: Fraction, pool: Fraction, generator: torch.Generator
) -> set[int]:
    """The kept samples: the largest losses of a random pool, unseen ones first, by lot; and all that are not finite."""
    n = len(loss)
    finite = [i for i in range(n) if math.isfinite(loss[i])]
    wanted = max(1, math.floor(keep * n)) - (n - len(finite))
    wanted = min(max(wanted, 0), len(finite))
    inside = winners(max(wanted, math.floor(pool * len(finite))), generator, finite)
    unseen = {i for i in inside if loss[i] == NEW_SAMPLE}
    if len(unseen) > wanted:
        best = winners(wanted, generator, unseen)
    else:
        best = unseen | set(
            sorted(inside - unseen, key=lambda i: (-loss[i], -i))[: wanted - len(unseen)]
        )
    return best | (set(range(n)) - set(finite))


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plan_is_that_of_the_paper(kind: str) -> None:
    for number in range(depth(12, 60)):
        loss = hard_losses(kind, number)
        r = np.random.default_rng(number)
        if number % 3 == 0:
            loss = [NEW_SAMPLE if r.random() < 0.5 else value for value in loss]
        keep, pool = sorted(r.integers(1, 101, 2).tolist())
        plan = planned(OrderDp(keep / 100, pool / 100), loss, number)
        expected = transcribed(loss, Fraction(keep, 100), Fraction(pool, 100), seeded(number))
        with noted(f"instance {number}"):
            assert set(plan.ids.tolist()) == expected
            assert plan.weights is None and plan.refresh is None
            assert plan.facts["actual_fraction"] == pytest.approx(1 - len(expected) / len(loss))


def test_the_chance_of_a_rank_is_that_of_the_paper() -> None:
    """gamma_j = sum over l = 1 .. q of C(j - 1, l - 1) C(n - j, s - l) / C(n, s), j from the largest loss."""
    n, s, q, plans = 12, 8, 3, depth(2000, 20_000)
    gamma = [
        sum(math.comb(j - 1, k - 1) * math.comb(n - j, s - k) for k in range(1, q + 1))
        / math.comb(n, s)
        for j in range(1, n + 1)
    ]
    assert sum(gamma) == pytest.approx(q)
    loss = np.random.default_rng(0).permutation(n).astype(float)
    counts = np.zeros(n)
    for key in range(plans):
        counts[planned(OrderDp(q / n, s / n), loss.tolist(), key).ids.numpy()] += 1
    by_rank = counts[np.argsort(-loss)] / plans
    for found, chance in zip(by_rank, gamma, strict=True):
        assert abs(found - chance) <= 4 * math.sqrt(chance * (1 - chance) / plans) + 1e-12


def test_the_share_is_exact_from_the_first_epoch_on_and_new_samples_come_first() -> None:
    method, n = OrderDp(keep=0.3), 1000
    records = Records(method.columns(), n, torch.device("cpu"))
    seen: set[int] = set()
    for epoch in range(6):
        plan = method.plan_epoch(records, epoch=epoch, epochs=6, generator=seeded(epoch))
        assert len(plan.ids) == 300
        records.write(plan.ids, {"loss": torch.rand(300, generator=seeded(epoch))})
        if epoch < 3:
            assert seen.isdisjoint(plan.ids.tolist())
        seen |= set(plan.ids.tolist())
    assert len(seen) > 950


@pytest.mark.parametrize(
    "settings", [{"pool": 0.2}, {"pool": 0}, {"pool": 1.5}, {"keep": 0.5, "pool": float("nan")}]
)
def test_a_pool_that_is_too_small_or_no_share_is_refused(settings: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"^OrderDp: `pool` is a share of the samples, within \(0, 1\] and not below `keep`",
    ):
        OrderDp(**settings)


def test_keep_is_a_share() -> None:
    with pytest.raises(ValueError, match="^OrderDp: `keep` is the share kept"):
        OrderDp(keep=0)
