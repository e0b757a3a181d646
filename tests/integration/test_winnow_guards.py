"""The guard of Winnow in a training loop: planted trainings in which it must speak, and others in which it must not."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import Winnow


def of_four_classes(wrong: float, apart: float, *, least_agreement: float = 0.5) -> Any:
    """Trains on four classes that lie so far apart, a share of whose labels are replaced, and returns the run."""
    torch.manual_seed(0)
    labels = torch.arange(400) % 4
    x = torch.randn(400, 6) + apart * torch.nn.functional.one_hot(labels, 6)
    given = torch.where(torch.rand(400) < wrong, torch.randint(4, (400,)), labels)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run = thresher.attach(
        Winnow(least_agreement=least_agreement),
        loader=DataLoader(TensorDataset(x, given), 40, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=10,
    )
    while run.epoch < 10:
        for inputs, targets in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
        assert run.history
    return run


def test_many_wrong_labels_make_the_draw_uniform_and_are_said_once():
    with pytest.warns(
        UserWarning, match=r"rank correlation below 0\.5 .* draws uniformly in such epochs"
    ) as given:
        run = of_four_classes(wrong=0.6, apart=4.0)
    assert len(given) == 1
    assert [entry["uniform"] for entry in run.history[1:]] == [0, 0] + 7 * [1]
    assert max(entry["agreement"] for entry in run.history[3:]) < 0.5
    assert min(entry["spread"] for entry in run.history[3:]) > 0.14


def test_clean_labels_are_trusted_and_so_is_whoever_switches_the_guard_off():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = of_four_classes(wrong=0.0, apart=4.0)
        wrong = of_four_classes(wrong=0.6, apart=4.0, least_agreement=-1)
    assert min(entry["agreement"] for entry in clean.history[3:]) > 0.85
    assert not any(entry["uniform"] for run in (clean, wrong) for entry in run.history[1:])


def test_where_all_samples_are_as_uncertain_as_each_other_nothing_is_said():
    """The classes lie on top of each other: labels are not wrong, and inputs do not tell them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = of_four_classes(wrong=0.0, apart=0.0)
    assert max(entry["agreement"] for entry in run.history[3:]) < 0.5
    assert max(entry["spread"] for entry in run.history[1:]) < 0.14
    assert not any(entry["uniform"] for entry in run.history[1:])
