"""How often each class is taken for each other one."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch.utils.data import DataLoader, TensorDataset

from thresher_lab.tasks import TASKS
from thresher_lab.training.confusion import confusion
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec
from thresher_lab.training.trainable import Training


def test_the_counts_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    predicted, right = rng.integers(0, 5, 300), rng.integers(0, 5, 300)
    assert confusion(predicted, torch.tensor(right)) == confusion_matrix(right, predicted).tolist()
    assert confusion([0], [2]) == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert confusion([100], [0]) is None


@pytest.mark.parametrize(
    ("predicted", "right", "match"),
    [
        ([0.2, 0.8], [0, 1], r"whole numbers; got \(2,\) of float32 and \(2,\) of int64"),
        ([[1, 0]], [0], r"got \(1, 2\) of int64 and"),
        ([-1], [0], "whole numbers"),
        ([], [], "two of shape"),
        ([0, 1], [0], "as many predicted as right classes, got 2 and 1"),
    ],
)
def test_what_are_no_classes_is_refused(predicted, right, match):
    with pytest.raises(ValueError, match=f"predict must return .*{match}"):
        confusion(predicted, right)


class Own:
    """A training with a function `predict` of its own."""

    def training(self, _, seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 3)
        loader = DataLoader(TensorDataset(torch.randn(12, 2), torch.arange(12) % 3), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        evaluate = {
            "evaluate": lambda _: 0.5,
            "predict": lambda _: (torch.tensor([0, 2]), torch.tensor([1, 2])),
        }
        return Training(model, loader, torch.nn.CrossEntropyLoss(), optimizer, **evaluate)


def test_a_run_has_the_counts_of_its_last_model():
    assert train(Own(), None, MethodSpec("full"), seed=0, epochs=1)["confusion"] == [
        [0, 0, 0],
        [1, 0, 0],
        [0, 0, 1],
    ]
    task = TASKS["digits"]
    run = train(task, task.load(task.find(None)), MethodSpec("full"), seed=0, epochs=1)
    counts = np.array(run["confusion"])
    assert counts.shape == (10, 10) and counts.trace() / counts.sum() == pytest.approx(
        run["metric"]["value"]
    )
