"""Percentiles, chances and settings of EpochSelectiveBackprop; the whole of it is in tests/reference."""

import math
from typing import Any

import numpy as np
import pytest

from thresher import EpochSelectiveBackprop
from thresher.methods.epoch_selective_backprop import share_up_to, share_up_to_bin
from thresher.selection import CHUNK


def test_published_defaults() -> None:
    method = EpochSelectiveBackprop()
    assert method == EpochSelectiveBackprop(
        beta=0.43, bins=1000, min_probability=0.0, percentile="histogram"
    )
    assert method.requires.refresh == "eval"


@pytest.mark.parametrize(
    ("loss", "bins", "shares"),
    [
        ([0, 1, 2, 3], 4, [0.25, 0.5, 0.75, 1]),
        ([0, 1, 2, 3], 3, [0.25, 0.5, 1, 1]),
        ([0, 1, 2, 3], 1, [1, 1, 1, 1]),
        ([0, 0.5, 0.9, 100], 10, [0.75, 0.75, 0.75, 1]),
        ([-3, -2, -1], 2, [1 / 3, 1, 1]),
        ([7, 7, 7], 1000, [1, 1, 1]),
        ([7], 1000, [1]),
    ],
)
def test_share_up_to_bin(loss: list[float], bins: int, shares: list[float]) -> None:
    for dtype in (np.float32, np.float64):
        np.testing.assert_allclose(share_up_to_bin(np.array(loss, dtype), bins), shares, rtol=1e-12)


def test_the_range_of_float32_does_not_overflow() -> None:
    loss = np.array([-3e38, 3e38, 0, -3e38], np.float32)
    np.testing.assert_allclose(share_up_to_bin(loss, 10), [0.5, 1, 0.75, 0.5])


@pytest.mark.parametrize(
    ("loss", "shares"),
    [
        ([3, 1, 2], [1, 1 / 3, 2 / 3]),
        ([1, 1, 2, 2], [0.5, 0.5, 1, 1]),
        ([5, 5], [1, 1]),
        ([0, 1e30, 1], [1 / 3, 1, 2 / 3]),
    ],
)
def test_share_up_to(loss: list[float], shares: list[float]) -> None:
    np.testing.assert_allclose(share_up_to(np.array(loss, np.float32)), shares, rtol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "signed zeros", "tiny", "ascending"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_share_up_to_is_what_a_search_of_each_loss_finds(kind: str, dtype: type) -> None:
    """Also where equal losses are spread over several pieces."""
    r = np.random.default_rng(0)
    loss = r.normal(size=2 * CHUNK + 3)
    if kind == "ties":
        loss = r.integers(0, 3, len(loss))
    if kind == "equal":
        loss[:] = 0.1
    if kind == "signed zeros":
        loss = r.choice([0.0, -0.0, 1.0], len(loss))
    if kind == "tiny":
        loss *= 1e-42
    if kind == "ascending":
        loss.sort()
    loss = loss.astype(dtype)
    found = share_up_to(loss)
    assert np.array_equal(found, np.searchsorted(np.sort(loss), loss, side="right") / len(loss))


def test_one_outlier_moves_the_histogram_and_not_the_ranks() -> None:
    loss = np.linspace(0.1, 2, 1000).astype(np.float32)
    with_outlier = np.append(loss, np.float32(1e4))
    histogram, rank = (
        EpochSelectiveBackprop(beta=1),
        EpochSelectiveBackprop(beta=1, percentile="rank"),
    )
    assert histogram.chances(loss).mean() == pytest.approx(0.5, abs=0.01)
    assert histogram.chances(with_outlier).mean() > 0.99
    assert rank.chances(loss).mean() == pytest.approx(rank.chances(with_outlier).mean(), abs=0.01)
    assert rank.chances(loss).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("beta", "kept"), [(0, 1), (0.25, 0.8), (0.43, 0.7), (1, 0.5), (2, 1 / 3), (4, 0.2)]
)
def test_what_beta_keeps_of_evenly_spread_losses(beta: float, kept: float) -> None:
    loss = np.linspace(0, 5, 20_000)
    for percentile in ("histogram", "rank"):
        method = EpochSelectiveBackprop(beta=beta, percentile=percentile)
        assert method.chances(loss).mean() == pytest.approx(kept, abs=0.002)


def test_chances_have_a_floor_and_leave_out_what_is_not_finite() -> None:
    loss = np.array([math.nan, 1, math.inf, 2, -math.inf, 3, 4])
    expected = [1, 0.25**3, 1, 0.5**3, 1, 0.75**3, 1]
    for percentile in ("histogram", "rank"):
        method = EpochSelectiveBackprop(beta=3, percentile=percentile)
        np.testing.assert_allclose(method.chances(loss), expected)
    lifted = EpochSelectiveBackprop(beta=3, min_probability=0.2).chances(loss)
    np.testing.assert_allclose(lifted, np.maximum(expected, 0.2))
    assert EpochSelectiveBackprop().chances(np.full(3, math.nan)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"beta": value}, rf"`beta` must be a number within \[0, inf\), got {value!r}")
            for value in (-0.1, math.nan, math.inf, "one")
        ),
        *(
            ({"bins": value}, rf"`bins` must be a whole number of 1 or more, got {value}")
            for value in (0, -3, 10.0, True)
        ),
        *(
            (
                {"min_probability": value},
                rf"`min_probability` must be a number within \[0, 1\], got {value}",
            )
            for value in (-0.1, 1.1, math.nan)
        ),
        ({"percentile": "exact"}, "`percentile` must be 'histogram' or 'rank', got 'exact'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^EpochSelectiveBackprop: {message}"):
        EpochSelectiveBackprop(**settings)
