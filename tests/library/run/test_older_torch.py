"""With a torch that is too old for `subset_backward`, a run says so before anything changes, or chooses by a scoring pass."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

pytestmark = pytest.mark.usefixtures("torch_is_too_old")
NEEDS = r"subset_backward needs torch 99\.0 or newer, but torch "


@pytest.fixture
def torch_is_too_old(monkeypatch):
    monkeypatch.setattr("thresher.subset.compilers.OLDEST_TORCH", "99.0")


def attach(method=None, **settings):
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(32, 3), torch.arange(32) % 2)
    settings = {"criterion": nn.CrossEntropyLoss(), "model": model, "epochs": 1, **settings}
    return thresher.attach(
        method or thresher.SelectiveBackprop(keep=0.5), loader=DataLoader(data, 8), **settings
    )


def test_subset_backward_names_the_version():
    with pytest.raises(RuntimeError, match=NEEDS):
        thresher.subset_backward(nn.Linear(2, 1))


@pytest.mark.parametrize("settings", [{"forward_passes": "once"}, {"criterion": None}])
def test_once_is_refused(settings):
    with pytest.raises(
        RuntimeError, match=f"{NEEDS}.*Update torch, or use forward_passes='twice'.*criterion"
    ):
        attach(**settings)


def rows_of(run):
    rows = []
    for inputs, targets in run.loader:
        run.criterion(run.model(inputs), targets).backward()
        rows.append(run.ids.tolist())
    return rows


def test_auto_is_twice_with_one_warning():
    with pytest.warns(
        UserWarning, match=f"{NEEDS}.*SelectiveBackprop chooses by a scoring pass"
    ) as said:
        run = attach()
    assert len(said) == 1
    assert rows_of(run) == rows_of(attach(forward_passes="twice"))


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.UniformSubset(0.5)])
def test_other_methods_need_no_newer_torch(method):
    assert rows_of(attach(method))
