"""The cost of a run in samples, with the cost that full training would have had by now."""

import math
from dataclasses import asdict, dataclass
from typing import Any

UNSEEN = "the loop called neither run.model nor run.criterion, so its passes cannot be counted"


@dataclass
class Cost:
    """Counts how many samples went through the model; a sample counts once per forward or backward pass.

    Attributes:
        forward: Samples that went through a forward pass, including `refresh`, `scoring` and `comparing`.
        backward: Samples that went through a backward pass.
        refresh: Samples that went through the extra forward passes at the end of epochs, which do not train; part of
            `forward`.
        scoring: Samples that went through forward passes only to decide what to train on, part of `forward`.
        comparing: Samples that went through forward passes, in one step, that compare the run's own losses with those of the
            loop; part of `forward`.
        steps: Number of optimizer steps; without `attach(optimizer=...)`, number of batches with a loss.
        full_forward: Samples that full training would have put through a forward pass by now.
        full_backward: Samples that full training would have put through a backward pass by now.
        backward_to_forward: Time of a backward pass divided by the time of a forward pass, measured in the first steps;
            None before it is known.
        unknown: Why the number of samples that went through the model is not known, as a sentence without its period; None if
            it is known.

    Example:
        1000 samples went through a forward pass, and 330 of them through a backward pass, which costs twice as much:

        >>> cost = Cost(forward=1000, backward=330, steps=10, full_forward=1000, full_backward=1000)
        >>> round(cost.ratio(), 3)
        0.553
    """

    forward: int = 0
    backward: int = 0
    refresh: int = 0
    scoring: int = 0
    comparing: int = 0
    steps: int = 0
    full_forward: int = 0
    full_backward: int = 0
    backward_to_forward: float | None = None
    unknown: str | None = None

    def add_scores(self, cost: tuple[int, int] | None) -> None:
        """Adds the cost of scores that the run did not compute, such as those before training or losses of a reference model.

        Args:
            cost: Numbers of samples that went through a forward and through a backward pass; None adds nothing.
        """
        if cost is not None:
            self.forward += cost[0]
            self.scoring += cost[0]
            self.backward += cost[1]

    def ratio(self, backward_to_forward: float = 2.0) -> float:
        """Returns the cost of this run over the cost of full training.

        Args:
            backward_to_forward: Cost of a backward pass in forward passes, >= 0. Default 2, the usual estimate;
                `cost.backward_to_forward` is the number measured in the run.

        Returns:
            1.0 for full training; nan before training, or if the cost is unknown.

        Raises:
            ValueError: `backward_to_forward` is negative or nan.
        """
        if not backward_to_forward >= 0:
            raise ValueError(
                f"ratio: `backward_to_forward` must be 0 or more, got {backward_to_forward}"
            )
        if self._why_unknown is not None:
            return float("nan")
        full = self.full_forward + backward_to_forward * self.full_backward
        if full:
            return (self.forward + backward_to_forward * self.backward) / full
        return float("nan")

    @property
    def of_loop(self) -> int:
        """Samples that went through a forward pass of the training loop itself."""
        return self.forward - self.refresh - self.scoring - self.comparing

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts and the cost, as plain values for a log or a JSON file.

        Returns:
            The fields of the class by name; `ratio`, the cost if a backward pass costs as much as two forward passes; and
            `measured_ratio`, the cost with the measured `backward_to_forward`. Unknown values are None. The counts do not tell
            the time saved, because small batches take more time per sample; `thresher compare` measures time.

        Example:
            >>> cost = Cost(forward=100, backward=50, steps=10, full_forward=100, full_backward=100, backward_to_forward=1.0)
            >>> {name: cost.to_dict()[name] for name in ("ratio", "measured_ratio")}
            {'ratio': 0.6666666666666666, 'measured_ratio': 0.75}
        """
        ratio = self.backward_to_forward
        measured = None if ratio is None else _known(self.ratio(ratio))
        return asdict(self) | {"ratio": _known(self.ratio()), "measured_ratio": measured}

    @property
    def _why_unknown(self) -> str | None:
        if self.unknown is None and (self.full_forward or self.steps) and not self.of_loop:
            return UNSEEN
        return self.unknown

    def __str__(self) -> str:
        if not (self.forward or self.full_forward or self.steps):
            return "no steps yet, so there is no cost yet"
        if (reason := self._why_unknown) is not None:
            full = f", in which full training would have put {self.full_forward:,} samples through the model"
            return (
                f"unknown after {self.steps:,} steps{full if self.full_forward else ''}: {reason}"
            )
        ratio = self.backward_to_forward
        if ratio is None:
            measured = ""
        else:
            measured = f", {self.ratio(ratio):.3f} with the measured ratio {ratio:.2f}"
        comparing = f", comparing {self.comparing:,}" if self.comparing else ""
        return (
            f"forward {self.forward:,} of {self.full_forward:,} samples (refresh {self.refresh:,}, scoring "
            f"{self.scoring:,}{comparing}), backward {self.backward:,} of {self.full_backward:,}, {self.steps:,} steps: "
            f"{self.ratio():.3f} of full training at 2 forwards a backward{measured}"
        )


def _known(ratio: float) -> float | None:
    return None if math.isnan(ratio) else ratio


def break_even(forward_s: float, backward_s: float) -> float:
    """Returns the share of a batch below which selection inside the batch with two forward passes saves time.

    Scoring takes a forward pass over the whole batch, and training takes a forward and a backward pass over the rows that are
    kept: F + keep * (F + B), against F + B for full training. With r = B / F, the first is less if keep < r / (1 + r).

    Args:
        forward_s: Time F of a forward pass over a batch, > 0; in seconds, or in any unit that both times have.
        backward_s: Time B of the backward pass over that batch, > 0.

    Returns:
        The share r / (1 + r), in [0, 1].

    Raises:
        ValueError: A time is not a positive finite number.

    Example:
        A backward pass that takes as long as two forward passes:

        >>> round(break_even(0.01, 0.02), 3)
        0.667
    """
    for name, seconds in (("forward_s", forward_s), ("backward_s", backward_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"break_even: `{name}` must be a positive finite number of seconds, got {seconds}; measure it again"
            )
    return 1 / (1 + forward_s / backward_s)
