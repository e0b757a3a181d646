"""AdaSelection and its base selectors against a transcription of the formulas that shares nothing with the library.

The transcription sorts with Python, takes means as exact fractions, and computes exponentials and logarithms with 40 decimal
digits, as products where the library adds logarithms. The library computes in single precision: where the last sample kept
and the first one left out differ by less than that can tell, a step is undecided; few are.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import (
    AdaBoost,
    AdaSelection,
    BigLoss,
    CoresetCenter,
    CoresetExtremes,
    GradientNorm,
    SmallLoss,
)
from thresher.methods.ada_boost import boost_weights
from thresher.methods.ada_selection import log_importance, log_scores
from thresher.rng import seeded

pytestmark = pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
TINY = Decimal(2) ** -126
EXACT = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)
KEEPS = ["0.29", "0.57", "0.5", "0.01", "1", "0.3", "0.75"]


def hard_values(
    r: np.random.Generator, n: int, scale: float = 1.0, *, signed: bool = True, least: float = 1e-30
) -> np.ndarray:
    """Ties, zeros, values of all sizes, and some that are not finite."""
    kind = r.integers(5)
    if kind == 0:
        values = r.gamma(1.0, 1.0, n)
    elif kind == 1:
        values = r.choice([0.0, 0.25, 0.125, 1.0, 3.0], n)
    elif kind == 2:
        values = r.choice([least, 1e-3, 0.0, 1.0], n) * r.random(n)
    elif kind == 3:
        values = np.full(n, r.choice([0.0, 2.5]))
    else:
        values = np.round(r.normal(size=n) * 8) / 8
        values = values if signed else np.abs(values)
    values = (values * scale).astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.0, 0.2, 1.0], p=[0.4, 0.25, 0.3, 0.05])
    values[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    return values


def hard_ids(r: np.random.Generator, n: int) -> list[int]:
    """In no order and beyond single precision."""
    return (r.permutation(n) * 3 + 2**40).tolist()


# The base selectors


def upper(values: list[Any], ids: list[int], k: int) -> set[int]:
    """Rows of the k largest by (value, id); None is above all."""
    order = sorted(
        range(len(ids)), key=lambda row: (values[row] is None, values[row] or 0, ids[row])
    )
    return set(order[-k:])


def lower(values: list[Any], ids: list[int], k: int) -> set[int]:
    """Rows of the k smallest by (value, id); None is below all."""
    order = sorted(
        range(len(ids)), key=lambda row: (values[row] is not None, values[row] or 0, ids[row])
    )
    return set(order[:k])


def both_ends(values: list[Any], ids: list[int], k: int) -> set[int]:
    lost = [row for row, value in enumerate(values) if value is None]
    if len(lost) >= k:
        return set(sorted(lost, key=lambda row: ids[row])[-k:])
    rest = sorted(
        (row for row in range(len(ids)) if values[row] is not None),
        key=lambda row: (values[row], ids[row]),
    )
    found = set(lost)
    while len(found) < k:
        found.add(rest.pop())
        if len(found) < k:
            found.add(rest.pop(0))
    return found


def fractions(values: np.ndarray) -> list[Fraction | None]:
    return [Fraction(float(value)) if math.isfinite(value) else None for value in values]


def distances(values: list[Fraction | None]) -> list[Fraction | None]:
    finite = [value for value in values if value is not None]
    return [None if value is None else abs(value - sum(finite) / len(finite)) for value in values]


def near(values: list[Any], kept: set[int], tolerance: Any, inputs: list[Any]) -> bool:
    """Whether something left out is as good as something kept but for rounding, and not the same value twice."""
    pairs = [(a, b) for a in kept for b in set(range(len(values))) - kept if inputs[a] != inputs[b]]
    return any(
        abs(values[a] - values[b]) <= tolerance
        for a, b in pairs
        if None not in (values[a], values[b])
    )


SCALES = [1.0, 1e-3, 1e4, 1e37]


NUMBERS = depth(range(40), range(200))


@over_instances(NUMBERS)
def test_selectors_on_hard_instances(seed: int) -> None:
    r = np.random.default_rng(seed)
    n, share = int(r.choice([1, 2, 5, 8, 16, 33])), str(r.choice(KEEPS))
    losses, grads, ids = (
        hard_values(r, n, float(r.choice(SCALES))),
        hard_values(r, n, signed=False),
        hard_ids(r, n),
    )
    k = max(1, math.floor(Fraction(share) * n))
    signals = {
        "id": torch.tensor(ids),
        "loss": torch.from_numpy(losses),
        "grad_norm": torch.from_numpy(grads),
    }

    def rows(method: Any) -> set[int]:
        plan, state = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
        found = plan.rows.tolist()
        assert (
            found == sorted(set(found)) and len(found) == k and plan.weights is None and state == {}
        )
        return set(found)

    keep, exact = float(share), fractions(losses)
    assert rows(BigLoss(keep)) == upper(exact, ids, k)
    assert rows(SmallLoss(keep)) == lower(exact, ids, k)
    assert rows(GradientNorm(keep)) == upper(fractions(grads), ids, k)
    assert rows(CoresetExtremes(keep)) == both_ends(exact, ids, k)
    away = distances(exact)
    found, scale = (
        rows(CoresetCenter(keep)),
        max((abs(float(loss)) for loss in exact if loss is not None), default=1.0),
    )
    expected = lower(away, ids, k)
    assert found == expected or near(away, expected, 1e-5 * scale, exact)
    for weights in ("scaled", "paper_abs"):
        with localcontext(EXACT):
            boosted = boosts(
                [None if loss is None else Decimal(float(loss)) for loss in exact], weights
            )
            found, expected = rows(AdaBoost(keep, weights)), upper(boosted, ids, k)
            assert found == expected or near(boosted, expected, 1e-6, exact)


def test_scaled_adaboost_and_big_loss_choose_the_same() -> None:
    for seed in range(100):
        losses = torch.from_numpy(hard_values(np.random.default_rng(seed), 33))
        signals = {"id": torch.arange(33), "loss": losses}
        plans = [
            m.plan_batch(signals, {}, step=0, generator=seeded(0))[0]
            for m in (BigLoss(0.3), AdaBoost(0.3, "scaled"))
        ]
        assert losses[plans[0].rows].nan_to_num(9, 9, 9).sort().values.tolist() == pytest.approx(
            losses[plans[1].rows].nan_to_num(9, 9, 9).sort().values.tolist(), rel=1e-6
        )


def boosts(losses: list[Decimal | None], weights: str) -> list[Decimal | None]:
    """Equation (1)."""
    top = max((abs(loss) for loss in losses if loss is not None), default=Decimal(0))
    found: list[Decimal | None] = []
    for loss in losses:
        if loss is None:
            found.append(None)
        elif weights == "paper_abs":
            found.append((max(TINY, abs(1 + loss)).ln() - max(TINY, abs(1 - loss)).ln()) / 2)
        else:
            ratio = loss / (top * Decimal("1.0001")) if top else Decimal(0)
            found.append(((1 + ratio) / (1 - ratio)).ln() / 2)
    return found


# AdaSelection


@dataclass
class Transcribed:
    """Equations (2) to (6), with the weights and averages as they go from step to step; all in the order of the ids."""

    keep: str
    pool: tuple[str, ...]
    beta: float
    gamma: float
    average: str
    curriculum: bool
    adaboost: str
    uniform: str
    normalise: bool
    importance: str
    weights: list[Decimal] = field(default_factory=list)
    before: list[Decimal | None] = field(default_factory=list)
    decided: bool = True
    largest_change: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        self.weights = [1 / Decimal(len(self.pool)) for _ in self.pool]
        self.before = [None for _ in self.pool]

    def step(self, t: int, losses: list[Any], grads: list[Any], draws: list[float]) -> set[int]:
        """Positions kept; None is a value that is not finite."""
        self.decided = True
        n = len(losses)
        k = max(1, math.floor(Fraction(self.keep) * n))
        lost = {
            i
            for i in range(n)
            if losses[i] is None or ("gradient_norm" in self.pool and grads[i] is None)
        }
        usable = [i for i in range(n) if i not in lost]
        units = [self.in_units(values, usable) for values in (losses, grads)]
        inputs = self.inputs(losses, grads, draws)
        columns = {name: self.scores(name, *units, draws, usable, k) for name in self.pool}
        columns = {
            name: self.voiced(name, column, n, k, inputs) for name, column in columns.items()
        }
        alphas = {name: self.alpha(column) for name, column in columns.items()}
        averages = [
            self.mean(name, columns[name], alphas[name], losses, lost, k) for name in self.pool
        ]
        self.update(averages, losses, usable)
        total: list[Any] = [None] * n
        sizes = [
            self.largest_change,
            *(abs(x) for column in columns.values() for x in column.values() if x.is_finite()),
        ]
        for i in usable:
            reward = (
                (-units[0][i] / Decimal(t) ** Decimal(self.gamma)).exp()
                if self.curriculum
                else Decimal(1)
            )
            mixed = sum(
                w * alphas[name][i] for w, name in zip(self.weights, self.pool, strict=True)
            )
            total[i] = (reward * mixed).ln() if mixed else Decimal("-1e30")
        tolerance = Decimal("1e-5") + Decimal("3e-6") * (
            max(sizes, default=0) + max((abs(units[0][i]) for i in usable), default=0)
        )
        return self.top(total, k, tolerance + Decimal(self.loose), inputs)

    def voiced(
        self, name: str, column: dict[int, Any], n: int, k: int, inputs: list[Any]
    ) -> dict[int, Any]:
        """What importances are the softmax of; undecided where rounding may change an order."""
        if self.importance == "softmax" or not column:
            return column
        if self.importance == "spread":
            mean = sum(column.values()) / len(column)
            spread = (sum((value - mean) ** 2 for value in column.values()) / len(column)).sqrt()
            size = max(map(abs, column.values()))
            self.decided &= (
                not 0 < spread < Decimal("1e-3") * size
            )  # the rest of values that cancel
            return {i: (value - mean) / (spread or 1) for i, value in column.items()}
        order = sorted(column, key=lambda i: (column[i], i))
        for one, two in itertools.pairwise(order):
            close = column[two] - column[one] <= Decimal("1e-5") * (1 + abs(column[two])) + Decimal(
                self.loose
            )
            self.decided &= name == "uniform" or not close or inputs[one] == inputs[two]
        if self.importance == "votes":
            return {i: Decimal(0) if i in order[-k:] else Decimal("-Infinity") for i in column}
        lost, normal = n - len(order), NormalDist()
        return {
            i: Decimal(normal.inv_cdf((lost + place + 0.5) / n)) for place, i in enumerate(order)
        }

    @property
    def loose(self) -> float:
        """Rounding of losses in units of their mean, which the formula of AdaBoost makes 10,000 times as large near the top."""
        return 1e-3 if self.normalise and "ada_boost" in self.pool else 0.0

    def in_units(self, values: list[Any], usable: list[int]) -> list[Any]:
        """Values over the mean of their sizes."""
        if not self.normalise or any(
            values[i] is None for i in usable
        ):  # gradients that no selector asks for
            return values
        size = sum((abs(values[i]) for i in usable), Decimal(0)) / max(1, len(usable))
        return [None if value is None else value / (size or 1) for value in values]

    def inputs(self, losses: list[Any], grads: list[Any], draws: list[float]) -> list[Any]:
        """What the scores of a sample depend on."""
        drawn, ranked = (
            "uniform" in self.pool and self.uniform == "drawn",
            "coreset_extremes" in self.pool,
        )
        rows = zip(losses, grads, draws, strict=True)
        return [
            (x, "gradient_norm" in self.pool and g, drawn and u, ranked and i)
            for i, (x, g, u) in enumerate(rows)
        ]

    def scores(
        self,
        name: str,
        losses: list[Any],
        grads: list[Any],
        draws: list[float],
        usable: list[int],
        k: int,
    ) -> dict[int, Any]:
        if name == "uniform" and self.importance != "softmax":
            return {i: Decimal(draws[i]) for i in usable}
        if name == "uniform":
            voted = sorted(usable, key=lambda i: (-draws[i], i))[:k]
            return {
                i: Decimal(0) if self.uniform == "flat" or i in voted else Decimal("-Infinity")
                for i in usable
            }
        if name == "gradient_norm":
            return {i: grads[i] for i in usable}
        if name == "ada_boost":
            return dict(
                zip(usable, boosts([losses[i] for i in usable], self.adaboost), strict=True)
            )
        if name == "coreset_center":
            mean = sum(losses[i] for i in usable) / len(usable) if usable else 0
            return {i: -abs(losses[i] - mean) for i in usable}
        if name == "coreset_extremes":
            order, found, count = (
                sorted(usable, key=lambda i: (losses[i], i)),
                {},
                Decimal(len(usable)),
            )
            while len(order) > 1:
                found[order[-1]] = Decimal(len(order)) / count
                found[order[0]] = Decimal(len(order) - 1) / count
                order = order[1:-1]
            return found | dict.fromkeys(order, Decimal(0))
        return {i: losses[i] if name == "big_loss" else -losses[i] for i in usable}

    @staticmethod
    def alpha(column: dict[int, Any]) -> dict[int, Decimal]:
        powers = {
            i: value.exp() if value.is_finite() else Decimal(0) for i, value in column.items()
        }
        total = sum(powers.values())
        return {i: power / total for i, power in powers.items()}

    def mean(
        self,
        name: str,
        column: dict[int, Any],
        alpha: dict[int, Any],
        losses: list[Any],
        lost: set[int],
        k: int,
    ) -> Any:
        if not column:
            return None
        if self.average == "weighted":
            return sum((alpha[i] * losses[i] for i in column), Decimal(0))
        kept = set(column)
        if self.importance != "softmax":
            order = sorted(column, key=lambda i: (column[i], i))
            kept = set(
                order[max(0, len(column) + len(lost) - k) :]
            )  # those without a loss are kept before them
        elif name == "uniform" and self.uniform == "drawn":
            kept = {i for i, value in column.items() if value.is_finite()}
            kept -= set(
                sorted(kept)[: max(0, len(kept) + len(lost) - k)]
            )  # those without a loss are kept before them
        elif name != "uniform":
            values = [column.get(i) for i in range(len(losses))]
            scale = max(abs(value) for value in column.values())
            ranked = values if name == "gradient_norm" else losses
            kept = self.top(values, k, Decimal("1e-6") * (1 + scale), ranked) - lost
        return sum((losses[i] for i in kept), Decimal(0)) / len(kept) if kept else None

    def top(self, values: list[Any], k: int, tolerance: Decimal, inputs: list[Any]) -> set[int]:
        """The k largest; undecided where one left out is as good but for rounding, and not the same sample twice."""
        kept = upper(values, list(range(len(values))), k)
        self.decided &= not near(values, kept, tolerance, inputs)
        return kept

    def update(self, averages: list[Any], losses: list[Any], usable: list[int]) -> None:
        size = max(
            (abs(losses[i]) for i in usable if min(losses[j] for j in usable) < 0),
            default=Decimal("1e-20"),
        )
        self.largest_change = Decimal(0)
        for m, (now, before) in enumerate(zip(averages, self.before, strict=True)):
            if now is not None and 0 < abs(now) < size / 1000:
                self.decided = False  # what is left of larger losses that cancel, or of importances that underflow
            if now is None or not before:
                continue
            change = Decimal(self.beta) * (now - before) / before
            self.largest_change = max(self.largest_change, abs(change))
            self.weights[m] *= change.exp()
        total = sum(self.weights)
        self.weights = [weight / total for weight in self.weights]
        self.before = averages

    def take_over(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from where the library is, so that rounding does not add up."""
        self.weights = [Decimal(value).exp() for value in state["log_weights"].tolist()]
        self.before = [
            Decimal(value) if math.isfinite(value) else None for value in state["average"].tolist()
        ]


NAMES = [
    "big_loss",
    "small_loss",
    "uniform",
    "gradient_norm",
    "ada_boost",
    "coreset_extremes",
    "coreset_center",
]


def hard_settings(r: np.random.Generator) -> dict[str, Any]:
    pools = [("big_loss", "small_loss", "uniform"), ("big_loss", "small_loss"), tuple(NAMES)]
    pool = (
        pools[r.integers(3)]
        if r.random() < 0.5
        else tuple(map(str, r.permutation(NAMES)[: r.integers(1, 8)]))
    )
    normalise = bool(r.random() < 0.6)
    importance = str(r.choice(["ranks", "ranks", "softmax", "softmax", "votes", "spread"]))
    return {
        "keep": str(r.choice(KEEPS)),
        "pool": pool,
        "beta": float(
            r.choice([0.5, 1.0, 0.0, 0.1] if normalise else [0.5, -0.5, 1.0, -1.0, 0.0, 0.1])
        ),
        "gamma": float(r.choice([0.5, 0.25, 1.0, 2.0])),
        "average": str(r.choice(["weighted", "weighted", "picked"])),
        "curriculum": bool(r.random() < 0.7),
        "adaboost": str(r.choice(["scaled", "paper_abs"])),
        "uniform": str(r.choice(["drawn", "drawn", "flat"]))
        if importance == "softmax"
        else "drawn",
        "normalise": normalise,
        "importance": importance,
    }


def decimals(values: torch.Tensor) -> list[Decimal | None]:
    return [Decimal(value) if math.isfinite(value) else None for value in values.tolist()]


@cache
def compare(seed: int) -> list[tuple[dict[str, Any], bool, list[float]]]:
    """A few steps of both, held against one another; says of each what it was like and whether it was decided."""
    with localcontext(EXACT):
        return steps_of_both(seed)


def steps_of_both(seed: int) -> list[tuple[dict[str, Any], bool, list[float]]]:
    r = np.random.default_rng(seed)
    settings = hard_settings(r)
    method, other = (
        AdaSelection(**{**settings, "keep": float(settings["keep"])}),
        Transcribed(**settings),
    )
    state, said = method.init_state(), []
    n, first = int(r.choice([1, 2, 5, 8, 16])), int(r.choice([0, 0, 3, 99, 4000]))
    scale = float(r.choice([1, 1e30, 1e-10, 30] if settings["normalise"] else [1, 1, 0.01, 30]))
    for step, size in enumerate([n] * int(r.integers(2, 5)) + [int(r.integers(1, n + 1))], first):
        losses = torch.from_numpy(hard_values(r, size, scale, least=1e-4))
        grads = torch.from_numpy(hard_values(r, size, signed=False, least=1e-4))
        ids = torch.tensor(hard_ids(r, size))
        plan, state = method.plan_batch(
            {"id": ids, "loss": losses, "grad_norm": grads},
            state,
            step=step,
            generator=seeded(seed, step),
        )
        order = ids.argsort()
        draws = torch.rand(size, generator=seeded(seed, step)).tolist()
        expected = other.step(step + 1, decimals(losses[order]), decimals(grads[order]), draws)
        if other.decided:
            assert plan.rows.tolist() == sorted(order[list(expected)].tolist())
            error = 1e-4 + (1e-6 + other.loose) * float(other.largest_change) + other.loose
            logs = [float(w.ln()) for w in other.weights]
            assert state["log_weights"].tolist() == pytest.approx(logs, rel=1e-4, abs=error)
            averages = [math.nan if value is None else float(value) for value in other.before]
            error = (4e-6 + other.loose) * max(
                map(abs, filter(math.isfinite, losses.tolist())), default=0
            )
            assert state["average"].tolist() == pytest.approx(
                averages, rel=1e-5, abs=error, nan_ok=True
            )
        said.append((settings, other.decided, losses.tolist()))
        other.take_over(state)
    return said


@over_instances(NUMBERS)
def test_hard_instances(seed: int) -> None:
    compare(seed)


def test_most_instances_are_decided_and_they_are_hard() -> None:
    met: Counter[str] = Counter()
    for settings, decided, losses in (entry for seed in NUMBERS for entry in compare(seed)):
        met["steps"] += 1
        met["decided"] += decided
        if decided:
            met.update(settings["pool"])
            met.update(
                f"{name} {settings[name]}"
                for name in (
                    "average",
                    "curriculum",
                    "adaboost",
                    "uniform",
                    "normalise",
                    "importance",
                )
            )
            met["one"] += len(losses) == 1
            met["tied"] += len(set(losses)) < len(losses)
            met["lost"] += not any(map(math.isfinite, losses))
            met["spoilt"] += any(map(math.isfinite, losses)) and not all(map(math.isfinite, losses))
    assert met.pop("decided") > 0.65 * met.pop("steps")
    assert len(met) == 7 + 14 + 4 and min(met.values()) >= depth(4, 20), met


# Worked vectors

L = [0.2, 0.5, 1.0, 1.5, 2.0]
ALPHA_BIG = [0.069958, 0.094433, 0.155694, 0.256696, 0.423220]
ALPHA_SMALL = [0.380521, 0.281897, 0.170979, 0.103704, 0.062900]
EARLY = [0.164927, 0.110821, 0.064249, 0.043365, 0.033408]
LATE = [0.197453, 0.173802, 0.158026, 0.167277, 0.202105]


@pytest.mark.parametrize("t", [1, 100])
def test_worked_vector_of_the_default(t: int) -> None:
    """By NumPy, from the formulas as they stand in the module's text."""
    loss, k, before = np.array(L), 2, 1.3
    draws = torch.rand(5, generator=seeded(4)).numpy()
    u = loss / loss.mean()
    quantiles = np.array([NormalDist().inv_cdf((place + 0.5) / 5) for place in range(5)])
    powers = np.exp(quantiles) / np.exp(quantiles).sum()
    big, small, vote = (powers[np.argsort(np.argsort(order))] for order in (loss, -loss, draws))
    averages = np.array([voice @ loss for voice in (big, small, vote)])
    w = np.exp(0.5 * (averages - before) / before)
    w /= w.sum()
    scores = np.exp(-u / t) * (w[0] * big + w[1] * small + w[2] * vote)
    method = AdaSelection(0.4)
    start = {**method.init_state(), "average": torch.full((3,), before)}
    signals = {"id": torch.arange(5), "loss": torch.tensor(L)}
    plan, state = method.plan_batch(signals, start, step=t - 1, generator=seeded(4))
    assert state["average"].tolist() == pytest.approx(averages, abs=1e-6)
    share = len({*plan.rows.tolist()} & {*np.argsort(-draws)[:k].tolist()}) / k
    assert list(method.report(state).values()) == pytest.approx([*w, share], abs=1e-6)
    assert plan.rows.tolist() == sorted(np.argsort(scores)[-k:].tolist())
    assert w == pytest.approx([0.409892, 0.280210, 0.309897], abs=1e-6)
    assert t > 1 or scores == pytest.approx(
        [0.189722, 0.088579, 0.096437, 0.034388, 0.033479], abs=1e-6
    )


@pytest.mark.parametrize(
    ("beta", "t", "weights", "scores", "rows"),
    [
        (0.5, 1, [0.385246, 0.285507, 0.329248], EARLY, [0, 1]),
        (
            0.5,
            24,
            [0.385246, 0.285507, 0.329248],
            None,
            [0, 1],
        ),  # the last step before the rows change
        (0.5, 25, [0.385246, 0.285507, 0.329248], None, [0, 4]),
        (0.5, 100, [0.385246, 0.285507, 0.329248], LATE, [0, 4]),
        (-0.5, 100, [0.284138, 0.383398, 0.332464], None, [0, 1]),
    ],
)
def test_worked_vector(
    beta: float, t: int, weights: list[float], scores: list[float] | None, rows: list[int]
) -> None:
    method = AdaSelection.variant("literal", keep=0.4, beta=beta, average="weighted")
    start = {"log_weights": torch.full((3,), -math.log(3)), "average": torch.full((3,), 1.3)}
    signals = {"id": torch.arange(5), "loss": torch.tensor(L)}
    plan, state = method.plan_batch(signals, start, step=t - 1, generator=seeded(0))
    assert plan.rows.tolist() == rows
    assert state["average"].tolist() == pytest.approx([1.448385, 0.669387, 1.04], abs=1e-6)
    assert list(method.report(state).values()) == pytest.approx(weights, abs=1e-6)
    loss = torch.tensor(L)
    importance = log_importance(
        torch.stack((loss, -loss, 0 * loss), 1), torch.ones(5, dtype=torch.bool)
    )
    assert importance[:, 0].exp().tolist() == pytest.approx(ALPHA_BIG, abs=1e-6)
    assert importance[:, 1].exp().tolist() == pytest.approx(ALPHA_SMALL, abs=1e-6)
    if scores:
        found = log_scores(importance, state["log_weights"], loss, t**-0.5).exp()
        assert found.tolist() == pytest.approx(scores, abs=1e-6)


def test_worked_vectors_of_the_selectors() -> None:
    signals = {"id": torch.arange(6), "loss": torch.tensor([0.9, 0.1, 0.5, 0.3, 2, 1.2])}
    for method, rows in ((CoresetExtremes(4 / 6), [1, 3, 4, 5]), (CoresetCenter(2 / 6), [0, 2])):
        assert method.plan_batch(signals, {}, step=0, generator=seeded(0))[0].rows.tolist() == rows
    assert boost_weights(torch.tensor(L), "scaled").tolist() == pytest.approx(
        [0.100325, 0.255386, 0.549239, 0.972784, 4.951769], abs=1e-5
    )
    assert boost_weights(torch.tensor([1.5, 3, 6]), "paper_abs").tolist() == pytest.approx(
        [0.805, 0.347, 0.168], abs=1e-3
    )


def test_worked_vector_of_mkl_sgd() -> None:
    """Three samples drawn, one step on the smallest loss."""
    losses, drawn = torch.tensor([0.1, 0.4, 0.9, 1.6, 2.0]), torch.tensor([2, 0, 4])
    plan, _ = SmallLoss(1 / 3).plan_batch(
        {"id": drawn, "loss": losses[drawn]}, {}, step=0, generator=seeded(0)
    )
    assert drawn[plan.rows].tolist() == [0]
