"""What paired differences show, and what they do not: intervals, equivalence within a margin, and how many seeds would do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95
"""Of intervals; every one-sided test is at half of what is left, so that one comparison agrees with its interval."""
ALPHA = (1 - LEVEL) / 2
POWER = 0.8
LEAST_SEEDS = 3
SEEDS = np.arange(LEAST_SEEDS, 1001)
"""Where more would be needed, no number is named."""
NO_SPREAD = 1e-9

Finding = Literal["no loss", "loses", "unclear"]
Against = Literal["better", "worse", "no better", "unclear"]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Paired:
    """Differences of two ways to train, seed by seed.

    Attributes:
        n: Seeds.
        mean: Of the differences.
        low: Lower end of the 95 % t-interval of the mean; None for fewer than two seeds.
        high: Upper end.
        spread: Standard deviation of the differences; None likewise.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    spread: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Paired":
        """Describe differences, of which there is at least one."""
        n, mean = len(differences), float(np.mean(differences))
        if n < 2:
            return cls(n, mean, None, None, None)
        spread = float(np.std(differences, ddof=1))
        half = float(stats.t.ppf(1 - ALPHA, n - 1)) * spread / math.sqrt(n)
        return cls(n, mean, mean - half, mean + half, spread)

    @property
    def tells(self) -> bool:
        """Whether there are seeds enough, and any spread, to judge by."""
        return self.n >= LEAST_SEEDS and self.spread is not None and self.spread > NO_SPREAD

    def chance(self, at_most: float) -> float:
        """How often a mean as large as this one, or larger, would come up were the true difference `at_most`; 1 if untold."""
        if not self.tells or self.spread is None:
            return 1.0
        return float(stats.t.sf((self.mean - at_most) * math.sqrt(self.n) / self.spread, self.n - 1))

    def chance_below(self, at_least: float) -> float:
        """The same of a mean as small or smaller, were the true difference `at_least`."""
        return Paired(self.n, -self.mean, None, None, self.spread).chance(-at_least)

    def seeds_for(self, distance: float, among: int = 1) -> int | None:
        """Seeds with which a true difference `distance` from a limit is told from it in four of five comparisons.

        By the noncentral t distribution and the spread that was seen.

        Args:
            distance: In units of the metric, above 0.
            among: How many comparisons it is corrected for.

        Returns:
            At least `LEAST_SEEDS`; None without a spread to go by, and where more than 1,000 would be needed.
        """
        if self.spread is None or self.spread <= NO_SPREAD or distance <= 0:
            return None
        enough = np.flatnonzero(_power(SEEDS, distance / self.spread, ALPHA / among) >= POWER)
        return int(SEEDS[enough[0]]) if len(enough) else None

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


def _power(n: NDArray[np.int64], effect: float, alpha: float) -> NDArray[np.float64]:
    """Of one-sided t-tests with n differences whose mean is `effect` standard deviations from the limit."""
    power = stats.nct.sf(stats.t.ppf(1 - alpha, n - 1), n - 1, effect * np.sqrt(n))
    return np.where(np.isfinite(power), power, 1.0)  # so far out that the series fails


def holm(chances: Mapping[Key, float]) -> dict[Key, float]:
    """Chances corrected for how many comparisons there are: the family is wrong at most as often as each alone would be.

    Holm's step-down procedure.
    """
    order = sorted(chances, key=lambda key: chances[key])
    corrected, largest = {}, 0.0
    for position, key in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - position) * chances[key]))
        corrected[key] = largest
    return {key: corrected[key] for key in chances}


def findings(compared: Mapping[Key, Paired], margin: float) -> dict[Key, Finding]:
    """What each method's differences to full training show, corrected for the number of methods.

    "no loss": it is shown that the true difference is above -margin. "loses": it is shown to be below 0, and not the former.
    "unclear": neither.
    """
    within = holm({key: paired.chance(-margin) for key, paired in compared.items()})
    below = holm({key: paired.chance_below(0.0) for key, paired in compared.items()})

    def one(key: Key) -> Finding:
        if within[key] <= ALPHA:
            return "no loss"
        return "loses" if below[key] <= ALPHA else "unclear"

    return {key: one(key) for key in compared}


def seeds_to_tell(paired: Paired, margin: float, among: int) -> int | None:
    """Seeds with which an unclear difference to full training would be clear, if the true one is the one seen."""
    return _more(paired, max(paired.mean + margin, -paired.mean), among)


def against_controls(compared: Mapping[Key, Paired], margin: float) -> dict[Key, Against]:
    """What the differences of methods to controls of the same cost show, corrected for how many there are.

    "better" and "worse": the true difference is shown to be above, or below, 0. "no better": it is shown to be less than the
    margin. "unclear": none of these.
    """
    above = holm({key: paired.chance(0.0) for key, paired in compared.items()})
    below = holm({key: paired.chance_below(0.0) for key, paired in compared.items()})
    less = holm({key: paired.chance_below(margin) for key, paired in compared.items()})

    def one(key: Key) -> Against:
        if above[key] <= ALPHA:
            return "better"
        if below[key] <= ALPHA:
            return "worse"
        return "no better" if less[key] <= ALPHA else "unclear"

    return {key: one(key) for key in compared}


def seeds_to_tell_from_control(paired: Paired, margin: float, among: int) -> int | None:
    """The same of an unclear difference to a control."""
    return _more(paired, max(abs(paired.mean), margin - paired.mean), among)


def _more(paired: Paired, distance: float, among: int) -> int | None:
    """At least one more than there are, which did not do."""
    seeds = paired.seeds_for(distance, among)
    return None if seeds is None else max(seeds, paired.n + 1)
