"""Ucb against a transcription that follows each sample by itself, with both ways to explore."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, noted, winners
from thresher import Ucb
from thresher.records import Records
from thresher.rng import seeded

EPOCHS = 8


def losses_of(number: int, kind: str) -> list[list[float]]:
    """The losses after each epoch, which a sample has only where it was trained on."""
    first = np.array(hard_losses(kind, number, most=30), np.float32)
    r = np.random.default_rng(number)
    return [
        (first * r.choice(np.array([0.25, 0.5, 1, 2], np.float32), len(first))).tolist()
        for _ in range(EPOCHS)
    ]


def transcribed(
    losses: list[list[float]], method: Ucb, keep: Fraction, epsilon: Fraction, key: int
) -> list[set[int]]:
    n = len(losses[0])
    mean: dict[int, float] = {}
    variance = dict.fromkeys(range(n), 0.0)
    last: dict[int, float] = {}
    plans, choice = [set(range(n))], set()
    for epoch in range(1, EPOCHS):
        for i in plans[-1]:
            last[i] = loss = losses[epoch - 1][i]
            if not math.isfinite(loss):
                continue
            if i in mean:
                variance[i] = float(
                    np.float32(
                        (1 - method.alpha) * variance[i] + method.alpha * (loss - mean[i]) ** 2
                    )
                )
                mean[i] = float(np.float32(mean[i] + method.alpha * (loss - mean[i])))
            else:
                mean[i] = loss
        known = {i for i in range(n) if math.isfinite(last[i])}
        if (epoch - 1) % method.every == 0 or not choice:
            wanted = max(0, max(1, math.floor(keep * n)) - (n - len(known)))
            bonus = np.float32(method.c) if method.explore == "ucb" else np.float32(0)
            drawn = math.floor(epsilon * wanted) if method.explore == "epsilon" else 0
            score = {i: np.float32(mean[i]) + bonus * np.float32(variance[i]) for i in known}
            choice = set(sorted(known, key=lambda i: (-score[i], -i))[: wanted - drawn])
            if drawn:
                choice |= winners(drawn, seeded(key, epoch), known - choice)
        plans.append(choice | (set(range(n)) - known))
    return plans


@pytest.mark.parametrize("kind", [kind for kind in HARD_KINDS if kind != "huge"])
def test_the_plans_are_those_of_the_paper(kind: str) -> None:
    for number in range(depth(8, 40)):
        r = np.random.default_rng(number)
        percent, part = int(r.choice([1, 29, 50, 90])), int(r.choice([0, 10, 50, 100]))
        method = Ucb(
            keep=percent / 100,
            explore="ucb" if r.random() < 0.5 else "epsilon",
            c=float(r.choice([0, 1, 4])),
            epsilon=part / 100,
            alpha=float(r.choice([0.25, 0.5, 1])),
            every=int(r.choice([1, 1, 3])),
        )
        losses = losses_of(number, kind)
        expected = transcribed(losses, method, Fraction(percent, 100), Fraction(part, 100), number)
        records = Records(method.columns(), len(losses[0]), torch.device("cpu"))
        for epoch in range(EPOCHS):
            plan = method.plan_epoch(
                records, epoch=epoch, epochs=EPOCHS, generator=seeded(number, epoch)
            )
            with noted(f"instance {number}, epoch {epoch}, {method}"):
                assert set(plan.ids.tolist()) == expected[epoch]
            records.remember(plan.remember)
            records.epoch = epoch
            records.write(plan.ids, {"loss": torch.tensor(losses[epoch])[plan.ids]})


def test_huge_losses_overflow_to_the_largest_score_and_keep_the_share() -> None:
    method, n = Ucb(keep=0.5), 20
    records = Records(method.columns(), n, torch.device("cpu"))
    for epoch in range(6):
        plan = method.plan_epoch(records, epoch=epoch, epochs=6, generator=seeded(epoch))
        assert len(plan.ids) == (n if epoch == 0 else n // 2)
        records.remember(plan.remember)
        records.epoch = epoch
        records.write(plan.ids, {"loss": torch.rand(len(plan.ids), generator=seeded(epoch)) * 1e38})
    assert records["variance"].isfinite().all()


def test_the_bonus_brings_a_sample_of_changing_loss_before_one_of_the_same_mean() -> None:
    steady, changing = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 4.0, 0.0])
    kept: dict[float, list[int]] = {}
    for c in (0.0, 1.0):
        method = Ucb(keep=0.5, c=c, alpha=0.5)
        records = Records(method.columns(), 2, torch.device("cpu"))
        for epoch in range(4):
            plan = method.plan_epoch(records, epoch=epoch, epochs=9, generator=seeded(0))
            records.remember(plan.remember)
            records.epoch = epoch
            if epoch < 3:
                records.write(
                    torch.arange(2), {"loss": torch.stack([changing[epoch], steady[epoch]])}
                )
            kept[c] = plan.ids.tolist()
    assert records["mean"].tolist() == [1.25, 1.0] and kept[1.0] == [0]
    assert records["variance"].tolist() == [pytest.approx(0.5 * 0.5 * 9 + 0.5 * 2.5**2), 0.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", 0),
        ("explore", "greedy"),
        ("c", -1),
        ("epsilon", 1.1),
        ("alpha", 0),
        ("every", 0),
        ("every", 1.5),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^Ucb: `{name}` "):
        Ucb(**{name: value})
