"""`torch.func` transforms: the model works inside, and losses are attributed outside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils.data import DataLoader, TensorDataset

import thresher


@pytest.fixture(
    params=[thresher.FullData(), thresher.SelectiveBackprop(keep=0.5)], ids=["all", "once"]
)
def sample(request):
    net = nn.Linear(10, 4)
    run = thresher.attach(
        request.param,
        loader=DataLoader(TensorDataset(torch.randn(64, 10), torch.arange(64) % 4), 16),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        epochs=1,
    )
    x, y = next(iter(run.loader))
    return run, {name: value.detach() for name, value in net.named_parameters()}, x, y


def loss_of(model, criterion):
    return lambda parameters, x, y: criterion(functional_call(model, parameters, x[None]), y[None])


def test_gradients_per_sample_of_the_model(sample):
    run, parameters, x, y = sample
    gradients, losses = vmap(grad_and_value(loss_of(run.model, F.cross_entropy)), (None, 0, 0))(
        parameters, x, y
    )
    expected = vmap(grad(loss_of(nn.Linear(10, 4), F.cross_entropy)), (None, 0, 0))(
        parameters, x, y
    )
    assert torch.equal(gradients["weight"], expected["weight"])
    run.reduce(losses, ids=run.ids)
    assert torch.allclose(run.records["loss"][run.ids], losses)
    assert "torch.func transform" in str(run.cost)


@pytest.mark.parametrize("stated", [False, True])
def test_a_criterion_inside_is_refused(sample, stated):
    run, parameters, x, y = sample
    criterion = (
        (lambda outputs, targets: run.criterion(outputs, targets, ids=run.ids[:1]))
        if stated
        else run.criterion
    )
    with pytest.raises(
        thresher.AttributionError, match=r"torch.func.*run.reduce\(losses, ids=run.ids\)"
    ):
        vmap(grad(loss_of(run.model, criterion)), (None, 0, 0))(parameters, x, y)
    assert not run._parts.accumulator.in_step
