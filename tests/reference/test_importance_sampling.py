"""ImportanceSampling against a transcription in exact arithmetic; that its weights are unbiased; what it costs."""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
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
from thresher import EpochPlan, ImportanceSampling
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def planned(
    method: ImportanceSampling, loss: np.ndarray, *, epoch: int = 1, epochs: int = 100, key: int = 0
) -> EpochPlan:
    records = Records(method.columns(), len(loss), CPU)
    records["loss"].copy_(torch.as_tensor(loss))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(key, epoch))


@dataclass
class Answer:
    kept: list[int]
    drawn: list[int]
    weights: dict[int, Fraction]


def transcribed(loss: list[float], keep: str, key: int, epoch: int) -> Answer:
    """Sample by sample: who has no chance is there once, the others by walking along their losses to a random point."""
    n = len(loss)
    known = [i for i in range(n) if math.isfinite(loss[i]) and loss[i] >= 0]
    kept = [i for i in range(n) if i not in set(known)]
    if not known:
        return Answer(kept, [], dict.fromkeys(kept, Fraction(1)))
    masses = [Fraction(loss[i]) for i in known]
    if not any(masses):
        masses = [Fraction(1)] * len(known)
    k = max(
        1, math.floor(Fraction(keep) * n) - len(kept), math.floor(Fraction(keep) * len(known)) // 2
    )
    points = torch.rand(k, generator=seeded(key, epoch), dtype=torch.float64).tolist()
    edges = list(accumulate(masses))
    drawn = [known[bisect_right(edges, Fraction(point) * edges[-1])] for point in points]
    weights = dict.fromkeys(kept, Fraction(k + len(kept), n))
    for i, mass in zip(known, masses, strict=True):
        if mass:
            weights[i] = Fraction(k + len(kept), n * k) / (mass / edges[-1])
    return Answer(kept, drawn, weights)


KINDS = (
    "plain",
    "ties",
    "one",
    "zeros",
    "all zero",
    "nonfinite",
    "negative",
    "huge",
    "tiny",
    "outlier",
    "lost",
)


def instance(number: int) -> tuple[np.ndarray, str]:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = 1 if kind == "one" else int(r.integers(2, 90))
    loss = r.gamma(0.5, 2.0, n).astype(np.float32)
    if kind == "ties":
        loss = r.choice(np.float32([0.5, 1.0, 1.5]), n)
    if kind == "zeros":
        loss[r.random(n) < 0.8] = 0
    if kind == "all zero":
        loss[:] = 0
    if kind == "nonfinite":
        bad = r.random(n) < 0.4
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    if kind == "negative":
        loss -= np.float32(0.5)
    if kind == "huge":
        loss *= np.float32(1e37)
    if kind == "tiny":
        loss *= np.float32(1e-40)
    if kind == "outlier":
        loss[r.integers(n)] = 1e30
    if kind == "lost":
        loss[:] = np.nan
    return loss, str(r.choice(["1", "0.5", "0.29", "0.9"]))


NUMBERS = depth(range(44), range(220))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(number: int) -> None:
    loss, keep = instance(number)
    expected, n = transcribed(loss.tolist(), keep, number, 3), len(loss)
    for weights in ("none", "unbiased"):
        plan = planned(
            ImportanceSampling(weights=weights, keep=float(keep)), loss, epoch=3, key=number
        )
        plan.check(n)
        ids = plan.ids.tolist()
        assert plan.drawn == bool(expected.drawn) and plan.lr_scale == 1
        assert Counter(ids) == Counter(expected.kept + expected.drawn)
        assert plan.facts["actual_fraction"] == pytest.approx(1 - len(ids) / n)
        if weights == "none" or not expected.drawn:
            assert plan.weights is None
        else:
            assert plan.weights is not None
            assert plan.weights.tolist() == pytest.approx(
                [float(expected.weights[i]) for i in ids], rel=1e-6
            )


def test_the_instances_are_hard() -> None:
    seen = dict.fromkeys(
        ("repeats", "nothing drawn", "some kept", "zeros among others", "fewer", "all"), 0
    )
    for number in NUMBERS:
        loss, keep = instance(number)
        answer = transcribed(loss.tolist(), keep, number, 3)
        seen["repeats"] += len(set(answer.drawn)) < len(answer.drawn)
        seen["nothing drawn"] += not answer.drawn
        seen["some kept"] += bool(answer.kept and answer.drawn)
        seen["zeros among others"] += bool((loss == 0).any() and (loss > 0).any())
        seen["fewer"] += 0 < len(answer.drawn) < len(loss)
        seen["all"] += len(answer.drawn) == len(loss)
    assert min(seen.values()) >= depth(2, 10), seen


def test_every_epoch_and_every_seed_draws_anew() -> None:
    loss = np.ones(30)
    method = ImportanceSampling()
    plans = {
        tuple(planned(method, loss, epoch=epoch, key=key).ids.tolist())
        for epoch in range(1, 21)
        for key in range(5)
    }
    assert len(plans) == 100
    assert (
        planned(method, loss, epoch=2).ids.tolist() == planned(method, loss, epoch=2).ids.tolist()
    )


def away(samples: np.ndarray, expected: float) -> float:
    """Distance of the mean in standard errors."""
    return abs(samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(len(samples)))


@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_weights_make_it_unbiased(keep: float) -> None:
    """Of a gradient, not of the loss, whose estimate has no variance where p is in proportion to it."""
    r = np.random.default_rng(0)
    loss = r.gamma(0.7, 1.0, 200).astype(np.float32)
    loss[:20] = np.nan
    gradient = np.nan_to_num(loss) ** 0.5 + r.normal(size=200)
    means: dict[str, list[float]] = {"none": [], "unbiased": []}
    for weights, found in means.items():
        method = ImportanceSampling(weights=weights, keep=keep)
        for key in range(800):
            plan = planned(method, loss, key=key)
            factor = 1.0 if plan.weights is None else plan.weights.double().numpy()
            found.append(float((factor * gradient[plan.ids.numpy()]).mean()))
    assert away(np.array(means["unbiased"]), gradient.mean()) < 3
    assert away(np.array(means["none"]), gradient.mean()) > 10


@pytest.mark.parametrize(("losses", "refreshed"), [("fresh", 4 * 60), ("last", 0)])
def test_what_it_costs(losses: str, refreshed: int) -> None:
    """A pass over all samples before each of five epochs but the first."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draws)
    model = nn.Linear(3, 2)
    run = thresher.attach(
        ImportanceSampling(losses=losses),
        loader=DataLoader(
            TensorDataset(x, (x[:, 0] > 0).long()), 10, shuffle=True, generator=draws
        ),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=5,
    )
    for _ in range(5):
        trained, plan = [], run.plan
        for inputs, targets in run.loader:
            trained += run.ids.tolist()
            run.criterion(run.model(inputs), targets).backward()
        assert trained == plan.ids.tolist() if plan.drawn else sorted(trained) == list(range(60))
    assert run.cost.refresh == refreshed
    assert run.cost.of_loop == run.cost.backward == 300
