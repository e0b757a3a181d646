"""EpochSelectiveBackprop against a transcription sample by sample, its worked vector, and how often it keeps whom."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import EpochPlan, EpochSelectiveBackprop
from thresher.records import Records
from thresher.rng import seeded


def planned(
    method: EpochSelectiveBackprop, loss: np.ndarray, *, epoch: int = 1, key: int = 0
) -> EpochPlan:
    records = Records(method.columns(), len(loss), torch.device("cpu"))
    records["loss"].copy_(torch.as_tensor(loss))
    return method.plan_epoch(records, epoch=epoch, epochs=10, generator=seeded(key))


def test_worked_vector() -> None:
    loss = np.array([0, 0.1, 0.1, 0.5, 10])
    for dtype in (np.float32, np.float64):
        np.testing.assert_allclose(
            EpochSelectiveBackprop(beta=1).chances(loss.astype(dtype)), [0.2, 0.6, 0.6, 0.8, 1]
        )
        np.testing.assert_allclose(
            EpochSelectiveBackprop(beta=2).chances(loss.astype(dtype)), [0.04, 0.36, 0.36, 0.64, 1]
        )


def draw(key: int, i: int) -> float:
    """The random number of a sample: the upper half of a counter that is mixed (SplitMix64)."""
    bits = (i + 1) * 0x9E3779B97F4A7C15 + int(torch.randint(2**62, (), generator=seeded(key)))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits %= 2**64
        bits = (bits ^ (bits >> shift)) * factor
    return (bits >> 32) * 2.0**-32


def transcribed(
    loss: list[float], method: EpochSelectiveBackprop, draws: list[float]
) -> tuple[list[int], list[float]]:
    """Who is kept, and with which chance."""
    finite = [value for value in loss if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def bin_of(value: float) -> int:
        return (
            min(int((value - low) / (high - low) * method.bins), method.bins - 1)
            if high > low
            else 0
        )

    kept, chances = [], []
    for i, value in enumerate(loss):
        if not math.isfinite(value):
            chance = 1.0
        else:
            if method.percentile == "rank":
                count = sum(other <= value for other in finite)
            else:
                count = sum(bin_of(other) <= bin_of(value) for other in finite)
            chance = max(method.min_probability, (count / len(finite)) ** method.beta)
        chances.append(chance)
        if draws[i] < chance:
            kept.append(i)
    return kept, chances


KINDS = (
    "plain",
    "ties",
    "one",
    "equal",
    "outlier",
    "nonfinite",
    "negative",
    "huge",
    "tiny",
    "lost",
)


@dataclass
class Instance:
    loss: np.ndarray
    method: EpochSelectiveBackprop


def instance(number: int) -> Instance:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = 1 if kind == "one" else int(r.integers(2, 70))
    loss = r.gamma(0.7, 1.0, n).astype(np.float32)
    if kind == "ties":
        loss = r.choice(np.float32([0.5, 1.0, 1.5, 4]), n)
    if kind == "equal":
        loss[:] = r.choice(np.float32([0, 0.1, 3]))
    if kind == "outlier":
        loss[r.integers(n)] = r.choice([50, 1e4, 1e30])
    if kind in ("nonfinite", "lost"):
        bad = r.random(n) < (0.4 if kind == "nonfinite" else 2)
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    if kind == "negative":
        loss -= np.float32(1.5)
    if kind == "huge":
        loss *= r.choice(np.float32([1e37, -1e37]), n)
    if kind == "tiny":
        loss *= np.float32(1e-42)
    method = EpochSelectiveBackprop(
        beta=float(r.choice([0, 0.43, 1, 3])),
        bins=int(r.choice([1, 2, 10, 1000])),
        min_probability=float(r.choice([0, 0, 0.1])),
        percentile=str(r.choice(["histogram", "histogram", "rank"])),
    )
    return Instance(loss, method)


NUMBERS = depth(range(50), range(250))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(number: int) -> None:
    given = instance(number)
    n = len(given.loss)
    kept, chances = transcribed(
        given.loss.tolist(), given.method, [draw(number, i) for i in range(n)]
    )
    plan = planned(given.method, given.loss, key=number)
    plan.check(n)
    assert plan.ids.tolist() == kept
    assert plan.refresh is not None and plan.refresh.tolist() == sorted(set(range(n)) - set(kept))
    assert plan.weights is None and plan.lr_scale == 1 and not plan.drawn
    assert plan.facts["scheduled_fraction"] == pytest.approx(1 - sum(chances) / n, abs=2**-32)
    assert plan.facts["actual_fraction"] == pytest.approx(1 - len(kept) / n)


def test_the_instances_are_hard() -> None:
    seen = dict.fromkeys(("hides", "hides nothing", "lost", "one bin", "rank", "floor"), 0)
    for number in NUMBERS:
        given = instance(number)
        plan = planned(given.method, given.loss, key=number)
        seen["hides"] += len(plan.ids) < len(given.loss)
        seen["hides nothing"] += len(plan.ids) == len(given.loss) > 1
        seen["lost"] += not np.isfinite(given.loss).any()
        seen["one bin"] += given.method.bins == 1
        seen["rank"] += given.method.percentile == "rank" and len(plan.ids) < len(given.loss)
        seen["floor"] += given.method.min_probability > 0
    assert min(seen.values()) >= depth(4, 20), seen


def test_every_sample_is_kept_as_often_as_it_should() -> None:
    loss, draws = np.array([0, 0.1, 0.1, 0.5, 10]), 4000
    method = EpochSelectiveBackprop(beta=2)
    kept = np.zeros((draws, 5))
    for key in range(draws):
        kept[key, planned(method, loss, key=key).ids.numpy()] = 1
    expected = np.array([0.04, 0.36, 0.36, 0.64, 1])
    assert (np.abs(kept.mean(0) - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()
    assert (kept[:, 1] * kept[:, 2]).mean() == pytest.approx(
        0.36**2, abs=5 * math.sqrt(0.13 * 0.87 / draws)
    )


def test_the_first_epoch_keeps_everything() -> None:
    plan = planned(EpochSelectiveBackprop(beta=5), np.arange(20.0), epoch=0)
    assert plan.ids.tolist() == list(range(20)) and plan.refresh is None
