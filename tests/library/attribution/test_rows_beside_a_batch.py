"""Cost of forward passes over a batch and other rows together."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.InfoBatch()])
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_beside_the_batch_are_counted(method, parts):
    x, y, unlabeled = torch.randn(64, 10), torch.arange(64) % 4, torch.randn(48, 10)
    loader = DataLoader(TensorDataset(x, y), 16)
    run = thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=nn.Linear(10, 4), epochs=1
    )
    for x, y in run.loader:
        outputs = run.model(torch.cat([x, unlabeled]))
        own = zip(outputs[:16].chunk(parts), y.chunk(parts), strict=True)
        (sum(run.criterion(o, t) for o, t in own) + outputs[16:].mean()).backward()
    assert run.cost.forward == run.cost.backward == 256
    assert run.cost.ratio() == 1
    assert run.trained.tolist() == [1] * 64


def test_a_number_of_rows_that_is_not_certain_makes_the_cost_unknown():
    x, y = torch.randn(64, 16), torch.arange(64) % 4
    loader = DataLoader(TensorDataset(x, y), 16)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(16, 4),
        epochs=1,
    )
    for x, y in run.loader:
        run.criterion(run.model(torch.cat([x, x]))[:16], y).backward()
    assert "first or the second dimension" in str(run.cost)


def test_several_heads_of_new_inputs_are_counted_once():
    x, y = torch.randn(64, 10), torch.arange(64) % 4
    loader = DataLoader(TensorDataset(x, y), 16)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(10, 4),
        epochs=1,
    )
    for x, y in run.loader:
        outputs = run.model(x * 2)
        (run.criterion(outputs, y) + run.criterion(outputs * 2, y)).backward()
    assert run.cost.forward == run.cost.backward == 64


@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.InfoBatch()])
def test_pairs_and_triplets_of_new_inputs_count_each_forward_pass(method, towers):
    """A loss of pairs comes from several passes, whose inputs the loop has changed."""
    torch.manual_seed(0)
    inputs = [torch.randn(48, 4) for _ in range(towers)]
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = []
    model.register_forward_hook(lambda module, args, outputs: rows.append(len(outputs)))
    loader = DataLoader(TensorDataset(*inputs), 8, shuffle=True)
    run = thresher.attach(
        method, loader=loader, criterion=None, model=model, optimizer=optimizer, epochs=3
    )
    for _ in range(3):
        for batch in run.loader:
            first, *others = [run.model(part * 2) for part in batch]
            losses = sum((first - other).pow(2).sum(1) for other in others)
            run.reduce(losses, ids=run.ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.forward == run.cost.backward == sum(rows)
    assert run.cost.full_forward == towers * 48 * 3
