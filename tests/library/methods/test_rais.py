"""Features, least squares, gain and settings of Rais; the whole of it is in tests/reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from thresher import Rais
from thresher.methods._base import Chances
from thresher.methods.rais import (
    TRUSTING,
    features,
    fitted_estimates,
    gain,
    nonnegative_least_squares,
    normal_equations,
)
from thresher.records import Records
from thresher.rng import seeded


def test_defaults() -> None:
    assert Rais() == Rais(robustness=1.0, uniform=0.01, keep=1.0)


def test_features() -> None:
    found = features(np.float32([2, 0, 1e30]), np.int16([1, 3, 2]), 4.0)
    np.testing.assert_allclose(
        found, [[1, 1, 1], [0, 3, 1], [np.float64(np.float32(1e30)) ** 2 / 4, 2, 1]], rtol=1e-12
    )


@pytest.mark.parametrize("number", range(60))
def test_least_squares_fulfil_the_conditions_of_their_optimum(number: int) -> None:
    """No coefficient below zero; where one is above, the slope is zero; where one is zero, the slope is not downwards."""
    r = np.random.default_rng(number)
    x = r.gamma(1.0, 1.0, (int(r.integers(3, 60)), 3))
    if number % 3 == 0:
        x[:, 1] = 1.0  # as ages that are all the same
    true = r.choice([0.0, 0.5, -0.5, 2.0], 3)
    y = x @ true + r.normal(size=len(x)) * r.choice([0, 0.3])
    c = nonnegative_least_squares(normal_equations([(x[:2], y[:2]), (x[2:], y[2:])]))
    slope = x.T @ (x @ c - y)
    scale = 1e-7 * (1 + np.abs(x.T @ y).max())
    assert (c >= 0).all()
    assert (np.abs(slope[c > 0]) < scale).all() and (slope > -scale).all()
    if (true >= 0).all() and np.allclose(y, x @ true) and number % 3:
        np.testing.assert_allclose(c, true, atol=1e-6)


def test_of_columns_that_say_the_same_one_is_used() -> None:
    x = np.array([[1.0, 1, 1], [2, 1, 1], [4, 1, 1]])
    np.testing.assert_allclose(solved(x, [3, 4, 6]), [1, 0, 2], atol=1e-9)
    assert solved(x, [-1, -1, -1]).tolist() == [0, 0, 0]
    assert solved(x, [0, 0, 0]).tolist() == [0, 0, 0]


def solved(x: np.ndarray, y: list[float]) -> np.ndarray:
    return nonnegative_least_squares(normal_equations([(x, np.array(y, np.float64))]))


def fitted(x: np.ndarray, squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In two pieces, the second of which may be empty."""
    return fitted_estimates(lambda: [(x[:9], squared[:9]), (x[9:], squared[9:])])


def test_what_is_learned() -> None:
    """Squares that are half of the old ones and a constant, with an error of a tenth of the constant."""
    r = np.random.default_rng(0)
    x = features(r.gamma(1.0, 1.0, 4000), r.integers(1, 5, 4000), 1.0)
    squared = 0.5 * x[:, 0] + 2 + r.choice([-0.1, 0.1], 4000)
    c, d = fitted(x, squared)
    np.testing.assert_allclose(c, [0.5, 0, 2], atol=0.02)
    np.testing.assert_allclose(x @ d, 0.1, atol=0.02)
    older = 0.5 * x[:, 0] + 0.3 * x[:, 1]
    np.testing.assert_allclose(fitted(x, older)[0], [0.5, 0.3, 0], atol=1e-9)


def test_too_few_to_learn_from() -> None:
    x = features(np.ones(9), np.ones(9), 1.0)
    assert fitted(x, np.full(9, 7.0)) is TRUSTING
    assert fitted(np.concatenate([x, x[:1]]), np.full(10, 7.0)) is not TRUSTING


@pytest.mark.parametrize(
    ("squared", "chances", "expected"),
    [
        ([16, 1, 1, 4], [0.5, 0.125, 0.125, 0.25], 1.375),
        ([16, 1, 1, 4], [0.25] * 4, 1),
        ([1, 1], [0.9, 0.1], 2 * 2 / (1 / 0.9 + 1 / 0.1)),
        ([4, 0], [1, 0], 2),
        ([0, 0], [0.5, 0.5], 1),
        ([math.nan, 4, 0], [math.nan, 1, 0], 2),
    ],
)
def test_gain(squared: list[float], chances: list[float], expected: float) -> None:
    assert gain(np.array(squared, np.float64), Chances(np.array(chances))) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"robustness": value},
                rf"`robustness` must be a number within \[0, inf\), got {value}",
            )
            for value in (-0.1, math.nan, math.inf)
        ),
        *(
            (
                {"uniform": value},
                rf"`uniform` must be a number within \[0, 1\], got {value}",
            )
            for value in (-0.1, 1.1, math.nan)
        ),
        *(
            ({"keep": keep}, rf"`keep` is the share kept, within \(0, 1\], got {keep}")
            for keep in (0, -0.5, 1.5, math.nan)
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Rais: {message}"):
        Rais(**settings)


def filled(method: Rais, norm: list[float], seen: list[int]) -> Records:
    records = Records(method.columns(), len(norm), torch.device("cpu"))
    records["grad_norm"].copy_(torch.tensor(norm))
    records["epoch"].copy_(torch.tensor(seen))
    return records


def test_before_any_norm_everything_is_kept() -> None:
    method = Rais()
    for epoch in range(3):
        records = Records(method.columns(), 4, torch.device("cpu"))
        plan = method.plan_epoch(records, epoch=epoch, epochs=9, generator=seeded(0))
        assert plan.ids.tolist() == [0, 1, 2, 3] and plan.weights is None and not plan.drawn
    plan = method.plan_epoch(
        filled(method, [1.0, 2.0], [0, 0]), epoch=0, epochs=9, generator=seeded(0)
    )
    assert plan.ids.tolist() == [0, 1] and not plan.drawn


def test_a_plan_remembers_what_it_was_made_of() -> None:
    method = Rais()
    records = filled(method, [1.0, 2.0, math.nan], [2, 1, 0])
    plan = method.plan_epoch(records, epoch=3, epochs=9, generator=seeded(0))
    records["grad_norm"].zero_()
    assert plan.remember["grad_norm_then"].nan_to_num(-1).tolist() == [1, 2, -1]
    assert plan.remember["epoch_then"].tolist() == [2, 1, 0]
    records.remember(plan.remember)


def test_weights_stay_below_one_over_the_uniform_share() -> None:
    norm = [0.0] * 99 + [1e3]
    plan = (method := Rais(robustness=0, uniform=0.5)).plan_epoch(
        filled(method, norm, [0] * 100), epoch=1, epochs=9, generator=seeded(1)
    )
    assert plan.weights is not None
    weights = dict(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True))
    assert weights.pop(99) == pytest.approx(1 / (100 * (0.5 + 0.005)))
    assert len(weights) > 10 and set(weights.values()) == {2.0}
