"""Learning rates of the arms of a comparison: those of the training, or those that each arm was best with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thresher.experiments.comparison.job import Control
from thresher.experiments.comparison.summary import RowDict, listed

Arm = tuple[str, Control | None]
"""Label of a method, and the kind of one of its controls; None for the method itself."""


@dataclass(frozen=True)
class Rates:
    """Factors on the learning rate of the training, by arm.

    Args:
        chosen: Factor of each arm. A placebo has that of its method. Default: 1 for all.
        factors: Factors that every arm was tried with. Default: none.
        seeds: Seeds that it was tried with, which do not count. Default: none.
        everywhere: Factor of all arms, where one is tried. Default None: those of `chosen`.
    """

    chosen: Mapping[Arm, float] = field(default_factory=dict)
    factors: Sequence[float] = ()
    seeds: Sequence[int] = ()
    everywhere: float | None = None

    def of(self, method: str, kind: Control | None = None) -> float:
        """Returns the factor of an arm.

        Args:
            method: Label of the method.
            kind: Kind of one of its controls. Default None: the method itself.
        """
        if self.everywhere is not None:
            return self.everywhere
        own = self.chosen.get((method, None), 1.0)
        return own if kind in (None, "placebo") else self.chosen.get((method, kind), own)


def parse_rates(text: str) -> list[float]:
    """Parses factors on the learning rate that are separated by commas.

    Args:
        text: Two or more different numbers above 0, such as "0.5,1,2".

    Raises:
        ValueError: A factor is no number above 0, there is one only, or one is given twice.

    Example:
        >>> parse_rates("2,0.5,1")
        [0.5, 1.0, 2.0]
    """
    try:
        factors = sorted(float(part) for part in text.split(","))
    except ValueError:
        factors = []
    if len(set(factors)) < max(2, len(factors)) or not all(0 < one < math.inf for one in factors):
        raise ValueError(
            "--rates: two or more different factors above 0 on the learning rate, separated by commas, as in 0.5,1,2; got "
            f"{text!r}"
        )
    return factors


def rates_sentences(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on the learning rates of a comparison; none where every arm has that of the training.

    Args:
        results: Content of results.json.
    """
    looked = results.get("rates")
    if not looked:
        return []
    factors, seeds = (listed([f"{one:g}" for one in looked[name]]) for name in ("factors", "seeds"))
    by_method: dict[str, list[RowDict]] = {}
    for row in results["summary"]:
        by_method.setdefault(row["control_of"] or row["method"], []).append(row)
    said = [
        f"Every arm was tried with the learning rate of the training times {factors}, on the seeds {seeds}, which do not "
        f"count, and has the best one: {'; '.join(_of_method(rows) for rows in by_method.values())}."
    ]
    ends = {min(looked["factors"]), max(looked["factors"])}
    at_end = [row["method"] for row in results["summary"] if row["rate"] in ends and not row["method"].startswith("placebo@")]
    if at_end and len(looked["factors"]) > 2:
        named = listed([*dict.fromkeys(at_end)])
        said.append(
            f"Best at the smallest or the largest of these rates were {named}. Rates beyond them may change the verdicts."
        )
    return said


def _of_method(rows: Sequence[RowDict]) -> str:
    own, *controls = rows
    others = [
        f"{row['method'].partition('@')[0]} {row['rate']:g}" for row in controls if not row["method"].startswith("placebo@")
    ]
    return f"{own['method']} {own['rate']:g}" + (f" ({', '.join(others)})" if others else "")
