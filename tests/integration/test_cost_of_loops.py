"""Costs of loops that call the model in unusual ways: right, in one unit, or unknown."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import FullData, SelectiveBackprop, UniformSubset, subset_backward

ONCE = SelectiveBackprop(keep=0.5)
pytestmark = pytest.mark.usefixtures("shared_traces")


def attached(method, *, net=None, crops=False, n=64, epochs=1, **settings):
    torch.manual_seed(0)
    x, y = torch.randn(n, 10), torch.arange(n) % 4
    net = net or nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = TensorDataset(torch.stack([x, x * 0.9], 1) if crops else x, y)
    loader = DataLoader(data, 16, shuffle=True)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, net, optimizer


def train(run, optimizer, loss, epochs=1):
    for _ in range(epochs):
        for x, y in run.loader:
            optimizer.zero_grad()
            value = loss(x, y)
            if value is not None:
                value.backward()
                optimizer.step()


@pytest.mark.parametrize("how", ["eval", "module", "own name", "own name, all rows"])
def test_a_call_of_subset_backward_by_any_name_counts_its_backward_pass_once(how):
    net = subset_backward(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4)))
    full = how == "own name, all rows"
    run, net, optimizer = attached(
        FullData() if full else ONCE, net=net, **({} if full else {"forward_passes": "once"})
    )
    if how == "eval":
        run.model.eval()  # as with frozen statistics of normalizations
    model = {"eval": run.model, "module": run.model.module}.get(how, net)
    train(
        run, optimizer, lambda x, y: run.criterion(model((x - 0.3) / 1.2), y)
    )  # without the warning that it was not run.model
    cost = run.cost
    assert (cost.forward, cost.full_forward, cost.full_backward, cost.unknown) == (64, 64, 64, None)
    assert cost.backward == (64 if full else 32)


def test_a_call_of_subset_backward_beside_the_training_is_not_counted():
    run, net, optimizer = attached(
        ONCE, net=subset_backward(nn.Linear(10, 4)), forward_passes="once"
    )

    def loss(x, y):
        net(x + 1)  # as for a plot
        return run.criterion(run.model(x), y)

    train(run, optimizer, loss)
    assert run.cost.forward == 64 and run.cost.unknown is None


def test_a_second_loss_of_a_call_by_its_own_name_counts_its_forward_pass():
    run, net, optimizer = attached(FullData(), net=subset_backward(nn.Linear(10, 4)))
    train(run, optimizer, lambda x, y: run.criterion(run.model(x), y) + net(x + 1).square().mean())
    cost = run.cost
    assert (cost.forward, cost.backward, cost.full_forward, cost.full_backward) == (
        128,
        128,
        128,
        128,
    )


def test_a_second_loss_of_all_rows_is_named():
    """Its gradient reaches all rows, so that the backward pass costs them all; a second loss of the run keeps the same rows."""
    run, _, optimizer = attached(ONCE, forward_passes="once")

    def two(x, y):
        outputs = run.model(x)
        return run.criterion(outputs, y) + run.criterion(outputs * 0.5, y)

    train(run, optimizer, two)
    assert run.cost.backward == 32
    run, _, optimizer = attached(ONCE, forward_passes="once", epochs=2)

    def with_penalty(x, y):
        outputs = run.model(x)
        return run.criterion(outputs, y) + 1e-4 * outputs.square().mean()

    with pytest.warns(
        UserWarning,
        match="kept 0.50 .* 4 of 4 backward passes had a gradient in all rows.*with run.criterion",
    ) as said:
        train(run, optimizer, with_penalty, epochs=2)
    assert len(said) == 1 and said[0].filename == __file__ and run.cost.backward == 128


class OfTheBatch(nn.Linear):
    mixes = False

    def forward(self, x):
        return super().forward(x) * (x.mean() if self.mixes else 1.0)


@pytest.mark.filterwarnings("ignore:subset_backward. using the plain")
def test_a_model_that_is_called_as_it_is_is_no_second_loss():
    """The gradient of the batch that was traced came to all rows: that is not why the others cost the whole batch."""
    run, net, optimizer = attached(ONCE, forward_passes="once", net=OfTheBatch(10, 4), epochs=2)

    def loss(x, y):
        outputs = run.model(x)
        value = run.criterion(outputs, y) + (0 if net.mixes else outputs.square().mean())
        net.mixes = True
        return value

    with pytest.warns(
        UserWarning,
        match="kept 0.50 .* could not be traced, .* whole batch: .*mix.* This warning is given once",
    ) as said:
        train(run, optimizer, loss, epochs=2)
    assert not any("had a gradient in all rows" in str(warning.message) for warning in said)


def test_batches_that_a_method_leaves_whole_are_no_second_loss():
    """Their gradient reaches all rows, as it should: those before `start`, in a whole epoch and within one."""
    for start in (0.5, 0.6):
        run, _, optimizer = attached(
            SelectiveBackprop(keep=0.5, start=start), epochs=2, forward_passes="once"
        )
        train(run, optimizer, lambda x, y, run=run: run.criterion(run.model(x), y), epochs=2)
        assert 64 < run.cost.backward < 128


def test_batches_before_a_method_chooses_are_no_reason_to_keep_less():
    """Two forward passes that save nothing are told by the batches in which the method chose."""
    run, _, optimizer = attached(
        SelectiveBackprop(keep=0.5, start=0.5), epochs=2, forward_passes="twice"
    )
    run._parts.stopwatch.ratio = lambda: (
        2.0
    )  # a backward pass takes two forward passes, so that .5 saves time
    train(run, optimizer, lambda x, y: run.criterion(run.model(x), y), epochs=2)
    assert (run.cost.scoring, run.cost.backward) == (64, 96)


def test_reentrant_checkpoints_make_the_cost_unknown():
    """Without the warning that the outputs did not come from run.model."""
    run, _, optimizer = attached(ONCE, forward_passes="once")
    train(
        run,
        optimizer,
        lambda x, y: run.criterion(
            checkpoint(run.model, x.clone().requires_grad_(), use_reentrant=True), y
        ),
    )
    assert "use_reentrant=False" in str(run.cost) and math.isnan(run.cost.ratio())


@pytest.mark.parametrize("method", [FullData(), UniformSubset(0.5)])
def test_checkpoints_that_are_not_reentrant_are_counted(method):
    run, _, optimizer = attached(method)
    train(
        run, optimizer, lambda x, y: run.criterion(checkpoint(run.model, x, use_reentrant=False), y)
    )
    assert run.cost.unknown is None and run.cost.ratio() == method_share(method)


def method_share(method):
    return 1.0 if isinstance(method, FullData) else 0.5


def without_a_class(run):
    def loss(x, y):
        some = y != 3
        return run.criterion(run.model(x[some]), y[some], ids=run.ids[some]) if some.any() else None

    return loss


@pytest.mark.parametrize(
    ("method", "passes"),
    [(FullData(), "auto"), (UniformSubset(0.5), "auto"), (ONCE, "twice"), (ONCE, "once")],
)
def test_a_loop_that_leaves_out_rows_of_batches(method, passes):
    """What it would do with the samples that are not selected is known only where none is left out."""
    run, _, optimizer = attached(method, n=128, epochs=3, forward_passes=passes)
    train(run, optimizer, without_a_class(run), epochs=3)
    if isinstance(method, FullData) or passes == "once":
        assert run.cost.unknown is None and run.cost.full_backward == 3 * 96
    else:
        assert "torch.utils.data.Subset" in str(run.cost) and math.isnan(run.cost.ratio())


def test_whole_batches_that_are_left_out_stand_for_as_many_candidates():
    run, _, optimizer = attached(UniformSubset(0.5), n=128, epochs=2)
    turn = iter(range(100))
    train(
        run,
        optimizer,
        lambda x, y: run.criterion(run.model(x), y) if next(turn) % 2 else None,
        epochs=2,
    )
    assert run.cost.unknown is None and run.cost.ratio() == 0.5 and run.cost.full_forward == 128


def test_micro_batches_are_no_parts():
    run, _, optimizer = attached(UniformSubset(0.5), n=128, epochs=2)
    train(
        run,
        optimizer,
        lambda x, y: (
            run.criterion(run.model(x[:5]), y[:5]) + run.criterion(run.model(x[5:]), y[5:])
        ),
        2,
    )
    assert run.cost.unknown is None and run.cost.ratio() == 0.5


@pytest.mark.parametrize("by_reduce", [False, True])
@pytest.mark.parametrize(
    ("method", "passes", "backward"), [(FullData(), "auto", 64), (ONCE, "once", 32)]
)
def test_losses_of_cached_outputs_have_no_backward_pass_through_the_model(
    method, passes, backward, by_reduce
):
    """GradCache: losses of outputs without gradients, then chunks with gradients, whose rows the hook of a layer counts."""
    run, _, optimizer = attached(method, forward_passes=passes)
    for x, y in run.loader:
        with torch.no_grad():
            outputs = run.model(x)
        outputs.requires_grad_()
        losses = F.cross_entropy(outputs, y, reduction="none")
        loss = run.reduce(losses, targets=y) if by_reduce else run.criterion(outputs, y)
        loss.backward()
        for chunk, gradient in zip(x.chunk(4), outputs.grad.chunk(4), strict=True):
            run.model(chunk).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    cost = run.cost
    assert (cost.forward, cost.full_forward, cost.backward, cost.full_backward) == (
        128,
        128,
        backward,
        64,
    )
    assert cost.unknown is None


def test_a_look_without_gradients_does_not_hide_the_backward_pass_of_the_plain_model():
    run, net, optimizer = attached(FullData())

    def loss(x, y):
        with torch.no_grad():
            run.model(x)
        return run.criterion(net(x), y)

    train(run, optimizer, loss)
    assert run.cost.backward == 64


@pytest.mark.parametrize("how", ["views", "normalized", "eval"])
@pytest.mark.parametrize("method", [FullData(), ONCE])
def test_crops_are_counted_in_one_unit(method, how):
    run, _, optimizer = attached(
        method, crops=True, **({} if isinstance(method, FullData) else {"forward_passes": "once"})
    )
    if how == "eval":
        run.model.eval()

    def loss(x, y):
        crops = x.flatten(0, 1)
        return run.criterion(
            run.model(crops if how == "views" else crops * 0.5).unflatten(0, (-1, 2)).mean(1), y
        )

    train(run, optimizer, loss)
    cost = run.cost
    assert cost.unknown is None and cost.ratio() == pytest.approx(
        1.0 if isinstance(method, FullData) else 2 / 3
    )
    assert cost.full_forward == cost.full_backward


@pytest.mark.filterwarnings("ignore:.*got no loss")
def test_parts_of_samples_that_go_backward_add_up():
    """Of two crops per sample, three rows go backward in each of four steps: six samples."""
    run, _, _ = attached(FullData(), net=subset_backward(nn.Linear(10, 4)), crops=True)
    for x, _ in run.loader:
        run.model(x.flatten(0, 1))[:3].square().sum().backward()
    assert run.cost.backward == 6


@pytest.mark.parametrize(
    ("method", "settings"),
    [(SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}), (thresher.Kakurenbo(0.4), {})],
)
def test_extra_passes_count_a_sample_as_often_as_the_loop(method, settings):
    """Two calls of the model per sample, such as both images of a pair: all passes are counted in the same unit."""
    calls = []

    def both(model, batch):
        calls.append(2 * len(batch[1]))
        return model(batch[0][:, 0]) + model(batch[0][:, 1]), batch[1]

    epochs = 3
    run, _, optimizer = attached(method, crops=True, epochs=epochs, forward=both, **settings)
    for _ in range(epochs):
        compared = []
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x[:, 0]) + run.model(x[:, 1]), y).backward()
            optimizer.step()
            compared.append(run.cost.scoring + run.cost.refresh)  # reading the cost changes nothing
    run.detach()
    cost = run.cost
    extra, loop = cost.scoring + cost.refresh, cost.of_loop
    assert extra > 0 and sum(calls) == extra + cost.comparing and cost.comparing <= 2 * 16
    assert (cost.full_forward, cost.full_backward) == (
        2 * 64 * epochs,
        2 * 64 * epochs,
    ) and loop == cost.backward
    if cost.scoring:
        assert cost.scoring == 2 * 64 * epochs and compared == sorted(compared)
    else:
        assert extra + loop == 2 * 64 * epochs


def test_extra_passes_are_counted_as_they_run_beside_a_loop_with_two_passes_per_step():
    """SAM makes two forward passes per step; `forward=` makes one per sample, and counts as one."""
    forward = lambda model, batch: (model(batch[0]), batch[1])  # noqa: E731
    run, _, optimizer = attached(
        SelectiveBackprop(keep=0.5), forward=forward, forward_passes="twice"
    )
    for x, y in run.loader:
        for _ in range(2):
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
        optimizer.step()
    assert (run.cost.scoring, run.cost.full_forward) == (64, 128) and run.cost.of_loop == 2 * 32
