"""The history has the mean of the recorded losses, beside the loss of the chosen rows that the loop sees."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N = 96


@pytest.mark.parametrize(
    "method", [thresher.FullData(), "kakurenbo", thresher.SelectiveBackprop(keep=0.25)], ids=str
)
def test_the_mean_over_all_samples(method):
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    y = (x[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), 32, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    printed = []
    for _ in range(2):
        for inputs, targets in run.loader:
            loss = run.criterion(run.model(inputs), targets)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    expected = F.cross_entropy(model(x), y).item()
    assert [entry["mean_loss"] for entry in run.history] == pytest.approx([expected] * 2, rel=1e-3)
    if isinstance(method, thresher.SelectiveBackprop):
        assert min(printed) > 1.2 * expected
    logged = {}
    run.log(lambda numbers, step: logged.update(numbers))
    assert logged["thresher/mean_loss"] == pytest.approx(expected, rel=1e-3)


class PlannedHalf:
    """Trains on every other sample, and records losses in a column of its own."""

    stage = "epoch"
    requires = thresher.Requirements()

    def __init__(self, **column):
        self.column = column

    def columns(self):
        return {"loss": thresher.Column(torch.float32, **self.column)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return thresher.EpochPlan(torch.arange(0, len(records["loss"]), 2))


@pytest.mark.parametrize(
    ("column", "expected"), [({}, None), ({"fill": thresher.records.NEVER_SEEN}, 1.0)]
)
def test_a_column_that_does_not_show_which_samples_were_seen_has_no_mean(column, expected):
    """A sample that was never seen has the loss 0 there, as one that is learned has."""
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), 4)
    run = thresher.attach(PlannedHalf(**column), loader=loader, criterion=None, epochs=1)
    for (x,) in run.loader:
        run.reduce(x.square().flatten(), ids=run.ids)
    assert run.history[0].get("mean_loss") == expected
