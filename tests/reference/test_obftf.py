"""OBFTF against a transcription in exact arithmetic, and against every subset there is.

The transcription goes through samples as tuples (loss, id), tries each swap one after the other and compares fractions.
"""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import Obftf
from thresher.rng import seeded

Sample = tuple[Fraction, int, int]  # loss, id, row


def transcribed(losses: list[float], ids: list[int], keep: str, swaps: int) -> list[int]:
    n = len(losses)
    count = max(1, math.floor(Fraction(keep) * n))
    strange = sorted((ids[row], row) for row in range(n) if not math.isfinite(losses[row]))
    ranked: list[Sample] = sorted(
        (Fraction(losses[r]), ids[r], r) for r in range(n) if math.isfinite(losses[r])
    )
    kept = [row for _, row in strange[::-1][:count]]
    left = count - len(kept)
    if left == 0:
        return sorted(kept)
    inside = [ranked[math.floor(Fraction(2 * j + 1, 2 * left) * len(ranked))] for j in range(left)]
    target = sum(loss for loss, _, _ in ranked) / len(ranked)
    for _ in range(swaps):
        nearest, swap = abs(mean(inside) - target), None
        for out in sorted(inside):
            for new in ranked:
                if new in inside:
                    continue
                distance = abs(mean(inside) + (new[0] - out[0]) / left - target)
                if distance < nearest:
                    nearest, swap = distance, (out, new)
        if swap is None:
            break
        inside.remove(swap[0])
        inside.append(swap[1])
    return sorted(kept + [row for _, _, row in inside])


def mean(samples: list[Sample]) -> Fraction:
    return sum((loss for loss, _, _ in samples), Fraction(0)) / len(samples)


def rows_of(method: Obftf, losses: np.ndarray, ids: np.ndarray) -> list[int]:
    signals = {"id": torch.from_numpy(ids), "loss": torch.from_numpy(losses)}
    plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
    assert plan.weights is None and state == {}
    return plan.rows.tolist()


def hard_losses(r: np.random.Generator, n: int) -> np.ndarray:
    """Ties, negative, huge and tiny values on a grid on which sums do not round, and some that are not finite."""
    kind = r.integers(6)
    if kind == 0:
        losses = np.round(r.gamma(1.0, 1.0, n) * 1024) / 1024
    elif kind == 1:
        losses = r.choice([0.0, 0.25, 3.0], n)
    elif kind == 2:
        losses = np.full(n, r.choice([0.0, 2.5]))
    elif kind == 3:
        losses = r.integers(-500, 500, n) * 2.0 ** r.choice([-120, 118])
    elif kind == 4:
        losses = r.integers(0, 4, n).astype(float)
        losses[r.integers(n)] = 2.0**20
    else:
        losses = r.integers(0, 2**20, n) / 2**12
    losses = losses.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])
    losses[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    return losses


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, str, int]:
    r = np.random.default_rng(seed)
    n = int(r.choice([1, 2, 3, 5, 8, 13, 24]))
    ids = r.permutation(100)[:n].astype(np.int64) * 3 + 2**40
    return (
        hard_losses(r, n),
        ids,
        str(r.choice(["0.1", "0.29", "0.5", "0.75", "1"])),
        int(r.choice([0, 1, 2, 8])),
    )


NUMBERS = depth(range(60), range(300))


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    losses, ids, keep, swaps = instance(seed)
    found = rows_of(Obftf(float(keep), swaps), losses, ids)
    assert found == transcribed(losses.tolist(), ids.tolist(), keep, swaps)


def test_the_instances_are_hard() -> None:
    met: set[str] = set()
    for seed in NUMBERS:
        losses, ids, keep, swaps = instance(seed)
        finite = losses[np.isfinite(losses)]
        count = max(1, math.floor(Fraction(keep) * len(losses)))
        met |= {"one"} if len(losses) == 1 else set()
        met |= {"tied"} if len(set(finite.tolist())) < len(finite) else set()
        met |= {"huge"} if (np.abs(finite) > 1e36).any() else set()
        met |= {"nothing finite"} if not len(finite) else set()
        met |= (
            {"too few for all"}
            if 0 < len(finite) < len(losses) and len(losses) - len(finite) >= count
            else set()
        )
        met |= {"some of each"} if 0 < len(losses) - len(finite) < count < len(losses) else set()
        met |= {"everything"} if count == len(losses) else set()
        arguments = losses.tolist(), ids.tolist(), keep
        met |= (
            {"moves"}
            if transcribed(*arguments, 0)
            != transcribed(*arguments, 1)
            != transcribed(*arguments, 2)
            else set()
        )
    assert met == {
        "one",
        "tied",
        "huge",
        "nothing finite",
        "too few for all",
        "some of each",
        "everything",
        "moves",
    }


def test_worked_vector() -> None:
    losses = np.float32([0.1, 0.4, 0.9, 1.6, 2.0])
    for swaps in (0, 8):
        assert rows_of(Obftf(keep=0.4, swaps=swaps), losses, np.arange(5)) == [1, 3]
    assert losses[[1, 3]].mean() == pytest.approx(1.0) == losses.mean()


@pytest.mark.parametrize("keep", depth([0.25], [0.25, 0.5]))
def test_close_to_the_best_subset(keep: float) -> None:
    """Twelve losses, 300 times: always among the best tenth of all subsets, far nearer than the start or a random subset."""
    r = np.random.default_rng(0)
    n, k, ranks, gaps = 12, int(12 * keep), [], {"found": [], "start": [], "random": [], "best": []}
    subsets = np.array(list(combinations(range(n), k)))
    for _ in range(300):
        losses = r.gamma(1.0, 1.0, n).astype(np.float32)
        wide = losses.astype(np.float64)

        def gap(rows: list[int], wide: np.ndarray = wide) -> float:
            return abs(wide[rows].mean() - wide.mean())

        every = np.sort(np.abs(wide[subsets].mean(1) - wide.mean()))
        found = gap(rows_of(Obftf(keep), losses, np.arange(n)))
        ranks.append((every < found - 1e-12).mean())
        gaps["found"].append(found)
        gaps["start"].append(gap(rows_of(Obftf(keep, swaps=0), losses, np.arange(n))))
        gaps["random"].append(gap(r.permutation(n)[:k].tolist()))
        gaps["best"].append(every[0])
    means = {name: np.mean(values) for name, values in gaps.items()}
    assert max(ranks) < 0.1 and np.mean(ranks) < 0.02
    assert means["best"] <= means["found"] < 3 * means["best"]
    assert means["found"] < means["start"] / 5 and means["found"] < means["random"] / 15
