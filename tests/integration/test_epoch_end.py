"""When an epoch is over, by the table of docs/how-it-works.md."""

import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, EPOCHS = 32, 8, 4
NOT_ASKED = "epoch 0, but before the end of the loop over run.loader.*run it now"


class Training:
    """A loop with code after the last batch of each epoch."""

    def __init__(self, method=None, *, optimizer=True):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.run = thresher.attach(
            method or thresher.FullData(),
            loader=DataLoader(
                TensorDataset(torch.randn(N, 4), torch.arange(N) % 2), B, shuffle=True
            ),
            criterion=nn.CrossEntropyLoss(),
            model=self.net,
            optimizer=self.optimizer if optimizer else None,
            epochs=EPOCHS,
        )

    def step(self, batch):
        x, y = batch
        self.run.criterion(self.run.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self):
        file = io.BytesIO()
        torch.save(self.run.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def sizes(self, epochs=1):
        """Numbers of batches per epoch of the plain loop."""
        sizes = [0] * epochs
        for epoch in range(epochs):
            for batch in self.run.loader:
                self.step(batch)
                sizes[epoch] += 1
        return sizes


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        (None, True),
        (None, False),
        (thresher.Kakurenbo(max_fraction=0.5, tau=0.0), True),
        (thresher.InfoBatch(), False),
    ],
)
def test_a_loop_that_keeps_the_iterator(method, optimizer):
    """Its epoch ends with the next pass, or with `detach`; a state that is saved before is within it."""
    training = Training(method, optimizer=optimizer)
    for epoch in range(3):
        iterator = iter(training.run.loader)
        for _ in range(len(training.run.loader)):
            assert training.run.epoch == epoch
            training.step(next(iterator))
        assert training.run.epoch == epoch and training.run.progress > (epoch + 0.7) / EPOCHS
        training.saved()
        assert len(training.run.history) == epoch
    training.run.detach()
    assert training.run.epoch == 3
    plain = Training(method, optimizer=optimizer)
    plain.sizes(3)
    assert training.run.history == plain.run.history and all(
        entry["complete"] for entry in training.run.history
    )
    assert torch.equal(training.net.weight, plain.net.weight)


def test_a_kept_iterator_is_resumed_with_an_empty_rest():
    training = Training()
    iterator = iter(training.run.loader)
    for _ in range(4):
        training.step(next(iterator))
    other = Training()
    other.run.load_state_dict(training.saved())
    assert other.run.epoch == 0
    assert other.sizes(4) == [0, 4, 4, 4]


def test_detach_ends_an_epoch_that_was_left_early():
    training = Training()
    for batch in training.run.loader:
        training.step(batch)
        break
    training.run.detach()
    assert [(entry["complete"], entry["steps"]) for entry in training.run.history] == [(False, 1)]


def test_detach_after_a_look_ends_nothing():
    training = Training()
    next(iter(training.run.loader))
    training.run.detach()
    assert training.run.history == []


def test_a_reading_ends_no_epoch_whose_last_batch_was_not_trained_on():
    training = Training(thresher.UniformSubset(keep=0.5))
    first, last = training.run.loader
    training.step(first)
    assert (training.run.history, len(training.run.plan.ids)) == ([], N // 2)
    x, y = last
    training.run.criterion(training.run.model(x), y).backward()
    assert training.run.history == []  # behind a prefetcher the step is still to come
    training.optimizer.step()
    assert (training.run.epoch, len(training.run.history)) == (1, 1)


@pytest.mark.parametrize("around", [iter, enumerate, lambda loader: (batch for batch in loader)])
def test_saved_at_the_last_batch_inside_the_loop(around):
    """The loop has not come to its code after the last batch: the resumed loop does, after an empty rest of the epoch."""
    training, state = Training(), {}
    for number, batch in enumerate(around(training.run.loader), 1):
        training.step(batch[1] if around is enumerate else batch)
        assert training.run.epoch == 0
        if number == 4:
            state = training.saved()
    other = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.run.load_state_dict(state)
    assert other.run.epoch == 0
    assert other.sizes(4) == [0, 4, 4, 4]


def test_saved_after_the_loader_ran_out():
    training, other = Training(), Training()
    training.sizes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.run.load_state_dict(training.saved())
        again = other.saved()
    assert other.sizes(3) == [4, 4, 4]
    assert again["ranks"][0]["ran_out"]


def counted(loader):
    return zip(range(4), loader, strict=False)


@pytest.mark.parametrize("ends", [lambda loader: enumerate(itertools.islice(loader, 4)), counted])
def test_left_at_the_last_batch(ends):
    training, other = Training(), Training()
    for _, batch in ends(training.run.loader):
        training.step(batch)
    for state in (training.saved(), training.saved()):
        with pytest.warns(UserWarning, match=NOT_ASKED):
            other.run.load_state_dict(state)
    assert other.run.epoch == 1
    assert not other.saved()["ranks"][0]["ran_out"]  # saved again as it was loaded
    assert other.sizes(3) == [4, 4, 4]
    assert other.saved()["ranks"][0]["ran_out"]


def train_two_batches(training, *, save_inside=False):
    state = None
    for number, batch in enumerate(training.run.loader, 1):
        training.step(batch)
        if number == 2:
            state = training.saved() if save_inside else None
            break
    return state or training.saved()


@pytest.mark.parametrize("save_inside", [False, True])
def test_a_state_saved_before_the_last_batch_goes_on_within_the_epoch(save_inside):
    training, other = Training(), Training()
    training.sizes()
    state = train_two_batches(training, save_inside=save_inside)
    other.run.load_state_dict(state)
    assert (other.run.epoch, other.run.progress) == (1, 1.5 / EPOCHS)
    assert other.sizes(3) == [2, 4, 4]


def test_a_run_that_goes_on_otherwise_than_its_saved_state_says_so():
    training = Training()
    train_two_batches(training)
    with pytest.warns(
        UserWarning, match="left epoch 0 by break continues within epoch 0.*this run begins epoch 1"
    ):
        training.sizes()
    inside = Training()
    train_two_batches(inside, save_inside=True)
    inside.sizes()  # the state was saved within the epoch, where it goes on: nothing to say


def test_a_look_at_a_batch_is_no_epoch_that_was_left():
    training = Training()
    for _ in training.run.loader:
        break
    with pytest.warns(UserWarning, match="has not computed the loss of a batch"):
        training.saved()
    assert training.sizes(2) == [4, 4]
