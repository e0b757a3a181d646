"""Several forward passes and losses of the same rows around one step, and losses that are computed after it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


def attached(method=None, *, batch_size=8, model=None, **settings):
    torch.manual_seed(0)
    x, y = torch.randn(32, 5), torch.arange(32) % 3
    model = model or nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        **settings,
    }
    return thresher.attach(
        method or thresher.FullData(), loader=loader, epochs=2, **settings
    ), optimizer


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").detach()


def step(optimizer, loss, **options):
    optimizer.zero_grad()
    loss.backward(**options)
    optimizer.step()


def as_it_is(x):
    return x


def augmented(x):
    return x * 1.1


@pytest.mark.parametrize("seen", [as_it_is, augmented])
def test_losses_of_several_passes_before_one_backward_pass_are_added(seen):
    run, optimizer = attached()
    for x, y in run.loader:
        first = run.model(x)
        loss = run.criterion(first, y)
        second = run.model(seen(x))
        loss = loss + run.criterion(second, y)
        assert torch.equal(run.criterion(second, y), F.cross_entropy(second, y))
        step(optimizer, loss)
        assert torch.allclose(run.records["loss"][run.ids], losses(first, y) + losses(second, y))
    assert run.trained.tolist() == [1] * 32
    assert run.cost.forward == run.cost.backward == 64


def test_several_passes_before_each_backward_pass():
    run, optimizer = attached()
    for x, y in run.loader:
        for _ in range(2):
            optimizer.zero_grad()
            first = run.model(x)
            loss = run.criterion(first, y)
            second = run.model(x * 2)
            (loss + run.criterion(second, y)).backward()
        optimizer.step()
        assert torch.allclose(run.records["loss"][run.ids], losses(first, y) + losses(second, y))
    assert run.cost.forward == run.cost.backward == 128


def test_parts_of_a_batch_in_several_passes_before_one_backward_pass():
    run, _ = attached()
    for x, y in run.loader:
        first, second = run.model(x), run.model.module(x[:4])
        (run.criterion(first, y) + run.criterion(second, y[:4])).backward()
        expected = losses(first, y)
        expected[:4] += losses(second, y[:4])
        assert torch.allclose(run.records["loss"][run.ids], expected)


def test_a_pass_after_a_backward_pass_replaces_the_loss():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    run, optimizer = attached(
        thresher.SelectiveBackprop(keep=0.5), model=model, forward_passes="once"
    )
    for x, y in run.loader:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            outputs = run.model(x + delta)
            (moved,) = torch.autograd.grad(run.criterion(outputs, y), delta)
            delta = (delta + moved.sign()).detach().requires_grad_()
        outputs = run.model(x + delta)
        step(optimizer, run.criterion(outputs, y))
        assert torch.allclose(run.records["loss"][run.ids], losses(outputs, y))


def logged(run, outputs, y):
    run.criterion(outputs, y)


def logged_reshaped(run, outputs, y):
    run.criterion(outputs.view(8, -1), y)


def logged_with_other_targets(run, outputs, y):
    run.criterion(outputs, F.one_hot(y, 3).float(), ids=run.ids)


def logged_by_detached_outputs(run, outputs, y):
    run.criterion(outputs.detach(), y)


LOGS = [logged, logged_reshaped, logged_with_other_targets, logged_by_detached_outputs]


@pytest.mark.parametrize("processed", [as_it_is, torch.tanh])
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.AdaSelection()])
def test_a_loss_of_the_same_outputs_after_the_step_changes_nothing(method, log, processed):
    def trained(log):
        settings = {"forward_passes": "once"} if isinstance(method, thresher.AdaSelection) else {}
        run, optimizer = attached(method, **settings)
        for _ in range(2):
            for x, y in run.loader:
                outputs = processed(run.model(x))
                step(optimizer, run.criterion(outputs, y))
                log(run, outputs, y)
        return run

    alone, beside = trained(lambda *_: None), trained(log)
    assert torch.equal(alone.model.weight, beside.model.weight)
    assert torch.equal(alone.records["loss"], beside.records["loss"])
    assert torch.equal(alone.trained, beside.trained)
    assert alone.history == beside.history
    assert (alone.cost.forward, alone.cost.backward) == (beside.cost.forward, beside.cost.backward)


def test_a_loss_of_the_batch_before_changes_nothing_without_an_optimizer():
    run, optimizer = attached(optimizer=None)
    before = []
    for i, (x, y) in enumerate(run.loader):
        before.append((run.model(x), y))
        step(optimizer, run.criterion(*before[-1]))
        if i > 1:
            run.criterion(*before[-3])
    assert run.trained.tolist() == [1] * 32


def test_losses_of_micro_batches_after_the_step_change_nothing():
    run, optimizer = attached(batch_size=16)
    for x, y in run.loader:
        parts = [(run.model(x[i : i + 4]), y[i : i + 4]) for i in range(0, 16, 4)]
        for part in parts:
            run.criterion(*part).backward()
        optimizer.step()
        values = [run.criterion(*part) for part in parts]
        assert torch.equal(values[1], F.cross_entropy(*parts[1]))
    assert run.trained.tolist() == [1] * 32


def test_outputs_of_a_pass_without_a_loss_before_the_step_are_trained_on():
    run, optimizer = attached()
    x, y = next(batches := iter(run.loader))
    assert batches is not None
    first, second = run.model(x), run.model(x * 2)
    step(optimizer, run.criterion(first, y))
    step(optimizer, run.criterion(second, y))
    assert torch.allclose(run.records["loss"][:8], losses(second, y))


def test_a_loss_after_the_step_is_a_log_and_refused_if_it_is_trained_on():
    run, optimizer = attached()
    for x, y in run.loader:
        outputs = run.model(x)
        step(optimizer, run.criterion(outputs, y), retain_graph=True)
        log = run.criterion(torch.tanh(outputs), y)
        assert torch.allclose(run.records["loss"][run.ids], losses(outputs, y))
        with pytest.raises(
            thresher.AttributionError, match=r"step is over.*before the optimizer steps"
        ):
            log.backward()
    assert run.trained.tolist() == [1] * 32


def test_several_steps_on_one_batch_are_trained_on():
    run, optimizer = attached()
    for x, y in run.loader:
        for _ in range(3):
            outputs = run.model(x)
            step(optimizer, run.criterion(outputs, y))
        assert torch.allclose(run.records["loss"][run.ids], losses(outputs, y))
    assert run.trained.tolist() == [3] * 32
