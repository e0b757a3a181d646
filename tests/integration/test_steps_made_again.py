"""A loss whose gradient was never stepped with is not recorded: the step was made again, or given up."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import crossed

N, B = 64, 16
METHODS = [
    thresher.FullData(),
    0.5,
    "kakurenbo",
    "infobatch",
    thresher.SelectiveBackprop(keep=0.33),
]


class Fails(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        raise torch.OutOfMemoryError


class Gate(nn.Module):
    """The first layer, in whose backward pass the model runs out of memory."""

    def __init__(self):
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.ones(4)), False

    def forward(self, x):
        return Fails.apply(x * self.weight) if self.fails else x * self.weight


class Loop:
    """A training with a rate of 0, whose records are the losses of the model at any time."""

    def __init__(self, method=None, epochs=2, n=N):
        torch.manual_seed(0)
        self.x = torch.randn(n, 4)
        self.y = (self.x[:, 0] > 0).long()
        self.model = nn.Sequential(Gate(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)
        self.epochs = epochs
        self.run = thresher.attach(
            thresher.FullData() if method is None else method,
            loader=DataLoader(TensorDataset(self.x, self.y), B, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=self.optimizer,
            epochs=epochs,
            observe=True,
        )

    def losses(self, x=None, y=None):
        with torch.no_grad():
            return F.cross_entropy(self.model(self.x), self.y, reduction="none")

    def assert_right(self, seen=None):
        found = self.run.data_map()
        times = torch.as_tensor(found["times_seen"])
        known = times > 0
        # The data map holds half precision.
        torch.testing.assert_close(
            torch.as_tensor(found["loss"]).float()[known],
            self.losses()[known],
            rtol=0.02,
            atol=1e-3,
        )
        if "loss" in self.run.records:
            own = self.run.records["loss"].float()
            torch.testing.assert_close(own[own > -1], self.losses()[own > -1], rtol=0.02, atol=1e-3)
        if seen is not None:
            assert times.tolist() == [seen] * len(times)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "factor", "zeroed"), crossed(METHODS, [1.0, torch.inf], [False, True]), ids=str
)
def test_a_forward_pass_that_is_made_again(method, factor, zeroed):
    """In float32 after half precision overflowed: the first loss is dropped without a backward pass."""
    loop = Loop(method, epochs=3)
    for _ in range(3):
        for number, (x, y) in enumerate(loop.run.loader):
            if not zeroed:
                loop.optimizer.zero_grad()
            if number % 3 == 0:
                loop.run.criterion(loop.run.model(x) * factor, y)
                if zeroed:
                    loop.optimizer.zero_grad()
            loop.run.criterion(loop.run.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.assert_right()


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("early", [False, True])
def test_out_of_memory_and_again_in_parts(parts, early):
    """Early: before the backward pass has reached the model."""
    loop = Loop()
    for _ in range(loop.epochs):
        for number, (x, y) in enumerate(loop.run.loader):
            fails = number % 2 == 0
            loop.model[0].fails = fails and not early
            loss = loop.run.criterion(loop.run.model(x), y)
            try:
                (Fails.apply(loss) if early and fails else loss).backward()
            except torch.OutOfMemoryError:
                loop.optimizer.zero_grad()
                loop.model[0].fails = False
                for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                    (loop.run.criterion(loop.run.model(some), labels) / parts).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.assert_right(seen=loop.epochs)


@pytest.mark.parametrize("backward", [False, True])
def test_a_batch_that_is_given_up(backward):
    """As with gradients that are not finite: it counts as never seen, and later batches are not affected."""
    loop, given_up = Loop(), []
    for _ in range(loop.epochs):
        for number, (x, y) in enumerate(loop.run.loader):
            loss = (
                loop.run.criterion(loop.run.model(x) * 3.0, y)
                if number == 1
                else loop.run.criterion(loop.run.model(x), y)
            )
            if number == 1:
                given_up.append(loop.run.ids)
                if backward:
                    loss.backward()
                loop.optimizer.zero_grad()
                continue
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.assert_right()
    expected = torch.full((N,), loop.epochs).index_put_(
        (torch.cat(given_up),), torch.tensor(-1), accumulate=True
    )
    assert loop.run.trained.tolist() == expected.tolist()


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_zeroed_between_a_loss_and_its_backward_pass(every):
    loop = Loop()
    for _ in range(loop.epochs):
        for number, (x, y) in enumerate(loop.run.loader):
            loss = loop.run.criterion(loop.run.model(x), y)
            if number % every == 0:
                loop.optimizer.zero_grad()
            loss.backward()
            if (number + 1) % every == 0:
                loop.optimizer.step()
    loop.assert_right(seen=loop.epochs)


def test_two_forward_passes_that_are_both_trained_on_still_add_up():
    """R-Drop has a loss of each of two passes and one backward pass; so have auxiliary heads."""
    loop = Loop(epochs=1)
    for x, y in loop.run.loader:
        (
            loop.run.criterion(loop.run.model(x), y) + loop.run.criterion(loop.run.model(x), y)
        ).backward()
        loop.optimizer.step()
    found = torch.as_tensor(loop.run.data_map()["loss"]).float()
    torch.testing.assert_close(found, 2 * loop.losses(), rtol=0.02, atol=1e-3)
