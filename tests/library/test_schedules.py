import math
from fractions import Fraction
from typing import Any

import pytest

from thresher.schedules import check_milestones, step_value

PUBLISHED = ((0, 1.0), (0.3, 0.8), (0.6, 0.6), (0.8, 0.4))


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 10, 35, 80, 90, 100, 110, 200, 300, 600, 1000])
def test_shares_of_the_epochs(epochs: int) -> None:
    """A boundary b holds from the first epoch e on with e >= b * epochs, in exact arithmetic."""
    for epoch in range(epochs):
        expected = 1.0
        for boundary, value in (("0.3", 0.8), ("0.6", 0.6), ("0.8", 0.4)):
            if epoch >= Fraction(boundary) * epochs:
                expected = value
        assert step_value(PUBLISHED, epoch, epochs) == expected


def test_the_published_epochs() -> None:
    values = [step_value(PUBLISHED, epoch, 100) for epoch in range(100)]
    assert values == [1.0] * 30 + [0.8] * 30 + [0.6] * 20 + [0.4] * 20


def test_products_that_are_not_whole_as_floats() -> None:
    """0.07 * 100 is 7.000000000000001: epoch 7 has reached it."""
    assert 0.07 * 100 > 7
    assert [step_value(((0, 1), (0.07, 0.5)), epoch, 100) for epoch in (6, 7)] == [1, 0.5]


def test_epoch_numbers_do_not_depend_on_the_number_of_epochs() -> None:
    milestones = ((0, 1.0), (1, 0.9), (30, 0.8))
    for epochs in (40, 1000):
        assert [step_value(milestones, epoch, epochs) for epoch in (0, 1, 29, 30)] == [
            1.0,
            0.9,
            0.9,
            0.8,
        ]


@pytest.mark.parametrize(
    ("milestones", "message"),
    [
        ([], "milestones must start at 0, got []"),
        ([(0.1, 1)], "milestones must start at 0, got [(0.1, 1)]"),
        ([(0, 1), (0.6, 0.5), (0.3, 0.4)], "boundaries must ascend, got"),
        ([(0, 1), (0.3, 0.5), (0.3, 0.4)], "boundaries must ascend, got"),
        ([(0, 1), (math.nan, 0.5)], "boundaries must ascend, got"),
        (
            [(0, 1), (0.3, 0.5), (60, 0.4)],
            "boundaries must all be shares of the epochs or all epoch numbers, got",
        ),
        (
            [(0, 1), (0.3, 0.5), (1.0, 0.4)],
            "boundaries must all be shares of the epochs or all epoch numbers, got",
        ),
        ([(0, 1.1)], "values must be within [0, 1], got"),
        ([(0, 1), (30, -0.1)], "values must be within [0, 1], got"),
        ([(0, math.nan)], "values must be within [0, 1], got"),
    ],
)
def test_refused(milestones: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_milestones("Method: `schedule`", milestones)
    assert str(raised.value).startswith(f"Method: `schedule`: {message}")


def test_accepted() -> None:
    for milestones in (PUBLISHED, [(0, 0)], [(0, 1), (30, 0.8), (60.0, 0)], [(0.0, 1), (1, 0.5)]):
        check_milestones("any", milestones)
