"""Loaders that accelerate prepared: the end of an epoch is known while gradients are accumulated."""

import itertools

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import assert_same
from thresher.loading.sampler_order import is_free

N, B, EPOCHS = 20, 4, 2


@pytest.fixture(autouse=True)
def own_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_batches_that_accelerate_skips_are_refused_with_the_way_to_go_on():
    model = nn.Linear(6, 4)
    loader = DataLoader(TensorDataset(torch.randn(N, 6), torch.arange(N) % 4), B, shuffle=True)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=EPOCHS,
    )
    x, y = next(iter(accelerate.skip_first_batches(run.loader, 2)))
    with pytest.raises(
        thresher.AttributionError,
        match=r"use run.load_state_dict, not accelerate.skip_first_batches",
    ):
        run.criterion(run.model(x), y)


class Counted(TensorDataset):
    """Knows the epoch, as datasets with a `set_epoch` do."""

    epochs = ()

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)


def train(attached, loop=lambda loader: loader, *, prepared=True, method=None, **settings):
    """Three batches make a step; five batches make two steps an epoch only where the end of it is known."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = nn.Linear(6, 4)
    data = Counted(torch.randn(N, 6), torch.arange(N) % 4)
    loader = DataLoader(data, B, shuffle=True, **settings)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    criterion = nn.CrossEntropyLoss()
    loader = accelerator.prepare(loader) if prepared else loader
    call, feed, loss_of, run = net, loader, criterion, None
    if attached:
        run = thresher.attach(
            method or thresher.FullData(),
            loader=loader,
            criterion=criterion,
            model=net,
            optimizer=optimizer,
            epochs=EPOCHS,
        )
        call, feed, loss_of = run.model, run.loader, run.criterion
    steps, seen = [0], []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    for _ in range(EPOCHS):
        for x, y in loop(feed):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(call(x), y))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(
                (
                    len(accelerator.gather_for_metrics(y)),
                    accelerator.gradient_state.end_of_dataloader,
                )
            )
    return {
        "steps": steps[0],
        "seen": seen,
        "net": accelerator.unwrap_model(net).state_dict(),
        "rng": torch.get_rng_state(),
        "epochs": data.epochs,
    }, run


@pytest.mark.parametrize("workers", [0, 2])
def test_accumulation_is_that_of_the_plain_loop(workers):
    plain, _ = train(False, num_workers=workers)
    ours, run = train(True, num_workers=workers)
    assert ours["steps"] == 4
    assert_same(ours, plain)
    assert run.cost.steps == 4


def test_a_selected_epoch_has_its_own_end():
    """Ten of twenty samples are kept: the last of three batches is the end, and none of its rows is cut off."""
    ours, _ = train(True, method=thresher.UniformSubset(keep=0.5))
    assert ours["seen"] == [(4, False), (4, False), (2, True)] * 2
    assert ours["steps"] == 2


def test_a_loop_that_stops_by_itself():
    plain, _ = train(False)
    ours, _ = train(True, lambda loader: itertools.islice(loader, N // B))
    assert ours["steps"] == plain["steps"]
    assert_same(ours["net"], plain["net"])
    assert ours["epochs"] == plain["epochs"]


def test_a_prepared_optimizer_is_enough():
    """The loop takes its batches from a loader that was not prepared."""
    ours, _ = train(True, prepared=False)
    assert ours["steps"] == 4
    assert_same(ours["net"], train(False)[0]["net"])


@pytest.mark.parametrize("parts", ["all", "loader", "none"])
def test_attached_before_it_is_prepared(parts):
    """`prepare` leaves `run.loader` as it is; ten batches make three steps an epoch, four of them a step."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.arange(40) % 4), B, shuffle=True)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "model": net,
        "optimizer": optimizer,
        "epochs": EPOCHS,
    }
    run = thresher.attach(thresher.FullData(), loader=loader, **settings)
    feed, call = run.loader, run.model
    if parts == "all":
        call, optimizer, feed = accelerator.prepare(run.model, optimizer, run.loader)
    elif parts == "loader":
        feed = accelerator.prepare(run.loader)
    for _ in range(EPOCHS):
        for x, y in feed:
            with accelerator.accumulate(call):
                accelerator.backward(run.criterion(call(x), y))
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
    assert run.cost.steps == 6


def test_a_shuffle_has_the_epochs_that_accelerate_counts():
    def ids(loader, run):
        for x, y in loader:
            if run is not None:
                run.criterion(run.model(x), y)
            yield from x.flatten().int().tolist()

    orders = []
    for attached in (False, True):
        data = TensorDataset(torch.arange(float(N)).unsqueeze(1), torch.arange(N) % 4)
        shuffle = thresher.Shuffle(data, seed=2)
        loader, run = (
            accelerate.Accelerator(cpu=True).prepare(DataLoader(data, B, sampler=shuffle)),
            None,
        )
        if attached:
            settings = {"criterion": nn.CrossEntropyLoss(), "model": nn.Linear(1, 4), "epochs": 3}
            run = thresher.attach(thresher.FullData(), loader=loader, **settings)
        orders.append([[*ids(loader if run is None else run.loader, run)] for _ in range(3)])
    assert orders[0] == orders[1] == [[*thresher.Shuffle(range(N), seed=2)], *orders[1][1:]]
    assert len({tuple(order) for order in orders[0]}) == 3


def test_the_shuffle_of_accelerate_has_every_sample_once():
    """It seeds its generator by the epoch: plans may leave samples out of its order, and no state of it is saved."""
    settings = {"criterion": nn.CrossEntropyLoss(), "model": nn.Linear(1, 4), "epochs": 3}
    config = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    data = TensorDataset(torch.arange(float(N)).unsqueeze(1), torch.arange(N) % 4)

    def attached(method):
        loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(
            DataLoader(data, B, shuffle=True)
        )
        return loader, thresher.attach(method, loader=loader, **settings)

    def ids(loader, run=None):
        for x, y in loader:
            if run is not None:
                run.criterion(run.model(x), y)
            yield from x.flatten().int().tolist()

    plain, _ = attached(thresher.FullData())
    _, full = attached(thresher.FullData())
    expected = [[*ids(plain)] for _ in range(3)]
    assert [[*ids(full.loader, full)] for _ in range(3)] == expected
    assert len({tuple(order) for order in expected}) == 3
    _, run = attached(thresher.UniformSubset(keep=0.5))
    assert run.loader.yields_once and is_free(plain) and run.loader.generators() == []
    for order in expected:
        kept = set(run.plan.ids.tolist())
        assert len(run.loader) == -(-len(kept) // B)
        assert [*ids(run.loader, run)] == [one for one in order if one in kept]
