"""Parts of importance sampling in the batch by hand; the whole of it is in tests/reference."""

import math
from typing import Any

import pytest
import torch

from thresher import BatchImportance, BatchPlan
from thresher.methods.batch_importance import (
    masses,
    unbiased_row_weights,
    variance_gain,
    with_replacement,
)
from thresher.rng import seeded

NAN, INF = math.nan, math.inf


def planned(
    method: BatchImportance, scores: Any, ids: Any = None, gain: float = 9.0, seed: int = 0
) -> tuple[BatchPlan, dict[str, Any]]:
    scores = torch.as_tensor(scores)
    signals = {
        "id": torch.arange(len(scores)) if ids is None else torch.as_tensor(ids),
        "grad_norm": scores,
    }
    return method.plan_batch(signals, {"gain": torch.tensor(gain)}, step=0, generator=seeded(seed))


def weights(plan: BatchPlan) -> list[float]:
    assert plan.weights is not None and plan.weights.dtype == torch.float32
    return plan.weights.tolist()


def test_published_defaults() -> None:
    assert BatchImportance() == BatchImportance(
        keep=1 / 3, smoothing=0.9, threshold=None, exponent=1.0
    )
    assert BatchImportance.requires.signals == ("grad_norm",)
    assert BatchImportance().card.bytes_per_sample == 0
    assert [BatchImportance().count(n) for n in (1, 3, 9, 100)] == [1, 1, 3, 33]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        ({"keep": 1.1}, r"`keep` is the share kept, within \(0, 1\], got 1.1"),
        ({"smoothing": 1}, r"`smoothing` must be a number within \[0, 1\), got 1"),
        ({"smoothing": -0.1}, r"`smoothing` .* got -0.1"),
        ({"smoothing": NAN}, r"`smoothing` .* got nan"),
        ({"threshold": -1}, "`threshold` must be a finite number >= 0, or None, got -1"),
        ({"threshold": INF}, "`threshold` .* got inf"),
        ({"threshold": NAN}, "`threshold` .* got nan"),
        ({"exponent": 1.5}, r"`exponent` must be a number within \(-inf, 1\], got 1.5"),
        ({"exponent": -INF}, "`exponent` .* got -inf"),
        ({"exponent": NAN}, "`exponent` .* got nan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^BatchImportance: {message}"):
        BatchImportance(**settings)


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ([2.0, 1.0, 4.0], [0.5, 0.25, 1]),
        ([NAN, 1.0, INF, -INF, 0.5], [0, 1, 0, 0, 0.5]),
        ([0.0, 0.0], [1, 1]),
        ([0.0, NAN, 0.0], [1, 0, 1]),
        ([NAN, INF], [0, 0]),
        ([-1.0, 2.0], [0, 1]),
        ([-1.0, -2.0], [1, 1]),
        ([3e38, 3e38], [1, 1]),
        ([1e-45, 0.0], [1, 0]),
    ],
)
def test_masses(scores: list[float], found: list[float]) -> None:
    assert masses(torch.tensor(scores)).tolist() == found


@pytest.mark.parametrize(
    ("mass", "n", "gain"),
    [
        ([1.0, 1, 1, 1], 4, 1),
        ([1.0, 0, 0, 0], 4, 2),
        ([1.0, 1, 0, 0, 0], 4, math.sqrt(2)),
        ([1.0], 1, 1),
    ],
)
def test_variance_gain(mass: list[float], n: int, gain: float) -> None:
    assert variance_gain(torch.tensor(mass), torch.tensor(n)).item() == pytest.approx(gain)


def test_draws_at_the_ends() -> None:
    """A row without mass is never drawn, wherever it stands and whatever the draw."""
    mass = torch.tensor([0, 1, 0, 2, 0], dtype=torch.float64)
    draws = torch.tensor([0, 0.6, 2 / 3 + 1e-9, 0.99, 1 - 2**-53], dtype=torch.float64)
    assert with_replacement(mass, draws).tolist() == [3, 3, 1, 1, 1]


def test_weights_of_positions() -> None:
    mass = torch.tensor([1, 0, 0.5, 0.5], dtype=torch.float64)
    assert unbiased_row_weights(mass, torch.tensor([0, 1, 2, 2])).tolist() == [0.5, 0, 1, 1]
    flat = unbiased_row_weights(mass, torch.tensor([0, 1, 2]), 0.0)
    assert flat.tolist() == pytest.approx([2 / 3, 0, 2 / 3]), (
        "their weighted masses still add up to 1"
    )
    assert unbiased_row_weights(mass, torch.tensor([0, 2]), -1.0).tolist() == pytest.approx(
        [0.8, 0.4]
    )


def test_uniform_at_first() -> None:
    """No row twice, weights of exactly 1, and another draw each time."""
    found = set()
    for seed in range(20):
        plan, state = planned(
            BatchImportance(), torch.rand(30, generator=seeded(3)), gain=0.0, seed=seed
        )
        rows = plan.rows.tolist()
        assert len(set(rows)) == 10 and rows == sorted(rows) and set(weights(plan)) == {1.0}
        found.add(tuple(rows))
    assert len(found) == 20
    assert plan.facts == pytest.approx({"scheduled_fraction": 2 / 3, "actual_fraction": 2 / 3})


@pytest.mark.parametrize(("gain", "active"), [(2.0, False), (2.0001, True)])
def test_the_average_must_be_above_the_threshold(gain: float, active: bool) -> None:
    plan, _ = planned(BatchImportance(), [1.0, *[0.0] * 8], gain=gain)
    assert (plan.rows.tolist() == [0, 0, 0]) == active
    assert weights(plan) == [pytest.approx(1 / 9) if active else 1.0] * 3


def test_the_average_before_the_batch_decides() -> None:
    method = BatchImportance(smoothing=0.0, threshold=1.5)
    plan, state = planned(method, [1.0, *[0.0] * 8], gain=0.0)
    assert set(weights(plan)) == {1.0} and state["gain"].item() == 3
    assert method.report(state) == {"gain": 3.0}
    plan, state = planned(method, [1.0] * 9, gain=3.0)
    assert state["gain"].item() == 1


def test_rows_without_a_score_are_kept_once_each() -> None:
    scores = torch.full((20,), 1e-3)
    scores[[2, 5, 9]] = torch.tensor([NAN, INF, -INF])
    scores[7] = 50.0
    for gain in (9.0, 0.0):
        for seed in range(10):
            plan, _ = planned(BatchImportance(keep=0.3), scores, gain=gain, seed=seed)
            rows = plan.rows.tolist()
            assert [rows.count(row) for row in (2, 5, 9)] == [1, 1, 1] and len(rows) == 6
            by_row = dict(zip(rows, weights(plan), strict=True))
            assert [by_row[row] for row in (2, 5, 9)] == [pytest.approx(6 / 20)] * 3
            if not gain:
                assert max(by_row.values()) == pytest.approx(17 / 20 * 6 / 3)


def test_more_rows_without_a_score_than_room() -> None:
    plan, state = planned(BatchImportance(keep=0.4), [NAN, 1.0, INF, NAN, 2.0], ids=[9, 1, 3, 5, 2])
    assert plan.rows.tolist() == [0, 3], "the higher ids"
    assert weights(plan) == [pytest.approx(3 / 5)] * 2
    assert state["gain"].item() == pytest.approx(0.9 * 9 + 0.1 * math.sqrt(2 * 5) / 3)


def test_no_score_leaves_the_average_alone() -> None:
    plan, state = planned(BatchImportance(), [NAN] * 6, gain=1.25)
    assert plan.rows.tolist() == [4, 5] and state["gain"].item() == 1.25


def test_as_many_random_numbers_whatever_the_scores() -> None:
    states = []
    for gain, scores in ((0.0, [1.0] * 9), (9.0, [NAN] * 9), (9.0, [1.0] * 9)):
        g = seeded(0)
        signals = {"id": torch.arange(9), "grad_norm": torch.tensor(scores)}
        BatchImportance().plan_batch(signals, {"gain": torch.tensor(gain)}, step=0, generator=g)
        states.append(g.get_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_an_empty_batch() -> None:
    plan, state = planned(BatchImportance(), torch.empty(0), gain=1.5)
    assert plan.rows.tolist() == weights(plan) == [] and state["gain"].item() == 1.5
