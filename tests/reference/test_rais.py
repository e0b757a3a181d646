"""Rais against a transcription with loops and another solver; its worked vector; that it is unbiased; a real training."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import EpochPlan, Rais
from thresher.methods._base import Chances, unbiased_weights
from thresher.methods.rais import gain
from thresher.records import NEVER_SEEN, Records
from thresher.rng import seeded

CPU = torch.device("cpu")
EPOCH = 7


def planned(
    method: Rais, columns: dict[str, np.ndarray], key: int = 0, epoch: int = EPOCH
) -> EpochPlan:
    records = Records(method.columns(), len(columns["grad_norm"]), CPU)
    for name, values in columns.items():
        records[name].copy_(torch.from_numpy(values))
    return method.plan_epoch(records, epoch=epoch, epochs=50, generator=seeded(key))


def test_worked_vector() -> None:
    """The limit of exact importances: last norms 4, 1, 1, 2, seen in the epoch before."""
    norm = np.float32([4, 1, 1, 2])
    chances = Chances(norm)
    assert chances.of(slice(None)).tolist() == [0.5, 0.125, 0.125, 0.25]
    assert unbiased_weights(chances.of(slice(None)), 4, draws=4, size=4).tolist() == [0.5, 2, 2, 1]
    assert gain(norm.astype(np.float64) ** 2, chances) == 1.375
    columns = {"grad_norm": norm, "epoch": np.full(4, 6, np.int16)}
    seen = {}
    for key in range(30):
        plan = planned(Rais(robustness=0, uniform=0), columns, key)
        assert plan.weights is not None and plan.facts["gain"] == pytest.approx(1.375)
        seen |= dict(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True))
    assert seen == pytest.approx({0: 0.5, 1: 2, 2: 2, 3: 1})


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def descend(x: list[list[float]], y: list[float]) -> list[float]:
    """Least squares without negative coefficients, a coordinate at a time until nothing moves."""
    m = len(x[0])
    gram = [[math.fsum(row[i] * row[j] for row in x) for j in range(m)] for i in range(m)]
    moment = [math.fsum(row[i] * value for row, value in zip(x, y, strict=True)) for i in range(m)]
    c = [0.0] * m
    for _ in range(20_000):
        moved = 0.0
        for i in range(m):
            if gram[i][i] == 0:
                continue
            better = max(
                0.0,
                c[i] + (moment[i] - math.fsum(gram[i][j] * c[j] for j in range(m))) / gram[i][i],
            )
            moved = max(moved, abs(better - c[i]))
            c[i] = better
        if moved < 1e-14:
            break
    return c


def transcribed(columns: dict[str, np.ndarray], method: Rais) -> list[float | None]:
    """Chance of each sample; None for those that are kept."""
    norm, epoch, norm_then, epoch_then = (columns[name].tolist() for name in columns)
    n = len(norm)
    c, d = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    pairs = [
        i
        for i in range(n)
        if epoch[i] == EPOCH - 1 and math.isfinite(norm[i]) and math.isfinite(norm_then[i])
    ]
    if len(pairs) >= 10:
        scale = math.fsum(norm_then[i] ** 2 for i in pairs) / len(pairs) or 1.0
        x = [[norm_then[i] ** 2 / scale, EPOCH - 1 - epoch_then[i], 1.0] for i in pairs]
        y = [norm[i] ** 2 / scale for i in pairs]
        relative = [[part / (row[0] + 1) for part in row] for row in x]
        c = descend(relative, [value / (row[0] + 1) for value, row in zip(y, x, strict=True)])
        off = [abs(value - dot(row, c)) for value, row in zip(y, x, strict=True)]
        d = descend(relative, [value / (row[0] + 1) for value, row in zip(off, x, strict=True)])
    known = [i for i in range(n) if math.isfinite(norm[i])]
    scale = math.fsum(norm[i] ** 2 for i in known) / max(1, len(known)) or 1.0
    mass: dict[int, float] = {}
    for i in known:
        row = [norm[i] ** 2 / scale, EPOCH - epoch[i], 1.0]
        mass[i] = math.sqrt(dot(row, c) + method.robustness * dot(row, d))
    total = math.fsum(mass.values())
    chances: list[float | None] = [None] * n
    for i in known:
        best = mass[i] / total if total else 1 / len(known)
        chances[i] = (1 - method.uniform) * best + method.uniform / len(known)
    return chances


KINDS = ("plain", "drift", "few", "one", "nonfinite", "zeros", "all zero", "huge", "unseen", "lost")


def instance(number: int) -> tuple[dict[str, np.ndarray], Rais]:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = {"one": 1, "few": int(r.integers(2, 12))}.get(kind, int(r.integers(40, 120)))
    then = r.gamma(1.0, 1.0, n)
    now = np.sqrt(r.uniform(0, 1) * then**2 + r.uniform(0, 1) + 0.3 * r.random(n))
    seen_then = r.integers(0, EPOCH - 1, n)
    seen = np.where(r.random(n) < 0.6, EPOCH - 1, seen_then)
    norm = np.where(seen == EPOCH - 1, now, then)
    if kind == "drift":
        norm = norm * 0.1
    if kind == "nonfinite":
        norm[r.random(n) < 0.3] = r.choice([np.nan, np.inf])
        then[r.random(n) < 0.3] = np.nan
    if kind == "zeros":
        norm[r.random(n) < 0.6] = 0
    if kind == "all zero":
        norm[:], then[:] = 0, 0
    if kind == "huge":
        norm, then = norm * 1e30, then * 1e30
    if kind == "unseen":
        then[:], seen_then[:] = NEVER_SEEN, -1
    if kind == "lost":
        norm[:] = np.nan
    columns = {
        "grad_norm": norm.astype(np.float32),
        "epoch": seen.astype(np.int16),
        "grad_norm_then": then.astype(np.float32),
        "epoch_then": seen_then.astype(np.int16),
    }
    method = Rais(
        float(r.choice([0, 1, 3])), float(r.choice([0.01, 0.2, 1])), float(r.choice([1, 0.5]))
    )
    return columns, method


NUMBERS = depth(range(40), range(150))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(number: int) -> None:
    columns, method = instance(number)
    chances, n = transcribed(columns, method), len(columns["grad_norm"])
    plan = planned(method, columns, number)
    plan.check(n)
    kept = [i for i in range(n) if chances[i] is None]
    if len(kept) == n:
        assert plan.ids.tolist() == kept and plan.weights is None
        return
    k = max(
        1, math.floor(method.keep * n) - len(kept), math.floor(method.keep * (n - len(kept))) // 2
    )
    times = Counter(plan.ids.tolist())
    assert plan.drawn and len(plan.ids) == k + len(kept) and all(times[i] == 1 for i in kept)
    assert plan.weights is not None
    for i, weight in zip(plan.ids.tolist(), plan.weights.tolist(), strict=True):
        chance = chances[i]
        exact = len(plan.ids) / n if chance is None else len(plan.ids) / (n * k * chance)
        assert weight == pytest.approx(exact, rel=1e-4)
    assert plan.facts["gain"] > 0 and plan.lr_scale == 1 and plan.refresh is None


def test_the_instances_are_hard() -> None:
    learn, trust = 0, 0
    for number in NUMBERS:
        columns, _ = instance(number)
        fresh = (
            (columns["epoch"] == EPOCH - 1)
            & np.isfinite(columns["grad_norm"])
            & np.isfinite(columns["grad_norm_then"])
        )
        learn += fresh.sum() >= 10
        trust += fresh.sum() < 10
    assert learn > depth(15, 60) and trust > depth(10, 40)


def away(samples: np.ndarray, expected: float) -> float:
    """Distance of the mean in standard errors."""
    return abs(samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(len(samples)))


def test_unbiased_and_of_less_variance_than_uniform_draws() -> None:
    """The estimate of a mean gradient, where last norms tell much of the present ones."""
    r = np.random.default_rng(0)
    gradient = r.normal(size=300) * r.gamma(0.3, 1.0, 300)
    columns = {
        "grad_norm": np.abs(gradient * r.uniform(0.7, 1.3, 300)).astype(np.float32),
        "epoch": np.full(300, EPOCH - 1, np.int16),
        "grad_norm_then": np.abs(gradient * r.uniform(0.7, 1.3, 300)).astype(np.float32),
        "epoch_then": np.full(300, EPOCH - 2, np.int16),
    }
    found, gains = [], []
    for key in range(700):
        plan = planned(Rais(), columns, key)
        assert plan.weights is not None
        found.append(float((plan.weights.double().numpy() * gradient[plan.ids.numpy()]).mean()))
        gains.append(plan.facts["gain"])
    assert away(np.array(found), gradient.mean()) < 3
    uniform = np.var(gradient) / 300
    assert np.var(found) < 0.6 * uniform
    assert np.square(gradient).mean() / 300 / np.var(found) == pytest.approx(gains[0], rel=0.25)


def test_older_norms_get_more_of_a_chance_where_age_makes_them_grow() -> None:
    """Squares that grow with the epochs since they were seen: of equal last norms, the older is drawn more often."""
    r = np.random.default_rng(1)
    n = 400
    ages = r.integers(1, 6, n)
    columns = {
        "grad_norm": np.sqrt(1 + ages).astype(np.float32),
        "epoch": np.full(n, EPOCH - 1, np.int16),
        "grad_norm_then": np.ones(n, np.float32),
        "epoch_then": (EPOCH - 1 - ages).astype(np.int16),
    }
    columns["grad_norm"][:2], columns["epoch"][:2] = 2.0, (EPOCH - 1, EPOCH - 6)
    plan = planned(Rais(), {name: values.copy() for name, values in columns.items()})
    weights = {}
    for key in range(60):
        plan = planned(Rais(), columns, key)
        assert plan.weights is not None
        weights |= dict(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True))
    assert weights[1] < 0.8 * weights[0]


def test_in_a_training() -> None:
    """Norms are those of the gradients at the outputs; what a plan was made of is there when the next one is made."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draws)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = thresher.attach(
        Rais(),
        loader=DataLoader(TensorDataset(x, y), 10, shuffle=True, generator=draws),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=4,
    )
    norm, seen = torch.full((60,), NEVER_SEEN), torch.full((60,), -1)
    for epoch in range(4):
        plan = run.plan
        if epoch:
            assert plan.drawn and torch.equal(
                run.records["grad_norm_then"], run.records["grad_norm"]
            )
            assert torch.equal(run.records["epoch_then"], run.records["epoch"])
            assert torch.allclose(run.records["grad_norm"], norm, rtol=1e-4)
            assert torch.equal(run.records["epoch"].long(), seen)
        for inputs, targets in run.loader:
            outputs = run.model(inputs)
            error = outputs.detach().softmax(1) - nn.functional.one_hot(targets, 2)
            norm[run.ids], seen[run.ids] = error.norm(dim=1), epoch
            optimizer.zero_grad()
            run.criterion(outputs, targets).backward()
            optimizer.step()
    assert [entry["kept"] for entry in run.history] == [60] * 4
    assert all(entry["gain"] > 0.5 for entry in run.history[1:])
    assert run.cost.forward == run.cost.backward == 240
