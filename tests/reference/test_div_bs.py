"""DivBS against a transcription with whole gradients: outer products, Gram-Schmidt on vectors, a residual vector."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import DivBS
from thresher.methods.div_bs import gradient_products, pursued
from thresher.rng import seeded


def worths(vectors: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Inner products of all gradients with the mean gradient, after its components along the chosen ones were taken out."""
    residual, basis = vectors.mean(0), []
    for i in chosen:
        direction = vectors[i].copy()
        for _ in range(2):
            for one in basis:
                direction -= (direction @ one) * one
        if np.linalg.norm(direction) > 1e-4 * np.linalg.norm(vectors[i]):
            direction /= np.linalg.norm(direction)
            basis.append(direction)
            residual = residual - (residual @ direction) * direction
    return np.abs(vectors @ residual)


def hard_rows(r: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    kind = r.integers(5)
    error, feature = r.normal(size=(n, 3)), r.normal(size=(n, 4))
    if kind == 1:
        error, feature = np.round(error), np.round(feature)
    if kind == 2:
        error[:], feature[:] = error[0], feature[0]
    if kind == 3:
        error, feature = error * 1e15, feature * 1e15
    if kind == 4:
        error[:] = 0
    return error.astype(np.float32), feature.astype(np.float32)


NUMBERS = depth(range(60), range(600))


@over_instances(NUMBERS)
def test_each_row_is_the_one_with_the_largest_inner_product(seed: int) -> None:
    r = np.random.default_rng(seed)
    n = int(r.choice([1, 2, 5, 16]))
    error, feature = hard_rows(r, n)
    bad = np.flatnonzero(r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1]))
    error[bad, 0] = r.choice([math.nan, math.inf, -math.inf], len(bad))
    layer = bool(r.integers(2))
    keep = float(r.choice([0.1, 0.5, 1.0]))
    k = max(1, math.floor(keep * n))
    lots = torch.rand(n, generator=seeded(seed), dtype=torch.float64)
    products, finite = gradient_products(
        torch.from_numpy(error), torch.from_numpy(feature) if layer else None
    )
    order = pursued(products, finite, k, lots, None).tolist()
    assert len(set(order)) == k
    first = order[: min(k, len(bad))]
    assert first == sorted(bad.tolist())[::-1][:k], (
        "what is not finite comes first, the highest position of all"
    )
    fine = np.setdiff1d(np.arange(n), bad)
    wide = error.astype(float) / (np.abs(error[fine]).max(initial=0) or 1)
    wide[bad] = 0
    inputs = feature.astype(float) / (np.abs(feature[fine]).max(initial=0) or 1)
    vectors = np.einsum("nc,nd->ncd", wide, inputs).reshape(n, -1) if layer else wide
    scale = worths(vectors[fine], [])[:, None].max(initial=0) if len(fine) else 0
    places = {row: i for i, row in enumerate(fine)}
    for slot in range(len(first), k):
        before = [places[row] for row in order[len(first) : slot]]
        found = worths(vectors[fine], before)
        free = np.setdiff1d(np.arange(len(fine)), before)
        best = found[free].max()
        if best > 1e-6 * scale and scale > 0:
            assert found[places[order[slot]]] >= best - 1e-6 * scale
        elif best < 1e-12 * scale or scale == 0:
            left = [fine[i] for i in free]
            assert order[slot] == max(left, key=lambda row: lots[row]), "random rows fill up"


@over_instances(depth(range(20), range(200)))
def test_draws_in_proportion_to_the_inner_products(seed: int) -> None:
    """Of exponential waiting times over the inner products, the shortest wins: here written as the largest ratio."""
    r = np.random.default_rng(seed)
    n, k = 8, 3
    error, feature = (
        r.normal(size=(n, 3)).astype(np.float32),
        r.normal(size=(n, 4)).astype(np.float32),
    )
    generator = seeded(seed)
    lots = torch.rand(n, generator=generator, dtype=torch.float64)
    waits = torch.empty(k, n, dtype=torch.float64).exponential_(generator=generator)
    products, finite = gradient_products(torch.from_numpy(error), torch.from_numpy(feature))
    order = pursued(products, finite, k, lots, waits).tolist()
    vectors = np.einsum("nc,nd->ncd", error.astype(float), feature.astype(float)).reshape(n, -1)
    for slot, row in enumerate(order):
        ratio = worths(vectors, order[:slot]) / waits[slot].numpy()
        ratio[order[:slot]] = -1
        assert row == ratio.argmax()
    method = DivBS(keep=k / n, sample=True)
    signals = {
        "id": torch.arange(n),
        "error": torch.from_numpy(error),
        "feature": torch.from_numpy(feature),
    }
    assert method.plan_batch(signals, {}, step=0, generator=seeded(seed))[
        0
    ].rows.tolist() == sorted(order)


def test_the_share_of_draws_is_that_of_the_inner_products() -> None:
    error = torch.tensor([[3.0], [1.0], [0.0], [-2.0]])
    counts = np.zeros(4)
    for seed in range(2000):
        method, signals = (
            DivBS(keep=0.25, gradient="outputs", sample=True),
            {"id": torch.arange(4), "error": error},
        )
        counts[method.plan_batch(signals, {}, step=0, generator=seeded(seed))[0].rows[0]] += 1
    assert counts / 2000 == pytest.approx([0.5, 1 / 6, 0, 1 / 3], abs=0.04)


def test_worked_vector() -> None:
    """Two alike rows, one at a right angle and one that is small: the second pick is not the twin of the first."""
    error = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 0.25]])
    signals = {"id": torch.arange(4), "error": error, "feature": torch.ones(4, 1)}
    plan, state = DivBS(keep=0.5).plan_batch(signals, {}, step=0, generator=seeded(0))
    assert plan.rows.tolist() == [1, 2] and plan.weights is None and state == {}
    assert plan.facts == {"scheduled_fraction": 0.5, "actual_fraction": 0.5}


def test_nothing_of_an_empty_batch() -> None:
    signals = {"id": torch.arange(0), "error": torch.empty(0, 2), "feature": torch.empty(0, 3)}
    assert len(DivBS().plan_batch(signals, {}, step=0, generator=seeded(0))[0].rows) == 0


@pytest.mark.parametrize("keep", [0.1, 0.25, 0.37])
def test_the_realized_share(keep: float) -> None:
    kept = 0
    for step in range(10):
        signals = {"id": torch.arange(128), "error": torch.randn(128, 3, generator=seeded(step))}
        kept += len(
            DivBS(keep, "outputs")
            .plan_batch(signals, {}, step=step, generator=seeded(0, step))[0]
            .rows
        )
    assert kept / 1280 == pytest.approx(keep, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        ({"gradient": "bias"}, "`gradient` must be 'layer' or 'outputs', got 'bias'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^DivBS: {message}"):
        DivBS(**settings)
