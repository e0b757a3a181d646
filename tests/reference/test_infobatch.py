"""InfoBatch against a transcription of the paper that shares nothing with the library, and its claim: it is unbiased."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from depth import depth
from helpers import over_instances
from loss_cases import measure
from thresher import EpochPlan, InfoBatch
from thresher.losses import adapt
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def filled(method: InfoBatch, loss: Any) -> Records:
    records = Records(method.columns(), len(loss), CPU)
    records["loss"].copy_(torch.as_tensor(loss))
    return records


def planned(
    method: InfoBatch, loss: Any, *, epoch: int = 1, epochs: int = 100, key: int = 0
) -> EpochPlan:
    return method.plan_epoch(
        filled(method, loss), epoch=epoch, epochs=epochs, generator=seeded(key, epoch)
    )


# 200 random instances


@dataclass
class Answer:
    prunes: bool
    below: list[int]
    kept_below: int
    weight: float


def transcribed(
    loss: list[float],
    *,
    prune_fraction: str,
    delta: str,
    threshold: str,
    rescale: str,
    epoch: int,
    epochs: int,
) -> Answer:
    """Everything but the draw itself, sample by sample and in exact arithmetic."""
    finite = [Fraction(value) for value in loss if math.isfinite(value)]
    if epoch == 0 or epoch + 1 > Fraction(delta) * epochs or not finite:
        return Answer(False, [], 0, 1.0)
    if threshold == "mean":
        cut = sum(finite) / len(finite)
    else:
        finite.sort()
        cut = finite[min(math.floor(Fraction(threshold) * len(finite)), len(finite) - 1)]
    below = [i for i, value in enumerate(loss) if math.isfinite(value) and Fraction(value) < cut]
    keep = 1 - Fraction(prune_fraction)
    kept = math.floor(keep * len(below))
    if not kept and below:
        kept = 1  # whose weight stands for all of them; the original code would lose them
    prunes = kept < len(below)
    weight = Fraction(len(below), kept) if rescale == "mass" and kept else 1 / keep
    return Answer(prunes, below if prunes else [], kept, float(weight))


KINDS = (
    "plain",
    "ties",
    "one",
    "equal",
    "nonfinite",
    "zero",
    "integer",
    "quantile",
    "late",
    "everything",
)


@dataclass
class Instance:
    loss: np.ndarray
    settings: dict[str, str]
    epoch: int
    epochs: int

    def method(self) -> InfoBatch:
        s = self.settings
        threshold = "mean" if s["threshold"] == "mean" else float(s["threshold"])
        return InfoBatch(float(s["prune_fraction"]), float(s["delta"]), threshold, s["rescale"])

    def answer(self) -> Answer:
        return transcribed(
            self.loss.tolist(), epoch=self.epoch, epochs=self.epochs, **self.settings
        )


def instance(number: int) -> Instance:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = 1 if kind == "one" else int(r.integers(2, 120))
    loss = r.gamma(1.0, 1.0, n).astype(np.float32)
    if kind in ("ties", "everything"):
        loss = r.choice(np.float32([0.5, 1.0, 1.5]), n)
        if kind == "ties":
            loss = np.append(
                np.concatenate([loss, 2 - loss]), np.float32(1)
            )  # the mean is exactly one of them
    if kind == "equal":
        loss[:] = r.choice(np.float32([0.1, 3.0, 2.3, 1e-7]))
    if kind in ("nonfinite", "everything"):
        bad = r.random(n) < r.choice([0.1, 0.5, 1.0])
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    prune_fraction = str(r.choice(["0.5", "0.3", "0.71", "0.9", "0.99"]))
    if kind == "zero":
        prune_fraction = "0"
    if kind == "integer":
        # A hundred below the mean; (1 - r) * 100 is whole, its float product is not.
        loss = np.concatenate([r.random(100), np.full(40, 5.0)]).astype(np.float32)
        prune_fraction = str(r.choice(["0.71", "0.43", "0.42", "0.9"]))
    epochs = int(r.integers(1, 300)) if kind == "late" else 40
    epoch = (
        int(Fraction("0.875") * epochs) + int(r.integers(-2, 2))
        if kind == "late"
        else int(r.integers(1, 34))
    )
    settings = {
        "prune_fraction": prune_fraction,
        "delta": "0.875",
        "threshold": str(r.choice(["0.29", "0.5", "0.8", "0.07"]))
        if kind in ("quantile", "everything")
        else "mean",
        "rescale": str(r.choice(["mass", "ratio"])),
    }
    return Instance(loss, settings, min(max(epoch, 0), epochs - 1), epochs)


NUMBERS = depth(range(50), range(200))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(number: int) -> None:
    given = instance(number)
    expected, n = given.answer(), len(given.loss)
    plan = planned(given.method(), given.loss, epoch=given.epoch, epochs=given.epochs, key=number)
    plan.check(n)
    assert plan.refresh is None and plan.lr_scale == 1 and not plan.drawn
    ids = plan.ids.tolist()
    if not expected.prunes:
        assert ids == list(range(n)) and plan.weights is None
        assert plan.facts["actual_fraction"] == plan.facts["scheduled_fraction"] == 0
        return
    assert plan.weights is not None
    below = set(expected.below)
    assert set(range(n)) - below <= set(ids)
    assert sum(i in below for i in ids) == expected.kept_below
    for i, weight in zip(ids, plan.weights.tolist(), strict=True):
        assert weight == (float(np.float32(expected.weight)) if i in below else 1.0)
    assert plan.facts["actual_fraction"] == pytest.approx((len(below) - expected.kept_below) / n)


def test_the_instances_are_hard() -> None:
    seen = dict.fromkeys(
        (
            "prunes",
            "keeps all",
            "at the cut",
            "nonfinite",
            "whole",
            "odd",
            "all but one",
            "annealing",
        ),
        0,
    )
    for number in NUMBERS:
        given = instance(number)
        answer, keep = given.answer(), 1 - Fraction(given.settings["prune_fraction"])
        finite = [v for v in given.loss.tolist() if math.isfinite(v)]
        seen["prunes"] += answer.prunes
        seen["keeps all"] += not answer.prunes
        seen["at the cut"] += answer.prunes and sum(map(Fraction, finite)) / len(finite) in finite
        seen["nonfinite"] += answer.prunes and len(finite) < len(given.loss)
        seen["whole"] += answer.prunes and int(float(keep) * len(answer.below)) != math.floor(
            keep * len(answer.below)
        )
        seen["odd"] += answer.prunes and bool(keep * len(answer.below) % 1)
        seen["all but one"] += answer.prunes and answer.kept_below == 1
        seen["annealing"] += given.epoch + 1 > Fraction("0.875") * given.epochs
    assert min(seen.values()) >= depth(1, 4), seen


# When it prunes


@pytest.mark.parametrize(
    ("delta", "exact"), [(0.875, "0.875"), (0.7, "0.7"), (1.0, "1"), (0.0, "0")]
)
def test_annealing_epochs_are_full_and_unweighted(delta: float, exact: str) -> None:
    """For every number of epochs; in the original code the weights stay where delta * E is not whole."""
    method = InfoBatch(delta=delta)
    records = filled(method, [0.0, 0.1, 0.2, 0.3, 9.0, 9.0])
    pruned = 0
    for epochs in range(1, 301, depth(7, 1)):
        last = math.floor(Fraction(exact) * epochs)  # epochs numbered from 1, as the paper does
        for number in range(max(1, last - 1), epochs + 1):
            plan = method.plan_epoch(
                records, epoch=number - 1, epochs=epochs, generator=seeded(epochs, number)
            )
            if number > last or number == 1:
                assert plan.ids.tolist() == list(range(6)), (epochs, number)
                assert plan.weights is None, (epochs, number)
            else:
                assert len(plan.ids) == 4, (epochs, number)
                assert plan.weights is not None and sorted(plan.weights.tolist()) == [1, 1, 2, 2]
                pruned += 1
    assert pruned > depth(70, 500) or delta == 0


@pytest.mark.parametrize("loss", [None, 3.0, 0.1])
@pytest.mark.parametrize("epoch", [0, 1])
def test_nothing_is_pruned_before_losses_exist(loss: float | None, epoch: int) -> None:
    """The float32 mean of 14,197,122 threes is above three, so the original code prunes half of ImageNet-21k blindly."""
    method, n = InfoBatch(), 14_197_122
    records = Records(method.columns(), n, CPU)
    if loss is not None:
        records["loss"].fill_(loss)
    plan = method.plan_epoch(records, epoch=epoch, epochs=100, generator=seeded(0, epoch))
    assert len(plan.ids) == n
    assert plan.weights is None


@pytest.mark.parametrize("n", [2, 3, 10, 1001, 99_999])
@pytest.mark.parametrize("value", [0.1, 2.3, 1e-7, 3.0, 1e30])
def test_equal_losses_are_not_below_their_mean(value: float, n: int) -> None:
    assert len(planned(InfoBatch(), torch.full((n,), value)).ids) == n


def test_one_loss_just_above_many_equal_ones() -> None:
    """The guard for equal losses must not stop pruning where there is a difference."""
    loss = torch.full((1001,), 0.1)
    loss[0] = float(np.nextafter(np.float32(0.1), np.float32(1)))
    plan = planned(InfoBatch(), loss)
    assert len(plan.ids) == 501 and 0 in plan.ids


def test_samples_without_a_loss_are_kept_and_not_averaged() -> None:
    loss = torch.tensor([1.0, 1.0, 3.0, math.nan, math.inf, -math.inf])
    for key in range(20):
        plan = planned(InfoBatch(), loss, key=key)
        assert plan.weights is not None
        assert set(plan.ids.tolist()) >= {2, 3, 4, 5}
        assert plan.weights[-4:].tolist() == [1, 1, 1, 1]
        assert len(plan.ids) == 5


# The draw


def test_the_draw_is_uniform_and_fresh() -> None:
    loss = np.concatenate([np.linspace(0, 1, 20), np.full(5, 50.0)])
    method = InfoBatch()
    plans = [planned(method, loss, key=key) for key in range(4000)]
    counts = np.bincount(torch.cat([plan.ids for plan in plans]).numpy(), minlength=25)
    assert (counts[20:] == 4000).all()
    # Each of twenty is kept with probability one half: standard deviation 31.6 over 4,000 plans.
    assert np.abs(counts[:20] - 2000).max() < 4 * math.sqrt(1000)
    together = np.mean([{0, 1} <= set(plan.ids.tolist()) for plan in plans])
    assert together == pytest.approx(10 / 20 * 9 / 19, abs=4 * math.sqrt(0.237 * 0.763 / 4000))
    assert len({tuple(plan.ids.tolist()) for plan in plans}) > 3900


# Unbiased


class Problem:
    """Cross-entropy of a linear model, in double precision, with easy and hard samples."""

    def __init__(self, class_weights: bool, n: int = 1503) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, 8, generator=g, dtype=torch.float64)
        self.w = torch.randn(8, 5, generator=g, dtype=torch.float64).requires_grad_()
        self.y = (self.x @ self.w + 2 * torch.randn(n, 5, generator=g)).argmax(1)
        self.class_weights = (
            torch.tensor([0.5, 1, 2, 1.5, 0.8], dtype=torch.float64) if class_weights else None
        )
        self.own = nn.CrossEntropyLoss(weight=self.class_weights)
        self.direction = torch.randn(8, 5, generator=g, dtype=torch.float64)
        with torch.no_grad():
            self.losses = nn.functional.cross_entropy(self.x @ self.w, self.y, reduction="none")

    def slope(self, value: torch.Tensor) -> float:
        """Derivative of the value along a fixed direction of the parameters."""
        (gradient,) = torch.autograd.grad(value, self.w)
        return float((gradient * self.direction).sum())

    def full(self) -> tuple[float, float]:
        value = self.own(self.x @ self.w, self.y)
        return value.item(), self.slope(value)

    def under(self, plan: EpochPlan) -> tuple[float, float]:
        ids = plan.ids
        value, _ = measure(
            adapt(self.own), self.x[ids] @ self.w, self.y[ids], len(ids), weights=plan.weights
        )
        # An epoch of K samples takes K / N as many steps; class weights are divided by what they weigh in the batch.
        share = 1.0 if self.class_weights is not None else len(ids) / len(self.y)
        return value.item() * share, self.slope(value) * share


def away(samples: np.ndarray, expected: float) -> float:
    """Distance of the mean in standard errors."""
    return abs(samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(len(samples)))


@pytest.mark.parametrize(
    ("class_weights", "prune_fraction", "threshold"),
    depth(
        [(False, 0.5, "mean"), (True, 0.7, 0.8)],
        [(False, 0.5, "mean"), (True, 0.5, "mean"), (False, 0.7, 0.8), (True, 0.7, 0.8)],
    ),
)
def test_unbiased(class_weights: bool, prune_fraction: float, threshold: Any) -> None:
    problem = Problem(class_weights)
    method = InfoBatch(prune_fraction, threshold=threshold)
    records = filled(method, problem.losses)
    plans = [
        method.plan_epoch(records, epoch=3, epochs=100, generator=seeded(7, k))
        for k in range(depth(400, 2000))
    ]
    assert {len(plan.ids) for plan in plans} == {len(plans[0].ids)}
    assert len(plans[0].ids) < 0.75 * len(problem.y)
    found = np.array([problem.under(plan) for plan in plans])
    for column, expected in enumerate(problem.full()):
        assert away(found[:, column], expected) < 3
        # The same kept samples without their weights are far off: the test can tell.
    unweighted = np.array(
        [problem.under(EpochPlan(plan.ids, torch.ones(len(plan.ids)))) for plan in plans[:50]]
    )
    assert away(unweighted[:, 0], problem.full()[0]) > 100


def test_the_weights_add_up_to_all_samples() -> None:
    for n in range(2, 200):
        loss = np.concatenate([np.linspace(0, 1, n), [1000.0]])
        plan = planned(InfoBatch(0.3), loss, key=n)
        assert plan.weights is not None
        assert plan.weights.double().sum().item() == pytest.approx(n + 1, rel=1e-6)


def test_the_ratio_of_the_original_code_loses_part_of_a_sample() -> None:
    """Seven below the mean, half of them kept: three of weight two, so the expectation lacks one seventh of theirs."""
    loss = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 20.0])
    totals = {}
    for rescale in ("ratio", "mass"):
        plans = [planned(InfoBatch(rescale=rescale), loss, key=key) for key in range(2000)]
        weights = [plan.weights for plan in plans if plan.weights is not None]
        assert {len(plan.ids) for plan in plans} == {4} and len(weights) == 2000
        assert weights[0].tolist() == [pytest.approx(7 / 3 if rescale == "mass" else 2)] * 3 + [1]
        totals[rescale] = np.array(
            [(loss[p.ids.numpy()] * w.numpy()).sum() for p, w in zip(plans, weights, strict=True)]
        )
    assert away(totals["ratio"], 20 + 2.8 * 6 / 7) < 3
    assert away(totals["ratio"], loss.sum()) > 10
    assert away(totals["mass"], loss.sum()) < 3


def test_no_sample_gets_a_large_weight_where_many_have_no_finite_loss():
    """Of the samples with a loss most are left out at most: what remains stands for at most nineteen others."""
    loss = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    loss[::2] = float("nan")
    method = InfoBatch(target=0.6)
    records = {"loss": loss, "left_out": torch.zeros(1000, dtype=torch.int16)}
    plan = method.plan_epoch(
        records, epoch=5, epochs=10, generator=torch.Generator().manual_seed(1)
    )
    assert float(plan.weights.max()) <= 20 and {int(i) for i in range(0, 1000, 2)} <= set(
        plan.ids.tolist()
    )
