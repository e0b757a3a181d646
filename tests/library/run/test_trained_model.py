"""The model of a run: where `subset_backward` goes, and what the model reports."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.subset import SubsetBackward, subset_backward

N, B = 8, 4


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def parts_of(module):
    return [part for part in module.modules() if isinstance(part, SubsetBackward)]


def attach(model, method=None, **settings):
    loader = DataLoader(TensorDataset(torch.randn(N, 6), torch.arange(N) % 3), B)
    method = method or thresher.SelectiveBackprop(keep=0.25)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "forward_passes": "once",
        "epochs": 1,
    } | settings
    return thresher.attach(method, loader=loader, model=model, **settings)


def trained(run):
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
    return run


def test_no_model():
    run = attach(None, thresher.RandomBackprop(keep=0.5), forward_passes="auto")
    for x, y in run.loader:
        run.criterion(x[:, :3].requires_grad_(), y).backward()
    assert run.cost.unknown is None and "not traced" not in run.summary()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "wrap", [lambda model: model, DistributedDataParallel], ids=["model", "DDP"]
)
def test_a_model_whose_backward_pass_costs_all_rows_is_called_as_it_is(wrap):
    model, calls = wrap(perceptron()), []
    run = attach(model, thresher.FullData(), forward_passes="auto")
    model.register_forward_pre_hook(lambda *_: calls.append(parts_of(model)))
    trained(run)
    assert run.model.module is model and calls == [[], []] and run.cost.backward == N


def test_a_model_is_wrapped():
    model = perceptron()
    run = trained(attach(model))
    assert isinstance(run.model.module, SubsetBackward) and run.model.module.wrapped is model
    assert run.cost.unknown is None and run.cost.backward == 2


def test_a_compiler_around_the_wrapper_is_said(recwarn):
    """It would compile the backward pass of all rows; inside, it is kept."""
    run = attach(torch.compile(subset_backward(perceptron())))
    assert isinstance(run.model.module, SubsetBackward)
    assert "Write subset_backward(torch.compile(model))" in str(recwarn.pop(UserWarning).message)
    for model in (
        subset_backward(torch.compile(perceptron())),
        torch.compile(perceptron()),
        subset_backward(perceptron()),
    ):
        assert isinstance(attach(model).model.module, SubsetBackward)
    assert not [
        one for one in recwarn if "torch.compile around subset_backward" in str(one.message)
    ]


@pytest.mark.usefixtures("group_of_one")
def test_ddp_is_called_with_the_wrapped_module_inside():
    model = DistributedDataParallel(perceptron())
    inside, seen = model.module, []
    run = attach(model)
    model.register_forward_pre_hook(lambda *_: seen.append(model.module))
    trained(run)
    assert run.model.module is model and model.module is inside
    assert len(seen) == 2 and seen[0] is seen[1] and seen[0].wrapped is inside
    assert run.cost.unknown is None and run.cost.backward == 2


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_was_made_for_it_is_left_as_it_is():
    inner = subset_backward(perceptron())
    model = DistributedDataParallel(inner)
    run = trained(attach(model))
    assert run.model.module is model and model.module is inner and parts_of(model) == [inner]
    assert run.cost.unknown is None and run.cost.backward == 2


def test_the_cost_of_a_model_of_which_some_parts_are_wrapped_is_unknown():
    model = perceptron()
    model[0], model[2] = subset_backward(model[0]), subset_backward(model[2])
    run = trained(attach(model))
    assert run.model.module is model
    assert run.cost.unknown is not None and "only a part of the model" in run.cost.unknown
    assert run.cost.backward == 2  # two parts that report would count each sample twice


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "wrap", [lambda model: model, DistributedDataParallel], ids=["model", "DDP"]
)
def test_a_model_that_cannot_be_traced_is_plain(wrap):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x) if float(x.detach().sum()) < 1e9 else self.linear(-x)

    run = attach(wrap(Branches()))
    assert "not traced" not in run.summary()
    with pytest.warns(UserWarning, match="using the plain Branches"):
        trained(run)
    assert "not traced" in run.summary() and run.cost.backward == N
