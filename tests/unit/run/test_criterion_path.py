"""A loss goes from the criterion to the records through each room once."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

SOURCE = str(Path(thresher.__file__).parent)


def room_of(filename: str) -> str | None:
    if not filename.startswith(SOURCE):
        return None
    return Path(filename).relative_to(SOURCE).with_suffix("").parts[0]


def entered(call) -> list[str]:
    """The rooms that control enters from another one while `call` runs, in order; returning to a room is not entering it."""
    rooms: list[str] = []

    def watch(frame, event, _):
        if event != "call" or (room := room_of(frame.f_code.co_filename)) is None:
            return
        caller = frame.f_back
        while caller is not None and room_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        if caller is None or room_of(caller.f_code.co_filename) != room:
            rooms.append(room)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return rooms


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.InfoBatch(), thresher.Kakurenbo(adjust_lr=False)])
def test_criterion_enters_each_room_at_most_once(method):
    net = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    run = thresher.attach(method, loader=DataLoader(data, 8), criterion=nn.CrossEntropyLoss(), model=net, epochs=3)
    for _ in range(2):
        for x, y in run.loader:
            outputs = run.model(x)
            rooms = entered(lambda outputs=outputs, y=y: run.criterion(outputs, y))
            compared = ["passes"] if run._epochs.comparison.pending else []
            assert rooms[:3] == ["run", "attribution", "losses"] and rooms[3:4] == compared
            assert entered(lambda: run.records)[-1:] == ["records"]


def test_the_profile_sees_what_it_should():
    """Were a room entered twice, it would be in the list twice."""
    records = thresher.records.Records({"loss": thresher.Column(torch.float32)}, 3, torch.device("cpu"))
    write = lambda: records.write(torch.arange(3), {"loss": torch.ones(3)})  # noqa: E731
    assert entered(lambda: (write(), write())) == ["records", "records"]
