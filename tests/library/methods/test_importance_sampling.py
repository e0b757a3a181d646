"""Settings of ImportanceSampling, and what it needs; the whole of it is in tests/reference."""

import math
from typing import Any

import pytest
import torch

from thresher import EpochPlan, ImportanceSampling
from thresher.records import Records
from thresher.rng import seeded


def planned(
    method: ImportanceSampling, loss: list[float], *, epoch: int = 1, epochs: int = 5
) -> EpochPlan:
    records = Records(method.columns(), len(loss), torch.device("cpu"))
    records["loss"].copy_(torch.tensor(loss))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(7, epoch))


def test_published_defaults() -> None:
    assert ImportanceSampling() == ImportanceSampling(
        weights="none", losses="fresh", keep=1.0, first_epoch="all"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "all"}, r"`weights` must be one of \('none', 'unbiased'\), got 'all'"),
        ({"losses": None}, r"`losses` must be one of \('fresh', 'last'\), got None"),
        ({"first_epoch": 0}, r"`first_epoch` must be one of \('all', 'uniform'\), got 0"),
        *(
            ({"keep": keep}, rf"`keep` is the share kept, within \(0, 1\], got {keep}")
            for keep in (0, -0.5, 1.5, math.nan)
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^ImportanceSampling: {message}"):
        ImportanceSampling(**settings)


def test_fresh_losses_need_a_pass_over_all_samples_before_every_epoch_but_the_first() -> None:
    method = ImportanceSampling()
    assert method.requires.refresh == "eval"
    for epoch in range(4):
        refresh = planned(method, [1.0, 2.0, 3.0], epoch=epoch).refresh
        assert refresh is not None and refresh.tolist() == [0, 1, 2]
    assert planned(method, [1.0, 2.0, 3.0], epoch=4).refresh is None


def test_last_losses_need_none() -> None:
    method = ImportanceSampling(losses="last")
    assert method.requires.refresh is None
    assert all(planned(method, [1.0, 2.0], epoch=epoch).refresh is None for epoch in range(5))


def test_the_first_epoch() -> None:
    loss = [0.0, 0.0, 0.0, 1.0]
    assert planned(ImportanceSampling(), loss, epoch=0).ids.tolist() == [0, 1, 2, 3]
    method = ImportanceSampling(first_epoch="uniform", weights="unbiased")
    plan = planned(method, loss * 100, epoch=0)
    assert plan.drawn and len(plan.ids) == 400
    assert plan.weights is not None and plan.weights.tolist() == pytest.approx([1.0] * 400)
    # Of uniform draws 1 / e of the samples are missing.
    assert plan.facts["distinct"] == pytest.approx(1 - 1 / math.e, abs=0.1)
    assert len({i % 4 for i in plan.ids.tolist()}) == 4  # losses do not matter yet


def test_samples_of_loss_zero_are_never_drawn() -> None:
    plan = planned(ImportanceSampling(), [0.0, 1.0] * 50)
    assert {i % 2 for i in plan.ids.tolist()} == {1}
