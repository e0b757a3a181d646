"""Losses that are not finite are counted and named in pieces, and the mean of the others is that of all that were seen."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N = 20


@dataclass(frozen=True)
class Chosen:
    """Trains on some samples in every epoch; the others are never seen."""

    ids: tuple[int, ...]
    stage = "epoch"

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=thresher.records.NEVER_SEEN)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return thresher.EpochPlan(torch.tensor(self.ids))


def train(losses, ids, **settings):
    """Trains for an epoch on samples with given losses, and returns its entry in the history."""
    loader = DataLoader(TensorDataset(losses.unsqueeze(1), torch.zeros(len(losses))), 4)
    settings = {
        "criterion": lambda outputs, _: outputs[:, 0],
        "model": nn.Identity(),
        "epochs": 1,
    } | settings
    run = thresher.attach(Chosen(tuple(ids)), loader=loader, **settings)
    for x, y in run.loader:
        run.criterion(run.model(x), y)
    return run.history[-1]


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize(
    "places", [[0], [2, 3, 4], [1, 8, 11, 15, 16, 18], [i for i in range(N) if i % 7 != 6]]
)
def test_they_are_counted_and_the_first_are_named(monkeypatch, piece, places):
    monkeypatch.setattr("thresher.run.history.LOOKED_AT", piece)
    losses = torch.rand(N)
    losses[places] = torch.tensor([torch.nan, torch.inf]).repeat(10)[: len(places)]
    seen = [i for i in range(N) if i % 7 != 6]
    more = " ..." if len(places) > 5 else ""
    message = f"^{len(places)} samples have a loss that is not finite (ids {places[:5]}{more}); "
    with pytest.raises(
        FloatingPointError, match=message.translate({ord(c): f"\\{c}" for c in "()[]."})
    ):
        train(losses, seen, on_nonfinite="raise")
    with pytest.warns(UserWarning, match="they are kept for training and not scored"):
        entry = train(losses, seen)
    assert entry["nonfinite"] == len(places)


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_samples_that_were_never_seen_do_not_count(monkeypatch, piece):
    monkeypatch.setattr("thresher.run.history.LOOKED_AT", piece)
    entry = train(torch.arange(float(N)), [3, 4, 11], on_nonfinite="raise")
    assert entry["nonfinite"] == 0 and entry["mean_loss"] == 6.0


@pytest.mark.filterwarnings("ignore:.*that is not finite:UserWarning")
def test_losses_that_are_not_finite_are_not_in_the_mean():
    losses = torch.tensor([torch.nan, 2.0, torch.inf, 4.0, 9.0])
    assert train(losses, [0, 1, 2, 3])["mean_loss"] == 3.0
    assert "mean_loss" not in train(losses, [0, 2])
