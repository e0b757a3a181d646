"""Ray Train: the loader that it wraps, and the example, in the processes that it starts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import in_verify
from helpers import assert_same

EXAMPLE = Path(__file__).parents[3] / "examples" / "frameworks" / "ray_train.py"


def dataset():
    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def test_the_loader_inside_of_a_wrapper_of_ray_is_taken(monkeypatch):
    class _WrappedDataLoader(DataLoader):
        def __init__(self, loader):
            self._dataloader = loader

        def __iter__(self):
            raise AssertionError("the wrapper moves batches, which the run does")

    monkeypatch.setattr(_WrappedDataLoader, "__module__", "ray.train.torch.train_loop_utils")
    loader = DataLoader(dataset(), 4, shuffle=True)
    run = thresher.attach(
        0.5, loader=_WrappedDataLoader(loader), criterion=nn.CrossEntropyLoss(), epochs=2
    )
    assert run.loader.dataset is loader.dataset


@in_verify
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_example(workers, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    example: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    paths = {
        "env_vars": {
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "RAY_TRAIN_V2_ENABLED": "1",
        }
    }
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    try:
        found = []
        for method in (thresher.UniformSubset(keep=0.5), thresher.FullData()):
            example.train(method, network, dataset(), 3, tmp_path, workers)
            found.append([torch.load(tmp_path / f"{rank}.pt") for rank in range(workers)])
    finally:
        ray.shutdown()
    full = found[1]
    assert [sum(state["backward"] for state in states) for states in found] == [66, 132]
    assert all(
        torch.equal(state["model"][name], value)
        for state in full
        for name, value in full[0]["model"].items()
    )
    if workers == 1:
        assert_same(full[0]["model"], plain())


def network():
    return nn.Linear(6, 2)


def plain():
    torch.manual_seed(0)
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = DataLoader(dataset(), 4, shuffle=True)
    for _ in range(3):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()
