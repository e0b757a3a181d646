import pytest
import torch
from torch import nn

from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.task import WeightAverage, decay_of


def test_the_decay_is_that_of_torchvisions_script():
    recipe = loading.read_recipe(loading.file_of("resnet50"))
    assert recipe.ema is not None
    assert decay_of(recipe.ema, recipe.batch.size, recipe.epochs) == pytest.approx(
        1 - 0.00002 * 2048 * 32 / 600
    )


def stepped(average, model, optimizer, value):
    nn.init.constant_(model[0].weight, value)
    optimizer.step()
    return average.model[0].weight.item()


def test_updates_after_the_warm_up():
    """By hand: a copy in the warm-up, then half of the way to the weights at every second step."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    average = WeightAverage(model, optimizer, decay=0.5, every=2, copied=4)
    assert average.model is model
    seen = [
        stepped(average, model, optimizer, value)
        for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    ]
    assert seen == [1.0, 2.0, 2.0, 4.0, 4.0, 5.0, 5.0, 6.5]
    assert average.model is not model and model[0].weight.item() == 8.0


def test_buffers_are_averaged_too():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    average = WeightAverage(model, optimizer, decay=0.75, every=1, copied=0)
    optimizer.step()
    model[1].running_mean.fill_(4.0)
    optimizer.step()
    assert average.model[1].running_mean.item() == 1.0
