"""The last batch of a plan: BatchNorm cannot be trained on one row, which full training never meets."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.samplers import Grouped, StratifiedBatchSampler

SIZE = 10


def attached(rows, *, norm=True, size=SIZE, method=None, workers=0, drop_last=False, sampler=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(rows, 4), torch.arange(rows) % 2)
    loader = DataLoader(data, size, shuffle=True, num_workers=workers, drop_last=drop_last)
    if sampler is not None:
        loader = DataLoader(data, batch_sampler=sampler)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    method = thresher.UniformSubset(keep=0.5) if method is None else method
    loss = nn.CrossEntropyLoss()
    return thresher.attach(
        method, loader=loader, criterion=loss, model=model, optimizer=optimizer, epochs=2
    ), optimizer


def sizes_of(run, optimizer):
    """Trains an epoch, and returns the sizes of its batches."""
    planned, sizes = len(run.loader), []
    for x, y in run.loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        optimizer.step()
    assert len(sizes) == planned
    return sizes


@pytest.mark.parametrize("workers", [0, 2])
def test_one_row_is_left_out_where_the_model_has_batch_norm(workers):
    run, optimizer = attached(102, workers=workers)  # 51 rows
    assert sizes_of(run, optimizer) == [10] * 5 == sizes_of(run, optimizer)
    assert (
        [entry["kept"] for entry in run.history] == [51, 51]
        and run.cost.backward == 100
        and run.cost.steps == 10
    )
    assert "no recorded loss" not in run.summary()


@pytest.mark.parametrize("kind", [Grouped, StratifiedBatchSampler])
def test_composed_batches_leave_one_row_out_as_well(kind):
    run, optimizer = attached(102, sampler=kind(torch.arange(102) % 2 + 1, SIZE))
    assert sizes_of(run, optimizer) == [10] * 5 == sizes_of(run, optimizer)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"rows": 102, "norm": False}, [10] * 5 + [1]),
        ({"rows": 104}, [10] * 5 + [2]),
        ({"rows": 104, "drop_last": True}, [10] * 5),
        ({"rows": 20, "size": 1}, [1] * 10),
        ({"rows": 41, "method": thresher.FullData(), "norm": False}, [10] * 4 + [1]),
    ],
)
def test_other_last_batches_stay(given, sizes):
    run, optimizer = attached(**given)
    if given.get("size") == 1:
        run.model.module.eval()  # which can be trained on one row
    assert sizes_of(run, optimizer) == sizes


@pytest.mark.parametrize("given", [{"rows": 41, "method": thresher.FullData()}, {"rows": 2}])
def test_a_plan_of_everything_or_of_one_row_ends_as_full_training_does(given):
    run, optimizer = attached(**given)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        sizes_of(run, optimizer)


def test_what_is_saved_before_the_last_batch_goes_on_to_the_same_end():
    whole, optimizer = attached(102)
    expected = [x for x, _ in whole.loader]
    first, optimizer = attached(102)
    seen = []
    for x, y in first.loader:
        seen.append(x)
        first.criterion(first.model(x), y).backward()
        optimizer.step()
        if len(seen) == 4:
            break
    again, _ = attached(102)
    again.load_state_dict(first.state_dict())
    seen += [x for x, _ in again.loader]
    assert [*map(len, seen)] == [10] * 5 and torch.equal(torch.cat(seen), torch.cat(expected))
