"""Settings and draws of MinibatchDropping; the whole of it is in tests/reference."""

import math
from typing import Any

import numpy as np
import pytest

from thresher import MinibatchDropping
from thresher.methods.minibatch_dropping import kept_batches
from thresher.rng import seeded


def test_published_defaults() -> None:
    assert MinibatchDropping() == MinibatchDropping(drop_fraction=0.5, batch_size=128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"drop_fraction": value},
                rf"`drop_fraction` must be a number within \[0, 1\), got {value}",
            )
            for value in (-0.1, 1.0, math.nan)
        ),
        *(
            (
                {"batch_size": value},
                rf"`batch_size` must be a whole number of 1 or more, got {value}",
            )
            for value in (0, -1, 32.0, True)
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^MinibatchDropping: {message}"):
        MinibatchDropping(**settings)


def test_batches_stay_by_chance_and_independently() -> None:
    kept = np.array([kept_batches(6, 0.3, seeded(key)) for key in range(4000)])
    assert np.abs(kept.mean(0) - 0.7).max() < 5 * math.sqrt(0.21 / 4000)
    assert (kept[:, 0] & kept[:, 1]).mean() == pytest.approx(0.49, abs=5 * math.sqrt(0.25 / 4000))


def test_one_batch_always_stays_and_it_is_any() -> None:
    kept = np.array([kept_batches(4, 0.9999, seeded(key)) for key in range(1000)])
    assert (kept.sum(1) >= 1).all() and kept.sum() < 1010
    assert np.abs(kept.mean(0) - 0.25).max() < 5 * math.sqrt(0.1875 / 1000)
    assert kept_batches(1, 0.99, seeded(0)).tolist() == [True]


def test_nothing_is_dropped_at_zero() -> None:
    assert all(kept_batches(50, 0.0, seeded(key)).all() for key in range(50))
