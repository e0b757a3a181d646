"""The model of a run: where `subset_backward` goes, and what the model reports."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thresher.attribution.cost_meter import Meter
from thresher.cost import Cost
from thresher.run.trained_model import TrainedModel
from thresher.subset import SubsetBackward, subset_backward


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def parts_of(module):
    return [part for part in module.modules() if isinstance(part, SubsetBackward)]


def test_no_model():
    for subset in (False, True):
        trained = TrainedModel(None, subset=subset)
        trained.report_to(meter := Meter(Cost()))
        assert trained.module is None and not trained.is_plain and not trained.is_plain_anywhere(can_score=True)
        assert meter.cost.unknown is None


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel], ids=["model", "DDP"])
def test_a_model_whose_backward_pass_costs_all_rows_is_called_as_it_is(wrap):
    model = wrap(perceptron())
    trained = TrainedModel(model, subset=False)
    assert trained.module is model and trained.call is None and not parts_of(model)


def test_a_model_is_wrapped():
    model = perceptron()
    trained = TrainedModel(model, subset=True)
    assert isinstance(trained.module, SubsetBackward) and trained.module.wrapped is model and trained.call is None
    trained.report_to(meter := Meter(Cost()))
    assert trained.module.meter is meter and meter.cost.unknown is None


def test_a_compiler_around_the_wrapper_is_said(recwarn):
    """It would compile the backward pass of all rows; inside, it is kept."""
    trained = TrainedModel(torch.compile(subset_backward(perceptron())), subset=True)
    assert isinstance(trained.module, SubsetBackward)
    assert "Write subset_backward(torch.compile(model))" in str(recwarn.pop(UserWarning).message)
    for model in (subset_backward(torch.compile(perceptron())), torch.compile(perceptron()), subset_backward(perceptron())):
        assert isinstance(TrainedModel(model, subset=True).module, SubsetBackward)
    assert not [one for one in recwarn if "torch.compile around subset_backward" in str(one.message)]


@pytest.mark.usefixtures("group_of_one")
def test_ddp_is_called_with_the_wrapped_module_inside():
    model = DistributedDataParallel(perceptron())
    inside, seen = model.module, []
    trained = TrainedModel(model, subset=True)
    trained.report_to(meter := Meter(Cost()))
    model.register_forward_pre_hook(lambda *_: seen.append(model.module))
    trained.call(torch.randn(4, 6))[:1].sum().backward()
    assert trained.module is model and model.module is inside and meter.cost.unknown is None
    assert len(seen) == 1 and seen[0].wrapped is inside and seen[0].meter is meter
    assert meter.cost.backward == 1


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_was_made_for_it_is_left_as_it_is():
    model = DistributedDataParallel(subset_backward(perceptron()))
    trained = TrainedModel(model, subset=True)
    trained.report_to(meter := Meter(Cost()))
    assert trained.module is model and trained.call is None and model.module.meter is meter and meter.cost.unknown is None


def test_the_cost_of_a_model_of_which_some_parts_are_wrapped_is_unknown():
    model = perceptron()
    model[0], model[2] = subset_backward(model[0]), subset_backward(model[2])
    trained = TrainedModel(model, subset=True)
    trained.report_to(meter := Meter(Cost()))
    assert trained.module is model and trained.call is None
    assert meter.cost.unknown is not None and "only a part of the model" in meter.cost.unknown
    assert [part.meter for part in parts_of(model)] == [meter, None]  # two would count each sample twice


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel], ids=["model", "DDP"])
def test_a_model_that_cannot_be_traced_is_plain(wrap):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x) if float(x.detach().sum()) < 1e9 else self.linear(-x)

    trained = TrainedModel(wrap(Branches()), subset=True)
    assert not trained.is_plain and not trained.is_plain_anywhere(can_score=True)
    with pytest.warns(UserWarning, match="using the plain Branches"):
        (trained.call or trained.module)(torch.randn(4, 6))
    assert trained.is_plain and trained.is_plain_anywhere(can_score=True)
