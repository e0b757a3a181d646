"""Draws with replacement: the chances of the samples, the draws, and the weights that remove the bias.

A sample whose importance is not known is never drawn but kept once. The draws invert the cumulative distribution in double
precision, because torch.multinomial accepts at most 2^24 categories. Everything is computed in pieces: beside the importances
and the plan there is one number of 8 bytes for each draw.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.exact import chunks
from thresher.permutation import Permutation
from thresher.plans import EpochPlan
from thresher.selection import Values, share
from thresher.shards import Shard


class Chances:
    """Probabilities of the samples in one draw, in proportion to their importances.

    They are computed where they are needed, and take no memory beside the importances.

    Args:
        importance: Importances, shape (N,), floating point; one that is not finite or is below zero counts as not known. All
            samples whose importance is known have the same chance where all known importances are zero.

    Attributes:
        n: Number of samples.
        known: Number of samples whose importance is known.

    Example:
        >>> Chances(np.array([1.0, np.nan, 3.0, 0.0])).of(slice(None))
        array([0.25,  nan, 0.75, 0.  ])
    """

    def __init__(self, importance: Values) -> None:
        self._importance, self.n, self.known = importance, len(importance), 0
        largest = 0.0
        for part in chunks(self.n):
            values = importance[part]
            known = np.isfinite(values) & (values >= 0)
            self.known += int(np.count_nonzero(known))
            largest = max(largest, float(values.max(initial=0, where=known)))
        self._largest = largest
        self._total = 0.0
        for _, edges in self._edges():
            self._total = float(edges[-1])

    def of(self, samples: slice | NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the probabilities of some samples, shape (n,); NaN where the importance is not known.

        Args:
            samples: Ids of the samples.
        """
        mass = self._mass(samples)
        mass /= self._total or 1.0
        return mass

    def unknown(self) -> Iterator[NDArray[np.int64]]:
        """Yields the samples whose importance is not known, in ascending order, in pieces."""
        if self.known < self.n:
            for part in chunks(self.n):
                yield np.flatnonzero(np.isnan(self._mass(part))) + part.start

    def at(self, points: NDArray[np.float64]) -> Iterator[NDArray[np.int64]]:
        """Yields the samples at points of the cumulative distribution, in ascending order, in pieces.

        Args:
            points: Points within [0, 1), shape (k,), ascending. They are overwritten.
        """
        points *= self._total
        np.minimum(points, np.nextafter(self._total, 0), out=points)
        done = 0
        for first, edges in self._edges():
            inside = points[done : done + int(np.searchsorted(points[done:], edges[-1], side="left"))]
            for some in chunks(len(inside)):
                yield np.searchsorted(edges, inside[some], side="right") + first
            done += len(inside)

    def _mass(self, samples: slice | NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns importances over the largest one, so that the sum of huge ones stays finite; NaN where not known."""
        mass = self._importance[samples].astype(np.float64)
        mass[~(np.isfinite(mass) & (mass >= 0))] = np.nan
        mass /= self._largest or 1.0
        return mass if self._largest else mass + 1

    def _edges(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Yields the first sample of a piece, and the sums of the masses up to each sample of the piece."""
        reached = 0.0
        for part in chunks(self.n):
            edges = np.nan_to_num(self._mass(part), copy=False)
            edges[0] += reached
            np.cumsum(edges, out=edges)
            reached = edges[-1]
            yield part.start, edges


def drawn_ids(chances: Chances, k: int, generator: torch.Generator) -> tuple[NDArray[np.int64], int]:
    """Draws `k` samples with replacement and adds, once each, those that have no chance because theirs is not known.

    The points that are looked up in the cumulative distribution are sorted first: one pass over the samples finds them all,
    several times as fast as looking them up in the order of the draws.

    Args:
        chances: Chances of the samples, of which some are known.
        k: Number of draws, 1 or more.
        generator: Random generator on the CPU.

    Returns:
        Ids, shape (k + N - known,), in random order, and how many different ones there are.
    """
    points = torch.rand(k, generator=generator, dtype=torch.float64).numpy()
    points.sort()
    ids = np.empty(k + chances.n - chances.known, dtype=np.int64)
    order = Permutation(len(ids), seed=int(torch.randint(2**62, (), generator=generator)), epoch=0)
    done, distinct, last = 0, 0, -1
    for some in chain(chances.at(points), chances.unknown()):
        ids[order.piece(done, done + len(some))] = some
        distinct += int(np.count_nonzero(np.diff(some, prepend=last)))
        done, last = done + len(some), some[-1] if len(some) else last
    return ids, distinct


def unbiased_weights(chances: Values, n: int, *, draws: int, size: int) -> NDArray[np.float32]:
    """Returns weights with which the expected mean loss over an epoch is the mean loss of all samples.

    Args:
        chances: Probabilities in one draw of some samples of the epoch, shape (k,); NaN where one was kept without a draw.
        n: Number of samples of the dataset.
        draws: Number of draws of the epoch.
        size: Number of samples of the epoch: the draws, and the samples that were kept without one.

    Returns:
        Weights, shape (k,), float32: size / (n p draws) for a sample of probability p, which is 1 / (n p) where all were drawn;
        size / n for a sample that was kept without a draw.
    """
    per_draw = np.where(np.isnan(chances), 1.0, chances * draws)
    return (size / (n * per_draw)).astype(np.float32)


def full_plan(samples: int | Shard) -> EpochPlan:
    """Returns the plan of an epoch that keeps everything, in the order of the loader.

    Args:
        samples: Number of samples, or the shard that the plan is of.
    """
    shard = Shard.whole(samples) if isinstance(samples, int) else samples
    return EpochPlan(shard.ids, facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})


def drawn_plan(
    chances: Chances,
    keep: float,
    generator: torch.Generator,
    *,
    weighted: bool,
    remember: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, float] | None = None,
) -> EpochPlan:
    """Returns the plan of an epoch of draws.

    Args:
        chances: Chances of the samples; one whose chance is not known is kept without a draw.
        keep: Number of samples of the plan as a share of all, > 0. Samples that are kept without a draw take the place of
            draws, but of half of them at most: a few draws would need large weights.
        generator: Random generator on the CPU.
        weighted: Whether the samples have the weights that make the plan unbiased.
        remember: Columns that are stored, as in `EpochPlan`. Default None: no columns.
        facts: Numbers for the history, in addition to the fractions and to `distinct`, the share of the samples that appear at
            least once. Default None: no numbers.

    Returns:
        Plan with the samples in random order; with all samples in order where no chance is known.
    """
    n = chances.n
    draws = max(1, share(keep, n) - (n - chances.known), share(keep, chances.known) // 2)
    if not chances.known:
        return full_plan(n)
    ids, distinct = drawn_ids(chances, draws, generator)
    weights = np.empty(len(ids) if weighted else 0, dtype=np.float32)
    for part in chunks(len(weights)):
        weights[part] = unbiased_weights(chances.of(ids[part]), n, draws=draws, size=len(ids))
    return EpochPlan(
        torch.from_numpy(ids),
        weights=torch.from_numpy(weights) if weighted else None,
        drawn=True,
        facts={
            "scheduled_fraction": 1 - keep,
            "actual_fraction": 1 - len(ids) / n,
            "distinct": distinct / n,
            **(facts or {}),
        },
        remember=remember or {},
    )
