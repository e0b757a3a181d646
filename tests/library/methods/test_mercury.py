"""Settings and groups of Mercury; the whole of it is in tests/reference."""

import math
from typing import Any

import pytest
import torch

from thresher import Mercury
from thresher.methods.mercury import group_of
from thresher.records import Records
from thresher.rng import seeded


@pytest.mark.parametrize(
    ("epoch", "groups", "n", "ids"),
    [
        (0, 3, 8, [0, 3, 6]),
        (1, 3, 8, [1, 4, 7]),
        (2, 3, 8, [2, 5]),
        (3, 3, 8, [0, 3, 6]),
        (0, 1, 4, [0, 1, 2, 3]),
        (5, 1, 4, [0, 1, 2, 3]),
        (4, 10, 3, []),
        (12, 10, 3, [2]),
    ],
)
def test_groups(epoch: int, groups: int, n: int, ids: list[int]) -> None:
    found = group_of(epoch, groups, n)
    assert found.tolist() == ids and found.dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"groups": value}, rf"`groups` must be a whole number of 1 or more, got {value}")
            for value in (0, -1, 2.0, True)
        ),
        *(
            ({"keep": keep}, rf"`keep` is the share kept, within \(0, 1\], got {keep}")
            for keep in (0, -0.5, 1.5, math.nan)
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Mercury: {message}"):
        Mercury(**settings)


def test_the_first_epoch_trains_on_everything_and_the_last_refreshes_nothing() -> None:
    method = Mercury(groups=2)
    records = Records(method.columns(), 5, torch.device("cpu"))
    records["loss"].copy_(torch.arange(5.0))
    plans = [method.plan_epoch(records, epoch=e, epochs=3, generator=seeded(e)) for e in range(3)]
    assert (
        plans[0].ids.tolist() == [0, 1, 2, 3, 4] and not plans[0].drawn and plans[0].weights is None
    )
    refreshed = [None if plan.refresh is None else plan.refresh.tolist() for plan in plans]
    assert refreshed == [[0, 2, 4], [1, 3], None]
    assert plans[1].drawn and plans[2].drawn and plans[2].weights is not None
