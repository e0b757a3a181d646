"""A criterion that cannot be computed from the kept rows of a batch: the error says how it can."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, T, C = 32, 16, 6, 5
Y = torch.arange(3 * N).view(N, 3) % (C - 1) + 1
LENGTHS = torch.full((B,), T), torch.full((B,), 3)


def run_of(criterion):
    settings = {
        "forward_passes": "once",
        "epochs": 1,
        "model": nn.Linear(10, T * C),
        "criterion": criterion,
    }
    loader = DataLoader(TensorDataset(torch.randn(N, 10), Y), B)
    return thresher.attach(thresher.SelectiveBackprop(keep=0.5), loader=loader, **settings)


def test_outputs_of_which_time_is_the_first_dimension():
    run = run_of(lambda o, t: F.ctc_loss(o, *t, reduction="none"))
    x, y = next(iter(run.loader))
    log_probs = run.model(x).view(B, T, C).transpose(0, 1).log_softmax(2)
    ways_out = (
        r"transpose within the criterion.*forward_passes='twice'.*run.reduce\(losses, ids=run.ids\)"
    )
    with pytest.raises(
        ValueError, match=rf"for the 16 samples of a batch, but not for 8 of them: .*{ways_out}"
    ):
        run.criterion(log_probs, (y, *LENGTHS), ids=run.ids)
    assert not run.trained.any()


def test_the_ways_out():
    run = run_of(lambda o, t: F.ctc_loss(o.transpose(0, 1).log_softmax(2), *t, reduction="none"))
    x, y = next(iter(run.loader))
    run.criterion(run.model(x).view(B, T, C), (y, *LENGTHS), ids=run.ids).backward()
    assert run.trained.sum() == B // 2
    run = run_of(None)
    x, y = next(iter(run.loader))
    log_probs = run.model(x).view(B, T, C).transpose(0, 1).log_softmax(2)
    run.reduce(F.ctc_loss(log_probs, y, *LENGTHS, reduction="none"), ids=run.ids).backward()
    assert run.trained.sum() == B // 2


class Fails(nn.Module):
    """Raises an error for the kept rows of a batch."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, outputs, targets):
        if len(outputs) < B:
            raise self.error
        return outputs.sum(1)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), ValueError("criterion Fails() has a reason of its own")],
)
def test_other_errors_stay_as_they_are(error):
    run = run_of(Fails(error))
    x, y = next(iter(run.loader))
    with pytest.raises(type(error)) as raised:
        run.criterion(run.model(x), y)
    assert raised.value is error
