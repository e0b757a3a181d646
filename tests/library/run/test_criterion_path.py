"""A loss goes from the criterion to the records through each package once."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

SOURCE = str(Path(thresher.__file__).parent)


def calls_and_files(call) -> tuple[int, int]:
    """The number of calls of our own functions while `call` runs, and the number of files that they are in."""
    files: list[str] = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files))


def package_of(filename: str) -> str | None:
    if not filename.startswith(SOURCE):
        return None
    return Path(filename).relative_to(SOURCE).with_suffix("").parts[0]


def entered(call) -> list[str]:
    """The packages that control enters from another one while `call` runs, in order; a return to one does not count."""
    packages: list[str] = []

    def watch(frame, event, _):
        if event != "call" or (package := package_of(frame.f_code.co_filename)) is None:
            return
        caller = frame.f_back
        while caller is not None and package_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        if caller is None or package_of(caller.f_code.co_filename) != package:
            packages.append(package)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return packages


@pytest.mark.parametrize(
    "method", [thresher.FullData(), thresher.InfoBatch(), thresher.Kakurenbo(adjust_lr=False)]
)
def test_criterion_enters_each_package_at_most_once(method):
    net = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    run = thresher.attach(
        method, loader=DataLoader(data, 8), criterion=nn.CrossEntropyLoss(), model=net, epochs=3
    )
    for _ in range(2):
        for x, y in run.loader:
            outputs, clock = (
                run.model(x),
                ["backward_ratio"] if run._parts.stopwatch.running else [],
            )
            packages = entered(
                lambda outputs=outputs, y=y, criterion=run.criterion: criterion(outputs, y)
            )
            compared = ["passes"] if run._timeline.comparison.pending else []
            path = ["run", "attribution", "losses", *clock, *compared]
            assert packages[: len(path)] == path and (compared or packages == path)
            assert entered(lambda: run.records)[-1:] == ["records"]


def test_the_profile_sees_what_it_should():
    """Were a package entered twice, it would be in the list twice."""
    records = thresher.records.Records(
        {"loss": thresher.Column(torch.float32)}, 3, torch.device("cpu")
    )
    write = lambda: records.write(torch.arange(3), {"loss": torch.ones(3)})  # noqa: E731
    assert entered(lambda: (write(), write())) == ["records", "records"]


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.Kakurenbo(), 0.5])
def test_the_common_case_of_the_criterion_is_read_in_a_few_files(method):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 6), torch.arange(256) % 3)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = thresher.attach(
        method,
        loader=DataLoader(data, 16, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=3,
    )
    for epoch in range(2):
        for step, (x, y) in enumerate(run.loader):
            outputs = run.model(x)
            if (epoch, step) == (1, 3):
                calls, files = calls_and_files(
                    lambda outputs=outputs, y=y: run.criterion(outputs, y)
                )
                assert 1 <= calls <= 9 and 1 <= files <= 5
            else:
                run.criterion(outputs, y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert calls
