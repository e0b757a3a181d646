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
    """Slices of an order that is made up as it is read; a new one begins where the rest is too short."""
    size, left, found = max(1, math.floor(keep * n)), set(range(n)), []
    for epoch in range(epochs):
        if replace or len(left) < size:
            left = set(range(n))
        found.append(winners(size, seeded(key, epoch), left))
        left = left - found[-1]
    return found


@pytest.mark.parametrize("replace", [False, True])
def test_the_plans_are_those_of_the_paper(replace: bool) -> None:
    for number in range(depth(12, 60)):
        r = np.random.default_rng(number)
        n, percent = (1 if number == 0 else int(r.integers(2, 60))), int(r.choice([1, 10, 29, 33, 50, 51, 90, 100]))
        with noted(f"instance {number}"):
            expected = transcribed(n, Fraction(percent, 100), replace, 9, number)
            assert epochs_of(Rs2(percent / 100, replace), n, 9, number) == expected


def test_no_sample_comes_twice_before_all_had_a_turn() -> None:
    plans = epochs_of(Rs2(0.25), 100, 8, 0)
    assert set().union(*plans[:4]) == set().union(*plans[4:]) == set(range(100))
    assert all(len(plan) == 25 for plan in plans)


@pytest.mark.parametrize("replace", [False, True])
def test_every_sample_is_as_likely_as_any_other_and_so_is_every_pair(replace: bool) -> None:
    plans = [plan for key in range(depth(500, 3000)) for plan in epochs_of(Rs2(0.3, replace), 10, 3, key)]
    counts = np.bincount([i for plan in plans for i in plan], minlength=10)
    assert np.abs(counts - 0.3 * len(plans)).max() < 4 * math.sqrt(0.21 * len(plans))
    together = np.mean([{2, 7} <= plan for plan in plans])
    assert together == pytest.approx(3 / 10 * 2 / 9, abs=4 * math.sqrt(1 / 15 * 14 / 15 / len(plans)))


@pytest.mark.parametrize("settings", [{"keep": 0}, {"keep": 1.1}, {"replace": "yes"}])
def test_settings_out_of_range_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=f"^Rs2: `{next(iter(settings))}` "):
        Rs2(**settings)
