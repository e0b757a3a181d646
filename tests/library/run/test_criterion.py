"""`run.criterion` as a module that takes the place of the user's criterion."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = (
            nn.Linear(3, 2),
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
        )


def attached(task: Task, criterion="own"):
    data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
    criterion = task.criterion if criterion == "own" else criterion
    return thresher.attach(thresher.InfoBatch(), loader=DataLoader(data, 4), criterion=criterion, model=task.net,
                           optimizer=torch.optim.SGD(task.parameters(), 0.1), epochs=2)  # fmt: skip


def test_it_takes_the_place_of_the_criterion_of_a_task():
    task, plain = Task(), Task()
    run = attached(task)
    own, task.criterion = task.criterion, run.criterion
    assert list(task.state_dict()) == list(plain.state_dict()) and "CrossEntropyLoss" in repr(
        task.criterion
    )
    for x, y in run.loader:
        task.criterion(run.model(x), y).backward()
    assert run.records["loss"].isfinite().all()
    task.to(torch.float64)
    assert own.weight.dtype == torch.float64 and own.weight is task.criterion.weight


def test_modes_and_buffers_are_those_of_the_users_criterion():
    task = Task()
    task.criterion.register_buffer("seen", torch.zeros(1), persistent=False)
    own, names = task.criterion, list(task.state_dict())
    task.criterion = attached(task).criterion
    assert list(task.state_dict()) == names
    task.eval()
    assert not own.training
    task.train()
    assert own.training


def test_a_copy_is_the_users_criterion():
    task = Task()
    own = task.criterion
    task.criterion = attached(task).criterion
    for copied in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert type(copied.criterion) is nn.CrossEntropyLoss and copied.criterion is not own
        assert torch.equal(copied.criterion.weight, own.weight)


def test_more_arguments_are_refused_with_the_way_out():
    run = attached(Task(), nn.CrossEntropyLoss())
    x, y = next(iter(run.loader))
    with pytest.raises(
        TypeError, match=r"got 1 more: pass ids= by name.*attach\(criterion=None\).*run.reduce"
    ):
        run.criterion(run.model(x), y, run.ids)
    with torch.no_grad(), pytest.raises(TypeError, match="got 1 more"):
        run.criterion(run.model(x), y, run.ids)


def test_without_a_criterion():
    with pytest.raises(
        ValueError, match="run.criterion: attach was given criterion=None; use run.reduce"
    ):
        thresher.attach(
            thresher.FullData(), loader=DataLoader([0.0]), criterion=None, epochs=1
        ).criterion(0, 0)
