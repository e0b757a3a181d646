import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from depth import depth
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import Data
from thresher_lab.tasks.regression import r_squared
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec, parse_methods

METHODS = (
    "full,uniform:keep=0.3,big_loss:keep=0.3,small_loss:keep=0.3,gradient_norm:keep=0.3,ada_boost:keep=0.3,"
    "coreset_extremes:keep=0.3,coreset_center:keep=0.3,"
    "ada_selection:keep=0.3:pool=('big_loss','small_loss','uniform','gradient_norm')"
)


class Answers(nn.Module):
    """What it is given, times a factor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


@pytest.mark.parametrize(("factor", "share"), [(1.0, 1.0), (0.0, -6.0), (0.5, -0.75)])
def test_the_share_explained_is_of_all_batches_together(factor, share):
    values = torch.tensor([[1.0], [2.0], [3.0]])
    model = Answers(factor)
    assert r_squared(model, [(values[:2], values[:2]), (values[2:], values[2:])]) == pytest.approx(
        share
    )
    assert model.training


@pytest.mark.parametrize(("name", "inputs"), [("line", 1), ("line-one-sided", 1), ("bike", 43)])
def test_networks_fit_and_seeds_fix_them(name, inputs):
    task = built_in(name)
    state = torch.get_rng_state()
    model, same, other = task.build(3), task.build(3), task.build(4)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0))
    assert (
        model(x).shape == (5, 1)
        and torch.equal(model(x), same(x))
        and not torch.equal(model(x), other(x))
    )
    assert (task.metric, task.has_images, task.batch_size) == ("R2", False, 100)


@pytest.mark.parametrize("name", ["line", "line-one-sided", "bike"])
def test_they_take_no_folder(tmp_path, name):
    with pytest.raises(
        ValueError, match=f"--data .*the task {name} brings its data or has it from a package"
    ):
        built_in(name).find(tmp_path)


SAMPLES = depth(200, 1000)


@pytest.fixture(scope="module")
def line():
    task = built_in(f"line@{SAMPLES}")
    return task, task.load(task.find(None))


@pytest.mark.parametrize("spec", parse_methods(METHODS), ids=lambda spec: spec.name)
def test_every_selector_trains_the_line(line, spec):
    run = train(*line, spec, seed=0, epochs=2)
    assert run["metric"]["name"] == "R2" and run["metric"]["value"] <= 1
    assert run["cost"]["full_forward"] == 2 * SAMPLES
    assert run["cost"]["backward"] == (2 if spec.name == "full" else 0.6) * SAMPLES


def test_the_line_is_learnt_through_its_outliers():
    task = built_in("line@1000")
    assert (
        train(task, task.load(task.find(None)), MethodSpec("full"), seed=0, epochs=10)["metric"][
            "value"
        ]
        > 0.9
    )


def test_infobatch_trains_values_too():
    x = torch.randn(300, 43, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].sum(1, keepdim=True)
    data = Data(TensorDataset(x, y), x[:100], y[:100])
    run = train(built_in("bike"), data, MethodSpec("infobatch"), seed=0, epochs=3)
    assert run["metric"]["value"] > 0.2
