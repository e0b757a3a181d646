"""Importance sampling in the batch against a transcription in exact arithmetic, and its claim: it is unbiased.

The transcription walks along the scores, one draw after the other, and takes the gain as published, from the distance
between the scores' distribution and the uniform one.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import BatchImportance, BatchPlan
from thresher.methods.batch_importance import masses, unbiased_row_weights, variance_gain
from thresher.rng import seeded

NAN, INF = math.nan, math.inf


@dataclass
class Transcribed:
    """What one batch gives: rows with their weights, ascending, and the moving average after it."""

    keep: str
    smoothing: float = 0.9
    threshold: float | None = None
    exponent: float = 1.0

    def answer(
        self,
        scores: list[float],
        ids: list[int],
        gain: float,
        keys: list[float],
        draws: list[float],
    ) -> tuple[list[tuple[int, float]], float]:
        """`keys` go to the samples from the lowest id to the highest, `draws` to the b places one after the other."""
        pool = len(ids)
        b = max(1, math.floor(Fraction(self.keep) * pool))
        order = sorted(range(pool), key=lambda row: ids[row])
        usable = [row for row in order if math.isfinite(scores[row])]
        strange = [row for row in order if row not in usable]
        known = {row: max(Fraction(0), Fraction(scores[row])) for row in usable}
        if usable and not any(known.values()):
            known = dict.fromkeys(usable, Fraction(1))
        least = (pool + 3 * b) / (3 * b) if self.threshold is None else self.threshold
        picked: list[tuple[int, float]] = [
            (row, max(b, len(strange)) / pool) for row in strange[::-1][:b]
        ]
        places = b - len(picked)
        if places and gain > least:
            found = [self.walk(usable, known, draws[slot]) for slot in range(len(picked), b)]
            raw = [sum(known.values()) / pool / known[row] for row in found]
            picked += [
                (row, w * b / places)
                for row, w in zip(found, self.tempered(raw, [known[r] for r in found]), strict=True)
            ]
        elif places:
            by_key = sorted(
                (key, ids[row], row) for key, row in zip(keys, order, strict=True) if row in known
            )
            picked += [(row, len(usable) / pool * b / places) for *_, row in by_key[-places:]]
        if usable:
            gain = self.smoothing * gain + (1 - self.smoothing) * self.gain(list(known.values()))
        return sorted(picked), gain

    @staticmethod
    def walk(usable: list[int], known: dict[int, Fraction], draw: float) -> int:
        remaining = (1 - Fraction(draw)) * sum(known.values())
        for row in usable:
            remaining -= known[row]
            if remaining <= 0:
                return row
        raise AssertionError("a draw beyond all scores")

    def tempered(self, weights: list[Fraction], scores: list[Fraction]) -> list[float]:
        if self.exponent == 1:
            return [float(w) for w in weights]
        powers = [float(w) ** self.exponent for w in weights]
        total = float(sum(w * s for w, s in zip(weights, scores, strict=True)))
        now = sum(power * float(s) for power, s in zip(powers, scores, strict=True))
        return [power * total / now for power in powers]

    @staticmethod
    def gain(scores: list[Fraction]) -> float:
        """1 / sqrt(1 - |g - u|^2 / |g|^2), as published."""
        g = [score / sum(scores) for score in scores]
        away = sum((share - Fraction(1, len(g))) ** 2 for share in g)
        return 1 / math.sqrt(1 - away / sum(share**2 for share in g))


def hard_scores(r: np.random.Generator, n: int) -> np.ndarray:
    kind = r.integers(6)
    if kind == 0:
        scores = r.gamma(1.0, 1.0, n)
    elif kind == 1:
        scores = r.choice([0.0, 0.25, 1.25], n)
    elif kind == 2:
        scores = r.choice([1e-30, 1e-40, 3e38, 0.0, 1.0], n) * r.random(n)
    elif kind == 3:
        scores = np.full(n, r.choice([0.0, 1.5]))
    elif kind == 4:
        scores = np.full(n, 1e-6)
        scores[r.integers(n)] = 1.4
    else:
        scores = r.random(n) ** 4
    scores = scores.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.15, 1.0], p=[0.6, 0.33, 0.07])
    scores[spoilt] = r.choice([NAN, INF, -INF], int(spoilt.sum()))
    return scores


def hard_settings(r: np.random.Generator) -> dict[str, Any]:
    return {
        "keep": str(r.choice(["0.1", "0.29", "0.5", "0.75", "1"])),
        "smoothing": float(r.choice([0.0, 0.5, 0.9])),
        "threshold": [None, 0.0, 1.0, 2.5][r.integers(4)],
        "exponent": float(r.choice([1.0, 1.0, 0.5, 0.0, -1.0])),
    }


def batches(r: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    n = int(r.choice([1, 2, 5, 8, 16, 33]))
    sizes = [n] * int(r.integers(2, 6)) + [int(r.integers(1, n + 1))]
    ids = r.permutation(sum(sizes)).astype(np.int64) * 3 + 2**40
    return [
        (hard_scores(r, size), part)
        for size, part in zip(sizes, np.split(ids, np.cumsum(sizes)[:-1]), strict=True)
    ]


def planned(
    method: BatchImportance, scores: Any, ids: Any, gain: float | torch.Tensor, key: int
) -> tuple[BatchPlan, float]:
    signals = {"id": torch.as_tensor(ids), "grad_norm": torch.as_tensor(scores)}
    plan, state = method.plan_batch(
        signals, {"gain": torch.as_tensor(gain)}, step=0, generator=seeded(key)
    )
    assert plan.weights is not None
    return plan, float(state["gain"])


NUMBERS = depth(range(60), range(300))


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    r = np.random.default_rng(seed)
    settings = hard_settings(r)
    method, other = (
        BatchImportance(**settings | {"keep": float(settings["keep"])}),
        Transcribed(**settings),
    )
    gain = float(method.init_state()["gain"])
    assert gain == 0
    for step, (scores, ids) in enumerate(batches(r)):
        plan, after = planned(method, scores, ids, gain, seed * 100 + step)
        g = seeded(seed * 100 + step)
        keys = torch.rand(len(ids), generator=g).tolist()
        draws = torch.rand(len(plan.rows), generator=g, dtype=torch.float64).tolist()
        expected, gain_after = other.answer(scores.tolist(), ids.tolist(), gain, keys, draws)
        assert plan.rows.tolist() == [row for row, _ in expected]
        assert plan.weights.tolist() == pytest.approx([weight for _, weight in expected], rel=1e-5)
        assert after == pytest.approx(gain_after, rel=1e-5)
        gain = after


def test_the_instances_are_hard() -> None:
    met: set[str] = set()
    for seed in NUMBERS:
        r = np.random.default_rng(seed)
        settings = hard_settings(r)
        for scores, ids in batches(r):
            finite = scores[np.isfinite(scores)]
            b = max(1, math.floor(Fraction(settings["keep"]) * len(ids)))
            met |= {"one"} if len(ids) == 1 else set()
            met |= {"tied"} if len(set(finite.tolist())) < len(finite) else set()
            met |= {"all zero"} if len(finite) and not finite.any() else set()
            met |= {"huge"} if (finite > 1e37).any() else set()
            met |= {"nothing finite"} if not len(finite) else set()
            met |= {"more than b"} if len(ids) > len(ids) - len(finite) > b else set()
            met |= {"forced and drawn"} if 0 < len(ids) - len(finite) < b else set()
    assert met == {
        "one",
        "tied",
        "all zero",
        "huge",
        "nothing finite",
        "more than b",
        "forced and drawn",
    }


def test_the_gain_is_that_of_the_code() -> None:
    """The code computes it from the distance of the probabilities to the uniform ones."""
    scores = np.random.default_rng(0).gamma(0.5, 1.0, 64)
    g = scores / scores.sum()
    expected = 1 / math.sqrt(1 - ((g - 1 / 64) ** 2).sum() / (g**2).sum())
    assert variance_gain(
        masses(torch.from_numpy(scores)), torch.tensor(64)
    ).item() == pytest.approx(expected)


def test_worked_vector() -> None:
    g = torch.tensor([0.5, 0.3, 0.1, 0.1])
    assert variance_gain(masses(g), torch.tensor(4)).item() == pytest.approx(1.2)
    assert unbiased_row_weights(masses(g), torch.arange(4)).tolist() == pytest.approx(
        [0.5, 0.8333333, 2.5, 2.5]
    )
    assert Transcribed.gain([Fraction(5), Fraction(3), Fraction(1), Fraction(1)]) == pytest.approx(
        1.2
    )


@pytest.mark.parametrize(
    ("scores", "settings", "updates"),
    [([1.0] + [0.0] * 8, {}, 11), ([1.0] * 4 + [0.0] * 21, {"threshold": 2.0}, 16)],
)
def test_the_average_starts_from_zero(
    scores: list[float], settings: dict[str, float], updates: int
) -> None:
    """Gains of 3 and 2.5 pass a threshold of 2 after 11 and 16 updates; B = 3b has that threshold."""
    method, gain, uniform = BatchImportance(**settings), 0.0, []
    for step in range(updates + 3):
        plan, gain = planned(method, scores, torch.arange(len(scores)), gain, step)
        assert plan.weights is not None
        uniform.append(bool((plan.weights == 1).all()))
        if not uniform[-1]:
            assert {scores[row] for row in plan.rows.tolist()} == {1.0}
    assert uniform == [True] * updates + [False] * 3


def away(samples: np.ndarray, expected: float) -> float:
    """Distance of the mean in standard errors."""
    return abs(samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(len(samples)))


def means(
    method: BatchImportance, scores: np.ndarray, losses: np.ndarray, gain: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted and plain mean losses of many draws."""
    weighted, plain = [], []
    for key in range(depth(400, 1000)):
        plan, _ = planned(method, scores, np.arange(len(losses)), gain, key)
        assert plan.weights is not None
        here = losses[plan.rows.numpy()]
        weighted.append((plan.weights.numpy().astype(np.float64) * here).mean())
        plain.append(here.mean())
    return np.array(weighted), np.array(plain)


@pytest.mark.parametrize("strange", [0, 1, 3])
def test_the_weighted_mean_is_unbiased(strange: int) -> None:
    """Whatever the scores say of the losses, and with rows that have none."""
    r = np.random.default_rng(strange)
    losses = r.gamma(1.0, 1.0, 15) + 0.5
    scores = (losses * r.uniform(0.3, 3, 15)).astype(np.float32)
    scores[:strange] = NAN
    method = BatchImportance(keep=0.4)
    for gain in (9.0, 0.0):
        weighted, plain = means(method, scores, losses, gain)
        assert away(weighted, losses.mean()) < 3
        if gain:
            assert away(plain, losses.mean()) > depth(12, 20), "the test could not tell a bias"


def test_tempered_weights_are_biased_and_vary_less() -> None:
    r = np.random.default_rng(5)
    scores = (r.random(15) ** 2 + 0.02).astype(np.float32)
    losses = r.gamma(1.0, 1.0, 15)
    exact, _ = means(BatchImportance(keep=0.4), scores, losses, 9.0)
    tempered, _ = means(BatchImportance(keep=0.4, exponent=0.3), scores, losses, 9.0)
    assert tempered.std() < exact.std() / 1.5
    assert away(tempered, losses.mean()) > 5


def test_scores_that_say_the_loss_leave_no_variance() -> None:
    """w_i s_i is the mean of the scores, whichever rows are drawn; tempered weights keep the sum of a batch."""
    r = np.random.default_rng(6)
    scores = r.gamma(1.0, 1.0, 30).astype(np.float32)
    for exponent in (1.0, 0.5, 0.0):
        for key in range(20):
            plan, _ = planned(BatchImportance(exponent=exponent), scores, np.arange(30), 9.0, key)
            assert plan.weights is not None
            mean = (plan.weights.numpy() * scores[plan.rows.numpy()]).mean()
            assert mean == pytest.approx(scores.mean(), rel=1e-5)


def test_rows_come_as_often_as_their_score_says() -> None:
    scores = np.float32([4, 0, 1, 3, 2])
    drawn = np.zeros(5)
    for key in range(1000):
        plan, _ = planned(BatchImportance(keep=0.6), scores, np.arange(5), 9.0, key)
        drawn += np.bincount(plan.rows.numpy(), minlength=5)
    share = scores / scores.sum()
    assert drawn[1] == 0
    assert (np.abs(drawn / 3000 - share) < 4 * np.sqrt(share * (1 - share) / 3000) + 1e-12).all()
