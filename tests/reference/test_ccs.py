"""CCS and D2 against transcriptions with lists and dictionaries, and what they refuse."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import Ccs, rng
from thresher.scores import Scores, d2

NUMBERS = depth(range(80), range(800))


def transcribed_ccs(
    values: list[float], keep: str, dropped: str, strata: int, lots: list[int]
) -> list[int]:
    n = len(values)
    budget = max(1, math.floor(Fraction(keep) * n))
    chosen = [i for i, v in enumerate(values) if not math.isfinite(v)][:budget]
    budget -= len(chosen)
    ranked = sorted((v, i) for i, v in enumerate(values) if math.isfinite(v))
    drop = min(math.floor(Fraction(dropped) * n), len(ranked) - budget)
    ranked = ranked[: len(ranked) - max(0, drop)]
    if not budget:
        return sorted(chosen)
    low, high = ranked[0][0], ranked[-1][0]
    groups: dict[int, list[int]] = {s: [] for s in range(strata)}
    for v, i in ranked:
        groups[min(strata - 1, int((v - low) / (high - low) * strata)) if high > low else 0].append(
            i
        )
    by_size = sorted(groups, key=lambda s: (len(groups[s]), s))
    while by_size:
        part = groups[by_size[0]]
        count = min(len(part), budget // len(by_size))
        chosen += sorted(part, key=lambda i: lots[i])[:count]
        budget -= count
        by_size = by_size[1:]
    return sorted(chosen)


def hard_values(r: np.random.Generator, n: int) -> np.ndarray:
    kind = r.integers(5)
    values = r.gamma(1.0, 1.0, n)
    if kind == 1:
        values = r.choice([0.0, 0.5, 3.0], n)
    if kind == 2:
        values = np.full(n, -1.0)
    if kind == 3:
        values = r.normal(size=n) * 1e30
    if kind == 4:
        values[r.integers(n)] = 1e6
    values = values.astype(np.float32)
    bad = r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])
    values[bad] = r.choice([math.nan, math.inf, -math.inf], int(bad.sum()))
    return values


@over_instances(NUMBERS)
def test_strata(number: int) -> None:
    r = np.random.default_rng(number)
    n, strata, seed = int(r.choice([1, 2, 5, 30])), int(r.choice([1, 2, 7, 50])), int(r.integers(3))
    keep, dropped = str(r.choice(["0.1", "0.29", "0.5"])), str(r.choice(["0", "0.1", "0.5"]))
    values = hard_values(r, n)
    found = Ccs(
        Scores(torch.arange(n), torch.from_numpy(values)), float(keep), float(dropped), strata, seed
    ).kept(n)
    lots = rng.lots(seed, range(n)).tolist()
    assert found.tolist() == transcribed_ccs(
        values.astype(float).tolist(), keep, dropped, strata, lots
    )


def test_worked_vector_of_strata() -> None:
    """Ten, one and ten samples in three strata, and nine to keep: the small one is kept whole, the others share the rest."""
    values = torch.cat(
        (torch.linspace(0, 0.9, 10), torch.tensor([1.5]), torch.linspace(2.1, 3.0, 10))
    )
    kept = Ccs(Scores(torch.arange(21), values), keep=9 / 21, strata=3).kept(21)
    assert [int((kept < 10).sum()), int((kept == 10).sum()), int((kept > 10).sum())] == [4, 1, 4]


def test_worked_example_of_negative_scores() -> None:
    """Strata of 2, 1, 0 and 4 samples, four to keep. The official code would lose the stratum of the largest score, -1."""
    values = torch.tensor([-5.0, -5.0, -4.0, -1.0, -1.0, -1.0, -1.0])
    kept = Ccs(Scores(torch.arange(7), values), keep=4 / 7, strata=4).kept(7)
    assert [int((values[kept] == value).sum()) for value in (-5, -4, -1)] == [1, 1, 2]


def test_the_draw_is_that_of_the_seed(tmp_path: Path) -> None:
    scores = Scores(torch.arange(200), torch.linspace(0, 1, 200), forward=12, backward=3)
    scores.save(tmp_path / "s.parquet")
    one, same, other = (
        Ccs(s, seed=seed) for s, seed in ((scores, 0), (tmp_path / "s.parquet", 0), (scores, 1))
    )  # type: ignore[arg-type]
    assert torch.equal(one.kept(200), same.kept(200)) and not torch.equal(
        one.kept(200), other.kept(200)
    )
    assert one.cost == same.cost == (12, 3)


@pytest.mark.parametrize("keep", [0.1, 0.33, 0.9])
def test_the_realized_share(keep: float) -> None:
    scores = Scores(torch.arange(1000), torch.rand(1000, generator=rng.seeded(0)))
    assert len(Ccs(scores, keep).kept(1000)) / 1000 == pytest.approx(keep, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scores": 3},
            "`scores` must be a thresher.scores.Scores or the path of its Parquet file, got 3",
        ),
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        (
            {"keep": 0.5, "drop_hardest": 0.6},
            r"`drop_hardest` is the share to remove, .* got 0.6 with keep=0.5",
        ),
        ({"drop_hardest": -0.1}, "`drop_hardest` is the share to remove"),
        ({"strata": 0}, "`strata` must be a whole number of 1 or more, got 0"),
        ({"seed": -1}, r"`seed` must be a whole number of 0 to 9223372036854775807, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Ccs: {message}"):
        Ccs(**{"scores": Scores(torch.arange(2), torch.rand(2)), **settings})


def transcribed_d2(
    scores: list[float],
    features: list[list[float]],
    k: int,
    forward: float,
    reverse: float,
    found: list[float],
) -> list[float]:
    """Places, n for the first pick of n; NaN where a value is not finite.

    Of scores that differ by no more than rounding, the one is picked whose place was found; without messages forward, scores
    are exact, and of equal ones the one of the higher id is picked.
    """
    known = [
        i for i, s in enumerate(scores) if math.isfinite(s) and all(map(math.isfinite, features[i]))
    ]
    near: dict[int, list[tuple[float, int]]] = {}
    for i in known:
        others = sorted((math.dist(features[i], features[j]), j) for j in known if j != i)
        near[i] = others[:k]
    now = {
        i: scores[i] + sum(math.exp(-forward * d) * scores[j] for d, j in near[i]) for i in known
    }
    places, left = [math.nan] * len(scores), len(known)
    while now:
        best = max(now, key=lambda i: (now[i], i))
        close = (
            [i for i in now if math.isclose(now[i], now[best], rel_tol=1e-12, abs_tol=1e-12)]
            if forward
            else []
        )
        best = next((i for i in close if found[i] == left), best)
        worth = now.pop(best)
        places[best] = left
        left -= 1
        for d, j in near[best]:
            if j in now:
                now[j] -= math.exp(-reverse * d) * worth
    return places


@over_instances(depth(range(40), range(300)))
def test_messages(number: int) -> None:
    r = np.random.default_rng(number)
    n, k = int(r.choice([1, 2, 5, 25])), int(r.choice([1, 3, 10]))
    forward, reverse = float(r.choice([0.0, 1.0, 2.5])), float(r.choice([0.0, 1.0]))
    features = r.normal(size=(n, 3)) if r.random() < 0.7 else r.integers(0, 2, (n, 3)).astype(float)
    values = r.gamma(1.0, 1.0, n) if r.random() < 0.7 else -r.gamma(1.0, 1.0, n)
    values[r.random(n) < 0.1] = math.nan
    features[r.random(n) < 0.1, 0] = math.inf
    values = values.astype(np.float32)
    scores = Scores(torch.arange(n), torch.from_numpy(values))
    found = d2(scores, torch.from_numpy(features), neighbours=k, forward=forward, reverse=reverse)
    expected = transcribed_d2(
        values.astype(float).tolist(), features.tolist(), k, forward, reverse, found.values.tolist()
    )
    assert found.values.tolist() == pytest.approx(expected, nan_ok=True)


def test_what_it_costs_and_what_it_is_of() -> None:
    scores = Scores(
        torch.arange(3), torch.rand(3), "aum", labels=torch.arange(3), forward=9, backward=6
    )
    found = d2(scores, torch.rand(3, 2), provenance={"features": "last layer"})
    assert (found.name, found.forward, found.backward, found.provenance["of"]) == (
        "d2",
        9,
        6,
        "aum",
    )
    assert found.labels is not None and found.provenance["features"] == "last layer"
    assert d2(
        Scores(torch.tensor([1, 2]), torch.rand(2)), torch.rand(3, 2)
    ).values.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": [1.0]}, TypeError, "d2: `scores` must be a thresher.scores.Scores, got list"),
        (
            {"features": torch.rand(2, 2)},
            ValueError,
            r"d2: `features` must have shape \(3, D\), .* got \(2, 2\)",
        ),
        (
            {"neighbours": 0},
            ValueError,
            "d2: `neighbours` must be a whole number of 1 or more, got 0",
        ),
        ({"forward": -1.0}, ValueError, "d2: `forward` must be a finite number >= 0, got -1.0"),
        ({"reverse": math.inf}, ValueError, "d2: `reverse` must be a finite number >= 0, got inf"),
    ],
)
def test_arguments_out_of_range_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        d2(
            **{
                "scores": Scores(torch.arange(3), torch.rand(3)),
                "features": torch.rand(3, 2),
                **arguments,
            }
        )
