"""Composer's rule against a transcription: which batches it acts on, and rows drawn one by one from the weights of ranks."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import SelectiveBackprop
from thresher.rng import seeded

NAN, INF = math.nan, math.inf


def chances(n: int, keep: Fraction) -> list[float]:
    """Of the first row drawn, by ascending rank."""
    c = [Fraction(2 * j + 1, 2 * n) for j in range(n)]
    power = 1 / keep - 1
    weights = [float(x) ** float(power) for x in c]
    return [w / sum(weights) for w in weights]


def sets(n: int, keep: Fraction) -> dict[frozenset[int], float]:
    """The probability of each set of ranks, drawn one after the other without replacement."""
    p, k, found = chances(n, keep), max(1, math.floor(keep * n)), {}
    for drawn in permutations(range(n), k):
        chance, left = 1.0, 1.0
        for rank in drawn:
            chance *= p[rank] / left
            left -= p[rank]
        found[frozenset(drawn)] = found.get(frozenset(drawn), 0.0) + chance
    return found


def inclusion(n: int, keep: Fraction) -> list[float]:
    return [
        sum(chance for ranks, chance in sets(n, keep).items() if rank in ranks) for rank in range(n)
    ]


def rows_of(method: SelectiveBackprop, loss: object, ids: object, key: int) -> list[int]:
    signals = {"id": torch.as_tensor(ids), "loss": torch.as_tensor(loss)}
    plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(key))
    assert plan.weights is None and state == {}
    return plan.rows.tolist()


def test_worked_vector_of_the_transcription() -> None:
    assert chances(4, Fraction(1, 2)) == pytest.approx([0.0625, 0.1875, 0.3125, 0.4375])
    assert chances(4, Fraction(1, 4)) == pytest.approx([0.0020, 0.0544, 0.2520, 0.6915], abs=5e-5)
    assert inclusion(4, Fraction(1, 2)) == pytest.approx([0.1539, 0.4311, 0.6485, 0.7665], abs=5e-5)


@pytest.mark.parametrize(
    ("n", "keep"),
    [
        (4, Fraction(1, 2)),
        (4, Fraction(1, 4)),
        (5, Fraction(2, 5)),
        (5, Fraction(3, 5)),
        (3, Fraction(1, 10)),
    ],
)
def test_every_set_of_rows_comes_as_often_as_it_should(n: int, keep: Fraction) -> None:
    draws, r = depth(1000, 3000), np.random.default_rng(n)
    rank_of = r.permutation(n)
    method, found = SelectiveBackprop(keep=float(keep), draw=True), {}
    for key in range(draws):
        rows = rows_of(method, rank_of.astype(np.float32), np.arange(n), key)
        ranks = frozenset(rank_of[rows].tolist())
        found[ranks] = found.get(ranks, 0) + 1
    expected = sets(n, keep)
    assert set(found) <= set(expected)
    for ranks, chance in expected.items():
        assert abs(found.get(ranks, 0) / draws - chance) < 4 * math.sqrt(
            chance * (1 - chance) / draws
        )


@pytest.mark.parametrize(
    ("interrupt", "active"),
    [(0, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 2, 4, 6]), (3, [0, 1, 3, 4, 6, 7]), (1, [])],
)
def test_worked_vector_of_active_batches(interrupt: int, active: list[int]) -> None:
    method = SelectiveBackprop(keep=0.5, draw=True, interrupt=interrupt)
    assert [step for step in range(8) if method.active(0.3, step)] == active


def test_active_between_start_and_end() -> None:
    method = SelectiveBackprop(keep=0.5, draw=True, start=0.5, end=0.9, interrupt=2)
    steps = 100
    active = [step for step in range(steps) if method.active(step / steps, step)]
    assert active == list(range(50, 90, 2))


def transcribed(losses: list[float], ids: list[int], keep: str, waits: list[float]) -> list[int]:
    """`waits` are exponential clocks, of the lowest loss first; a row's rings after its wait over its weight."""
    n = len(ids)
    count = max(1, math.floor(Fraction(keep) * n))
    strange = sorted((ids[row], row) for row in range(n) if not math.isfinite(losses[row]))
    ranked = sorted((losses[row], ids[row], row) for row in range(n) if math.isfinite(losses[row]))
    kept = [row for _, row in strange[::-1][:count]]
    power = 1 / Fraction(keep) - 1
    rings = []
    for j, (*_, row) in enumerate(ranked):
        c = Fraction(2 * j + 1, 2 * n)
        weight = (
            c**power.numerator if power.denominator == 1 else Fraction(float(c) ** float(power))
        )
        rings.append((Fraction(waits[j]) / weight, row))
    return sorted(kept + [row for _, row in sorted(rings)[: count - len(kept)]])


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    r = np.random.default_rng(seed)
    n = int(r.choice([1, 2, 5, 8, 16, 33]))
    losses = [
        r.gamma(1.0, 1.0, n),
        r.choice([0.0, 0.25, 3.0], n),
        np.full(n, 2.5),
        r.random(n) * 3e38,
    ][r.integers(4)]
    losses = losses.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])
    losses[spoilt] = r.choice([NAN, INF, -INF], int(spoilt.sum()))
    return (
        losses,
        r.permutation(n).astype(np.int64) * 3 + 2**40,
        str(r.choice(["0.01", "0.25", "0.29", "0.5", "0.75", "1"])),
    )


NUMBERS = depth(range(60), range(300))


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    losses, ids, keep = instance(seed)
    waits = torch.empty(len(ids), dtype=torch.float64).exponential_(generator=seeded(seed)).tolist()
    found = rows_of(SelectiveBackprop(keep=float(keep), draw=True), losses, ids, seed)
    assert found == transcribed(losses.tolist(), ids.tolist(), keep, waits)


def test_the_instances_are_hard() -> None:
    met: set[str] = set()
    for seed in NUMBERS:
        losses, ids, keep = instance(seed)
        finite, count = losses[np.isfinite(losses)], max(1, math.floor(Fraction(keep) * len(ids)))
        met |= {"one"} if len(ids) == 1 else set()
        met |= {"tied"} if len(set(finite.tolist())) < len(finite) else set()
        met |= {"nothing finite"} if not len(finite) else set()
        met |= {"more than count"} if len(ids) > len(ids) - len(finite) > count else set()
        met |= {"some of each"} if 0 < len(ids) - len(finite) < count < len(ids) else set()
        met |= {"everything"} if count == len(ids) > 1 else set()
    assert met == {"one", "tied", "nothing finite", "more than count", "some of each", "everything"}
