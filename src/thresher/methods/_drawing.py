"""Draws with replacement: chances from importances, the draws themselves, and weights that make them stand for all samples.

A sample whose importance is not known is never drawn but kept, once. torch.multinomial takes no more than 2^24 categories, so
the draws invert the cumulative distribution, in double precision.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from thresher.plans import EpochPlan
from thresher.selection import Values, share


def draw_probabilities(importance: Values) -> Values:
    """Chance of each sample in one draw, proportional to its importance.

    Args:
        importance: Shape (N,), floating point. One that is not finite or is below zero is not known.

    Returns:
        Shape (N,), float64: NaN where the importance is not known; the others add up to 1, all equal where all are zero.
    """
    known = np.isfinite(importance) & (importance >= 0)
    mass = np.where(known, importance, 0).astype(np.float64)
    largest = mass.max(initial=0.0)
    mass = mass / largest if largest else known.astype(np.float64)  # so that the sum of huge ones is finite
    return np.where(known, mass / max(mass.sum(), 1.0), np.nan)


def draw_positions(chances: Values, k: int, generator: torch.Generator) -> Values:
    """Draw `k` positions with replacement.

    Args:
        chances: Shape (N,), float64, none NaN, not all zero; a position of chance 0 is never drawn.
        k: How many.
        generator: On the CPU.

    Returns:
        Shape (k,), int64, in the order of the draws.
    """
    edges = np.cumsum(chances)
    points = torch.rand(k, generator=generator, dtype=torch.float64).numpy() * edges[-1]
    last = np.searchsorted(edges, edges[-1])
    return np.minimum(np.searchsorted(edges, points, side="right"), last)


def unbiased_weights(chances: Values, n: int) -> Values:
    """Weights under which the mean loss of what an epoch trains on is expected to be the mean loss of all samples.

    Args:
        chances: Of each sample of the epoch in one draw, shape (K,); NaN where it was kept without a draw.
        n: Samples of the dataset.

    Returns:
        Shape (K,), float32. A sample of chance p gets 1 / (n p) where all K were drawn, K / (n k p) where k of them were;
        one that was kept without a draw gets K / n.
    """
    kept = np.isnan(chances)
    draws = len(chances) - int(np.count_nonzero(kept))
    per_draw = np.where(kept, 1.0, chances * draws)
    return (len(chances) / (n * per_draw)).astype(np.float32)


def full_plan(n: int, refresh: Tensor | None = None) -> EpochPlan:
    """The plan of an epoch before importances are known: all of `n` samples, in the loader's own order."""
    return EpochPlan(torch.arange(n), refresh=refresh, facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})


def drawn_plan(
    chances: Values,
    keep: float,
    generator: torch.Generator,
    *,
    weighted: bool,
    refresh: Tensor | None = None,
    remember: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, float] | None = None,
) -> EpochPlan:
    """The plan of an epoch of draws.

    Args:
        chances: Of each sample in one draw, shape (N,); NaN where it is to be kept without a draw.
        keep: Draws as a share of the samples that have a chance, > 0.
        generator: On the CPU.
        weighted: Give the samples the weights that make the plan unbiased.
        refresh: As in `EpochPlan`.
        remember: As in `EpochPlan`.
        facts: Beside the fractions and `distinct`, the share of the samples that is there at least once.

    Returns:
        The samples in random order; everything where no sample has a chance.
    """
    n, kept = len(chances), np.flatnonzero(np.isnan(chances))
    if len(kept) == n:
        return full_plan(n, refresh)
    ids = draw_positions(np.nan_to_num(chances), max(1, share(keep, n - len(kept))), generator)
    if len(kept):
        ids = np.concatenate([kept, ids])
        ids = ids[torch.randperm(len(ids), generator=generator).numpy()]
    there = np.zeros(n, dtype=np.bool_)
    there[ids] = True
    return EpochPlan(
        torch.from_numpy(ids),
        weights=torch.from_numpy(unbiased_weights(chances[ids], n)) if weighted else None,
        refresh=refresh,
        drawn=True,
        facts={
            "scheduled_fraction": 1 - keep,
            "actual_fraction": 1 - len(ids) / n,
            "distinct": np.count_nonzero(there) / n,
            **(facts or {}),
        },
        remember=remember or {},
    )
