"""One run of a comparison: what is trained, for how long, and what it is called."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from thresher.experiments.training.specs import MethodSpec, Spec

Control = Literal["uniform", "shorter"]

FULL = MethodSpec("full")
UNCONTROLLED = ("full", "uniform")
"""Methods that are controls themselves."""

CONTROLS: tuple[Control, ...] = ("uniform", "shorter")
"""A fresh random subset each epoch, and full data for fewer epochs; both at the cost of the run that they are controls of."""


@dataclass(frozen=True)
class Job:
    """One run to be trained.

    Args:
        spec: The method.
        seed: Of the run.
        label: What the method is called in the results.
        share: Of the epochs that are trained, (0, 1]; the learning rate has decayed by then.
    """

    spec: Spec
    seed: int
    label: str
    share: float = 1.0

    @classmethod
    def of(cls, spec: Spec, seed: int) -> "Job":
        """A run of a method that was asked for."""
        return cls(spec, seed, spec.label)

    @classmethod
    def control(cls, kind: Control, seed: int, cost: float) -> "Job":
        """What a run of that cost is held against.

        Costs are told apart by three digits after the point, and no control costs more than full training: methods of the
        same cost have the same control.
        """
        share = min(1.0, max(0.001, round(cost, 3)))
        label = f"{kind}@{share:.3f}"
        if kind == "uniform":
            return cls(MethodSpec("uniform", {"keep": share}), seed, label)
        return cls(FULL, seed, label, share)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label}, seed {self.seed}"

    def epochs(self, epochs: int) -> int:
        """How many of `epochs` it trains, a last one in part included: at most one more, where that has no whole step."""
        return math.ceil(self.share * epochs - 1e-9)

    @cached_property
    def key(self) -> str:
        """The stem of its file: readable, and different wherever a setting is."""
        identity = [self.spec.name, self.spec.settings, self.seed, self.label, self.share]
        identity += [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.spec.files]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=repr).encode()).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9_.@=-]+', '_', self.label)[:80]}-seed{self.seed}-{digest}"

    @property
    def needs_control(self) -> bool:
        """Whether others of the same cost must be trained beside it."""
        return self.spec.name not in UNCONTROLLED
