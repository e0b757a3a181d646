"""Schedules of epochs: pure functions."""

from collections.abc import Sequence
from itertools import pairwise

Milestones = Sequence[tuple[float, float]]
"""(boundary, value) pairs: from a boundary on, the value holds. Boundaries below 1 are shares of all epochs, floats or 0."""


def check_milestones(name: str, milestones: Milestones) -> None:
    """Refuse milestones that are not a schedule from epoch 0 on.

    Raises:
        ValueError: Empty, not starting at 0, not ascending, shares mixed with epoch numbers, or a value outside [0, 1].
    """
    boundaries = [boundary for boundary, _ in milestones]
    if not boundaries or boundaries[0] != 0:
        raise ValueError(f"{name}: milestones must start at 0, got {list(milestones)}")
    if not all(b < a for b, a in pairwise(boundaries)):
        raise ValueError(f"{name}: boundaries must ascend, got {list(milestones)}")
    shares = [0 < boundary < 1 for boundary in boundaries[1:]]
    if any(shares) and not all(shares):
        raise ValueError(f"{name}: boundaries must all be shares of the epochs or all epoch numbers, got {list(milestones)}")
    if any(not 0 <= value <= 1 for _, value in milestones):
        raise ValueError(f"{name}: values must be within [0, 1], got {list(milestones)}")


def step_value(milestones: Milestones, epoch: int, epochs: int) -> float:
    """The value of the last milestone reached.

    Args:
        milestones: A share b applies where epoch >= b * epochs - 1e-9, an epoch number from that epoch on.
        epoch: 0-based.
        epochs: Of the whole run.
    """
    value = milestones[0][1]
    for boundary, then in milestones:
        if epoch >= (boundary * epochs if 0 < boundary < 1 else boundary) - 1e-9:
            value = then
    return value
