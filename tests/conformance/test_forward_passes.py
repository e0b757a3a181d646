"""`run.cost.forward` counts every row that goes through the model: a hook on its innermost layer counts the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from conformance.test_roster import CASES
from thresher import methods
from thresher.testing.check import CHECK_SAMPLES

EPOCHS = 5


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("passes", ["once", "twice", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_every_forward_pass_is_counted(name: str, passes: str) -> None:
    method = methods.create(name, **CASES[name][0])
    if method.stage != "batch" and passes != "auto":
        pytest.skip("chooses between epochs")
    torch.manual_seed(0)
    x = torch.randn(CHECK_SAMPLES, 4)
    y = torch.arange(CHECK_SAMPLES) % 3
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    rows: list[int] = []
    model[0].register_forward_hook(lambda module, inputs, outputs: rows.append(len(outputs)))
    settings: dict[str, Any] = {} if passes == "auto" else {"forward_passes": passes}
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    try:
        run = thresher.attach(
            method,
            loader=DataLoader(TensorDataset(x, y), 16, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=model,
            optimizer=optimizer,
            epochs=EPOCHS,
            **settings,
        )
    except (ValueError, TypeError) as error:
        pytest.skip(f"refused: {error}")
    of_scores = run.cost.forward
    for _ in range(EPOCHS):
        planned: list[int] = []
        trained: list[int] = []
        for inputs, targets in run.loader:
            planned = run.plan.ids.tolist() if method.stage == "epoch" else []
            trained += run.ids.tolist() if method.stage == "epoch" else []
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sorted(trained) == sorted(planned)
    assert run.cost.forward - of_scores == sum(rows)
