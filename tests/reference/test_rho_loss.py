"""RHO-LOSS against a transcription that looks losses up in a dict and sorts tuples, and its claim: not the noisy ones."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import RhoLoss
from thresher.rng import seeded
from thresher.scores import Scores


def transcribed(
    losses: list[float], ids: list[int], irreducible: dict[int, float], keep: str
) -> list[int]:
    count = max(1, math.floor(Fraction(keep) * len(ids)))
    queue = []
    for row, (loss, i) in enumerate(zip(losses, ids, strict=True)):
        held_out = irreducible.get(i, math.nan)
        if math.isfinite(loss) and math.isfinite(held_out):
            with np.errstate(over="ignore"):
                score = float(np.float32(loss) - np.float32(held_out))
            if math.isfinite(score):
                queue.append((0, score, i, row))
                continue
        queue.append((1, 0.0, i, row))
    queue.sort()
    return sorted(row for *_, row in queue[-count:])


def rows_of(method: RhoLoss, losses: np.ndarray, ids: np.ndarray) -> list[int]:
    signals = {"id": torch.from_numpy(ids), "loss": torch.from_numpy(losses)}
    plan, _ = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
    assert plan.weights is None
    return plan.rows.tolist()


def hard_losses(r: np.random.Generator, n: int) -> np.ndarray:
    kind = r.integers(4)
    if kind == 0:
        losses = r.gamma(1.0, 1.0, n)
    elif kind == 1:
        losses = r.choice([0.0, 0.5, 3.0], n)
    elif kind == 2:
        losses = r.choice([1e-30, 3e38, -3e38, 1.0], n) * r.random(n)
    else:
        losses = np.full(n, 2.5)
    losses = losses.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.15, 1.0], p=[0.6, 0.35, 0.05])
    losses[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    return losses


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, dict[int, float], str]:
    """Losses and ids of a batch, and a table with gaps that may end before the batch's largest id."""
    r = np.random.default_rng(seed)
    n = int(r.choice([1, 2, 5, 10, 33, 64]))
    ids = r.permutation(200)[:n].astype(np.int64)
    known = np.flatnonzero(r.random(200) < r.choice([0.3, 0.9, 1.0]))
    known = known[: int(r.choice([100, 200]))]
    table = dict(zip(known.tolist(), hard_losses(r, len(known)).tolist(), strict=True))
    return hard_losses(r, n), ids, table, str(r.choice(["0.1", "0.29", "0.5", "1"]))


NUMBERS = depth(range(60), range(300))


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    losses, ids, table, keep = instance(seed)
    scores = Scores(torch.tensor(list(table)), torch.tensor(list(table.values())))
    found = rows_of(RhoLoss(scores, keep=float(keep)), losses, ids)
    assert found == transcribed(losses.tolist(), ids.tolist(), table, keep)


def test_the_instances_are_hard() -> None:
    met: set[str] = set()
    for seed in NUMBERS:
        losses, ids, table, _ = instance(seed)
        reducible = [
            float(np.float32(x)) - table[i]
            for x, i in zip(losses, ids.tolist(), strict=True)
            if i in table
        ]
        finite = [value for value in reducible if math.isfinite(value)]
        met |= {"one"} if len(ids) == 1 else set()
        met |= {"tied"} if len(set(finite)) < len(finite) else set()
        met |= {"beyond the table"} if max(ids) > max(table) else set()
        met |= {"a gap"} if any(i not in table and i < max(table) for i in ids.tolist()) else set()
        met |= {"not finite"} if len(finite) < len(reducible) else set()
        met |= {"overflow"} if any(abs(value) > 3.5e38 for value in finite) else set()
    assert met == {"one", "tied", "beyond the table", "a gap", "not finite", "overflow"}


LOSSES = np.float32([2.3, 0.1, 1.5, 3, 0.7, 2, 0.9, 1.1, 0.4, 2.2])
IRREDUCIBLE = np.float32([2.2, 0.05, 0.4, 2.9, 0.6, 0.5, 0.9, 0.2, 0.1, 2.3])


def test_worked_vector() -> None:
    scores = Scores(torch.arange(10), torch.from_numpy(IRREDUCIBLE))
    method = RhoLoss(scores, keep=0.2)
    signals = {"loss": torch.from_numpy(LOSSES), "irreducible": torch.from_numpy(IRREDUCIBLE)}
    expected = [0.1, 0.05, 1.1, 0.1, 0.1, 1.5, 0, 0.9, 0.3, -0.1]
    assert method.scores(signals).tolist() == pytest.approx(expected, abs=1e-6)
    assert rows_of(method, LOSSES, np.arange(10)) == [2, 5]
    nothing = Scores(torch.arange(10), torch.zeros(10))
    assert rows_of(RhoLoss(nothing, keep=0.2), LOSSES, np.arange(10)) == [0, 3]
