"""What was measured in this repository of each method, which advice ranks methods by.

`findings.json` holds it. It is written by `python -m benchmarks.findings` from the results of the benchmarks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from thresher_lab.training.specs import Spec

MEASURED = Path(__file__).with_name("findings.json")

Standing = Literal["ahead", "undecided", "not measured", "behind"]
STANDINGS: tuple[Standing, ...] = ("ahead", "undecided", "not measured", "behind")
"""How a method stood in what was measured, the best first."""

MethodKind = tuple[str, bool, bool]
"""Name of a method, whether it makes two forward passes, and whether it spends its budget in smaller batches."""


@dataclass(frozen=True)
class Measurement:
    """One method on one training.

    Attributes:
        source: Name of the file of results in benchmarks/results.
        task: Name of the training.
        method: Method with its settings, as in results.
        cost: Cost as counted, as a share of full training.
        difference: Metric less that of full training, in points, or in the unit of a metric that is no share.
        to_full: Finding against full training: "no loss", "loses" or "unclear".
        against: Finding against each control of the same cost: "better", "worse", "no better" or "unclear".
        low: Lower end of the 95 % interval of the difference to full training, in the same unit, with the learning rate that a
            comparison takes by itself; `difference` may be at the best of several rates. Default None: not known.
        high: Upper end of that interval. Default None: not known.
        margin: Loss that did not matter, in the same unit. Default None: not known.
        smaller: Metric of smaller batches of the same cost less that of full training, in that unit. Default None: not known.
        best: Largest such difference of all ways to spend as little that were measured, smaller batches among them. Default
            None: not known.
    """

    source: str
    task: str
    method: str
    cost: float
    difference: float
    to_full: str
    against: Mapping[str, str]
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    smaller: float | None = None
    best: float | None = None

    @property
    def below(self) -> bool | None:
        """Whether the interval of the difference reached below the margin; None where it is not known."""
        return None if self.low is None or self.margin is None else self.low < -self.margin

    @property
    def all_lost(self) -> bool | None:
        """Whether every way to spend as little lost more than the margin; None where it is not known."""
        return None if self.best is None or self.margin is None else self.best < -self.margin

    @property
    def sign(self) -> int:
        """1 where it was better than a control and worse than none, -1 where worse and better than none, and 0 otherwise."""
        verdicts = self.against.values()
        return ("better" in verdicts) - ("worse" in verdicts)


@dataclass(frozen=True)
class Record:
    """All measurements of one kind of method.

    Args:
        measurements: The measurements.
        other_settings: Whether they are of other settings of the method than those that are asked about. Default: False.
    """

    measurements: Sequence[Measurement]
    other_settings: bool = False

    @property
    def standing(self) -> Standing:
        """Whether it was more often better than controls of the same cost than worse."""
        if not self.measurements:
            return "not measured"
        balance = sum(one.sign for one in self.measurements)
        return "undecided" if balance == 0 else "ahead" if balance > 0 else "behind"

    def tasks(self, holds: Callable[[Measurement], object] = lambda _: True) -> list[str]:
        """Returns the names of the trainings with a measurement for which a condition holds, by default of all."""
        return list(dict.fromkeys(one.task for one in self.measurements if holds(one)))

    def as_dict(self) -> dict[str, Any]:
        """Returns the standing and the names of the trainings as plain values.

        They are those on which the method was measured at all (`on`), was better than a control of the same cost and worse than
        none (`better_on`) or the other way round (`worse_on`), and lost more than the margin against full training (`lost_on`);
        those on which the interval of the difference to full training is known (`interval_on`), reached below the margin
        (`below_on`), and was below 0 as a whole (`under_zero_on`).
        """
        return {
            "standing": self.standing,
            "other_settings": self.other_settings,
            "on": self.tasks(),
            "better_on": self.tasks(lambda one: one.sign > 0),
            "worse_on": self.tasks(lambda one: one.sign < 0),
            "lost_on": self.tasks(lambda one: one.to_full == "loses"),
            "below_on": self.tasks(lambda one: one.below),
            "under_zero_on": self.tasks(lambda one: one.high is not None and one.high < 0),
            "interval_on": self.tasks(lambda one: one.below is not None),
        }


@cache
def all_measurements() -> tuple[Measurement, ...]:
    """Returns what was measured, of all methods."""
    return tuple(Measurement(**row) for row in json.loads(MEASURED.read_text(encoding="utf-8")))


def record_of(spec: Spec, *, traced: bool = True) -> Record:
    """Returns what was measured of a method with its settings; where nothing was, of those that compute in the same way.

    Args:
        spec: The method.
        traced: Whether the model can be traced: where it cannot, a method that may choose makes two forward passes.
            Default: True.

    Example:
        >>> from thresher_lab.training.specs import parse_methods
        >>> [twice] = parse_methods("selective_backprop:keep=0.33:forward_passes=twice")
        >>> record_of(twice).standing
        'behind'
    """
    name, twice, in_batches = kind_of_label(spec.label)
    chooses = spec.settings.get("forward_passes") == "auto"
    kind = name, twice or (chooses and not traced), in_batches
    exact = [one for one in all_measurements() if one.method == spec.label]
    measurements = exact or [one for one in all_measurements() if kind_of_label(one.method) == kind]
    return Record(measurements, other_settings=not exact and bool(measurements))


def kind_of_label(label: str) -> MethodKind:
    """Returns the kind of a method by its name in results.

    Args:
        label: Name in results, such as "selective_backprop:keep=0.33 twice".

    Example:
        >>> kind_of_label("selective_backprop:keep=0.33 twice")
        ('selective_backprop', True, False)
        >>> kind_of_label("uniform:keep=0.5+random_backprop:keep=0.5")
        ('uniform+random_backprop', False, False)
    """
    names = "+".join(part.partition(":")[0].partition(" ")[0] for part in label.split("+"))
    return names, " twice" in label, " in batches" in label
