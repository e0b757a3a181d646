"""Selective-Backprop against a transcription of the original code that shares nothing with the library.

The transcription keeps a deque as `RelativeProbabilityCalculator` of the original code does, compares loss by loss, and
counts with exact fractions; sorting is Python's, by (loss, id).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import SelectiveBackprop
from thresher.methods._base import extended_history
from thresher.methods.selective_backprop import percentile
from thresher.rng import seeded


@dataclass
class Transcribed:
    """The method with its history as it goes from batch to batch."""

    keep: str | None = None
    beta: str = "1"
    size: int = 1024
    least: str = "0"
    warmup: int = 0
    fifo: deque[float] = field(default_factory=deque)
    step: int = 0

    def rows(self, losses: list[float], ids: list[int], draws: list[float]) -> list[int]:
        """`draws` go to the samples from the lowest id to the highest."""
        self.step += 1
        if self.step <= self.warmup:
            return list(range(len(ids)))
        if self.keep is not None:
            return self.biggest(losses, ids)
        order = sorted(range(len(ids)), key=lambda row: ids[row])
        for row in order:
            self.fifo.append(losses[row])
            if len(self.fifo) > self.size:
                self.fifo.popleft()
        return sorted(
            row
            for draw, row in zip(draws, order, strict=True)
            if Fraction(draw) < self.probability(losses[row])
        )

    def biggest(self, losses: list[float], ids: list[int]) -> list[int]:
        assert self.keep is not None
        count = max(1, math.floor(Fraction(self.keep) * len(ids)))
        queue = []
        for row, loss in enumerate(losses):
            queue.append(
                (0, loss, ids[row], row) if math.isfinite(loss) else (1, 0.0, ids[row], row)
            )
        queue.sort()
        return sorted(row for *_, row in queue[-count:])

    def probability(self, loss: float) -> Fraction:
        finite = [other for other in self.fifo if math.isfinite(other)]
        if not math.isfinite(loss) or not finite:
            return Fraction(1)
        below = Fraction(sum(other < loss for other in finite), len(finite))
        power = Fraction(self.beta)
        chance = (
            below**power.numerator
            if power.denominator == 1
            else Fraction(float(below) ** float(power))
        )
        return max(Fraction(self.least), chance)


def hard_losses(r: np.random.Generator, n: int) -> np.ndarray:
    """Ties, values of all sizes, and some that are not finite."""
    kind = r.integers(5)
    if kind == 0:
        losses = r.gamma(1.0, 1.0, n)
    elif kind == 1:
        losses = r.choice([0.0, 0.25, 0.1, 3.0], n)
    elif kind == 2:
        losses = r.choice([1e-30, 1e30, 3e38, -1e30, 0.0, 1.0], n) * r.random(n)
    elif kind == 3:
        losses = np.full(n, r.choice([0.0, 2.5]))
    else:
        losses = r.normal(size=n).round(1)
    losses = losses.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.0, 0.2, 1.0], p=[0.4, 0.2, 0.35, 0.05])
    losses[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    return losses


def hard_settings(r: np.random.Generator) -> dict[str, Any]:
    settings: dict[str, Any] = {"warmup": int(r.choice([0, 0, 0, 2]))}
    if r.random() < 0.4:
        return settings | {
            "keep": str(r.choice(["0.29", "0.57", "0.5", "0.01", "1", "0.3", "0.75"]))
        }
    return settings | {
        "beta": str(r.choice(["0", "0.25", "0.43", "1", "2", "3", "40"])),
        "size": int(r.choice([1, 3, 7, 40, 1024])),
        "least": str(r.choice(["0", "0", "0.125", "1"])),
    }


def built(settings: dict[str, Any]) -> SelectiveBackprop:
    numbers = {name: float(value) for name, value in settings.items() if isinstance(value, str)}
    names = {
        "keep": "keep",
        "beta": "beta",
        "size": "history",
        "least": "min_probability",
        "warmup": "warmup_steps",
    }
    return SelectiveBackprop(
        **{names[name]: numbers.get(name, value) for name, value in settings.items()}
    )


def batches(r: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Losses and ids of a few steps, the last of which is smaller; ids are in no order and beyond float32."""
    n = int(r.choice([1, 2, 5, 8, 16, 33]))
    sizes = [n] * int(r.integers(1, 6)) + [int(r.integers(1, n + 1))]
    ids = r.permutation(sum(sizes)).astype(np.int64) * 3 + 2**40
    splits = np.split(ids, np.cumsum(sizes)[:-1])
    return [(hard_losses(r, size), part) for size, part in zip(sizes, splits, strict=True)]


NUMBERS = depth(range(80), range(400))


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    r = np.random.default_rng(seed)
    settings = hard_settings(r)
    method, other = built(settings), Transcribed(**settings)
    state = method.init_state()
    for step, (losses, ids) in enumerate(batches(r)):
        draws = torch.rand(len(ids), generator=seeded(seed, step)).tolist()
        expected = other.rows(losses.tolist(), ids.tolist(), draws)
        signals = {"id": torch.from_numpy(ids), "loss": torch.from_numpy(losses)}
        plan, state = method.plan_batch(signals, state, step=step, generator=seeded(seed, step))
        assert plan.rows.tolist() == expected
        assert plan.weights is None
        if "keep" not in settings:
            finite = [value if math.isfinite(value) else None for value in other.fifo]
            assert [
                value if math.isfinite(value) else None for value in state["history"].tolist()
            ] == finite


def test_the_instances_are_hard() -> None:
    """Both ways to select, histories that run over within one batch, single samples, ties, and every kind of loss."""
    met: set[str] = set()
    for seed in NUMBERS:
        r = np.random.default_rng(seed)
        settings = hard_settings(r)
        for losses, ids in batches(r):
            met |= {"keep" if "keep" in settings else "beta"}
            met |= {"one"} if len(ids) == 1 else set()
            met |= {"short"} if settings.get("size", 1024) < len(ids) else set()
            met |= {"tied"} if len(set(losses.tolist())) < len(losses) else set()
            met |= {"nothing finite"} if not np.isfinite(losses).any() else set()
            met |= {str(value) for value in losses.tolist() if not math.isfinite(value)}
            met |= {"huge"} if (np.abs(losses[np.isfinite(losses)]) > 1e29).any() else set()
    assert met == {
        "keep",
        "beta",
        "one",
        "short",
        "tied",
        "nothing finite",
        "nan",
        "inf",
        "-inf",
        "huge",
    }


A = [0.1, 0.2, 0.3, 0.4, 0.5]
DRAWS = [0.5, 0.01, 0.2, 0.3, 0.7]


def test_worked_vector_a(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.tensor(A)
    q = percentile(loss, extended_history(torch.empty(0), loss, 1024))
    assert q.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert q.square().tolist() == pytest.approx([0, 0.04, 0.16, 0.36, 0.64])
    assert q.square().mean().item() == pytest.approx(0.24)
    monkeypatch.setattr(
        torch, "rand", lambda n, *, generator, dtype: torch.tensor(DRAWS[:n], dtype=dtype)
    )
    for beta, rows in ((1.0, [1, 2, 3, 4]), (2.0, [1, 3])):
        method = SelectiveBackprop(beta=beta)
        signals = {"id": torch.arange(5), "loss": loss}
        plan, state = method.plan_batch(
            signals, method.init_state(), step=0, generator=torch.Generator()
        )
        assert plan.rows.tolist() == rows
        assert torch.equal(state["history"], loss)
        assert Transcribed(beta=f"{beta:.0f}").rows(A, [0, 1, 2, 3, 4], DRAWS) == rows


def test_worked_vector_b() -> None:
    history = torch.tensor([1.0, 2, 3, 4])
    three = torch.tensor([3.0])
    assert percentile(three, history).tolist() == [0.5]
    pushed = extended_history(history, torch.tensor([5.0]), 4)
    assert pushed.tolist() == [2, 3, 4, 5]
    assert percentile(three, pushed).tolist() == [0.25]


@pytest.mark.parametrize(
    ("beta", "least"), [(0.25, 0.0), (0.43, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (2.0, 0.3)]
)
def test_the_share_of_one_batch_is_the_finite_samples(beta: float, least: float) -> None:
    n, draws = 64, depth(500, 1500)
    chances = [max(least, (j / n) ** beta) for j in range(n)]
    method = SelectiveBackprop(beta=beta, min_probability=least)
    signals = {"id": torch.arange(n), "loss": torch.randperm(n, generator=seeded(1)).float()}
    kept = 0
    for draw in range(draws):
        plan, _ = method.plan_batch(
            signals, method.init_state(), step=draw, generator=seeded(2, draw)
        )
        kept += len(plan.rows)
    error = math.sqrt(sum(p * (1 - p) for p in chances) * draws)
    assert abs(kept - sum(chances) * draws) < 3 * error


@pytest.mark.parametrize("beta", [0.43, 1.0, 2.0])
def test_the_share_in_the_long_run(beta: float) -> None:
    """Losses without ties from one distribution: the rank in a full history is uniform on 0 to R - 1."""
    size, n, steps = 256, 32, depth(500, 1500)
    method = SelectiveBackprop(beta=beta, history=size)
    state, shares, g = method.init_state(), [], seeded(3)
    for step in range(steps + size // n):
        signals = {"id": torch.arange(n), "loss": torch.rand(n, generator=g)}
        plan, state = method.plan_batch(signals, state, step=step, generator=seeded(4, step))
        if step >= size // n:
            shares.append(len(plan.rows) / n)
    expected = sum((j / size) ** beta for j in range(size)) / size
    assert abs(np.mean(shares) - expected) < 3 * np.std(shares) / math.sqrt(steps)
    assert expected == pytest.approx(method.expected_keep, abs=1 / size)
