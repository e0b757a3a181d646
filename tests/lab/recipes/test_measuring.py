import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score
from torch import nn

from thresher_lab.recipes.task import Measure, WeightAverage


class Answers(nn.Module):
    """Gives back its inputs; has a weight, so that there is a device, and remembers its mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.modes = set()

    def forward(self, x):
        self.modes.add(self.training)
        return x * self.weight


def batches(shape, classes, sizes=(5, 3)):
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, classes, *shape, generator=draw),
            torch.randint(classes, (n, *shape), generator=draw),
        )
        for n in sizes
    ]


def test_accuracy_over_uneven_batches():
    given, model = batches((), 4), Answers()
    outputs, targets = (torch.cat(parts) for parts in zip(*given, strict=True))
    assert Measure(given, "accuracy", nn.CrossEntropyLoss())(model) == float(
        (outputs.argmax(1) == targets).float().mean()
    )
    assert model.modes == {False} and model.training


def test_mean_iou_is_that_of_scikit_learn():
    given = batches((4, 6), 3)
    outputs, targets = (torch.cat(parts) for parts in zip(*given, strict=True))
    wanted = jaccard_score(
        targets.flatten().numpy(), outputs.argmax(1).flatten().numpy(), average="macro"
    )
    assert Measure(given, "mean IoU", nn.CrossEntropyLoss())(Answers()) == pytest.approx(wanted)


def test_a_class_that_is_not_there_does_not_count():
    outputs = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    assert Measure([(outputs, torch.tensor([0, 0]))], "mean IoU", nn.CrossEntropyLoss())(
        Answers()
    ) == pytest.approx(0.25)


def test_the_loss_is_a_mean_over_targets():
    given = [
        (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)),
        (torch.tensor([[6.0]]), torch.zeros(1, 1)),
    ]
    assert Measure(given, "-loss", nn.MSELoss())(Answers()) == pytest.approx(-np.mean([1, 4, 36]))


def test_the_average_is_measured_in_place_of_the_network():
    model = Answers()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    average = WeightAverage(model, optimizer, decay=0.5, every=1, copied=0)
    optimizer.step()
    nn.init.constant_(model.weight, -1.0)
    given = [(torch.eye(3), torch.arange(3))]
    measure = Measure(given, "accuracy", nn.CrossEntropyLoss(), average)
    assert measure(model) == 1.0 and not model.modes and model.training
