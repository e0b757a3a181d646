"""With drop_last, a plan of less than one batch still has a step; what full training drops stays dropped."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

METHODS = {
    "half, fewer steps": (0.5, {"spend": "steps"}),
    "half, smaller batches": (0.5, {}),
    "uniform": (thresher.UniformSubset(keep=0.5), {}),
    "Rs2": (thresher.Rs2(keep=0.5), {}),
    "Kakurenbo": (thresher.Kakurenbo(max_fraction=0.4, tau=0.5), {}),
    "InfoBatch": (thresher.InfoBatch(), {}),
    "two passes": (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
    "two passes by chance": (thresher.SelectiveBackprop(beta=1.0), {"forward_passes": "twice"}),
}


def attached(method, n=80, batch_size=64, epochs=4, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(n, 4)
    run = thresher.attach(
        method,
        loader=DataLoader(
            TensorDataset(x, (x[:, 0] > 0).long()), batch_size, shuffle=True, drop_last=True
        ),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", METHODS)
def test_every_epoch_has_a_step(name):
    method, settings = METHODS[name]
    run, optimizer = attached(method, **settings)
    for epoch in range(run.epochs):
        expected = None if name.endswith("by chance") else len(run.loader)
        steps = 0
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        assert steps == 1 and expected in (None, 1), epoch
        assert run.progress == pytest.approx((epoch + 1) / run.epochs)
    assert 0 < run.cost.ratio() <= 1.1


def test_a_plan_of_more_than_one_batch_drops_its_rest():
    run, optimizer = attached(thresher.UniformSubset(keep=0.5), n=160, batch_size=64, epochs=1)
    sizes = [len(x) for x, _ in run.loader]
    assert sizes == [64]


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.UniformSubset(keep=0.5)])
def test_data_of_less_than_one_batch_has_no_step_in_the_plain_loop_either(method):
    run, _ = attached(method, n=40)
    assert len(run.loader) == 0 and [*run.loader] == []
