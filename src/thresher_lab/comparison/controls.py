"""The runs of a comparison: methods, their controls, and the learning rate of each."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from thresher_lab.training.placebo import why_no_placebo
from thresher_lab.training.specs import Composition, MethodSpec, Spec

Control = Literal["shorter@time", "uniform", "shorter", "smaller", "placebo", "fewer"]
SAME_TIME: Control = "shorter@time"
"""Kind and label of the control that has the time of its method; the others have its cost as counted."""

ON_REQUEST: tuple[Control, ...] = ("fewer",)
"""Kinds of controls that are trained only if asked for by name."""

FULL_TRAINING = MethodSpec("full")
METHODS_WITHOUT_CONTROLS = ("full", "uniform")
"""Methods that are trained without controls: the baseline, and one that is a control itself."""


@dataclass(frozen=True)
class ControlKind:
    """How a kind of control is named and drawn.

    Attributes:
        words: Its name in tables and sentences.
        does: End of a sentence that begins with its name, such as "trains for fewer epochs".
        label: Its name in the legend of a chart.
        dash: Dash of its lines, in the terms of plotly.
        rule: Reason why it leaves a sample out, for `thresher why`; "" if its method says so itself.
    """

    words: str
    does: str
    label: str
    dash: str
    rule: str = ""


CONTROLS: dict[Any, ControlKind] = {
    # What people would do without the method: it comes first.
    SAME_TIME: ControlKind(
        "fewer epochs in the same time",
        "trains for as many epochs as fit into the time of the method above it",
        "fewer epochs, same time",
        "longdashdot",
        "not reached: training had ended",
    ),
    # Another random subset in each epoch.
    "uniform": ControlKind(
        "random", "trains on a random subset each epoch", "random, same cost", "dot"
    ),
    # Full data for fewer epochs, with a learning rate that decays within them.
    "shorter": ControlKind(
        "fewer epochs",
        "trains for fewer epochs",
        "fewer epochs, same cost",
        "dash",
        "not reached: training had ended",
    ),
    # It takes as many steps as full training, with smaller batches.
    "smaller": ControlKind(
        "smaller batches",
        "trains on smaller batches",
        "smaller batches, same cost",
        "dashdot",
        "not in the random subset",
    ),
    # The method itself, with its signals permuted among the samples.
    "placebo": ControlKind(
        "permuted signals",
        "is the method with its losses or scores permuted among samples",
        "signals permuted",
        "longdash",
        "left out by the rule of the method, with the losses or scores of another sample",
    ),
    # A part of the data, for all epochs.
    "fewer": ControlKind(
        "few samples, many epochs",
        "trains all epochs on one random subset",
        "few samples, same cost",
        "2px,6px",
        "not in the random subset of all epochs",
    ),
}
"""Kinds of controls. A new kind has its line here, and `Job.control` says how it is trained."""


def kind_of(run: Mapping[str, Any]) -> str | None:
    """Returns the kind of a control, such as `uniform`; None for a method.

    Args:
        run: Run, or row of the summary, as in results.json.

    Example:
        >>> kind_of({"method": "uniform@0.500", "control_of": "winnow"})
        'uniform'
    """
    label = run["method"]
    if run["control_of"] is None:
        return None
    return label if label == SAME_TIME else label.partition("@")[0]


def same_time_share(method: Sequence[float], full: Sequence[float]) -> float | None:
    """Returns the share of the epochs of full training that fits into the time of a method; 1 where the method is slower.

    It is the median over the seeds, so that one run that was disturbed does not decide.

    Args:
        method: Seconds of the method, seed by seed.
        full: Seconds of full training with the same seeds.

    Returns:
        None where no time is known.

    Example:
        >>> same_time_share([6.0, 7.0, 30.0], [10.0, 10.0, 10.0])
        0.7
    """
    known = [own / whole for own, whole in zip(method, full, strict=True) if own > 0 and whole > 0]
    return min(1.0, statistics.median(known)) if known else None


def parse_budget(text: str) -> list[float]:
    """Parses shares of the cost of full training that are separated by commas.

    Args:
        text: Shares, such as "0.5,0.35" or "50%,35%", each within (0, 1).

    Raises:
        ValueError: A share is no number within (0, 1), or one is given twice.

    Example:
        >>> parse_budget(".5,35%")
        [0.5, 0.35]
    """
    shares = [_as_number(part) for part in text.split(",")]
    if not all(0 < share < 1 for share in shares):
        raise ValueError(
            f"--budget: shares of the cost of full training, within (0, 1), separated by commas, as in 0.5,0.35; got {text!r}"
        )
    if len(set(shares)) < len(shares):
        raise ValueError(f"--budget: a share is given twice in {text!r}")
    return shares


def _as_number(text: str) -> float:
    """Returns the number in a text, which may be in percent; NaN if there is none."""
    part = text.strip()
    try:
        return float(part.removesuffix("%")) / (100 if part.endswith("%") else 1)
    except ValueError:
        return math.nan


def parse_controls(text: str) -> tuple[Control, ...]:
    """Parses kinds of controls that are separated by commas.

    Args:
        text: Kinds, out of `CONTROLS`; "" for none.

    Raises:
        ValueError: There is no such kind, or one is given twice.

    Example:
        >>> parse_controls("uniform,smaller")
        ('uniform', 'smaller')
    """
    named = [part.strip() for part in text.split(",") if part.strip()]
    kinds: dict[str, Control] = {kind: kind for kind in CONTROLS}
    chosen: tuple[Control, ...] = tuple(kinds[one] for one in named if one in kinds)
    if len(chosen) < len(named) or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"--controls: {', '.join(CONTROLS)}, each at most once and separated by commas; got {text!r}"
        )
    return chosen


def has_controls(spec: Spec) -> bool:
    """Returns whether controls of the same cost are trained for a method."""
    return spec.name not in METHODS_WITHOUT_CONTROLS


def as_placebo(spec: Spec) -> Spec:
    """Returns the same method with its signals permuted; of methods of several stages all that choose by signals of the run.

    Args:
        spec: The method.

    Raises:
        ValueError: There are no signals to permute, or they are permuted already.
    """
    if reason := why_no_placebo_of(spec):
        raise ValueError(f"{spec.label}: {reason}")
    permuted = tuple(
        part if _why_none(part) else replace(part, batch={**part.batch, "placebo": True})
        for part in spec.parts
    )
    if isinstance(spec, Composition):
        return Composition(permuted)
    return permuted[0]


def why_no_placebo_of(spec: Spec) -> str:
    """Returns why a method has no placebo, without a full stop; "" where it has one.

    Args:
        spec: The method.
    """
    reasons = [_why_none(part) for part in spec.parts]
    return reasons[-1] if all(reasons) else ""


def _why_none(part: MethodSpec) -> str:
    if part.batch.get("placebo"):
        return "its signals are permuted already"
    return why_no_placebo(part.create())


@dataclass(frozen=True)
class Job:
    """One run of a comparison.

    Args:
        spec: The method.
        seed: Random seed of the run.
        label: Name of the method in the results.
        share: Share of the epochs that are trained, (0, 1]; the learning rate decays within them. Default: 1.
        method: Label of the method that a control is of, for messages. Default "": the label says it all.
        rate: Factor on the learning rate. Default: 1.
        rate_of_full: Factor of the full training beside which samples of the run are shown. Default: 1.
    """

    spec: Spec
    seed: int
    label: str
    share: float = 1.0
    method: str = ""
    rate: float = 1.0
    rate_of_full: float = 1.0

    @classmethod
    def of(cls, spec: Spec, seed: int, rate: float = 1.0, rate_of_full: float = 1.0) -> "Job":
        """Returns the run of a method that is compared."""
        return cls(spec, seed, spec.label, rate=rate, rate_of_full=rate_of_full)

    @classmethod
    def control(
        cls, kind: Control, seed: int, cost: float, of: Spec = FULL_TRAINING, rate: float = 1.0
    ) -> "Job":
        """Returns the control of a run.

        Costs are rounded to three digits after the point, so that methods of the same cost share their controls, and no
        control costs more than full training.

        Args:
            kind: Kind of the control.
            seed: Random seed of the run.
            cost: Cost of the run, as a share of full training; its time, for a control in the same time.
            of: Method of the run, for a placebo or a control in the same time.
            rate: Factor on the learning rate. Default: 1.
        """
        share = min(1.0, max(0.001, round(cost, 3)))
        label = f"{kind}@{share:.3f}"
        if kind == SAME_TIME:
            return cls(FULL_TRAINING, seed, SAME_TIME, share, of.label, rate)
        if kind == "placebo":
            return cls(as_placebo(of), seed, label, method=of.label, rate=rate)
        if kind == "shorter":
            return cls(FULL_TRAINING, seed, label, share, rate=rate)
        subset = {"keep": share, "fixed": True} if kind == "fewer" else {"keep": share}
        spec = MethodSpec("uniform", subset, {"spend": "batches"} if kind == "smaller" else {})
        return cls(spec, seed, label, rate=rate)

    @property
    def name(self) -> str:
        """Label and seed, for messages, and a learning rate that is not that of the training."""
        rate = "" if self.rate == 1 else f", rate x {self.rate:g}"
        return f"{self.label}{' of ' * bool(self.method)}{self.method}, seed {self.seed}{rate}"

    def epochs(self, epochs: int) -> int:
        """Returns how many of `epochs` are trained, a partial last one included; one too many where that has no whole step."""
        return math.ceil(self.share * epochs - 1e-9)

    @cached_property
    def key(self) -> str:
        """Stem of the run's files: readable, and different for every difference in settings."""
        identity = [
            self.spec.name,
            self.spec.settings,
            self.seed,
            self.label,
            self.share,
            *[self.rate] * (self.rate != 1),
        ]
        identity += [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.spec.files]
        digest = hashlib.sha256(
            json.dumps(identity, sort_keys=True, default=repr).encode()
        ).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9_.@=-]+', '_', self.label)[:80]}-seed{self.seed}-{digest}"

    @property
    def is_control(self) -> bool:
        """Whether this is the control of a run, and not the run of a method that is compared."""
        return self.label != self.spec.label


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
        of_method = self.chosen.get((method, None), 1.0)
        if kind in (None, "placebo"):
            return of_method
        return self.chosen.get((method, kind), of_method)


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
    factors = sorted(_as_number(part) for part in text.split(","))
    if len(set(factors)) < max(2, len(factors)) or not all(0 < one < math.inf for one in factors):
        raise ValueError(
            "--rates: two or more different factors above 0 on the learning rate, separated by commas, as in 0.5,1,2; got "
            f"{text!r}"
        )
    return factors
