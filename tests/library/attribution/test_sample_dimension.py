"""The samples are the first dimension of a tensor for certain, or its rows are not known: (T, B) with T = B."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import thresher
from thresher import AttributionError

N, B = 16, 6


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x, lengths=None):
        return x * self.one


def time_first(samples):
    return tuple(
        part.t().contiguous() if part.dim() > 1 else part for part in default_collate(samples)
    )


def samples_first(samples):
    return tuple(default_collate(samples))


def run_of(collate, length, criterion=lambda outputs, targets: outputs, **settings):
    """Tokens that are the id of their sample."""
    tokens = torch.arange(N, dtype=torch.float32).unsqueeze(1).expand(N, length).clone()
    data = TensorDataset(tokens, tokens.clone(), torch.arange(N))
    loader = DataLoader(data, B, collate_fn=collate, **settings)
    return thresher.attach(
        thresher.FullData(), loader=loader, criterion=criterion, model=Scale(), epochs=5
    )


def losses_of_all(run):
    for x, y, _ in run.loader:
        run.criterion(run.model(x), y)
    loss = run.records["loss"]
    known = torch.isfinite(loss)
    assert torch.equal(loss[known], torch.arange(N, dtype=torch.float32)[known])
    return int(known.sum())


@pytest.mark.parametrize("length", [B, N % B, 5])
@pytest.mark.filterwarnings("ignore:FullData. run.criterion or run.reduce got no loss")
def test_time_first_is_refused(length):
    """Also with as many steps as samples, in the first batches or in the last one."""
    run = run_of(time_first, length)
    for _ in range(2):
        for x, y, lengths in run.loader:
            for call in (
                lambda x=x, y=y: run.criterion(run.model(x), y),
                lambda x=x: run.criterion(run.model(x), None),
                lambda x=x, n=lengths: run.criterion(run.model(x, n), None),
                lambda x=x, y=y, n=lengths: run.criterion(run.model(x, lengths=n), y.double()),
            ):
                with pytest.raises((AttributionError, ValueError)):
                    call()
    assert not run.trained.any()


def test_labels_name_the_rows_beside_unclear_inputs():
    run = run_of(samples_first, B, lambda outputs, targets: targets + 0 * outputs.sum())
    for x, _, labels in run.loader:
        run.criterion(run.model(x), labels)
    assert torch.equal(run.records["loss"], torch.arange(N, dtype=torch.float32))


@pytest.mark.parametrize("collate", [None, samples_first])
@pytest.mark.parametrize("length", [5, N % B])
def test_samples_first(collate, length):
    assert losses_of_all(run_of(collate, length)) == N


def test_as_many_steps_as_samples_with_the_collate_function_of_torch():
    assert losses_of_all(run_of(None, B)) == N


def test_unclear_until_a_batch_of_another_size_came():
    run = run_of(samples_first, B)
    batches = iter(run.loader)
    x, y, _ = next(batches)
    with pytest.raises(
        AttributionError,
        match=r"shape \(6, 6\).*along the first or the second dimension.*ids=run.ids",
    ):
        run.criterion(run.model(x), y)
    run.criterion(run.model(x), y, ids=run.ids)
    for x, y, _ in batches:
        if len(x) < B:
            run.criterion(run.model(x), y)
    assert losses_of_all(run) == N


def run_over(x, batch_size):
    """A run over inputs alone, whose collate function is the user's own."""
    loader = DataLoader(TensorDataset(x), batch_size, collate_fn=samples_first)
    criterion = lambda outputs, _: outputs.flatten(1).mean(1)  # noqa: E731
    return thresher.attach(
        thresher.FullData(), loader=loader, criterion=criterion, model=Scale(), epochs=2
    )


def test_images_are_not_unclear():
    run = run_over(torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 8, 8), 8)
    for (x,) in run.loader:
        run.criterion(run.model(x), None)
    assert torch.equal(run.records["loss"], torch.arange(8.0))


def test_a_batch_of_one_sample_is_not_unclear_and_teaches_nothing():
    run = run_over(torch.ones(1, 1), 1)
    for (x,) in run.loader:
        run.criterion(run.model(x), None)
    run = run_over(torch.arange(5.0).unsqueeze(1).expand(5, 4), 4)
    for _ in range(2):
        for (x,) in run.loader:
            if len(x) == 1:
                run.criterion(run.model(x), None)
                continue
            with pytest.raises(
                AttributionError, match=r"shape \(4, 4\).*along the first or the second dimension"
            ):
                run.criterion(run.model(x), None)
    assert run.records["loss"].isfinite().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("length", [4, B])
def test_repeat_does_not_count_samples_of_the_second_dimension(length):
    """Flattened, the rows of one time stand next to each other: each would get the loss of other samples."""
    run = run_of(time_first, length)
    for step, (x, y, _) in enumerate(run.loader):
        outputs = run.model(x)
        if not step or len(run.ids) != length:
            with pytest.raises(
                AttributionError,
                match=r"`repeat` needs the rows .*outputs\.permute\(1, 2, 0\), targets\.T, ids=run\.ids",
            ):
                run.criterion(outputs.flatten(), y.flatten(), ids=run.ids, repeat=length)
        run.criterion(outputs.unsqueeze(2).permute(1, 2, 0).squeeze(1), y.T, ids=run.ids).backward()
    losses = run.records["loss"]
    assert losses.isfinite().sum() == N and torch.equal(
        losses, torch.arange(N, dtype=torch.float32)
    )
