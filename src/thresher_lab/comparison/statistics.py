"""Statistics of paired differences: intervals, equivalence within a margin, and how many seeds would be enough."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
"""Level of the intervals. One-sided tests are at half of the rest, so that one comparison agrees with its interval."""
ALPHA = (1 - LEVEL) / 2
POWER = 0.8
LEAST_SEEDS = 3
SEED_COUNTS = np.arange(LEAST_SEEDS, 1001)
"""Numbers of seeds that are considered; where more would be needed, no number is named."""
NO_SPREAD = 1e-9

Finding = Literal["no loss", "loses", "unclear"]
Against = Literal["better", "worse", "no better", "unclear"]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Paired:
    """The differences between two ways to train, seed by seed.

    Attributes:
        n: Number of seeds.
        mean: Mean of the differences, in units of the metric.
        low: Lower end of the 95 % interval of the mean; None if there are too few seeds for one.
        high: Upper end of that interval.
        spread: Standard deviation of the differences; None for fewer than two seeds.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    spread: float | None
    any_look: ClassVar[bool] = False

    @classmethod
    def of(cls, differences: Sequence[float]) -> Self:
        """Returns the statistics of differences, of which there is at least one."""
        n = len(differences)
        mean = float(np.mean(differences))
        if n < 2:
            return cls(n, mean, None, None, None)
        spread = float(np.std(differences, ddof=1))
        t = t_at_any_look(n, 2 * ALPHA) if cls.any_look else stats.t.ppf(1 - ALPHA, n - 1)
        if np.isinf(t):
            return cls(n, mean, None, None, spread)
        half = float(t) * spread / math.sqrt(n)
        return cls(n, mean, mean - half, mean + half, spread)

    @property
    def decides(self) -> bool:
        """Whether there are enough seeds, and any spread, to judge by."""
        return self.n >= LEAST_SEEDS and self.spread is not None and self.spread > NO_SPREAD

    def chance(self, at_most: float) -> float:
        """Returns how often a mean this large would occur if the true difference were `at_most`; 1 without a spread."""
        if not self.decides or self.spread is None:
            return 1.0
        t = (self.mean - at_most) * math.sqrt(self.n) / self.spread
        if self.any_look:
            return float(chance_at_any_look(t, self.n)) / 2 if t > 0 else 1.0
        return float(stats.t.sf(t, self.n - 1))

    def chance_below(self, at_least: float) -> float:
        """Returns how often a mean this small would occur if the true difference were `at_least`."""
        return replace(self, mean=-self.mean).chance(-at_least)

    def seeds_for(self, distance: float, among: int = 1) -> int | None:
        """Returns the number of seeds with which a test would succeed in four of five comparisons.

        The power of the test follows from the noncentral t distribution and the observed spread. At every look, it is the number
        at which the interval is short enough.

        Args:
            distance: Distance of the true difference from the limit of the test, in units of the metric, above 0.
            among: Number of comparisons that the test is corrected for. Default: 1.

        Returns:
            At least `LEAST_SEEDS`; None where there is no spread, and where more than 1,000 seeds would be needed.
        """
        if self.spread is None or self.spread <= NO_SPREAD or distance <= 0:
            return None
        effect = distance / self.spread
        if self.any_look:
            t = t_at_any_look(SEED_COUNTS, 2 * ALPHA / among)
            enough = np.flatnonzero(t <= effect * np.sqrt(SEED_COUNTS))
        else:
            enough = np.flatnonzero(_power(SEED_COUNTS, effect, ALPHA / among) >= POWER)
        return int(SEED_COUNTS[enough[0]]) if len(enough) else None


class PairedAtAnyLook(Paired):
    """Differences whose interval and chances are valid at every look, see `chance_at_any_look`."""

    any_look = True


PRIOR_WIDTH = 3.0
"""Standard deviation of the prior of the effect, in standard deviations of the differences.

A wide prior can decide early; a narrow one needs fewer seeds if the effect is small. Below 2.52, no third seed decides. With 3, the
mean number of seeds at the decision is at most 1.3 above that of the best width for each effect from 0.5 to 10 (looks after 3 to 30
seeds; 26 seeds for an effect of 0.5, 14.1 for 1, 6.1 for 2, 4.6 for 3; 20,000 repetitions).
"""


def chance_at_any_look(t: ArrayLike, n: ArrayLike) -> NDArray[np.float64]:
    """Returns a p-value of a t-statistic that stays valid if one looks after every difference, and stops when one likes.

    It is 1 / M, where M is the likelihood ratio of the differences, scaled by the first of them, for an effect drawn from
    N(0, `PRIOR_WIDTH`^2) and for no effect (the mixture over the effect with the right Haar prior of the standard deviation). M is
    a martingale that starts at 1, so it exceeds 1 / p at any look with a probability of at most p, by Ville's inequality. Paper:
    Wang and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance, arXiv 2310.03722.

    Args:
        t: Mean of the differences less its assumed value, divided by its standard error.
        n: Number of differences, 2 or more.

    Example:
        >>> print(f"{chance_at_any_look(5.0, 8):.4f}")
        0.0237
    """
    n = np.asarray(n, np.float64)
    k = 1 + n * PRIOR_WIDTH**2
    r = np.square(t) / (n - 1)
    return np.minimum(1.0, np.sqrt(k) * ((1 + r / k) / (1 + r)) ** (n / 2))


def t_at_any_look(n: ArrayLike, chance: float) -> NDArray[np.float64]:
    """Returns the t-statistic at which `chance_at_any_look` is `chance`; infinite if n differences are too few for any.

    Example:
        >>> print(f"{t_at_any_look(8, 0.05):.2f}")
        4.39
    """
    n = np.asarray(n, np.float64)
    k = 1 + n * PRIOR_WIDTH**2
    q = (chance**2 / k) ** (1 / n)
    return np.sqrt((n - 1) * np.where(q * k > 1, (1 - q) / np.maximum(q - 1 / k, 1e-300), np.inf))


def _power(n: NDArray[np.int64], effect: float, alpha: float) -> NDArray[np.float64]:
    """Returns the power of one-sided t-tests with n differences whose mean is `effect` standard deviations from the limit."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # scipy's, of a series that does not converge
        power = stats.nct.sf(stats.t.ppf(1 - alpha, n - 1), n - 1, effect * np.sqrt(n))
    return np.where(np.isfinite(power), power, 1.0)  # an effect so large that the series fails


def holm(chances: Mapping[Key, float], looks: int = 1) -> dict[Key, float]:
    """Returns p-values that are corrected for the number of comparisons, by Holm's step-down procedure.

    With them, all comparisons together are wrong at most as often as each alone would be.

    Args:
        chances: Chances by comparison.
        looks: Number of times that the comparisons may be judged, with more seeds each time, and that they are corrected for
            as well (Bonferroni). Default: 1.
    """
    order = sorted(chances, key=lambda key: chances[key])
    corrected = {}
    largest = 0.0
    for position, key in enumerate(order):
        largest = max(largest, min(1.0, looks * (len(order) - position) * chances[key]))
        corrected[key] = largest
    return {key: corrected[key] for key in chances}


def findings(compared: Mapping[Key, Paired], margin: float, looks: int = 1) -> dict[Key, Finding]:
    """Returns what the differences of methods to full training show, corrected for the number of methods.

    Args:
        compared: Differences to full training, by method.
        margin: Loss that does not matter, in units of the metric, above 0.
        looks: Number of looks that the findings are corrected for, see `holm`. Default: 1.

    Returns:
        "no loss" where the true difference is shown to be above -margin, else "loses" where it is shown to be below 0 (below
        -margin if the statistics are valid at every look), else "unclear".
    """
    tests = {
        "no loss": lambda paired: paired.chance(-margin),
        "loses": lambda paired: paired.chance_below(-margin if paired.any_look else 0.0),
    }
    return _first_shown(compared, tests, looks)


def _first_shown(
    compared: Mapping[Key, Paired], tests: Mapping[str, Callable[[Paired], float]], looks: int
) -> dict[Key, Any]:
    """Returns for each comparison the first finding whose test shows it, or "unclear"."""
    corrected = {
        name: holm({key: test(paired) for key, paired in compared.items()}, looks)
        for name, test in tests.items()
    }
    return {
        key: next((name for name in tests if corrected[name][key] <= ALPHA), "unclear")
        for key in compared
    }


def seeds_to_tell(paired: Paired, margin: float, among: int) -> int | None:
    """Returns the seeds that would decide an unclear difference to full training, if the observed one is the true one."""
    return _more_seeds(paired, max(paired.mean + margin, -paired.mean), among)


def against_controls(
    compared: Mapping[Key, Paired], margin: float, looks: int = 1
) -> dict[Key, Against]:
    """Returns what the differences of methods to controls of the same cost show, corrected for the number of differences.

    Args:
        compared: Differences to controls, by method and control.
        margin: Gain that does not matter, in units of the metric, above 0.
        looks: Number of looks that the findings are corrected for, see `holm`. Default: 1.

    Returns:
        "better" or "worse" where the true difference is shown to be above or below 0, else "no better" where it is shown to
        be less than the margin, else "unclear".
    """
    tests = {
        "better": lambda paired: paired.chance(0.0),
        "worse": lambda paired: paired.chance_below(0.0),
    }
    return _first_shown(
        compared, tests | {"no better": lambda paired: paired.chance_below(margin)}, looks
    )


def seeds_to_tell_from_control(paired: Paired, margin: float, among: int) -> int | None:
    """Returns the seeds that would decide an unclear difference to a control, if the observed one is the true one."""
    return _more_seeds(paired, max(abs(paired.mean), margin - paired.mean), among)


def _more_seeds(paired: Paired, distance: float, among: int) -> int | None:
    """Returns the number of seeds for a distance, at least one more than there are, because those were not enough."""
    seeds = paired.seeds_for(distance, among)
    return None if seeds is None else max(seeds, paired.n + 1)
