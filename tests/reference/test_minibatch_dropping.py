"""MinibatchDropping against dropping the mini-batches of a shuffle one by one, and the steps that the paper counts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import EpochPlan, MinibatchDropping
from thresher.records import Records
from thresher.rng import seeded


def planned(method: MinibatchDropping, n: int, *, epoch: int = 0, key: int = 0) -> EpochPlan:
    records = Records(method.columns(), n, torch.device("cpu"))
    return method.plan_epoch(records, epoch=epoch, epochs=200, generator=seeded(key, epoch))


def transcribed(n: int, batch_size: int, drop: float, draws: list[float]) -> tuple[int, int]:
    """How many mini-batches of a list of samples stay, and how many samples they have."""
    batches = [list(range(start, min(start + batch_size, n))) for start in range(0, n, batch_size)]
    assert len(batches) == len(draws)
    kept = [batch for batch, u in zip(batches, draws, strict=True) if not u < drop]
    if not kept:
        kept = [max(zip(draws, batches, strict=True))[1]]
    return len(kept), sum(map(len, kept))


@over_instances(depth(range(40), range(200)))
def test_agrees_with_the_transcription(number: int) -> None:
    r = np.random.default_rng(number)
    n = 1 if number % 10 == 0 else int(r.integers(2, 300))
    batch_size = int(r.choice([1, 2, 7, 32, 128, 1000]))
    drop = float(r.choice([0, 0.1, 0.5, 0.9, 0.99]))
    batches = math.ceil(Fraction(n, batch_size))
    draws = torch.rand(batches, generator=seeded(number, 0), dtype=torch.float64).tolist()
    kept, samples = transcribed(n, batch_size, drop, draws)
    plan = planned(MinibatchDropping(drop, batch_size), n, key=number)
    plan.check(n)
    assert plan.facts["batches"] == kept and len(plan.ids) == samples
    assert math.ceil(samples / batch_size) == kept  # as many steps
    assert plan.facts["scheduled_fraction"] == drop
    assert plan.facts["actual_fraction"] == pytest.approx(1 - samples / n)
    assert plan.weights is None and plan.refresh is None and plan.lr_scale == 1 and not plan.drawn


def test_the_steps_of_the_paper() -> None:
    """160 epochs of CIFAR-10 are 160 x 391 mini-batches of 128, of which half are expected: 31,280."""
    method = MinibatchDropping()
    plans = [planned(method, 50_000, epoch=epoch, key=1) for epoch in range(160)]
    assert sum(plan.facts["batches"] for plan in plans) == pytest.approx(
        31_280, abs=4 * math.sqrt(160 * 391 / 4)
    )
    assert {len(plan.ids) % 128 for plan in plans} == {
        0,
        50_000 % 128,
    }  # with the rest and without it


def test_who_is_kept_is_uniform() -> None:
    n, draws = 10, 6000
    kept = np.zeros((draws, n))
    for key in range(draws):
        kept[key, planned(MinibatchDropping(0.5, 3), n, key=key).ids.numpy()] = 1
    share = kept.mean()
    assert np.abs(kept.mean(0) - share).max() < 5 * math.sqrt(share * (1 - share) / draws)
    # Four mini-batches, the last of one sample; were none to stay, the one of the largest draw does.
    assert share == pytest.approx(
        (5 + 2.5 / 16) / 10, abs=5 * kept.mean(1).std() / math.sqrt(draws)
    )
    together = (kept.T @ kept / draws)[~np.eye(n, dtype=bool)]
    assert np.abs(together - together.mean()).max() < 5 * math.sqrt(0.25 / draws)


def test_every_epoch_is_fresh_the_first_included() -> None:
    method = MinibatchDropping(0.5, 2)
    assert (
        len({tuple(planned(method, 40, epoch=epoch).ids.tolist()) for epoch in range(100)}) == 100
    )
