"""Draws with replacement: the probabilities of the samples, the draws, and the weights that remove the bias.

A sample whose importance is not known is never drawn but kept once. The draws invert the cumulative distribution in double
precision, because torch.multinomial accepts at most 2^24 categories.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from thresher.plans import EpochPlan
from thresher.selection import Values, share
from thresher.shards import Shard


def draw_probabilities(importance: Values) -> Values:
    """Returns the probability of each sample in one draw, proportional to its importance.

    Args:
        importance: Importances, shape (N,), floating point; one that is not finite or is below zero counts as not known.

    Returns:
        Probabilities, shape (N,), float64: NaN where the importance is not known. The others add up to 1, and are equal where
        all known importances are zero.
    """
    known = np.isfinite(importance) & (importance >= 0)
    mass = np.where(known, importance, 0).astype(np.float64)
    largest = mass.max(initial=0.0)
    mass = mass / largest if largest else known.astype(np.float64)  # the sum of huge importances stays finite
    return np.where(known, mass / max(mass.sum(), 1.0), np.nan)


def draw_positions(chances: Values, k: int, generator: torch.Generator) -> Values:
    """Draws `k` positions with replacement.

    Args:
        chances: Probabilities, shape (N,), float64, without NaN, not all zero; a position of probability 0 is never drawn.
        k: Number of draws.
        generator: Random generator on the CPU.

    Returns:
        Positions, shape (k,), int64, in the order of the draws.
    """
    edges = np.cumsum(chances)
    points = torch.rand(k, generator=generator, dtype=torch.float64).numpy() * edges[-1]
    last = np.searchsorted(edges, edges[-1])
    return np.minimum(np.searchsorted(edges, points, side="right"), last)


def unbiased_weights(chances: Values, n: int) -> Values:
    """Returns weights with which the expected mean loss over an epoch is the mean loss of all samples.

    Args:
        chances: Probability in one draw of each sample of the epoch, shape (K,); NaN where it was kept without a draw.
        n: Number of samples of the dataset.

    Returns:
        Weights, shape (K,), float32. A sample of probability p has 1 / (n p) where all K were drawn, and K / (n k p) where k of
        them were drawn; a sample that was kept without a draw has K / n.
    """
    kept = np.isnan(chances)
    draws = len(chances) - int(np.count_nonzero(kept))
    per_draw = np.where(kept, 1.0, chances * draws)
    return (len(chances) / (n * per_draw)).astype(np.float32)


def full_plan(samples: int | Shard, refresh: Tensor | None = None) -> EpochPlan:
    """Returns the plan of an epoch that keeps everything, in the order of the loader.

    Args:
        samples: Number of samples, or the shard that the plan is of.
        refresh: Ids that are refreshed after the epoch, as in `EpochPlan`. Default None: no ids.
    """
    shard = Shard.whole(samples) if isinstance(samples, int) else samples
    return EpochPlan(shard.ids, refresh=refresh, facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})


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
    """Returns the plan of an epoch of draws.

    Args:
        chances: Probability of each sample in one draw, shape (N,); NaN where it is kept without a draw.
        keep: Number of draws as a share of the samples that have a probability, > 0.
        generator: Random generator on the CPU.
        weighted: Whether the samples have the weights that make the plan unbiased.
        refresh: Ids that are refreshed after the epoch, as in `EpochPlan`. Default None: no ids.
        remember: Columns that are stored, as in `EpochPlan`. Default None: no columns.
        facts: Numbers for the history, in addition to the fractions and to `distinct`, the share of the samples that appear at
            least once. Default None: no numbers.

    Returns:
        Plan with the samples in random order; with all samples in order where no sample has a probability.
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
