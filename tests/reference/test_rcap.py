"""Rcap against a transcription class by class, and how often it draws whom."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, lot, noted
from thresher import EpochPlan, Rcap
from thresher.methods.rcap import budgets
from thresher.records import Records
from thresher.rng import seeded


def planned(
    method: Rcap,
    loss: list[float],
    label: list[int],
    kept: list[bool],
    key: int = 0,
    epoch: int = 1,
) -> EpochPlan:
    records = Records(method.columns(), len(loss), torch.device("cpu"))
    records["loss"].copy_(torch.tensor(loss))
    records["label"].copy_(torch.tensor(label))
    records["kept"].copy_(torch.tensor(kept))
    return method.plan_epoch(records, epoch=epoch, epochs=9, generator=seeded(key))


def numbers_of_classes(
    wanted: dict[int, float], sizes: dict[int, int], total: int
) -> dict[int, int]:
    """Budgets by the common factor at which the parts, within their limits, add up; found by halving."""
    least = 1 if total >= len(sizes) else 0
    if not sum(wanted.values()):
        wanted = {c: float(size) for c, size in sizes.items()}

    def at(factor: float) -> dict[int, float]:
        return {c: min(max(factor * wanted[c], least), sizes[c]) for c in sizes}

    low, high = 0.0, 1.0
    while sum(at(high).values()) < total and high < 1e300:
        high *= 2
    for _ in range(2000):
        low, high = (
            (low, (low + high) / 2)
            if sum(at((low + high) / 2).values()) >= total
            else ((low + high) / 2, high)
        )
    parts = at(high)
    lacking = total - sum(
        parts.values()
    )  # where all classes with a part are full, the others get what is left, by size
    if lacking > 1e-6:
        open_ = [c for c in sizes if not wanted[c]]
        more = numbers_of_classes(
            dict.fromkeys(open_, 0.0),
            {c: sizes[c] for c in open_},
            total - sum(int(parts[c]) for c in sizes if wanted[c]),
        )
        return {c: more.get(c, int(parts[c])) for c in sizes}
    found = {c: math.floor(parts[c] + 1e-9) for c in sizes}
    for c in sorted(
        sizes, key=lambda c: (-(round(parts[c] - found[c], 9) if found[c] < sizes[c] else -1), c)
    ):
        if sum(found.values()) < total:
            found[c] += 1
    return found


def transcribed(
    loss: list[float], label: list[int], kept: list[bool], keep: Fraction, beta: float, key: int
) -> set[int]:
    n = len(loss)
    known = [i for i in range(n) if math.isfinite(loss[i]) and label[i] >= 0]
    total = min(len(known), max(0, max(1, math.floor(keep * n)) - (n - len(known))))
    if not total:
        return set(range(n)) - set(known)
    classes = sorted({label[i] for i in known})
    cut = [
        min(max(x, 0.0), math.log(len(classes))) / beta if math.isfinite(x) else 0.0 for x in loss
    ]
    members = {c: [i for i in known if label[i] == c] for c in classes}
    wanted = {}
    for c in classes:
        lasting = sum(math.exp(cut[i]) for i in members[c] if kept[i]) / sum(
            math.exp(cut[i]) for i in members[c]
        )
        wanted[c] = math.sqrt(lasting * len(members[c]) / len(known))
    counts = numbers_of_classes(wanted, {c: len(members[c]) for c in classes}, total)
    base = int(torch.randint(2**62, (), generator=seeded(key)))
    chosen = set(range(n)) - set(known)
    for c in classes:
        weight = {i: -math.log((lot(base, i) + 0.5) / 2**32) / math.exp(cut[i]) for i in members[c]}
        chosen |= set(sorted(members[c], key=lambda i: weight[i])[: counts[c]])
    return chosen


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plan_is_that_of_the_paper(kind: str) -> None:
    for number in range(depth(10, 60)):
        loss = hard_losses(kind, number)
        r = np.random.default_rng(number)
        labels = np.array([[0, 1], [0, 1, 2, 5, 9], [7, 2**30]][number % 3])
        label = r.choice(labels, len(loss), p=r.dirichlet(np.ones(len(labels)))).tolist()
        if number % 4 == 0:
            label = [-100 if r.random() < 0.1 else one for one in label]
        kept = (r.random(len(loss)) < r.choice([0, 0.5, 1])).tolist()
        percent, beta = int(r.choice([1, 29, 50, 90, 100])), float(r.choice([1 / 3, 1, 3]))
        plan = planned(Rcap(percent / 100, beta), loss, label, kept, number)
        expected = transcribed(loss, label, kept, Fraction(percent, 100), beta, number)
        with noted(f"instance {number}"):
            assert set(plan.ids.tolist()) == expected
            assert plan.remember["kept"].nonzero().flatten().tolist() == plan.ids.tolist()


def test_a_class_with_large_losses_gets_more_and_draws_them_first() -> None:
    loss = [0.0] * 50 + [0.7] * 50
    label = [0, 1] * 50
    counts = np.zeros(100)
    for key in range(depth(200, 1000)):
        plan = planned(Rcap(0.3, beta=1 / 3), loss, label, [True] * 100, key)
        assert len(plan.ids) == 30 and sum(i % 2 for i in plan.ids.tolist()) == 15
        counts[plan.ids.numpy()] += 1
    assert counts[50:].sum() / counts[:50].sum() > 2.5, (
        "a loss of log 2 has eight times the chance of 0 in one draw"
    )
    only_ones = [bool(i % 2) for i in range(100)]
    assert sum(i % 2 for i in planned(Rcap(0.3), loss, label, only_ones).ids.tolist()) == 29, (
        "all but the one of the other class"
    )


def test_losses_above_the_guess_count_no_more_than_it() -> None:
    plans = [
        planned(Rcap(0.5), [0.1, 0.2, x, 0.3] * 5, [0, 1, 0, 1] * 5, [True] * 20)
        for x in (math.log(2), 100.0)
    ]
    assert plans[0].ids.tolist() == plans[1].ids.tolist()


@pytest.mark.parametrize(
    ("wanted", "sizes", "total", "found"),
    [
        ([1, 1, 1], [10, 10, 10], 10, [4, 3, 3]),
        ([100, 1, 1], [4, 10, 10], 10, [4, 3, 3]),
        ([100, 1, 1], [50, 50, 50], 10, [8, 1, 1]),
        ([1, 1, 1], [5, 5, 5], 2, [1, 1, 0]),
        ([0, 0], [6, 2], 4, [3, 1]),
        ([1, 0], [2, 6], 5, [2, 3]),
        ([3, 1], [5, 5], 10, [5, 5]),
    ],
)
def test_budgets(wanted: list[float], sizes: list[int], total: int, found: list[int]) -> None:
    assert budgets(np.array(wanted, float), np.array(sizes), total).tolist() == found


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 0), ("beta", 0), ("beta", math.inf), ("beta", "1")]
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^Rcap: `{name}` "):
        Rcap(**{name: value})
