"""A script may set the default dtype at its top: plans, weights and records do not depend on it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N = 120
METHODS = [
    0.5,
    "kakurenbo",
    "infobatch",
    "forgetting",
    "importance_sampling",
    "ies",
    "ada_selection",
    "batch_importance",
]


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_training_under_another_default_dtype(method, default_dtype):
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    y = (x[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), 10, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=3,
        observe=True,
    )
    for _ in range(3):
        for inputs, targets in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
    table = run.data_map()
    seen = torch.as_tensor(table["times_seen"]) > 0
    with torch.no_grad():
        expected = F.cross_entropy(model(x).float(), y, reduction="none")
    losses = torch.as_tensor(table["loss"]).float()
    torch.testing.assert_close(losses[seen], expected[seen], rtol=0.02, atol=0.02)
    assert bool((run.trained > 0).any())
