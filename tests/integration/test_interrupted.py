"""A state that is saved within a step, or after the loop was left, says what a resumed run does."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, EPOCHS = 160, 16, 3
METHODS = [
    (thresher.FullData(), {}),
    (0.5, {}),
    ("kakurenbo", {}),
    (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
    (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
]
STEPS = ("yielded", "forwarded", "credited", "backward", "stepped")


class Training:
    def __init__(self, method, settings, optimizer=True):
        torch.manual_seed(0)
        x = torch.randn(N, 6)
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.run = thresher.attach(
            method,
            loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), B, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            epochs=EPOCHS,
            **settings,
        )
        self.steps = 0

    def train(self, stop_in=None, at=3):
        """Trains an epoch, or until Ctrl-C comes at a place in a step."""

        def reached(place):
            if place == stop_in and self.steps == at:
                raise KeyboardInterrupt

        for x, y in self.run.loader:
            reached("yielded")
            outputs = self.run.model(x)
            reached("forwarded")
            loss = self.run.criterion(outputs, y)
            reached("credited")
            loss.backward()
            reached("backward")
            self.optimizer.step()
            self.optimizer.zero_grad()
            reached("stepped")
            self.steps += 1


@pytest.mark.parametrize("place", STEPS)
@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_ctrl_c(method, settings, place):
    first = Training(method, settings)
    with pytest.raises(KeyboardInterrupt):
        first.train(place)
    expected = {
        "yielded": ["state_dict: the loop has not computed the loss of a batch"],
        "forwarded": ["state_dict: the loop has not computed the loss of a batch"],
        "stepped": [],
    }.get(place, ["load_state_dict: the state was saved within a step"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = first.run.state_dict()
        second = Training(method, settings)
        second.run.load_state_dict(state)
    said = [str(one.message) for one in caught]
    assert [
        s
        for s in said
        if s.startswith("load_state_dict: the state was saved after the loop had left epoch 0")
    ]
    assert [
        s for s in said if "has not computed the loss of a batch" in s or "within a step" in s
    ] == [s for s in said for begin in expected if s.startswith(begin)]
    assert len([s for s in said if any(map(s.startswith, expected))]) == len(expected)
    steps = first.steps + (place == "stepped")
    second.train()
    whole = N // B if settings.get("forward_passes") != "twice" else N // B // 2
    assert steps + second.steps == whole - (place != "stepped")


@pytest.mark.parametrize("saved", ["inside", "after"])
def test_break(saved):
    """A state from inside the loop goes on there; one that was saved after it says so."""
    first = Training(0.5, {})
    for number, (x, y) in enumerate(first.run.loader):
        first.run.criterion(first.run.model(x), y).backward()
        first.optimizer.step()
        if number == 3:
            state = first.run.state_dict()
            break
    second = Training(0.5, {})
    if saved == "inside":
        second.run.load_state_dict(state)
    else:
        state = first.run.state_dict()
        with pytest.warns(
            UserWarning,
            match="left epoch 0 by break, return or an exception. The resumed run finishes epoch 0",
        ):
            second.run.load_state_dict(state)
    second.train()
    assert second.steps == N // B - 4


def test_a_group_that_is_accumulated_is_lost_and_a_given_up_step_is_not():
    first = Training(thresher.FullData(), {})
    batches = iter(first.run.loader)
    for _ in range(2):
        x, y = next(batches)
        first.run.criterion(first.run.model(x), y).backward()
    state, second = first.run.state_dict(), Training(thresher.FullData(), {})
    with pytest.warns(UserWarning, match="had no optimizer step yet"):
        second.run.load_state_dict(state)
    first.optimizer.zero_grad()  # as after gradients that overflowed
    second.run.load_state_dict(first.run.state_dict())


def test_without_an_optimizer_no_step_is_waited_for():
    first = Training(thresher.FullData(), {}, optimizer=False)
    batches = iter(first.run.loader)
    x, y = next(batches)
    first.run.criterion(first.run.model(x), y).backward()
    first.optimizer.step()
    first.run.state_dict()
