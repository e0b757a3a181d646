"""The counted backward rows are those that a counter of floating-point operations finds, in loops of many kinds."""

import copy
import math
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import thresher
from thresher import FullData, SelectiveBackprop, UniformSubset, subset_backward

N, B, C, WIDTH = 64, 16, 3, 128
KEEP = 0.25
pytestmark = pytest.mark.usefixtures("shared_traces")


class Net(nn.Sequential):
    """Its first layer is small: whether a backward pass goes on to the inputs makes less than 1 %."""

    def __init__(self):
        super().__init__(
            nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, C)
        )


class Untraceable(Net):
    """Its forward asks for a value, which no graph can."""

    def forward(self, input):  # noqa: A002
        return super().forward(input if float(input.detach().sum()) < 1e9 else -input)


class Sample:
    """One training with everything that a loop needs, and the operations of its backward passes."""

    def __init__(self, method, passes: Any = "auto", *, net=None, model=True, n=N):
        torch.manual_seed(0)
        self.net = net or Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.run = thresher.attach(
            method,
            loader=DataLoader(
                TensorDataset(torch.randn(n, 2), torch.arange(n) % C), B, shuffle=True
            ),
            criterion=nn.CrossEntropyLoss(),
            model=self.net if model else None,
            optimizer=self.optimizer,
            epochs=3,
            forward_passes=passes,
        )
        self.run._timeline.comparison._times = (
            0  # its pass runs inside of a backward pass, whose operations are counted here
        )
        self.flops = 0

    @contextmanager
    def counting(self):
        with FlopCounterMode(display=False) as counter:
            yield
        self.flops += counter.get_total_flops()

    def backward(self, loss, **settings):
        with self.counting():
            loss.backward(**settings)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def rows(self):
        """Number of rows whose backward passes take as many operations."""
        net = Net()
        loss = F.cross_entropy(net(torch.randn(B, 2)), torch.zeros(B, dtype=torch.int64))
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return self.flops / (counter.get_total_flops() / B)


def plain(at, x, y, i):
    at.backward(at.run.criterion(at.run.model(x), y))
    at.step()


def accumulation(at, x, y, i):
    for rows in (slice(0, 6), slice(6, None)):
        at.backward(at.run.criterion(at.run.model(x[rows]), y[rows]))
    if i % 2:
        at.step()


def extra_loss(at, x, y, i):
    outputs = at.run.model(x)
    at.backward(at.run.criterion(outputs, y) + 0.01 * outputs.square().mean())
    at.step()


def extra_loss_by_itself(at, x, y, i):
    outputs = at.run.model(x)
    at.backward(at.run.criterion(outputs, y), retain_graph=True)
    at.backward(0.01 * outputs.square().mean())
    at.step()


def unused_losses(at, x, y, i):
    loss = at.run.criterion(at.run.model(x), y)
    if i % 2:
        at.backward(loss)
        at.step()


def forgotten_criterion(at, x, y, i):
    at.backward(F.cross_entropy(at.run.model(x), y))
    at.step()


def forgotten_model(at, x, y, i):
    at.backward(at.run.criterion(at.net(x), y))
    at.step()


def forgotten_both(at, x, y, i):
    at.backward(F.cross_entropy(at.net(x), y))
    at.step()


def projected_gradient_descent(at, x, y, i):
    delta: Any = torch.zeros_like(x)
    for _ in range(3):
        delta.requires_grad_()
        at.backward(at.run.criterion(at.run.model(x + delta), y))
        delta = (delta + 0.1 * delta.grad.sign()).detach()
    at.step()


def of_the_plain_model(at, x, y, i):
    delta: Any = torch.zeros_like(x)
    for _ in range(3):
        delta.requires_grad_()
        at.backward(at.run.criterion(at.net(x + delta), y))
        delta = (delta + 0.1 * delta.grad.sign()).detach()
    at.step()


def lbfgs(at, x, y, i):
    def closure():
        optimizer.zero_grad()
        loss = at.run.criterion(at.run.model(x), y)
        at.backward(loss)
        return loss

    optimizer = torch.optim.LBFGS(at.net.parameters(), lr=0.01, max_iter=4)
    optimizer.step(closure)
    at.step()


def sharpness_aware(at, x, y, i):
    at.backward(at.run.criterion(at.run.model(x), y))
    before = copy.deepcopy(at.net.state_dict())
    with torch.no_grad():
        for parameter in at.net.parameters():
            parameter += 0.01 * parameter.grad
    at.net.zero_grad()
    at.backward(at.run.criterion(at.run.model(x), y))
    at.net.load_state_dict(before)
    at.step()


def normalized_inputs(at, x, y, i):
    at.backward(at.run.criterion(at.run.model((x - 1) / 2), y))
    at.step()


def slices_of_outputs(at, x, y, i):
    outputs = at.run.model((x - 1) / 2)
    at.backward(at.run.criterion(outputs[:5], y[:5]) + at.run.criterion(outputs[5:], y[5:]))
    at.step()


def two_heads_of_the_plain_model(at, x, y, i):
    outputs = at.net(x)
    at.backward(at.run.criterion(outputs, y) + at.run.criterion(2 * outputs, y))
    at.step()


def own_reduction(at, x, y, i):
    outputs = at.run.model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    at.backward(at.run.reduce(losses, outputs=outputs))
    at.step()


def uncredited_forward(at, x, y, i):
    clean, moved = at.run.model(x), at.run.model(x + 0.1)
    at.backward(
        at.run.criterion(clean, y)
        + F.kl_div(moved.log_softmax(1), clean.softmax(1), reduction="batchmean")
    )
    at.step()


ONCE = SelectiveBackprop(keep=KEEP)
SPENT = (1 + 2 * KEEP) / 3
LOOPS = [
    (plain, FullData(), {}, 1.0),
    (plain, UniformSubset(0.5), {}, 0.5),
    (plain, ONCE, {"passes": "once"}, SPENT),
    (plain, ONCE, {"passes": "twice"}, (1 + 3 * KEEP) / 3),
    (plain, ONCE, {"passes": "once", "net": Untraceable}, 1.0),
    (accumulation, FullData(), {}, 1.0),
    (accumulation, ONCE, {"passes": "once"}, None),
    (extra_loss, FullData(), {}, 1.0),
    (extra_loss, ONCE, {"passes": "once"}, 1.0),
    (extra_loss_by_itself, FullData(), {}, 1.0),
    (extra_loss_by_itself, ONCE, {"passes": "once"}, None),
    (unused_losses, FullData(), {}, None),
    (unused_losses, ONCE, {"passes": "once"}, None),
    (forgotten_criterion, FullData(), {}, 1.0),
    (forgotten_model, FullData(), {}, 1.0),
    (forgotten_model, FullData(), {"model": False}, 1.0),
    (forgotten_model, ONCE, {"passes": "once"}, 1.0),
    (forgotten_both, FullData(), {}, "unknown"),
    (projected_gradient_descent, FullData(), {}, 1.0),
    (projected_gradient_descent, UniformSubset(0.5), {}, 0.5),
    (projected_gradient_descent, ONCE, {"passes": "once"}, SPENT),
    (of_the_plain_model, UniformSubset(0.5), {}, 0.5),
    (lbfgs, FullData(), {}, 1.0),
    (lbfgs, ONCE, {"passes": "once"}, SPENT),
    (sharpness_aware, FullData(), {}, 1.0),
    (sharpness_aware, ONCE, {"passes": "once"}, SPENT),
    (normalized_inputs, ONCE, {"passes": "once"}, SPENT),
    (slices_of_outputs, FullData(), {}, 1.0),
    (two_heads_of_the_plain_model, FullData(), {}, 1.0),
    (own_reduction, ONCE, {"passes": "once"}, SPENT),
    (uncredited_forward, FullData(), {}, "unknown"),
]


@pytest.mark.parametrize(("loop", "method", "settings", "ratio"), LOOPS)
@pytest.mark.filterwarnings(
    "ignore:.*(using the plain|got no loss|did not come from|had a gradient in all)"
)
def test_backward_rows_are_those_that_ran(loop, method, settings, ratio):
    settings = {**settings, "net": settings["net"]()} if "net" in settings else settings
    at = Sample(method, **settings)
    for i, (x, y) in enumerate(at.run.loader):
        loop(at, x, y, i)
    cost = at.run.cost
    if ratio == "unknown":
        assert cost.unknown and math.isnan(cost.ratio()) and str(cost).startswith("unknown")
        return
    assert cost.backward == pytest.approx(at.rows, rel=0.01)
    assert cost.unknown is None
    if ratio is not None:
        assert cost.ratio() == pytest.approx(ratio, abs=0.002)


def test_a_loop_without_credited_losses_warns_then_raises():
    at = Sample(thresher.InfoBatch())
    said = "InfoBatch: run.criterion or run.reduce got no loss in an epoch. Call run.criterion"
    with pytest.warns(UserWarning, match=said):
        for x, y in at.run.loader:
            forgotten_criterion(at, x, y, 0)
    for x, y in at.run.loader:
        forgotten_criterion(at, x, y, 0)
    with pytest.raises(
        RuntimeError,
        match="InfoBatch chooses by the losses of samples, but got no loss in 2 epochs",
    ):
        iter(at.run.loader)


@pytest.mark.parametrize("method", [0.5, "kakurenbo", ONCE], ids=str)
def test_ten_steps_without_a_loss_are_enough(method):
    """Known before half of the data was trained on for an epoch: at the step, and refused before the method plans by it."""
    at = Sample(method, n=12 * B)
    batches = iter(at.run.loader)
    for x, y in islice(batches, 9):
        forgotten_criterion(at, x, y, 0)
    with pytest.warns(UserWarning, match="got no loss in 10 steps. Call run.criterion"):
        forgotten_criterion(at, *next(batches), 0)
    for x, y in batches:
        forgotten_criterion(at, x, y, 0)
    with pytest.raises(
        RuntimeError, match="chooses by the losses of samples, but got no loss in a whole epoch"
    ):
        iter(at.run.loader)


def test_a_loop_with_losses_is_not_warned():
    at = Sample(0.5, n=12 * B)
    for _ in range(2):
        for x, y in at.run.loader:
            plain(at, x, y, 0)
    assert at.run.cost.ratio() == 0.5


def test_a_method_without_losses_trains_on_and_its_cost_is_unknown():
    at = Sample(UniformSubset(0.5))
    with pytest.warns(
        UserWarning,
        match="UniformSubset: run.criterion or run.reduce got no loss in an epoch, and run.cost is unknown",
    ):
        for _ in range(3):
            for x, y in at.run.loader:
                forgotten_both(at, x, y, 0)
    assert "unknown" in str(at.run.cost) and "neither run.model nor run.criterion" in str(
        at.run.cost
    )


def test_one_batch_that_is_looked_at_first_is_no_silent_epoch():
    at = Sample(thresher.InfoBatch())
    next(iter(at.run.loader))
    for x, y in at.run.loader:
        plain(at, x, y, 0)
    assert at.run.cost.unknown is None


def test_looks_at_batches_are_no_silent_epochs():
    """As of loops that print shapes, or estimate a mean from some batches."""
    at = Sample(thresher.InfoBatch())
    for _ in range(3):
        next(iter(at.run.loader))
    for _ in zip(range(3), at.run.loader, strict=False):
        pass
    for x, y in at.run.loader:
        plain(at, x, y, 0)
    assert at.run.cost.unknown is None and at.run.cost.ratio() == 1


def test_epochs_that_are_left_early_are_silent_where_nothing_is_seen():
    run = thresher.attach(
        thresher.InfoBatch(),
        loader=DataLoader(TensorDataset(torch.randn(N, 2)), B, shuffle=True),
        criterion=None,
        epochs=3,
    )
    with pytest.warns(
        UserWarning,
        match="InfoBatch: run.criterion or run.reduce got no loss in an epoch, and run.cost is unknown",
    ):
        for _ in range(2):
            for _ in zip(range(2), run.loader, strict=False):
                pass


def test_a_forgotten_model_is_named():
    at = Sample(ONCE, "once")
    with pytest.warns(
        UserWarning, match="outputs of 64 samples did not come from run.model.*Call run.model"
    ):
        for x, y in at.run.loader:
            forgotten_model(at, x, y, 0)


def test_an_unknown_cost_is_saved():
    at = Sample(UniformSubset(0.5), model=False)
    at.run._parts.accumulator.meter.make_unknown("nobody looked")
    again = Sample(UniformSubset(0.5), model=False)
    again.run.load_state_dict(at.run.state_dict())
    assert again.run.cost.unknown == "nobody looked"


def test_before_the_first_step():
    assert str(Sample(FullData()).run.cost) == "no steps yet, so there is no cost yet"


def test_a_call_of_the_wrapped_model_itself_does_not_hide_the_next_backward_pass():
    wrapped = subset_backward(Net())
    at = Sample(ONCE, "once", net=wrapped)
    x, y = next(iter(at.run.loader))
    wrapped(x)  # as for an example to log
    before = at.run.cost.backward
    at.run.criterion(
        at.run.model(x[:1]), y[:1]
    ).backward()  # one sample goes through the plain model
    assert at.run.cost.backward == before + 1
