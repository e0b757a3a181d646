"""Batches whose gradients the loop clears instead of stepping were not trained on, whichever way it clears them."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

B = 6


def by_none(loop):
    for parameter in loop.model.parameters():
        parameter.grad = None


CLEAR = {
    "optimizer": lambda loop: loop.optimizer.zero_grad(),
    "optimizer in place": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "model": lambda loop: loop.model.zero_grad(),
    "model in place": lambda loop: loop.model.zero_grad(set_to_none=False),
    "run.model": lambda loop: loop.run.model.zero_grad(),
    "p.grad = None": by_none,
}


class Loop:
    def __init__(self, method, batches=7, epochs=3, **settings):
        torch.manual_seed(0)
        self.n, self.epochs = batches * B, epochs
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        x = torch.randn(self.n, 4)
        self.truth = torch.zeros(self.n, dtype=torch.int32)
        self.run = thresher.attach(
            method,
            loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), B, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=self.optimizer,
            epochs=epochs,
            **settings,
        )


@pytest.mark.filterwarnings("ignore:In epoch:UserWarning")
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("way", CLEAR)
def test_random_loops_that_accumulate_step_and_give_up(way, at_start):
    """Each batch is added to a group, stepped on, or given up; gradients are cleared at once, or before the next batch."""
    for seed in range(8):
        rng = random.Random(seed)
        loop = Loop(thresher.FullData(), batches=rng.choice([3, 7, 8]))
        group, cleared = [], True
        for _ in range(loop.epochs):
            for x, y in loop.run.loader:
                if at_start and cleared:
                    CLEAR[way](loop)
                cleared = False
                loop.run.criterion(loop.run.model(x), y).backward()
                group.append(loop.run.ids)
                what = rng.choice(["add", "step", "step", "give up"])
                if what == "add":
                    continue
                if what == "step":
                    loop.optimizer.step()
                    for (
                        ids
                    ) in group:  # a group that goes on in the next epoch may have a sample twice
                        loop.truth[ids] += 1
                group, cleared = [], True
                if not at_start:
                    CLEAR[way](loop)
            if rng.random() < 0.3:
                loop.run.state_dict()
        if not cleared:
            CLEAR[way](loop)
        if at_start:  # a batch that was given up last still has its gradients
            CLEAR[way](loop)
        assert torch.equal(loop.run.trained, loop.truth), seed


@pytest.mark.parametrize("way", CLEAR)
def test_a_group_that_is_given_up_is_not_recorded(way):
    loop = Loop(thresher.FullData(), batches=4, epochs=1, observe=True)
    group = []
    for number, (x, y) in enumerate(loop.run.loader):
        (loop.run.criterion(loop.run.model(x), y) / 2).backward()
        group.append(loop.run.ids)
        if number == 1:
            CLEAR[way](loop)
        if number == 3:
            loop.optimizer.step()
    seen = torch.as_tensor(loop.run.data_map()["times_seen"])
    assert not seen[torch.cat(group[:2])].any() and bool((seen[torch.cat(group[2:])] == 1).all())


def test_the_last_batch_of_an_epoch_that_is_given_up():
    loop = Loop(thresher.InfoBatch(), batches=5, epochs=4)
    for _ in range(loop.epochs):
        for number, (x, y) in enumerate(loop.run.loader):
            loop.run.criterion(loop.run.model(x), y).backward()
            if number < len(loop.run.loader) - 1:
                loop.optimizer.step()
                loop.truth[loop.run.ids] += 1
            loop.model.zero_grad()
    assert torch.equal(loop.run.trained, loop.truth)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(
    "skipped", [{(0, 1)}, {(0, 3)}, {(1, 2), (1, 3)}, {(2, 3)}, {(2, 2), (2, 3)}]
)
def test_batches_whose_backward_pass_the_loop_skips(skipped, detach):
    loop = Loop(thresher.FullData(), batches=4, observe=True)
    for epoch in range(loop.epochs):
        for number, (x, y) in enumerate(loop.run.loader):
            loss = loop.run.criterion(loop.run.model(x), y)
            loop.optimizer.zero_grad()
            if (epoch, number) in skipped:  # as `if not loss.isfinite(): continue`
                continue
            loss.backward()
            loop.optimizer.step()
            loop.truth[loop.run.ids] += 1
    if detach:
        loop.run.detach()
    assert torch.equal(loop.run.trained, loop.truth)
    assert loop.run.data_map()["times_seen"].tolist() == loop.truth.tolist()


def test_clipped_and_zero_gradients_are_no_cleared_gradients():
    """Clipping between two backward passes writes gradients in place; a dead network has gradients of zero."""
    for weight, clip in ((1.0, True), (0.0, False)):
        loop = Loop(thresher.FullData(), batches=4, epochs=2)
        for _ in range(loop.epochs):
            for number, (x, y) in enumerate(loop.run.loader):
                (weight * loop.run.criterion(loop.run.model(x), y)).backward()
                if clip:
                    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
                if number % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        assert loop.run.trained.tolist() == [loop.epochs] * loop.n


def test_a_head_outside_of_the_model_and_a_second_optimizer():
    """Gradients of the head are there before the backward pass reaches the outputs of run.model."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
    x = torch.randn(40, 4)
    run = thresher.attach(
        thresher.FullData(),
        loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8),
        criterion=nn.CrossEntropyLoss(),
        model=body,
        optimizer=optimizer,
        epochs=1,
    )
    truth = torch.zeros(40, dtype=torch.int32)
    for number, (inputs, targets) in enumerate(run.loader):
        run.criterion(head(run.model(inputs)), targets).backward()
        if number % 2:
            optimizer.step()
            truth[run.ids] += 1
        body.zero_grad()
        head.zero_grad()
    assert torch.equal(run.trained, truth)
