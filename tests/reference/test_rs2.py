"""Rs2: every sample has its turn before any has two, by draws that a transcription repeats; and both modes are uniform."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import noted, winners
from thresher import Rs2
from thresher.records import Records
from thresher.rng import seeded


def epochs_of(method: Rs2, n: int, epochs: int, key: int) -> list[set[int]]:
    records = Records(method.columns(), n, torch.device("cpu"))
    found = []
    for epoch in range(epochs):
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(key, epoch))
        plan.check(n)
        assert plan.facts["actual_fraction"] == pytest.approx(1 - len(plan.ids) / n)
        records.remember(plan.remember)
        found.append(set(plan.ids.tolist()))
    return found


def transcribed(n: int, keep: Fraction, replace: bool, epochs: int, key: int) -> list[set[int]]:
    """Slices of an order that is made up as it is read; a slice longer than the rest goes on in the next order."""
    size, everyone, found = max(1, math.floor(keep * n)), set(range(n)), []
    left = everyone
    for epoch in range(epochs):
        begins = len(left) < size
        rest, among = (left, everyone - left) if begins else (set(), left)
        drawn = winners(size - len(rest), seeded(key, epoch), among)
        found.append(rest | drawn)
        if not replace:
            left = (everyone if begins else left) - drawn
    return found


@pytest.mark.parametrize("replace", [False, True])
def test_the_plans_are_those_of_the_paper(replace: bool) -> None:
    for number in range(depth(12, 60)):
        r = np.random.default_rng(number)
        n, percent = (
            (1 if number == 0 else int(r.integers(2, 60))),
            int(r.choice([1, 10, 29, 33, 50, 51, 90, 100])),
        )
        with noted(f"instance {number}"):
            expected = transcribed(n, Fraction(percent, 100), replace, 9, number)
            assert epochs_of(Rs2(percent / 100, replace), n, 9, number) == expected


@pytest.mark.parametrize("keep", [0.25, 0.3, 0.5, 0.6, 0.9])
def test_no_sample_is_a_turn_ahead_of_another(keep: float) -> None:
    """Also where slices do not fit into an order: the official code then goes on with the samples that are left."""
    turns = np.zeros(10, dtype=int)
    for plan in epochs_of(Rs2(keep), 10, 30, 0):
        turns[list(plan)] += 1
        assert turns.max() - turns.min() <= 1
    assert turns.sum() == 30 * math.floor(keep * 10)


def test_worked_example() -> None:
    """Of ten samples, six an epoch: the second epoch has the other four and two more, which wait in the third."""
    first, second, third = epochs_of(Rs2(0.6), 10, 3, 0)
    assert first | second == set(range(10)) and len(first & second) == 2
    assert not third & first & second


@pytest.mark.parametrize("replace", [False, True])
def test_every_sample_is_as_likely_as_any_other_and_so_is_every_pair(replace: bool) -> None:
    plans = [
        plan for key in range(depth(500, 3000)) for plan in epochs_of(Rs2(0.3, replace), 10, 3, key)
    ]
    counts = np.bincount([i for plan in plans for i in plan], minlength=10)
    assert np.abs(counts - 0.3 * len(plans)).max() < 4 * math.sqrt(0.21 * len(plans))
    together = np.mean([{2, 7} <= plan for plan in plans])
    assert together == pytest.approx(
        3 / 10 * 2 / 9, abs=4 * math.sqrt(1 / 15 * 14 / 15 / len(plans))
    )


@pytest.mark.parametrize("settings", [{"keep": 0}, {"keep": 1.1}, {"replace": "yes"}])
def test_settings_out_of_range_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=f"^Rs2: `{next(iter(settings))}` "):
        Rs2(**settings)
