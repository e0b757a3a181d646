"""One run of a comparison: what is trained, and what it is called."""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property

from thresher.experiments.specs import MethodSpec

FULL = MethodSpec("full")
UNCONTROLLED = ("full", "uniform")
"""Methods that are controls themselves."""


@dataclass(frozen=True)
class Job:
    """One run to be trained.

    Args:
        spec: The method.
        seed: Of the run.
        label: What the method is called in the results.
        control_of: Label of the method that this run is a control of.
    """

    spec: MethodSpec
    seed: int
    label: str
    control_of: str | None = None

    @classmethod
    def of(cls, spec: MethodSpec, seed: int) -> "Job":
        """A run of a method that was asked for."""
        return cls(spec, seed, spec.label)

    @classmethod
    def control(cls, label: str, seed: int, cost: float) -> "Job":
        """A random subset each epoch, at the cost that the run of method `label` turned out to have."""
        keep = min(1.0, cost)
        return cls(MethodSpec("uniform", {"keep": keep}), seed, f"uniform@{keep:.3f}", control_of=label)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label}{f' for {self.control_of}' if self.control_of else ''}, seed {self.seed}"

    @cached_property
    def key(self) -> str:
        """The stem of its file: readable, and different wherever a setting is."""
        identity = [self.spec.name, self.spec.settings, self.seed, self.control_of]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=repr).encode()).hexdigest()[:10]
        readable = "-for-".join(filter(None, (self.label, self.control_of)))
        return f"{re.sub(r'[^A-Za-z0-9_.@=-]+', '_', readable)[:80]}-seed{self.seed}-{digest}"

    @property
    def needs_control(self) -> bool:
        """Whether a random subset of the same cost must be trained beside it."""
        return self.spec.name not in UNCONTROLLED
