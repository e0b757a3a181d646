"""What a run computed, what full training would have computed, and the ratio of the two."""

import math
from dataclasses import dataclass


@dataclass
class Cost:
    """Samples, not batches; `steps` are optimizer steps.

    Attributes:
        forward: Every sample that went through a forward pass, refresh and scoring included.
        backward: Samples that went through a backward pass.
        refresh: Forward-only passes at the end of an epoch, part of `forward`.
        scoring: Forward passes that only decided what to train on, part of `forward`.
        steps: Optimizer steps (batches with a credited loss where no optimizer was attached).
        full_forward: What full training would have forwarded by now.
        full_backward: What full training would have put through backward by now.
        backward_to_forward: Measured in the first steps: seconds of a backward pass over seconds of a forward pass.
    """

    forward: int = 0
    backward: int = 0
    refresh: int = 0
    scoring: int = 0
    steps: int = 0
    full_forward: int = 0
    full_backward: int = 0
    backward_to_forward: float | None = None

    def add_scores(self, cost: tuple[int, int] | None) -> None:
        """Count what scores took before training: samples put through a forward and a backward pass."""
        if cost is not None:
            self.forward += cost[0]
            self.scoring += cost[0]
            self.backward += cost[1]

    def ratio(self, backward_to_forward: float = 2.0) -> float:
        """Cost of this run over the cost of full training.

        Args:
            backward_to_forward: What a backward pass costs in forward passes; the textbook says 2, the run measures
                its own (`cost.backward_to_forward`).

        Returns:
            1.0 for full training; nan before anything was trained.

        Raises:
            ValueError: A negative ratio.
        """
        if not backward_to_forward >= 0:
            raise ValueError(f"ratio: `backward_to_forward` must be 0 or more, got {backward_to_forward}")
        full = self.full_forward + backward_to_forward * self.full_backward
        return (self.forward + backward_to_forward * self.backward) / full if full else float("nan")

    def __str__(self) -> str:
        own = self.backward_to_forward
        measured = "" if own is None else f", {self.ratio(own):.3f} with the measured ratio {own:.2f}"
        return (
            f"forward {self.forward:,} of {self.full_forward:,} samples (refresh {self.refresh:,}, scoring "
            f"{self.scoring:,}), backward {self.backward:,} of {self.full_backward:,}, {self.steps:,} steps: "
            f"{self.ratio():.3f} of full training at 2 forwards a backward{measured}"
        )


def break_even(forward_s: float, backward_s: float) -> float:
    """Share of a batch to keep below which selecting in the batch with two forward passes saves time.

    Scoring forwards everything, training the kept rows once more: F + keep * (F + B) against F + B. With r = B / F that
    is less for keep < r / (1 + r): 2/3 where a backward pass takes two forward passes.

    Args:
        forward_s: F, seconds of a forward pass over a batch, > 0; any unit, if both have the same.
        backward_s: B, seconds of the backward pass, > 0.

    Returns:
        r / (1 + r), within (0, 1).

    Raises:
        ValueError: Not positive finite numbers.
    """
    for name, seconds in (("forward_s", forward_s), ("backward_s", backward_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"break_even: `{name}` must be a positive finite number of seconds, got {seconds}; measure it again"
            )
    return 1 / (1 + forward_s / backward_s)
