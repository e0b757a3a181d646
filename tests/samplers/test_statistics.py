"""Frequencies of many draws: independent ones within their standard errors, paced ones within one visit."""

import numpy as np

from depth import depth
from thresher.samplers import WeightedSampler
from thresher.samplers.weighted import independent

DRAWS, CATEGORIES = depth((10**6, 10**4), (10**7, 10**5))
WEIGHTS = np.random.default_rng(0).random(CATEGORIES) + 0.05


def test_independent_draws():
    """Chi-square within 4 standard errors, and the largest deviation within the bound for so many categories at 1e-6."""
    expected = DRAWS * WEIGHTS / WEIGHTS.sum()
    counts = np.bincount(
        independent(WEIGHTS, DRAWS, np.random.default_rng(1)), minlength=CATEGORIES
    )
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (CATEGORIES - 1)) < 4 * (2 * CATEGORIES) ** 0.5
    # A count of 5 or more expected visits is above z standard errors with a probability far below exp(-z^2 / 2.5)
    assert (np.abs(counts - expected) / np.sqrt(expected)).max() < (
        2.5 * np.log(2e6 * CATEGORIES)
    ) ** 0.5


def test_paced_visits():
    sampler, seen = WeightedSampler(WEIGHTS), np.zeros(CATEGORIES)
    rate = CATEGORIES * WEIGHTS / WEIGHTS.sum()
    for epoch in range(1, DRAWS // CATEGORIES // 5 + 1):
        seen += np.bincount(sampler.order(epoch - 1).piece(0, CATEGORIES), minlength=CATEGORIES)
        assert np.abs(seen - epoch * rate).max() < 1 + 1e-4
