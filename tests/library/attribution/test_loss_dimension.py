"""Losses by position whose first two dimensions are as long as the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

T = 6


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 4)

    def forward(self, x):
        return self.head(x[..., None]).transpose(0, 1).contiguous()


class SamplesFirst(TimeFirst):
    def forward(self, x):
        return self.head(x[..., None])


def attached(model, samples, batch_size):
    torch.manual_seed(0)
    x, y = torch.randn(samples, T), torch.randint(4, (samples, T))
    loader = DataLoader(TensorDataset(x, y), batch_size)
    return thresher.attach(
        thresher.FullData(), loader=loader, criterion=None, model=model, epochs=1
    )


def losses(outputs, targets):
    return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")


def test_losses_with_as_many_times_as_samples_are_refused():
    run = attached(TimeFirst(), 2 * T, T)
    for x, y in run.loader:
        outputs = run.model(x)
        by_time = losses(outputs, y.t())
        for given in ({"outputs": outputs}, {"ids": run.ids}, {"targets": y}):
            with pytest.raises(
                thresher.AttributionError,
                match=r"losses of shape \(6, 6\) for 6 samples.*ids=run.ids, repeat=1; else",
            ):
                run.reduce(by_time, **given)
        assert not run.records["loss"][run.ids].isfinite().any()
        run.reduce(by_time.mean(0), ids=run.ids)
        assert torch.allclose(run.records["loss"][run.ids], by_time.detach().mean(0))


def test_another_shape_shows_that_the_samples_are_first():
    run = attached(SamplesFirst(), 8 + T, 8)
    for x, y in run.loader:
        outputs = run.model(x)
        by_sample = losses(outputs, y)
        run.reduce(by_sample, outputs=outputs)
        assert torch.allclose(run.records["loss"][run.ids], by_sample.detach().mean(1))


def test_a_loss_per_sample_needs_no_other_shape():
    run = attached(SamplesFirst(), T, T)
    for x, y in run.loader:
        run.reduce(losses(run.model(x), y).flatten(1).mean(1))
    assert run.records["loss"].isfinite().all()
