"""JEST against a transcription of its sampling, row by row: the next row of a chunk is that whose waiting time ends first."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import Jest
from thresher.rng import seeded
from thresher.scores import Scores


def transcribed(matrix: np.ndarray, chunks: int, k: int, waits: np.ndarray) -> list[int]:
    """Positions drawn; `matrix` has the learnability of image i and text j."""
    n = len(matrix)
    chunks = min(chunks, k)
    drawn: list[int] = []
    for number in range(chunks):
        before = list(drawn)
        for _ in range(k // chunks + (1 if number < k % chunks else 0)):
            times = {}
            for j in range(n):
                if j in drawn:
                    continue
                if not math.isfinite(matrix[j, j]):
                    times[j] = -math.inf
                    continue
                logit = 0.0
                if number:
                    logit = matrix[j, j]
                    for i in before:
                        logit += matrix[i, j] if math.isfinite(matrix[i, j]) else 0.0
                        logit += matrix[j, i] if math.isfinite(matrix[j, i]) else 0.0
                    logit /= 2 * len(before) + 1
                times[j] = math.log(waits[number, j]) - logit
            soonest = min(times.values())
            drawn.append(max(j for j, time in times.items() if time == soonest))
    return drawn


def waits_of(seed: int, chunks: int, n: int) -> np.ndarray:
    return torch.empty(chunks, n, dtype=torch.float64).exponential_(generator=seeded(seed)).numpy()


def hard_matrix(r: np.random.Generator, n: int) -> np.ndarray:
    kind = r.integers(5)
    matrix = r.normal(size=(n, n)) * r.choice([0.1, 3.0])
    if kind == 1:
        matrix = np.round(matrix)
    if kind == 2:
        matrix[:] = 1.5
    if kind == 3:
        matrix *= 1e30
    if kind == 4:
        matrix[r.random((n, n)) < r.choice([0.2, 1.0])] = r.choice([math.nan, math.inf, -math.inf])
    return matrix.astype(np.float32)


NUMBERS = depth(range(60), range(400))


@over_instances(NUMBERS)
def test_matrices(seed: int) -> None:
    r = np.random.default_rng(seed)
    n, chunks, keep = (
        int(r.choice([1, 2, 7, 16])),
        int(r.choice([1, 2, 5, 16])),
        float(r.choice([0.1, 0.5, 1.0])),
    )
    matrix, k = hard_matrix(r, n), max(1, math.floor(keep * n))
    expected = transcribed(matrix.astype(float), chunks, k, waits_of(seed, min(chunks, k), n))
    ids = np.sort(r.permutation(100)[:n]).astype(np.int64) + 2**40
    order = r.permutation(n)
    signals = {
        "id": torch.from_numpy(ids[order]),
        "learnability": torch.from_numpy(matrix[np.ix_(order, order)]),
    }
    plan, state = Jest(keep=keep, chunks=chunks, pairs=True).plan_batch(
        signals, {}, step=0, generator=seeded(seed)
    )
    assert sorted(order[plan.rows.numpy()].tolist()) == sorted(expected)
    assert plan.rows.tolist() == sorted(plan.rows.tolist()) and plan.weights is None and state == {}


@over_instances(NUMBERS)
def test_single_samples_have_no_pairs(seed: int) -> None:
    r = np.random.default_rng(seed)
    n, chunks, keep = (
        int(r.choice([1, 2, 7, 16])),
        int(r.choice([1, 3, 16])),
        float(r.choice([0.2, 0.5])),
    )
    losses = np.diagonal(hard_matrix(r, n)).copy()
    reference = r.normal(size=n).astype(np.float32)
    k = max(1, math.floor(keep * n))
    expected = transcribed(
        np.diag(losses.astype(float) - reference), chunks, k, waits_of(seed, min(chunks, k), n)
    )
    method = Jest(Scores(torch.arange(n), torch.from_numpy(reference)), keep=keep, chunks=chunks)
    signals = {"id": torch.arange(n), "loss": torch.from_numpy(losses)}
    plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(seed))
    assert plan.rows.tolist() == sorted(expected)
    assert torch.equal(state["irreducible"], torch.from_numpy(reference))


def test_chances_of_the_second_chunk() -> None:
    """After row 0, a row j has chance in proportion to exp((s_jj + s_0j + s_j0) / 3)."""
    matrix = torch.tensor(
        [
            [math.nan, 3.0, 0.0, 0.0],
            [0.0, 0.0, 9.0, 0.0],
            [1.5, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 1.5],
        ]
    )
    counts = np.zeros(4)
    for seed in range(3000):
        signals = {"id": torch.arange(4), "learnability": matrix}
        plan, _ = Jest(keep=0.5, chunks=2, pairs=True).plan_batch(
            signals, {}, step=0, generator=seeded(seed)
        )
        counts[plan.rows.numpy()] += 1
    chances = np.exp([3 / 3, 1.5 / 3, 1.5 / 3])
    assert counts[0] == 3000
    assert counts[1:] / 3000 == pytest.approx(chances / chances.sum(), abs=0.04)


def test_one_chunk_is_uniform() -> None:
    counts = np.zeros(5)
    for seed in range(2000):
        signals = {"id": torch.arange(5), "loss": torch.tensor([100.0, 0, 0, 0, 0])}
        counts[
            Jest(keep=0.2, chunks=1)
            .plan_batch(signals, {}, step=0, generator=seeded(seed))[0]
            .rows[0]
        ] += 1
    assert counts / 2000 == pytest.approx([0.2] * 5, abs=0.04)


@pytest.mark.parametrize("keep", [0.1, 0.2, 0.37])
def test_the_realized_share(keep: float) -> None:
    signals = {"id": torch.arange(128), "loss": torch.rand(128, generator=seeded(0))}
    assert len(
        Jest(keep=keep).plan_batch(signals, {}, step=0, generator=seeded(1))[0].rows
    ) / 128 == pytest.approx(keep, abs=0.01)


def test_nothing_of_an_empty_batch() -> None:
    plan, _ = Jest().plan_batch(
        {"id": torch.arange(0), "loss": torch.empty(0)}, {}, step=0, generator=seeded(0)
    )
    assert len(plan.rows) == 0


def test_what_the_reference_cost_and_lacks(tmp_path: Path) -> None:
    scores = Scores(torch.arange(3), torch.tensor([0.1, math.nan, 0.3]), forward=30, backward=20)
    scores.save(tmp_path / "s.parquet")
    for given in (scores, tmp_path / "s.parquet"):
        method = Jest(given)  # type: ignore[arg-type]
        assert method.cost == (30, 20)
        with pytest.raises(
            ValueError, match="Jest: `irreducible` has .* 1 of 3 samples; the first is sample 1"
        ):
            method.check(torch.arange(3))
    assert Jest().cost == (0, 0)
    Jest().check(torch.arange(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 1.5}, r"`keep` is the share kept, within \(0, 1\], got 1.5"),
        ({"chunks": 0}, "`chunks` must be a whole number of 1 or more, got 0"),
        ({"chunks": True}, "`chunks` must be a whole number of 1 or more, got True"),
        (
            {"irreducible": 3},
            "`irreducible` must be a thresher.scores.Scores or the path of its Parquet file, got 3",
        ),
        ({"irreducible": "x.parquet", "pairs": True}, "pass either `irreducible` .* or pairs=True"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Jest: {message}"):
        Jest(**settings)
