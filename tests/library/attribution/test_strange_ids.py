"""Ids that the loop states, of no batch that waits for its loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import thresher


class Indexed(Dataset):
    """Returns the index of each sample beside it."""

    def __init__(self):
        torch.manual_seed(0)
        self.x, self.y = torch.randn(64, 5), torch.arange(64) % 3

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def attached(dataset=None, **settings):
    loader = DataLoader(dataset or Indexed(), 2)
    criterion = nn.CrossEntropyLoss()
    return thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=criterion,
        model=nn.Linear(5, 3),
        epochs=1,
        **settings,
    )


def test_the_index_of_the_dataset_below_a_subset_is_refused():
    run = attached(Subset(Indexed(), [*range(20, 64), *range(20)]))
    for x, y, index in run.loader:
        outputs = run.model(x * 1.0)
        with pytest.raises(
            thresher.AttributionError,
            match="not in any batch without a loss.*position in the subset",
        ):
            run.criterion(outputs, F.one_hot(y, 3).float(), ids=index)
        run.criterion(outputs, F.one_hot(y, 3).float(), ids=run.ids.clone())
    assert run.trained.tolist() == [1] * 64


@pytest.mark.parametrize("ahead", [1, 5, 31])
def test_ids_of_older_batches_without_a_loss_are_right(ahead):
    run, waiting, expected = attached(), [], torch.zeros(64)

    def train(x, y, index):
        outputs, targets = run.model(x * 1.0), F.one_hot(y, 3).float()
        expected[index] = F.cross_entropy(outputs, targets, reduction="none").detach()
        run.criterion(outputs, targets, ids=index)

    for batch in run.loader:
        waiting.append(batch)
        run.ids_of(batch[0])
        if len(waiting) > ahead:
            train(*waiting.pop(0))
    for batch in waiting:
        train(*batch)
    assert torch.allclose(run.records["loss"], expected)
    assert run.trained.tolist() == [1] * 64


def test_ids_of_several_batches_that_the_loop_joins_are_right():
    run, waiting = attached(), []
    for batch in run.loader:
        waiting.append(batch)
        if len(waiting) == 2:
            x, y, index = (torch.cat(parts) for parts in zip(*waiting, strict=True))
            run.ids_of(batch[0])
            run.criterion(run.model(x), y, ids=index)
            waiting = []
    assert run.trained.tolist() == [1] * 64


def test_ids_of_a_batch_whose_loss_was_credited_long_ago_are_refused():
    run, first = attached(), None
    for x, y, index in run.loader:
        first = first or (x, y, index)
        run.criterion(run.model(x), y).backward()
    with pytest.raises(thresher.AttributionError, match="not in any batch without a loss"):
        run.criterion(run.model(first[0] * 1.0), first[1] * 1, ids=first[2])
