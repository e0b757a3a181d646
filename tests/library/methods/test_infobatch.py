"""Parts of InfoBatch by hand; the whole of it is in tests/reference."""

import math

import numpy as np
import pytest
import torch

from thresher import InfoBatch
from thresher.methods.infobatch import well_learned
from thresher.rng import seeded


def test_published_defaults() -> None:
    assert InfoBatch() == InfoBatch(
        prune_fraction=0.5, delta=0.875, threshold="mean", rescale="mass"
    )


@pytest.mark.parametrize(
    ("loss", "threshold", "below"),
    [
        ([1, 2, 3], "mean", [0]),
        ([2, 2, 2], "mean", []),
        ([5], "mean", []),
        ([1, math.nan, 3, math.inf, -math.inf], "mean", [0]),
        ([math.nan, math.inf], "mean", []),
        ([], "mean", []),
        ([4, 3, 2, 1], 0.5, [2, 3]),
        ([4, 3, 2, 1], 0.99, [1, 2, 3]),
        ([1, 1, 1, 2], 0.5, []),
        ([math.nan, 4, 3, 2, 1], 0.25, [4]),
        ([5], 0.5, []),
        ([math.nan], 0.5, []),
    ],
)
def test_well_learned(loss: list[float], threshold: float, below: list[int]) -> None:
    for dtype in (np.float32, np.float64):
        assert np.flatnonzero(well_learned(np.array(loss, dtype), threshold)).tolist() == below


def test_the_mean_is_taken_in_double_precision() -> None:
    """In float32 the mean of the two values would be one of them."""
    near = np.full(2**20, 2.0**24, np.float32)
    near[: 2**19] += 2
    assert int(well_learned(near, "mean").sum()) == 2**19


@pytest.mark.parametrize("value", [0.1, 2.3, 1 / 3, 1e-42])
def test_rounding_does_not_lift_the_mean_of_equal_losses_above_them(value: float) -> None:
    """The sum of float32 numbers that are equal is exact in double precision."""
    for n in (*range(1, 300), 100_003):
        losses = np.full(n, value, np.float32)
        assert not well_learned(losses, "mean").any()
    plan = InfoBatch().plan_epoch(
        {"loss": torch.from_numpy(losses)}, epoch=1, epochs=10, generator=seeded(0)
    )
    assert len(plan.ids) == n and plan.facts["actual_fraction"] == 0
