import dataclasses
import math
import time

import pytest
import torch
from torch import nn

from thresher import break_even
from thresher.cost import Cost
from thresher.run.stopwatch import Stopwatch


def test_ratio() -> None:
    cost = Cost(forward=90, backward=70, refresh=20, full_forward=100, full_backward=100)
    assert cost.ratio() == pytest.approx((90 + 2 * 70) / 300)
    assert cost.ratio(0) == pytest.approx(0.9)
    assert cost.ratio(backward_to_forward=1.0) == pytest.approx(0.8)
    assert Cost(forward=5, backward=5, full_forward=5, full_backward=5).ratio(3.7) == 1
    assert math.isnan(Cost().ratio())


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_ratio_refuses(value: float) -> None:
    with pytest.raises(ValueError, match=rf"ratio: `backward_to_forward` must be 0 or more, got {value}"):
        Cost().ratio(value)


def test_what_it_prints() -> None:
    cost = Cost(forward=1900, backward=1200, refresh=700, steps=12, full_forward=2000, full_backward=2000)
    assert str(cost) == (
        "forward 1,900 of 2,000 samples (refresh 700, scoring 0), backward 1,200 of 2,000, 12 steps: "
        "0.717 of full training at 2 forwards a backward"
    )
    measured = dataclasses.replace(cost, backward_to_forward=1.5)
    assert str(measured).endswith("a backward, 0.740 with the measured ratio 1.50")


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "share"),
    [(1, 2, 2 / 3), (1.0, 1.0, 0.5), (0.004, 0.001, 0.2), (3, 1e-300, 0.0), (1e-300, 1e300, 1.0), (1e308, 1e308, 0.5)],
)
def test_break_even(forward_s: float, backward_s: float, share: float) -> None:
    found = break_even(forward_s, backward_s)
    assert found == pytest.approx(share, abs=1e-12)
    assert forward_s + found * (forward_s + backward_s) == pytest.approx(forward_s + backward_s)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_break_even_refuses(value: float) -> None:
    for name, arguments in (("forward_s", (value, 1.0)), ("backward_s", (1.0, value))):
        with pytest.raises(ValueError, match=f"^break_even: `{name}` must be a positive finite number of seconds, got {value}"):
            break_even(*arguments)


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
