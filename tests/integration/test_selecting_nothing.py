"""Selecting nothing changes nothing: with FullData attached the loop computes what it computes unattached, bit for bit."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from helpers import assert_same

N, B, C, EPOCHS = 50, 8, 5, 3


class Net(nn.Module):
    """Dropout and BatchNorm: random numbers and buffers."""

    def __init__(self, out=C):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, out)
        )

    def forward(self, x):
        return self.body(x)


class Noisy(TensorDataset):
    """Augmentation from all three global generators, as datasets do in the main process or in a worker."""

    def __getitem__(self, i):
        x, *rest = super().__getitem__(i)
        return x + 0.01 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(
            np.random.rand()
        ), *rest


class Lazy(Sampler):
    """A sampler of the user's that draws from the global generator as it goes."""

    def __iter__(self):
        for _ in range(N):
            yield int(torch.randint(N, ()))

    def __len__(self):
        return N


def dataset(target, noisy=True):
    generator = torch.Generator().manual_seed(3)
    return (Noisy if noisy else TensorDataset)(torch.randn(N, 6, generator=generator), target)


def indices():
    return torch.arange(N) % C


def seed():
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def shape(progress):
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(make_loader, make_criterion, *, attached, optimizer="sgd", accumulate=1, epochs=EPOCHS):
    """The same loop twice: the attached one differs in the three names it calls, and in nothing else."""
    seed()
    loader = make_loader()
    net, criterion = Net(), make_criterion()
    seen = [0]
    if optimizer == "sgd":
        opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=100)
    else:
        opt = torch.optim.AdamW(net.parameters(), 1e-2)
        schedule = None
    call, feed, loss_of = net, loader, criterion
    if attached:
        run = thresher.attach(
            thresher.FullData(),
            loader=loader,
            criterion=criterion,
            model=net,
            optimizer=opt,
            epochs=epochs,
        )
        call, feed, loss_of = run.model, run.loader, run.criterion
        schedule = schedule or thresher.ProgressLR(opt, run, shape)
    elif schedule is None:
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: shape(seen[0] / (epochs * N)))
    losses, order, rates = [], [], []
    for _ in range(epochs):
        for i, (x, *y) in enumerate(feed):
            seen[0] += len(x)
            loss = loss_of(call(x), y[0])
            (loss / accumulate).backward()
            losses.append(loss.detach().clone())
            order.append(x.clone())
            if (i + 1) % accumulate == 0:
                opt.step()
                opt.zero_grad()
                schedule.step()
                rates.append(opt.param_groups[0]["lr"])
    return {
        "losses": losses,
        "order": order,
        "rates": rates,
        "model": net.state_dict(),
        "optimizer": opt.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "generator": None if loader.generator is None else loader.generator.get_state(),
        "sampler generator": None
        if getattr(loader.sampler, "generator", None) is None
        else loader.sampler.generator.get_state(),
        "state_dict keys": list((run.model if attached else net).state_dict()),
    }


def generator():
    return torch.Generator().manual_seed(11)


LOADERS = {
    "shuffle": lambda data: DataLoader(data, B, shuffle=True),
    "in order": lambda data: DataLoader(data, B),
    "own generator": lambda data: DataLoader(data, B, shuffle=True, generator=generator()),
    "weighted": lambda data: DataLoader(
        data, B, sampler=WeightedRandomSampler(torch.rand(N) + 0.1, N)
    ),
    "weighted, own generator": lambda data: DataLoader(
        data, B, sampler=WeightedRandomSampler(torch.rand(N) + 0.1, N, generator=generator())
    ),
    "with replacement": lambda data: DataLoader(
        data, B, sampler=RandomSampler(data, replacement=True, num_samples=70)
    ),
    "with replacement, own generator": lambda data: DataLoader(
        data, B, sampler=RandomSampler(data, replacement=True, generator=generator())
    ),
    "fewer samples": lambda data: DataLoader(
        data, B, sampler=RandomSampler(data, num_samples=30, generator=generator())
    ),
    "subset": lambda data: DataLoader(data, B, sampler=SubsetRandomSampler(range(N - 5))),
    "lazy custom": lambda data: DataLoader(data, B, sampler=Lazy()),
    "drop last": lambda data: DataLoader(data, B, shuffle=True, drop_last=True),
    "drop last, own generator": lambda data: DataLoader(
        data, B, shuffle=True, drop_last=True, generator=generator()
    ),
    "workers": lambda data: DataLoader(data, B, shuffle=True, num_workers=2),
    "workers, own generator": lambda data: DataLoader(
        data, B, shuffle=True, num_workers=2, generator=generator()
    ),
    "persistent workers": lambda data: DataLoader(
        data, B, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders(name):
    def make():
        return LOADERS[name](dataset(indices()))

    both = [train(make, nn.CrossEntropyLoss, attached=attached) for attached in (False, True)]
    assert_same(*both)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_optimizers_schedules_and_accumulation(optimizer, accumulate):
    def make():
        return DataLoader(dataset(indices()), B, shuffle=True)

    both = [
        train(
            make, nn.CrossEntropyLoss, attached=attached, optimizer=optimizer, accumulate=accumulate
        )
        for attached in (False, True)
    ]
    assert_same(*both)


WEIGHT = torch.linspace(0.5, 2, C)

CRITERIA = {
    "smoothing": (partial(nn.CrossEntropyLoss, label_smoothing=0.1), indices, None),
    "class weights": (partial(nn.CrossEntropyLoss, weight=WEIGHT), indices, None),
    "weights and smoothing": (
        partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.1),
        indices,
        None,
    ),
    "ignore_index": (partial(nn.CrossEntropyLoss, ignore_index=2), indices, None),
    "sum": (partial(nn.CrossEntropyLoss, reduction="sum"), indices, None),
    "probabilities": (
        nn.CrossEntropyLoss,
        lambda: torch.rand(N, C, generator=generator()).softmax(1),
        None,
    ),
    "nll": (nn.NLLLoss, indices, partial(F.log_softmax, dim=1)),
    "bce": (nn.BCELoss, lambda: torch.rand(N, C, generator=generator()).round(), torch.sigmoid),
    "bce with logits": (
        partial(nn.BCEWithLogitsLoss, pos_weight=WEIGHT),
        lambda: torch.rand(N, C, generator=generator()).round(),
        None,
    ),
    "mse": (nn.MSELoss, lambda: torch.randn(N, C, generator=generator()), None),
    "l1": (nn.L1Loss, lambda: torch.randn(N, C, generator=generator()), None),
    "smooth l1": (nn.SmoothL1Loss, lambda: torch.randn(N, C, generator=generator()), None),
    "huber": (nn.HuberLoss, lambda: torch.randn(N, C, generator=generator()), None),
    "kl": (
        partial(nn.KLDivLoss, reduction="batchmean"),
        lambda: torch.randn(N, C, generator=generator()).softmax(1),
        partial(F.log_softmax, dim=1),
    ),
    "dense": (
        nn.CrossEntropyLoss,
        lambda: torch.arange(N * 2).view(N, 2) % 2,
        lambda o: o[:, :4].reshape(-1, 2, 2),
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_criteria(name):
    make_criterion, target, activation = CRITERIA[name]

    def make():
        return DataLoader(dataset(target()), B, shuffle=True)

    def loop(attached):
        seed()
        loader, net, criterion = make(), Net(), make_criterion()
        opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        call, feed, loss_of = net, loader, criterion
        if attached:
            run = thresher.attach(
                thresher.FullData(),
                loader=loader,
                criterion=criterion,
                model=net,
                optimizer=opt,
                epochs=3,
            )
            call, feed, loss_of = run.model, run.loader, run.criterion
        losses = []
        for _ in range(EPOCHS):
            for x, y in feed:
                outputs = call(x)
                loss = loss_of(outputs if activation is None else activation(outputs), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.detach().clone())
        return losses, net.state_dict(), opt.state_dict(), torch.get_rng_state()

    assert_same(loop(False), loop(True))


def test_a_callable_is_averaged():
    def make():
        return DataLoader(dataset(indices()), B, shuffle=True)

    plain = train(make, nn.CrossEntropyLoss, attached=False)
    ours = train(make, lambda: partial(F.cross_entropy, reduction="none"), attached=True)
    for a, b in zip(plain["losses"], ours["losses"], strict=True):
        torch.testing.assert_close(a, b)


def test_breaking_out_draws_what_the_plain_loop_draws():
    def loop(attached):
        seed()
        loader = DataLoader(dataset(indices()), B, shuffle=True, generator=generator())
        net = Net()
        feed = loader
        if attached:
            feed = thresher.attach(
                thresher.FullData(),
                loader=loader,
                criterion=nn.CrossEntropyLoss(),
                model=net,
                epochs=3,
            ).loader
        order = []
        for _ in range(3):
            for i, (x, _) in enumerate(feed):
                order.append(x)
                if i == 2:
                    break
        return order, torch.get_rng_state(), loader.generator.get_state()

    assert_same(loop(False), loop(True))
