"""Mercury against a transcription in exact arithmetic, and in a training: whose losses are fresh when."""

import math
from bisect import bisect_right
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import Mercury
from thresher.methods._base import Chances, unbiased_weights
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def test_worked_vector() -> None:
    """Importances 1, 1, 2, 4 of a shard."""
    chances = Chances(np.array([1.0, 1.0, 2.0, 4.0])).of(slice(None))
    assert chances.tolist() == [0.125, 0.125, 0.25, 0.5]
    assert unbiased_weights(chances, 4, draws=4, size=4).tolist() == [2, 2, 1, 0.5]
    method = Mercury(groups=4)
    records = Records(method.columns(), 4, CPU)
    records["loss"].copy_(torch.tensor([1.0, 1.0, 2.0, 4.0]))
    seen = set()
    for key in range(20):
        plan = method.plan_epoch(records, epoch=1, epochs=9, generator=seeded(key))
        assert plan.weights is not None
        for i, weight in zip(plan.ids.tolist(), plan.weights.tolist(), strict=True):
            assert weight == [2, 2, 1, 0.5][i]
            seen.add(i)
    assert seen == {0, 1, 2, 3}


KINDS = ("plain", "ties", "one", "zeros", "all zero", "nonfinite", "huge", "lost")


def instance(number: int) -> tuple[np.ndarray, int, str, int]:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = 1 if kind == "one" else int(r.integers(2, 80))
    loss = r.gamma(0.5, 2.0, n).astype(np.float32)
    if kind == "ties":
        loss = r.choice(np.float32([0.5, 1.5]), n)
    if kind == "zeros":
        loss[r.random(n) < 0.7] = 0
    if kind == "all zero":
        loss[:] = 0
    if kind in ("nonfinite", "lost"):
        bad = r.random(n) < (0.4 if kind == "nonfinite" else 2)
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    if kind == "huge":
        loss *= np.float32(1e37)
    return loss, int(r.integers(1, 12)), str(r.choice(["1", "0.5", "0.29"])), int(r.integers(1, 30))


@over_instances(depth(range(40), range(200)))
def test_agrees_with_the_transcription(number: int) -> None:
    loss, groups, keep, epoch = instance(number)
    n = len(loss)
    method = Mercury(groups=groups, keep=float(keep))
    records = Records(method.columns(), n, CPU)
    records["loss"].copy_(torch.from_numpy(loss))
    plan = method.plan_epoch(records, epoch=epoch, epochs=31, generator=seeded(number))
    plan.check(n)
    assert plan.refresh is not None
    assert plan.refresh.tolist() == [i for i in range(n) if i % groups == epoch % groups]
    known = [i for i in range(n) if math.isfinite(loss[i])]
    lost = [i for i in range(n) if not math.isfinite(loss[i])]
    if not known:
        assert plan.ids.tolist() == lost and plan.weights is None
        return
    mass = [Fraction(float(loss[i])) for i in known]
    mass = mass if any(mass) else [Fraction(1)] * len(known)
    k = max(
        1, math.floor(Fraction(keep) * n) - len(lost), math.floor(Fraction(keep) * len(known)) // 2
    )
    edges = list(accumulate(mass))
    points = torch.rand(k, generator=seeded(number), dtype=torch.float64).tolist()
    drawn = [known[bisect_right(edges, Fraction(point) * edges[-1])] for point in points]
    assert Counter(plan.ids.tolist()) == Counter(lost + drawn)
    assert plan.weights is not None and plan.drawn
    size = k + len(lost)
    for i, weight in zip(plan.ids.tolist(), plan.weights.tolist(), strict=True):
        p = mass[known.index(i)] / edges[-1] if i in known else None
        exact = Fraction(size, n) if p is None else Fraction(size, n * k) / p
        assert weight == pytest.approx(float(exact), rel=1e-6)


def test_one_group_is_fresh_when_an_epoch_is_planned() -> None:
    """After each epoch the losses of its group are those of the model as it is then, in eval mode."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=draws)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(x, y), 10, shuffle=True, generator=draws)
    method = Mercury(groups=5)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=4,
    )
    for epoch in range(4):
        for inputs, targets in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
        now = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
        fresh = torch.isclose(run.records["loss"], now, rtol=1e-6, atol=0)
        if epoch < 3:
            assert fresh[epoch::5].all()
        assert not fresh.all()
    assert run.cost.refresh == 3 * 10 and run.cost.backward == 200
