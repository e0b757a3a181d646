"""Schedules over the epochs of a run: pure functions."""

from collections.abc import Sequence
from itertools import pairwise

Milestones = Sequence[tuple[float, float]]
"""Pairs (boundary, value) with ascending boundaries. A value applies from its boundary on, until the next boundary.

A boundary between 0 and 1 is a share of all epochs; 0, and any boundary of 1 or more, is an epoch number.
"""


def check_milestones(name: str, milestones: Milestones) -> None:
    """Checks that milestones are a valid schedule that begins at epoch 0.

    Args:
        name: Name of the setting, used in error messages.
        milestones: Pairs (boundary, value).

    Raises:
        ValueError: The milestones are empty, do not start at 0, do not ascend, mix shares with epoch numbers, or have a value
            outside [0, 1].

    Example:
        >>> check_milestones("Kakurenbo: `schedule`", [(0, 1.0), (0.3, 0.8)])
        >>> check_milestones("Kakurenbo: `schedule`", [(0.3, 0.8)])
        Traceback (most recent call last):
        ValueError: Kakurenbo: `schedule`: milestones must start at 0, got [(0.3, 0.8)]
    """
    boundaries = [boundary for boundary, _ in milestones]
    if not boundaries or boundaries[0] != 0:
        raise ValueError(f"{name}: milestones must start at 0, got {list(milestones)}")
    if not all(b < a for b, a in pairwise(boundaries)):
        raise ValueError(f"{name}: boundaries must ascend, got {list(milestones)}")
    shares = [0 < boundary < 1 for boundary in boundaries[1:]]
    if any(shares) and not all(shares):
        raise ValueError(
            f"{name}: boundaries must all be shares of the epochs or all epoch numbers, got {list(milestones)}"
        )
    if any(not 0 <= value <= 1 for _, value in milestones):
        raise ValueError(f"{name}: values must be within [0, 1], got {list(milestones)}")


def step_value(milestones: Milestones, epoch: int, epochs: int) -> float:
    """Returns the value of the last milestone that is reached.

    Args:
        milestones: Pairs (boundary, value). A share b is reached when epoch >= b * epochs - 1e-9, an epoch number from that
            epoch on.
        epoch: Number of the epoch, from 0.
        epochs: Number of epochs of the whole run.

    Example:
        >>> [step_value([(0, 1.0), (0.3, 0.8), (0.6, 0.6)], epoch, epochs=10) for epoch in (0, 2, 3, 6, 9)]
        [1.0, 1.0, 0.8, 0.6, 0.6]
    """
    value = milestones[0][1]
    for boundary, then in milestones:
        if epoch >= (boundary * epochs if 0 < boundary < 1 else boundary) - 1e-9:
            value = then
    return value
