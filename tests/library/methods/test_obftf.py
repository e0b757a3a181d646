"""Parts of OBFTF by hand; the whole of it is in tests/reference."""

import math
from typing import Any

import pytest
import torch

from thresher import Obftf
from thresher.methods.obftf import best_swap, quantiles
from thresher.rng import seeded

NAN, INF = math.nan, math.inf


def planned(method: Obftf, loss: Any, ids: Any = None) -> list[int]:
    loss = torch.as_tensor(loss)
    signals = {"id": torch.arange(len(loss)) if ids is None else torch.as_tensor(ids), "loss": loss}
    plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
    assert state == {} and plan.weights is None
    return plan.rows.tolist()


def test_defaults() -> None:
    assert (Obftf().keep, Obftf.requires.signals, Obftf().card.bytes_per_sample) == (
        0.1,
        ("loss",),
        0,
    )
    assert [Obftf().count(n) for n in (1, 10, 29, 640)] == [1, 1, 2, 64]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        ({"keep": 1.5}, r"`keep` .* got 1.5"),
        ({"keep": NAN}, r"`keep` .* got nan"),
        ({"swaps": -1}, "`swaps` must be a whole number of 0 or more, got -1"),
        ({"swaps": 2.0}, "`swaps` .* got 2.0"),
        ({"swaps": True}, "`swaps` .* got True"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Obftf: {message}"):
        Obftf(**settings)


@pytest.mark.parametrize(
    ("finite", "n", "k", "positions"),
    [
        (10, 10, 1, [5]),
        (10, 10, 2, [2, 7]),
        (10, 10, 5, [1, 3, 5, 7, 9]),
        (10, 10, 10, list(range(10))),
        (7, 10, 5, [1, 5, 7, 8, 9]),
        (7, 10, 3, [7, 8, 9]),
        (7, 10, 2, [8, 9]),
        (0, 4, 2, [2, 3]),
        (1, 1, 1, [0]),
    ],
)
def test_quantiles(finite: int, n: int, k: int, positions: list[int]) -> None:
    assert quantiles(torch.tensor(finite), n, k).tolist() == positions


@pytest.mark.parametrize(
    ("loss", "chosen", "after"),
    [
        (
            [0.0, 1, 2, 3, 4],
            [0, 1],
            [1, 3],
        ),  # 0 for 3 and 1 for 4 both meet the mean: the lowest goes
        ([0.0, 1, 2, 3, 4], [0, 4], [0, 4]),
        ([1.0, 1, 1, 1], [0, 1], [0, 1]),
        ([0.0, 0, 0, 4], [0, 3], [0, 3]),  # 4 for 0 comes no closer
        ([0.0, 2, 2, 2, 4], [0], [1]),  # the lowest of three
        ([0.0, 0, 2, 4, 4], [0, 1, 2], [1, 2, 3]),
        ([5.0], [0], [0]),
    ],
)
def test_one_swap(loss: list[float], chosen: list[int], after: list[int]) -> None:
    values = torch.tensor(loss, dtype=torch.float64)
    assert (
        best_swap(values, torch.ones(len(loss), dtype=torch.bool), torch.tensor(chosen)).tolist()
        == after
    )


def test_what_has_no_value_neither_counts_nor_moves() -> None:
    values = torch.tensor([0.0, 1, 2, 3, 0, 0], dtype=torch.float64)
    finite = torch.tensor([True] * 4 + [False] * 2)
    assert best_swap(values, finite, torch.tensor([0, 4, 5])).tolist() == [1, 4, 5]
    assert best_swap(values, finite, torch.tensor([4, 5])).tolist() == [4, 5]


def test_losses_that_are_not_finite_come_first() -> None:
    assert planned(Obftf(keep=0.5), [1.0, NAN, 2.0, 9.0, -INF, 3.0]) == [1, 4, 5]
    assert planned(Obftf(keep=0.2), [1.0, NAN, 2.0, 3.0, INF, 2.0]) == [4], "the higher id of those"


def test_more_swaps_come_closer() -> None:
    batches = [
        torch.empty(64, dtype=torch.float64).exponential_(generator=seeded(seed))
        for seed in range(50)
    ]
    gaps = [
        sum(
            float((loss[planned(Obftf(swaps=swaps), loss)].mean() - loss.mean()).abs())
            for loss in batches
        )
        / 50
        for swaps in (0, 1, 2, 8)
    ]
    assert gaps[0] > 20 * gaps[1] and gaps[1] > 1.5 * gaps[2] > 1.5 * gaps[3]


def test_losses_near_the_largest_number() -> None:
    loss = torch.full((20,), 3e38)
    loss[:10] = 1e38
    kept = loss[planned(Obftf(0.2), loss)]
    assert sorted(kept.tolist()) == pytest.approx([1e38, 1e38, 3e38, 3e38])


def test_facts() -> None:
    signals = {"id": torch.arange(25), "loss": torch.arange(25.0)}
    plan, _ = Obftf().plan_batch(signals, {}, step=0, generator=seeded(0))
    assert plan.facts == pytest.approx({"scheduled_fraction": 0.9, "actual_fraction": 23 / 25})


def test_an_empty_batch() -> None:
    assert planned(Obftf(), torch.empty(0)) == []
