"""Common parts of methods: draws with replacement, choice by rank, scores as a setting, and histories of losses.

Draws with replacement use an importance for each sample, such as its loss. A sample with an unknown importance is not drawn,
but kept once. The draws invert the cumulative distribution in double precision, because torch.multinomial accepts at most 2^24
categories. To save memory, everything is computed in pieces: besides the importances and the plan, a draw takes 8 bytes.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from numbers import Real
from typing import Any, ClassVar, Literal, get_args, get_origin

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.losses.signals import rows_in_order
from thresher.methods.contract import Requirements, State
from thresher.permutation import Permutation
from thresher.plans import BatchPlan, EpochPlan
from thresher.score_table import Scores
from thresher.selection import Values, chunks, share


class Chances:
    """Probability with which a single draw takes each sample, in proportion to the importance of the sample.

    The probabilities are computed when they are needed, and take no memory besides the importances.

    Args:
        importance: Importances, such as losses, shape (N,), floating point. One that is negative or not finite counts as
            unknown. If all known importances are 0, all samples with a known importance have the same probability.

    Attributes:
        n: Number of samples.
        known: Number of samples whose importance is known.

    Example:
        >>> Chances(np.array([1.0, np.nan, 3.0, 0.0])).of(slice(None))
        array([0.25,  nan, 0.75, 0.  ])
    """

    def __init__(self, importance: Values) -> None:
        self._importance = importance
        self.n = len(importance)
        self.known = 0
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
        """Returns the probabilities of some samples, shape (n,); NaN for samples with an unknown importance.

        Args:
            samples: Ids of the samples.
        """
        mass = self._mass(samples)
        mass /= self._total or 1.0
        return mass

    def unknown(self) -> Iterator[NDArray[np.int64]]:
        """Yields the ids of the samples with an unknown importance, in ascending order, in pieces."""
        if self.known < self.n:
            for part in chunks(self.n):
                yield np.flatnonzero(np.isnan(self._mass(part))) + part.start

    def at(self, points: NDArray[np.float64]) -> Iterator[NDArray[np.int64]]:
        """Looks up points in the cumulative distribution, and yields the ids of the samples there, ascending, in pieces.

        Args:
            points: Points within [0, 1), shape (k,), ascending. They are overwritten.
        """
        points *= self._total
        np.minimum(points, np.nextafter(self._total, 0), out=points)
        done = 0
        for first, edges in self._edges():
            inside = points[
                done : done + int(np.searchsorted(points[done:], edges[-1], side="left"))
            ]
            for some in chunks(len(inside)):
                yield np.searchsorted(edges, inside[some], side="right") + first
            done += len(inside)

    def _mass(self, samples: slice | NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns importances divided by the largest one, which keeps sums finite; NaN for unknown importances."""
        mass = self._importance[samples].astype(np.float64)
        mass[~(np.isfinite(mass) & (mass >= 0))] = np.nan
        mass /= self._largest or 1.0
        return mass if self._largest else mass + 1

    def _edges(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Yields for each piece its first id, and the sums of the masses of all samples up to each of its samples."""
        reached = 0.0
        for part in chunks(self.n):
            edges = np.nan_to_num(self._mass(part), copy=False)
            edges[0] += reached
            np.cumsum(edges, out=edges)
            reached = edges[-1]
            yield part.start, edges


def drawn_ids(
    chances: Chances, k: int, generator: torch.Generator
) -> tuple[NDArray[np.int64], int]:
    """Draws `k` samples with replacement, and adds each sample with an unknown probability once.

    The random points are sorted before they are looked up in the cumulative distribution. Then one pass over the samples finds
    all of them, several times as fast as in the order of the draws.

    Args:
        chances: Probabilities of the samples; not all of them may be unknown.
        k: Number of draws, 1 or more.
        generator: Random generator on the CPU.

    Returns:
        Ids, shape (k + N - known,), in random order, and the number of different ids.
    """
    points = torch.rand(k, generator=generator, dtype=torch.float64).numpy()
    points.sort()
    ids = np.empty(k + chances.n - chances.known, dtype=np.int64)
    order = Permutation(len(ids), seed=int(torch.randint(2**62, (), generator=generator)), epoch=0)
    done = 0
    distinct = 0
    last = -1
    for some in chain(chances.at(points), chances.unknown()):
        ids[order.piece(done, done + len(some))] = some
        distinct += int(np.count_nonzero(np.diff(some, prepend=last)))
        done = done + len(some)
        last = some[-1] if len(some) else last
    return ids, distinct


def unbiased_weights(chances: Values, n: int, *, draws: int, size: int) -> NDArray[np.float32]:
    """Returns weights with which the expected mean loss over an epoch is the mean loss of all samples.

    Args:
        chances: For each of k samples, the probability that a single draw takes it, shape (k,); NaN for a sample that was kept
            without a draw.
        n: Number of samples of the dataset.
        draws: Number of draws of the epoch.
        size: Number of samples of the epoch: the draws, and the samples that were kept without one.

    Returns:
        Weights, shape (k,), float32: size / (n p draws) for a sample of probability p, which is 1 / (n p) if all were drawn;
        size / n for a sample that was kept without a draw.
    """
    per_draw = np.where(np.isnan(chances), 1.0, chances * draws)
    return (size / (n * per_draw)).astype(np.float32)


def samples_of(records: Mapping[str, Tensor]) -> int:
    """Returns the number of samples, which is the length of every stored column.

    Args:
        records: Columns by name, one or more.

    Example:
        >>> samples_of({"loss": torch.zeros(3)})
        3
    """
    return len(next(iter(records.values())))


def full_plan(n: int) -> EpochPlan:
    """Returns a plan with all samples, in the order of the loader.

    Args:
        n: Number of samples.
    """
    return EpochPlan(torch.arange(n), facts={"scheduled_fraction": 0.0, "actual_fraction": 0.0})


def drawn_plan(
    chances: Chances,
    keep: float,
    generator: torch.Generator,
    *,
    weighted: bool,
) -> EpochPlan:
    """Returns a plan whose samples are drawn with replacement.

    Args:
        chances: Probabilities of the samples in a single draw; a sample with an unknown probability is kept without a draw.
        keep: Number of samples of the plan as a share of all, > 0. Each sample that is kept without a draw saves a draw. But at
            least keep / 2 draws are made per sample with a known probability, because few draws need large weights.
        generator: Random generator on the CPU.
        weighted: Whether the samples have the weights that make the plan unbiased.

    Returns:
        Plan with the samples in random order; all samples in order if no probability is known. Its facts have `distinct`, the
        share of the samples that appear at least once.
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
        },
    )


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Returns the positions of the `k` largest scores, ordered by (score, position).

    Args:
        scores: Scores, shape (n,), floating point; one that is not finite counts as larger than all others.
        k: Number of positions, 1 or more; all n positions if n is smaller.

    Returns:
        Positions, shape (min(k, n),), int64, the largest score last.
    """
    ascending = scores.nan_to_num(math.inf, math.inf, math.inf).argsort(stable=True)
    return ascending[max(0, len(scores) - k) :]


def running_sum(values: Tensor) -> Tensor:
    """Returns the sums of the first 1, 2, ... values, shape (n,).

    Args:
        values: Values of the rows of a batch or of a history, shape (n,), floating point.
    """
    if torch.are_deterministic_algorithms_enabled():  # CUDA has no cumsum for that mode
        return values.expand(len(values), -1).tril().sum(1)
    return values.cumsum(0)


def is_number(value: Any) -> bool:
    """Returns whether a setting is a number; True and False do not count as numbers."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_keep(method: object, keep: Any) -> None:
    """Checks that a `keep` is a share.

    Args:
        method: Method that was given the setting; its class name starts the error message.
        keep: Value of the setting.

    Raises:
        ValueError: `keep` is not a number, or is outside (0, 1].
    """
    if not (is_number(keep) and 0 < keep <= 1):
        raise ValueError(
            f"{type(method).__name__}: `keep` is the share kept, within (0, 1], got {keep!r}"
        )


def check_choices(method: Any, *switches: str) -> None:
    """Checks the settings that are declared as a `Literal`.

    Args:
        method: Method with the settings, a dataclass.
        *switches: Names of settings that must be True or False.

    Raises:
        ValueError: A setting has a value that is not allowed.
    """
    for one in fields(method):
        allowed = (True, False) if one.name in switches else None
        if get_origin(one.type) is Literal:
            allowed = get_args(one.type)
        if allowed is not None and (value := getattr(method, one.name)) not in allowed:
            raise ValueError(
                f"{type(method).__name__}: `{one.name}` must be one of {allowed}, got {value!r}"
            )


def check_within(method: object, interval: str, *names: str) -> None:
    """Checks that settings are numbers of an interval.

    Args:
        method: Method with the settings.
        interval: Interval as it is written, such as "(0, 1]" for numbers above 0, up to 1; "inf" is a bound that is never reached.
        *names: Names of the settings.

    Raises:
        ValueError: A setting is not a number, or is outside the interval.
    """
    low, high = map(float, interval[1:-1].split(","))
    for name in names:
        value = getattr(method, name)
        inside = is_number(value) and low <= value <= high
        at_open_end = (value == low and interval[0] == "(") or (
            value == high and interval[-1] == ")"
        )
        if not inside or at_open_end:
            raise ValueError(
                f"{type(method).__name__}: `{name}` must be a number within {interval}, got {value!r}"
            )


def check_whole(method: object, name: str, *, least: int = 1, most: int | None = None) -> None:
    """Checks that a setting is a whole number of `least` or more.

    Args:
        method: Method with the setting.
        name: Name of the setting.
        least: Smallest number that is allowed. Default 1.
        most: Largest number that is allowed. Default: none.

    Raises:
        ValueError: The setting is not an integer, or is outside the range.
    """
    value = getattr(method, name)
    # True is an integer in Python.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        allowed = "or more" if most is None else f"to {most}"
        raise ValueError(
            f"{type(method).__name__}: `{name}` must be a whole number of {least} {allowed}, got {value!r}"
        )


def in_id_order(signals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sorts the rows of a batch by id. A choice among the sorted rows does not depend on their order in the batch.

    Args:
        signals: Signals by name, each of shape (n,); "id" is among them.

    Returns:
        Row numbers in the order of the ids, shape (n,), int64, and the signals in that order.
    """
    by_id = signals["id"].argsort(stable=True)
    return by_id, rows_in_order(signals, by_id)


def plan_of(
    rows: Tensor, n: int, keep: float, weights: Tensor | None = None, *, drawn: bool = False
) -> BatchPlan:
    """Returns a `BatchPlan` whose facts are the scheduled and the actual fraction of rows that are left out.

    Args:
        rows: Row numbers, ascending, shape (k,), int64.
        n: Number of rows of the batch.
        keep: Scheduled share kept, (0, 1].
        weights: Factors on the losses, shape (k,), float32. Default None: 1 for all.
        drawn: Whether the rows were drawn at random and may repeat.
    """
    facts = {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - len(rows) / max(1, n)}
    return BatchPlan(rows, weights=weights, facts=facts, drawn=drawn)


class KeepShare:
    """Base class of methods that keep floor(keep * n) rows of each batch, at least one. Subclasses choose the rows in `picked`.

    By default, a method has no state.
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    keep: float

    def __post_init__(self) -> None:
        check_keep(self, self.keep)

    def init_state(self) -> State:
        """Returns an empty state."""
        return {}

    def count(self, n: int) -> int | None:
        """Returns the number of rows that are kept from a batch of `n` rows."""
        return max(1, share(self.keep, n))

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the positions of the rows that are kept, shape (k,), int64, in any order.

        Args:
            signals: Signals by name, each of shape (n, ...), n >= 1; entry i belongs to the sample with the i-th smallest id.
            k: Number of rows to keep.
            generator: Random generator on the CPU.
        """
        raise NotImplementedError

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the rows that `picked` chooses among the rows sorted by id."""
        by_id, ordered = in_id_order(signals)
        n = len(by_id)
        rows = by_id
        if n:
            rows = (
                by_id.index_select(0, self.picked(ordered, max(1, share(self.keep, n)), generator))
                .sort()
                .values
            )
        return plan_of(rows, n, self.keep), dict(state)


@dataclass(frozen=True)
class KeepLargest(KeepShare):
    """Base class of methods that keep the floor(keep * n) rows with the largest scores, at least one; ties go to higher ids.

    The score is the first signal, unless a subclass overrides `scores`. A sample without a finite score is kept before all
    others.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5.

    Raises:
        ValueError: `keep` is outside (0, 1].
    """

    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    keep: float = 0.5

    def scores(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Returns the score of each sample, shape (n,); not finite for a sample with a signal that is not finite.

        Args:
            signals: Signals by name, each of shape (n,); entry i belongs to the sample with the i-th smallest id of the batch.
        """
        return signals[self.requires.signals[0]]

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the positions of the largest scores; ties go to higher ids."""
        return top_positions(self.scores(signals), k)


@dataclass(frozen=True)
class KeepSmallest(KeepLargest):
    """Base class of methods that keep the rows with the smallest values; ties go to lower ids. `scores` negates the values."""

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns the rows with the smallest values; ties go to lower ids."""
        return super().plan_batch(
            {**signals, "id": -signals["id"]}, state, step=step, generator=generator
        )


def checked_scores(method: object, name: str, value: Any) -> Scores | str:
    """Checks that a setting is scores or the path of a file of scores, and returns it.

    Args:
        method: Method whose setting it is; its class name starts the error message.
        name: Name of the setting.
        value: Value of the setting.

    Raises:
        ValueError: The value is neither scores nor a path.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, Scores | str):
        raise ValueError(
            f"{type(method).__name__}: `{name}` must be a thresher.scores.Scores or the path of its Parquet file, got {value!r}"
        )
    return value


def loaded(scores: Scores | str) -> Scores:
    """Returns the scores; reads them from the file if `scores` is a path."""
    return Scores.load(scores) if isinstance(scores, str) else scores


def extended_history(history: Tensor, loss: Tensor, size: int) -> Tensor:
    """Appends new losses to a history, and returns its last `size` losses. New losses that are not finite become NaN.

    Args:
        history: Losses so far, oldest first, shape (h,), float32.
        loss: New losses, shape (n,), float32.
        size: Number of losses to keep.

    Returns:
        Losses, oldest first, shape (min(size, h + n),), float32, on the device of `loss`.
    """
    room = max(0, size - len(loss))
    older = history[max(0, len(history) - room) :].to(loss.device, non_blocking=True)
    newest = loss[max(0, len(loss) - size) :]
    return torch.cat((older, torch.where(newest.isfinite(), newest, math.nan)))
