"""`run.model` is the user's model to whoever reads it, sets it, saves it or copies it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.subset import SubsetBackward


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.temperature = 1.0

    def forward(self, input):  # noqa: A002
        return super().forward(input) / self.temperature


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.frozen = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.head(self.frozen(x))

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self


def make(model, method=None):
    data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    return thresher.attach(
        method or thresher.FullData(),
        loader=DataLoader(data, 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=9,
    )


def step(run):
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    return x


@pytest.mark.parametrize(
    "method", [None, thresher.SelectiveBackprop(keep=0.5)], ids=["all", "once"]
)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy]
)
def test_a_copy_is_a_copy_of_the_users_model(copied, method):
    """In mid-training, with tensors of many batches tracked; the process ended here once, so the copy is used for long."""
    model = Scaled()
    run = make(model, method)
    x = step(run)
    best = [copied(run.model) for _ in range(20)][-1]
    assert type(best) is Scaled
    assert list(best.state_dict()) == list(model.state_dict())
    assert torch.equal(best(x), model(x))
    step(run)
    if copied is not copy.copy:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        assert not torch.equal(best(x), model(x))
        run.model.load_state_dict(best.state_dict())
        assert torch.equal(best(x), model(x))
    for _ in range(3):
        for x, y in run.loader:
            run.criterion(run.model(x), y)


def test_averages_of_weights():
    model = Scaled()
    run = make(model)
    average = AveragedModel(run.model)
    x = step(run)
    average.update_parameters(run.model)
    assert torch.equal(average(x), model(x))


def test_a_saved_model_is_the_users():
    run, file = make(nn.Linear(3, 2)), io.BytesIO()
    step(run)
    torch.save(run.model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is nn.Linear


@pytest.mark.parametrize("part", [lambda run: run, lambda run: run.loader])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_is_not_copied(part, way):
    run = make(Scaled())
    step(run)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*run.state_dict\(\)"):
        way(part(run))


@pytest.mark.parametrize(
    "method", [None, thresher.SelectiveBackprop(keep=0.5)], ids=["all", "once"]
)
def test_names_are_the_users(method):
    model = Head()
    run = make(model, method)
    tracked = run.model
    assert [n for n, _ in tracked.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in tracked.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert [n for n, _ in tracked.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in tracked.named_children()] == ["head", "frozen"]
    assert tracked.get_submodule("head") is model.head
    outer = nn.ModuleDict({"net": tracked})
    assert {n for n, _ in outer.named_parameters()} <= set(outer.state_dict())
    outer.load_state_dict(outer.state_dict())
    assert "Linear" in repr(tracked)


def test_what_is_set_reaches_the_users_model():
    model = Scaled()
    run = make(model)
    x = step(run)
    run.model.temperature = 0.5
    assert model.temperature == 0.5
    assert torch.equal(run.model(x), nn.Sequential.forward(model, x) / 0.5)
    run.model.extra = nn.Linear(2, 2)
    assert model.extra is run.model.extra and "extra.weight" in run.model.state_dict()
    del run.model.extra
    assert not hasattr(model, "extra")
    run.model[2] = nn.Linear(4, 5)
    assert run.model(x).shape[1] == 5
    assert run.model[0] is model[0] and len(run.model) == 3 and list(run.model) == list(model)
    assert model[0] in run.model
    with pytest.raises(AttributeError, match="attach a new run"):
        run.model.module = nn.Linear(3, 2)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        run.model.absent  # noqa: B018


def test_a_replaced_head_is_trained():
    model = Head()
    run = make(model)
    run.model.head = nn.Linear(3, 2)
    step(run)
    assert model.head.weight.grad is not None


def test_modes_and_casts_are_the_users():
    model = Head()
    run = make(model)
    assert (
        run.model.train() is run.model
        and run.model.training
        and model.training
        and not model.frozen.training
    )
    assert run.model.eval() is run.model and not run.model.training and not model.training
    assert run.model.double() is run.model and model.head.weight.dtype == torch.float64
    seen = []
    assert run.model.apply(seen.append) is run.model and seen[-1] is model
    run.model.zero_grad()
    run.model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())


def test_hooks_are_the_users():
    model, seen = Scaled(), []
    run = make(model)
    run.model.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randn(2, 3))
    step(run)
    assert len(seen) == 2


def test_a_model_without_items():
    run = make(Head())
    assert run.model
    with pytest.raises(TypeError):
        len(run.model)
    with pytest.raises(TypeError, match="not subscriptable"):
        run.model[0]


def test_a_half_made_model_has_no_attributes():
    kind = type(make(Scaled()).model)
    with pytest.raises(AttributeError):
        kind.__new__(kind).anything  # noqa: B018


def test_the_copy_of_a_model_that_chooses_rows_is_the_users():
    model = Head()
    run = make(model, thresher.SelectiveBackprop(keep=0.5))
    assert isinstance(run.model.module, SubsetBackward)
    assert type(copy.deepcopy(run.model)) is Head
