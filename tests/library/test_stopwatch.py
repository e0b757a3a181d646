"""The ratio of backward to forward time in the first steps, with a clock by hand."""

import time

import pytest
import torch
from torch import nn

from thresher.backward_ratio import Stopwatch
from thresher.cost import Cost


class Clock:
    """Process time that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "process_time", lambda: self.now)


class Slow(torch.autograd.Function):
    """A layer whose passes take given times."""

    clock: Clock
    seconds = (1.0, 2.0)

    @staticmethod
    def forward(ctx, x):
        Slow.clock.now += Slow.seconds[0]
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Slow.clock.now += Slow.seconds[1]
        return grad


def step(watch: Stopwatch, x: torch.Tensor, *, between: float = 0.0) -> torch.Tensor:
    loss = watch.forward(lambda: Slow.apply(x)).sum()
    watch.watch(loss)
    Slow.clock.now += between
    loss.backward()
    return loss


def test_the_stopwatch_takes_the_median_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.clock = Clock(monkeypatch)
    watch = Stopwatch(torch.device("cpu"))
    x = torch.ones(3, requires_grad=True)
    # Two steps of warm-up; what lies between the passes counts for neither.
    for number, seconds in enumerate([(1, 100), (1, 100), (1, 2), (1, 3), (2, 5), (1, 50)]):
        assert watch.running
        assert watch.ratio() is None or number > 4
        Slow.seconds = seconds
        step(watch, x, between=10.0)
    assert watch.ratio() == pytest.approx((2.5 + 3) / 2)  # of 2, 3, 2.5, 50
    for _ in range(8):
        Slow.seconds = (1, 2)
        step(watch, x)
    assert not watch.running


def test_the_stopwatch_skips_what_it_cannot_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.clock, Slow.seconds = Clock(monkeypatch), (1.0, 2.0)
    watch = Stopwatch(torch.device("cpu"))
    x = torch.ones(3, requires_grad=True)
    watch.watch(x.sum())  # no forward pass yet
    for _ in range(4):
        watch.forward(lambda: Slow.apply(x))  # never put through backward
    assert watch.ratio() is None
    loss = watch.forward(lambda: Slow.apply(x.detach())).sum()
    watch.watch(loss)  # needs no gradient
    for _ in range(3):
        step(watch, x)
    assert watch.ratio() == 2.0
    loss = step(watch, x)
    watch.watch(loss.detach().requires_grad_())  # a second loss of the same pass is not timed
    assert watch.ratio() == 2.0


def test_the_stopwatch_leaves_results_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(20):
        model.zero_grad()
        plain = model(x).square().sum()
        plain.backward()
        expected = model.weight.grad.clone()
        model.zero_grad()
        loss = watch.forward(lambda: model(x)).square().sum()
        watch.watch(loss)
        loss.backward()
        assert torch.equal(loss, plain)
        assert torch.equal(model.weight.grad, expected)


def test_a_cost_keeps_its_ratio_until_another_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, cost = Stopwatch(torch.device("cpu")), Cost(backward_to_forward=1.5)
    watch.update(cost)
    assert cost.backward_to_forward == 1.5
    monkeypatch.setattr(watch, "ratio", lambda: 2.5)
    watch.update(cost)
    assert cost.backward_to_forward == 2.5
