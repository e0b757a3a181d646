"""A training with forward passes only, as zeroth-order methods make it, is no evaluation."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


def attached(method, net):
    x = torch.randn(64, 10)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 16)
    return thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=net, epochs=4
    )


@torch.no_grad()
def step(run, net, x, y, data):
    """Moves the weights by the difference of two losses, in place or through `.data`, which autograd does not see."""
    noise = torch.randn_like(net.weight)
    weight = net.weight.data if data else net.weight
    weight += 0.01 * noise
    one = run.criterion(run.model(x), y)
    weight -= 0.02 * noise
    weight += 0.01 * noise - 0.1 * (one - run.criterion(run.model(x), y)) / 0.02 * noise


@pytest.mark.parametrize("data", [False, True])
def test_nothing_shows_that_it_trained(data):
    """It looks like an evaluation: the same epoch begins again, and a warning names the way out."""
    run = attached(thresher.UniformSubset(0.5), net := nn.Linear(10, 4))
    with pytest.warns(
        UserWarning,
        match=r"A loop over run.loader without training.*forward passes only.*enable_grad\(\) once",
    ):
        for _ in range(3):
            for x, y in run.loader:
                step(run, net, x, y, data)
    assert run.epoch == 0 and run.history == []


def test_the_way_out_works():
    run = attached(thresher.InfoBatch(), net := nn.Linear(10, 4))
    for _ in range(3):
        for x, y in run.loader:
            with torch.enable_grad():
                run.criterion(run.model(x), y)
            step(run, net, x, y, data=False)
    assert run.epoch == 3 and bool((run.records["loss"] > 0).all())


def test_an_evaluation_of_averaged_parameters_is_no_epoch():
    """They take the place of the parameters in every batch, and are put back."""
    run = attached(thresher.InfoBatch(), net := nn.Linear(10, 4))
    averaged, own = copy.deepcopy(net.state_dict()), copy.deepcopy(net.state_dict())
    averaged["weight"] += 1
    for x, _ in run.loader:
        with torch.no_grad():
            net.load_state_dict(averaged)
            run.model(x)
            net.load_state_dict(own)
    assert run.epoch == 0 and run.history == []
