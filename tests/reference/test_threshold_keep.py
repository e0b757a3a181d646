"""Threshold keep against a transcription in plain Python, which looks for the threshold instead of computing it.

The transcription evaluates variance times cost on a fine grid between the scores and narrows it down; a threshold for a share
is found by bisection.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import thresher
from depth import depth
from helpers import over_instances
from thresher import ThresholdKeep
from thresher.methods.threshold_keep import best_threshold, threshold_of_share
from thresher.rng import seeded
from thresher.testing import planted
from thresher.testing.toys import train_model


def product(scores: list[float], tau: float, ratio: float) -> float:
    """Variance times cost of a threshold, in units that do not matter."""
    variance = cost = 0.0
    for s in scores:
        p = min(1.0, s / tau)
        variance += s * s / p if s else 0.0
        cost += 1 + ratio * p
    return variance * cost


def least_product(scores: list[float], ratio: float) -> float:
    edges = sorted({s for s in scores if s > 0})
    best = min(product(scores, edge, ratio) for edge in edges)
    for low, high in itertools.pairwise(edges):
        for _ in range(12):  # narrows a grid of 21 points down to the place of its least value
            grid = [low + (high - low) * i / 20 for i in range(21)]
            values = [product(scores, tau, ratio) for tau in grid]
            at = values.index(min(values))
            best = min(best, values[at])
            low, high = grid[max(0, at - 1)], grid[min(20, at + 1)]
    return best


def bisected_share(scores: list[float], keep: float) -> float:
    largest = max(scores) or 1.0
    raised = [max(s, 1e-6 * largest) for s in scores]
    low, high = 0.0, largest / keep * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle and sum(min(1.0, s / middle) for s in raised) / len(raised) > keep:
            low = middle
        else:
            high = middle
    return high


def hard_scores(r: np.random.Generator) -> np.ndarray:
    n = int(r.choice([1, 2, 3, 8, 30]))
    kind = r.integers(6)
    if kind == 0:
        scores = r.gamma(r.choice([0.1, 0.5, 2.0]), 1.0, n)
    elif kind == 1:
        scores = r.choice([0.0, 0.25, 3.0], n)
    elif kind == 2:
        scores = np.full(n, r.choice([0.0, 2.5]))
    elif kind == 3:
        scores = r.gamma(0.3, 1.0, n) * 1e30
    elif kind == 4:
        scores = r.gamma(0.3, 1.0, n) * 1e-30
    else:
        scores = np.ones(n)
        scores[0] = 1e4
    scores = scores.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.7, 0.2, 0.1])
    scores[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    return scores


NUMBERS = depth(range(60), range(600))


@over_instances(NUMBERS)
def test_no_threshold_is_better(seed: int) -> None:
    r = np.random.default_rng(seed)
    scores, ratio = hard_scores(r), float(r.choice([0.5, 2.0, 3.0]))
    tau = best_threshold(torch.from_numpy(scores), ratio).item()
    known = [float(s) for s in scores if math.isfinite(s)]
    if not any(known):
        assert tau == 0
        return
    scale = max(known)
    known = [s / scale for s in known]
    assert product(known, tau / scale, ratio) <= least_product(known, ratio) * (1 + 1e-9)
    if len(set(known)) == 1:
        assert tau <= scale, "equal scores are all kept"


@over_instances(NUMBERS)
def test_a_share_is_met(seed: int) -> None:
    r = np.random.default_rng(seed)
    scores, keep = hard_scores(r), float(r.choice([0.05, 0.25, 0.5, 0.9, 1.0]))
    known = [float(s) for s in scores if math.isfinite(s)]
    if not known:
        return
    tau, least = (value.item() for value in threshold_of_share(torch.from_numpy(scores), keep))
    shares = [min(1.0, max(s, least) / tau) for s in known]
    assert sum(shares) / len(shares) == pytest.approx(keep, abs=1e-9)
    if len(set(known)) > 1 and keep < 1:
        assert tau == pytest.approx(bisected_share(known, keep), rel=1e-6)


def transcribed(
    batches: list[dict[str, Any]], keep: float | None, size: int, draws: list[list[float]]
) -> list[Any]:
    """Rows by id, with their weights, of one batch after another."""
    window: list[float] = []
    answers: list[Any] = []
    seen = total = 0
    for batch, lots in zip(batches, draws, strict=True):
        ranked = sorted(zip(batch["ids"], batch["scores"], strict=True))
        window = (window + [s for _, s in ranked])[-size:]
        known = [s for s in window if math.isfinite(s)]
        tau, least = 0.0, 0.0
        if known and keep is None and any(known):
            tau = best_threshold(torch.tensor(known, dtype=torch.float64), 2.0).item()
        elif known and keep is not None:
            share = min(max(keep + (keep * seen - total) / size, keep / 2), (1 + keep) / 2)
            tau, least = bisected_share(known, share), 1e-6 * (max(known) or 1.0)
        kept = {}
        for (i, s), lot in zip(ranked, lots, strict=True):
            p = 1.0 if not math.isfinite(s) or not tau else min(1.0, max(s, least) / tau)
            if 1 - lot <= p:
                kept[i] = 1 / p
        answers.append(kept)
        seen, total = seen + len(ranked), total + len(kept)
    return answers


@pytest.mark.parametrize("keep", [None, 0.3])
@over_instances(depth(range(20), range(200)))
def test_batches(seed: int, keep: float | None) -> None:
    r = np.random.default_rng(seed)
    size = int(r.choice([1, 10, 1024]))
    sizes = [int(r.choice([1, 4, 16])) for _ in range(4)]
    batches = []
    for n in sizes:
        scores = np.resize(hard_scores(r), n)
        batches.append(
            {"ids": (r.permutation(200)[:n] + 2**40).tolist(), "scores": scores.tolist()}
        )
    draws = [
        torch.rand(n, generator=seeded(seed, step), dtype=torch.float64).tolist()
        for step, n in enumerate(sizes)
    ]
    method = ThresholdKeep(keep, history=size)
    state = method.init_state()
    for step, (batch, expected) in enumerate(
        zip(batches, transcribed(batches, keep, size, draws), strict=True)
    ):
        signals = {
            "id": torch.tensor(batch["ids"]),
            "grad_norm": torch.tensor(batch["scores"], dtype=torch.float32),
        }
        plan, state = method.plan_batch(signals, state, step=step, generator=seeded(seed, step))
        found = dict(zip(signals["id"][plan.rows].tolist(), plan.weights.tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "keep", "gain"),
    [
        (4.0, 0.795, 1.06),
        (1.0, 0.52, 1.29),
        (0.5, 0.374, 1.52),
        (1 / 3, 0.30, 1.68),
        (0.2, 0.22, 1.91),
        (1 / 9, 0.148, 2.17),
    ],
)
def test_worked_vectors_of_gamma_distributed_scores(shape: float, keep: float, gain: float) -> None:
    scores = torch.from_numpy(np.random.default_rng(0).gamma(shape, 1.0, 100_000))
    method = ThresholdKeep(history=len(scores))
    assert method.report({"history": scores})["gain"] == pytest.approx(gain, abs=0.02)
    tau = method.report({"history": scores})["threshold"]
    p = (scores / tau).clamp(max=1)
    assert p.mean().item() == pytest.approx(keep, abs=0.005)
    assert tau**2 == pytest.approx(
        (2 * (scores.square() / p).mean() / (1 + 2 * p.mean())).item(), rel=1e-6
    ), "fixed point"


def test_the_expected_sum_is_that_of_the_batch() -> None:
    """Over many draws, the weighted sum of the kept values is the sum of all, for scores that say little of the values."""
    r = np.random.default_rng(1)
    scores, values = (
        torch.from_numpy(r.gamma(0.5, 1.0, 40)).float(),
        torch.from_numpy(r.normal(1.0, 1.0, 40)),
    )
    sums = []
    for seed in range(3000):
        signals = {"id": torch.arange(40), "grad_norm": scores}
        plan, _ = ThresholdKeep(keep=0.4).plan_batch(
            signals, ThresholdKeep().init_state(), step=0, generator=seeded(seed)
        )
        sums.append(float((values[plan.rows] * plan.weights).sum()))
    error = np.std(sums) / math.sqrt(len(sums))
    assert np.mean(sums) == pytest.approx(values.sum().item(), abs=4 * error)


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.7])
def test_the_realized_share_is_the_requested_one(keep: float) -> None:
    method, r = ThresholdKeep(keep), np.random.default_rng(0)
    state, kept = method.init_state(), 0
    for step in range(150):
        signals = {
            "id": torch.arange(128),
            "grad_norm": torch.from_numpy(r.gamma(0.4, 1.0, 128)).float(),
        }
        plan, state = method.plan_batch(signals, state, step=step, generator=seeded(0, step))
        kept += len(plan.rows)
        assert plan.facts["scheduled_fraction"] == 1 - keep
    assert kept / (150 * 128) == pytest.approx(keep, abs=0.01)


@pytest.mark.parametrize("toy", ["skewed", "rare"])
def test_the_realized_share_of_a_training_is_the_requested_one(toy: str) -> None:
    """Gradient norms fall in the course of it."""
    cost = train_model(ThresholdKeep(keep=0.4), planted(toy, 0))[1]
    assert (3 * cost - 1) / 2 == pytest.approx(0.4, abs=0.01)


def test_nothing_is_known() -> None:
    assert ThresholdKeep().report(ThresholdKeep().init_state()) == {"threshold": 0.0, "gain": 1.0}
    assert ThresholdKeep().report({"history": torch.zeros(3)}) == {"threshold": 0.0, "gain": 1.0}
    plan, _ = ThresholdKeep().plan_batch(
        {"id": torch.arange(0), "grad_norm": torch.empty(0)},
        ThresholdKeep().init_state(),
        step=0,
        generator=seeded(0),
    )
    assert len(plan.rows) == 0


@pytest.mark.parametrize("keep", [0, 1.5, "half", True, math.nan])
def test_shares_out_of_range_are_refused(keep: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^ThresholdKeep: `keep` is the share kept, within \(0, 1\], got"
    ):
        ThresholdKeep(keep)


@pytest.mark.parametrize("ratio", [0, -1.0, math.inf, math.nan, True, "two"])
def test_ratios_out_of_range_are_refused(ratio: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^ThresholdKeep: `ratio` must be a number within \(0, inf\), got"
    ):
        ThresholdKeep(ratio=ratio)


@pytest.mark.parametrize("history", [0, 1.5, True])
def test_histories_out_of_range_are_refused(history: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^ThresholdKeep: `history` must be a whole number of 1 or more, got"
    ):
        ThresholdKeep(history=history)


@pytest.mark.usefixtures("shared_traces")
def test_its_losses_are_divided_by_the_rows_of_the_batch() -> None:
    with pytest.raises(
        ValueError, match="`criterion`: ThresholdKeep divides kept losses by the number of rows"
    ):
        thresher.attach(
            ThresholdKeep(), loader=planted("rare", 0).loader(), criterion=torch.nn.CrossEntropyLoss(reduction="sum"),
            model=torch.nn.Linear(20, 2), epochs=1, forward_passes="twice",
        )  # fmt: skip
