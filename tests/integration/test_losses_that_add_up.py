"""The record of a sample is the sum of its losses in a step; a call in which it has no valid label adds nothing to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, T, V = 32, 5, 6


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, x):
        return self.out(self.embed(x).cumsum(1).tanh())


def sequences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, V, (N, T), generator=generator)
    lengths = torch.randint(0, T + 1, (N,), generator=generator)
    return x, torch.where(torch.arange(T) < lengths[:, None], (x + 1) % V, -100)


def one_pass(criterion, model, x, y):
    outputs = model(x)
    return sum(criterion(outputs[:, t], y[:, t]) for t in range(T))


def halves(criterion, model, x, y):
    """Two forward passes with samples that overlap: the entries of a step are added up by id, not by batch."""
    half = len(x) // 2
    first = criterion(model(x)[:, 0], y[:, 0])
    return first + sum(criterion(model(x[half:])[:, t], y[half:, t]) for t in range(1, T))


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.InfoBatch()])
@pytest.mark.parametrize("losses", [one_pass, halves])
def test_losses_per_time_step_of_padded_sequences(losses, method):
    x, y = sequences()
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
        observe=isinstance(method, thresher.FullData),
    )
    for inputs, targets in run.loader:
        losses(run.criterion, run.model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        by_position = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
    counts = torch.ones(N, T, dtype=torch.bool)
    if losses is halves:
        counts = (torch.arange(N) % 8 >= 4)[:, None] | (torch.arange(T) == 0)
    valid = (y != -100) & counts
    expected = torch.where(valid.any(1), (by_position * valid).sum(1), -torch.inf)
    torch.testing.assert_close(run.records["loss"], expected)


@pytest.mark.filterwarnings("ignore:The losses that the run computes:UserWarning")
def test_signals_of_the_first_head_that_has_a_label():
    """The first head ignores odd samples: whether these were right is what the second head says."""
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    first = torch.where(torch.arange(N) % 2 == 0, 1, -100)
    second = (x[:, 0] > 0).long()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run = thresher.attach(
        thresher.Kakurenbo(),
        loader=DataLoader(TensorDataset(x, first, second), 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
        forward=lambda model, batch: (model(batch[0])[:, 2:], batch[2]),
    )
    for inputs, one, other in run.loader:
        outputs = run.model(inputs)
        (run.criterion(outputs[:, :2], one) + run.criterion(outputs[:, 2:], other)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = model(x)
    losses = [
        F.cross_entropy(outputs[:, :2], first, reduction="none"),
        F.cross_entropy(outputs[:, 2:], second, reduction="none"),
    ]
    torch.testing.assert_close(run.records["loss"], losses[0] + losses[1])
    right = torch.where(
        first >= 0, outputs[:, :2].argmax(1) == first, outputs[:, 2:].argmax(1) == second
    )
    assert torch.equal(run.records["correct"], right)
