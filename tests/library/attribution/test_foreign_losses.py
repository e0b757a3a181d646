"""Losses of another model than the run's own, before and after the own model's forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


def attached(method=None, epochs=2, **settings):
    torch.manual_seed(0)
    x, y = torch.randn(32, 5), torch.arange(32) % 3
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method or thresher.FullData(),
        loader=DataLoader(TensorDataset(x, y), 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, optimizer, nn.Linear(5, 3)


def with_gradients(teacher, x):
    return teacher(x)


def without_gradients(teacher, x):
    with torch.no_grad():
        return teacher(x)


def detached(teacher, x):
    return teacher(x).detach().requires_grad_()


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("passed", [with_gradients, without_gradients, detached])
def test_a_loss_of_another_model_before_the_forward_pass_chooses_no_rows(passed):
    def trained(teacher_first):
        run, optimizer, teacher = attached(thresher.AdaSelection(), forward_passes="once")
        for _ in range(2):
            for x, y in run.loader:
                if teacher_first:
                    run.criterion(passed(teacher, x), y)
                step(optimizer, run.criterion(run.model(x), y))
        return run

    alone, beside = trained(False), trained(True)
    assert torch.equal(alone.model.weight, beside.model.weight)
    assert torch.equal(alone.records["loss"], beside.records["loss"])
    assert torch.equal(alone.trained, beside.trained)
    assert alone.history == beside.history
    assert alone.cost.forward == beside.cost.forward
    assert alone.cost.ratio() == beside.cost.ratio()


@pytest.mark.parametrize("passed", [with_gradients, without_gradients])
def test_a_loss_of_another_model_is_the_plain_criterion_from_the_second_step_on(passed):
    run, optimizer, teacher = attached(thresher.SelectiveBackprop(keep=0.5), forward_passes="once")
    for i, (x, y) in enumerate(run.loader):
        outputs = passed(teacher, x)
        value = run.criterion(outputs, y)
        assert not i or torch.equal(value, F.cross_entropy(outputs, y))
        own = run.model(x * 2)
        loss = run.criterion(own, y)
        assert torch.allclose(loss, F.cross_entropy(own, y, reduction="none").topk(4).values.mean())
        step(optimizer, loss)


def test_the_users_model_called_by_itself_is_no_other_model():
    run, optimizer, teacher = attached()
    for x, y in run.loader:
        run.criterion(teacher(x), y)
        outputs = run.model.module(x)
        step(optimizer, run.criterion(outputs, y))
        expected = F.cross_entropy(outputs, y, reduction="none").detach()
        assert torch.allclose(run.records["loss"][run.ids], expected)
    assert run.cost.forward == 32


def test_losses_of_the_model_by_itself_stay_beside_the_first_pass_of_run_model():
    run, _, _ = attached()
    batches = iter(run.loader)
    (first, labels), (second, more) = next(batches), next(batches)
    run.criterion(run.model.module(first), labels)
    run.criterion(run.model(second), more)
    assert run.records["loss"].isfinite().sum() == 16


def test_parameters_that_the_loop_replaces_are_still_the_models():
    run, _, _ = attached()
    for x, y in run.loader:
        run.model.module.weight = nn.Parameter(torch.randn(3, 5))
        run.model.module.bias = None
        outputs = run.model.module(x)
        run.criterion(outputs, y)
        assert torch.allclose(
            run.records["loss"][run.ids], F.cross_entropy(outputs, y, reduction="none").detach()
        )


def test_another_model_alone_is_recorded():
    run, _, other = attached()
    for x, y in run.loader:
        run.criterion(other(x), y)
    assert run.records["loss"].isfinite().all()


def test_a_loop_over_the_loader_of_before_is_told_to_iterate_that_of_the_run():
    run, _, _ = attached()
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    with pytest.raises(
        thresher.AttributionError,
        match=r"iterate over run\.loader instead of your own DataLoader.*under torch\.no_grad",
    ):
        run.criterion(run.model(x), y)
    for x, y in run.loader:
        run.criterion(run.model(x), y)
        with pytest.raises(thresher.AttributionError, match="Nothing was recorded") as error:
            run.criterion(run.model(torch.randn(8, 5)), torch.arange(8) % 3)
        assert "iterate run.loader" not in str(error.value)
