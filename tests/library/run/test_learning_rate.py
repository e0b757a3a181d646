"""Learning rates of every step: scaled inside it, restored after it, whatever else touches the optimizer."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


class Recorder(torch.optim.SGD):
    """Remembers the learning rate that each step really used."""

    def __init__(self, params, lr, fail_at=None):
        super().__init__(params, lr)
        self.used, self.fail_at = [], fail_at

    @torch.no_grad()
    def step(self, closure=None):
        self.used.append([float(group["lr"]) for group in self.param_groups])
        if len(self.used) == self.fail_at:
            raise ArithmeticError("the step failed")
        return super().step(closure)


def attach(optimizer, net, method, n=40, epochs=10, batch=8):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(n) % 2), batch, shuffle=True)
    return thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=epochs,
    )


@pytest.mark.parametrize("lr_fraction", ["actual", "scheduled"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_every_step_of_kakurenbo(lr_fraction, warmup):
    net = nn.Linear(3, 2)
    optimizer = Recorder([{"params": net.weight, "lr": 0.1}, {"params": net.bias, "lr": 0.01}], 0.1)
    method = thresher.Kakurenbo(
        max_fraction=0.4, tau=0.5, lr_fraction=lr_fraction, warmup_epochs=warmup
    )
    run = attach(optimizer, net, method)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    expected = []
    for epoch in range(10):
        base = [0.1 * 0.5 ** (epoch // 3), 0.01 * 0.5 ** (epoch // 3)]
        for x, y in run.loader:
            plan = run.plan
            factor = 0.4 * (1, 1, 1, 0.8, 0.8, 0.8, 0.6, 0.6, 0.4, 0.4)[epoch] if epoch else 0
            scale = 40 / len(plan.ids) if lr_fraction == "actual" else 1 / (1 - factor)
            scale = scale if epoch >= warmup else 1
            expected.append([lr * scale for lr in base])
            assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(base)
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(base)
        scheduler.step()
    assert optimizer.used == [pytest.approx(rates, rel=1e-12) for rates in expected]
    assert run.cost.steps == len(expected)
    assert len({tuple(rates) for rates in optimizer.used}) > 5


@dataclass(frozen=True)
class Scaled:
    """Full training whose steps have scaled learning rates."""

    scale: float
    stage = "epoch"
    requires = thresher.Requirements(optimizer=True)

    def columns(self):
        return {}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return thresher.EpochPlan(torch.arange(40), lr_scale=self.scale)


def losses_of(optimizer, net, scale, epochs=2):
    """A run with scaled learning rates, and the losses of its batches, one after the other."""
    run = attach(optimizer, net, Scaled(scale), epochs=epochs)

    def losses():
        for _ in range(epochs):
            for x, y in run.loader:
                yield run.criterion(run.model(x), y)

    return run, losses()


@pytest.mark.parametrize("tensor", [False, True])
def test_restored_when_the_step_raises(tensor):
    net = nn.Linear(3, 2)
    rate = torch.tensor(0.1) if tensor else 0.1
    optimizer = Recorder(net.parameters(), rate, fail_at=1)
    run, losses = losses_of(optimizer, net, 1.7)
    next(losses).backward()
    with pytest.raises(ArithmeticError, match="the step failed"):
        optimizer.step()
    assert optimizer.used == [[pytest.approx(0.17)]]
    assert optimizer.param_groups[0]["lr"] == rate
    assert not tensor or optimizer.param_groups[0]["lr"] is rate
    assert run.cost.steps == 0
    optimizer.step()
    assert optimizer.used[1] == [pytest.approx(0.17)]
    assert float(optimizer.param_groups[0]["lr"]) == float(torch.tensor(0.1)) if tensor else 0.1
    assert run.cost.steps == 1


def test_restored_bit_for_bit():
    """0.1 * 3 / 3 is not 0.1: the value is put back, not divided."""
    for rate in (0.1, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64).squeeze()):
        net = nn.Linear(3, 2)
        optimizer = Recorder(net.parameters(), rate)
        _run, losses = losses_of(optimizer, net, 3.0)
        before = copy.deepcopy(rate)
        next(losses).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == before and optimizer.used == [
            [pytest.approx(0.3)]
        ]


@pytest.mark.parametrize("first", ["scheduler", "run"])
def test_schedulers_do_not_notice(first):
    net = nn.Linear(3, 2)
    optimizer = Recorder(net.parameters(), 0.1)
    if first == "scheduler":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        run, losses = losses_of(optimizer, net, 2.0)
    else:
        run, losses = losses_of(optimizer, net, 2.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    plain = Recorder([nn.Parameter(torch.ones(1))], 0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(plain, 1.0, total_steps=10)
    for _ in range(9):
        next(losses).backward()
        for opt, sched in ((optimizer, scheduler), (plain, reference)):
            opt.step()
            sched.step()
    assert [2 * a[0] for a in plain.used] == [a[0] for a in optimizer.used]
    run.detach()
    used = len(optimizer.used)
    optimizer.step()
    assert optimizer.used[used][0] == optimizer.param_groups[0]["lr"]


def test_grad_scaler_and_closures():
    net = nn.Linear(3, 2)
    optimizer = Recorder(net.parameters(), 0.1)
    run, losses = losses_of(optimizer, net, 2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(next(losses)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.used == [[0.2]]
    optimizer.zero_grad()
    scaler.scale(next(losses) * float("inf")).backward()
    scaler.step(optimizer)  # skipped by the scaler: not a step
    scaler.update()
    assert run.cost.steps == len(optimizer.used) == 1

    def closure():
        optimizer.zero_grad()
        loss = next(losses)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert run.cost.steps == 2 and optimizer.used[1] == [0.2]


def test_detach_leaves_the_optimizer_as_it_was():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = set(vars(optimizer))
    run = attach(optimizer, net, Scaled(2.0))
    assert set(vars(optimizer)) - before == {"step"}
    run.detach()
    assert set(vars(optimizer)) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_progress_lr():
    net = nn.Linear(3, 2)
    optimizer = Recorder(net.parameters(), 0.1)
    run = attach(optimizer, net, thresher.UniformSubset(keep=0.5), n=40, epochs=4)
    scheduler = thresher.ProgressLR(optimizer, run, lambda p: 0.5 * (1 + math.cos(math.pi * p)))
    seen = []
    for _ in range(4):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            scheduler.step()
            seen.append(run.progress)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(
                0.05 * (1 + math.cos(math.pi * seen[-1]))
            )
    assert seen == sorted(seen)
    assert run.progress == 1.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert set(scheduler.state_dict()) >= {"base_lrs", "last_epoch"}
    assert not {"fn", "_position", "optimizer"} & set(scheduler.state_dict())


def test_progress_lr_follows_the_batches_that_were_trained_on():
    """Beside a loader that runs ahead of the loop, as `run.pace` does."""
    rates = []
    for ahead in (0, 3):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = Recorder(net.parameters(), 0.1)
        run = attach(optimizer, net, thresher.UniformSubset(keep=0.5), n=40, epochs=4)
        scheduler = thresher.ProgressLR(optimizer, run, lambda p: 1 - p)
        rates.append([])
        for _ in range(4):
            for x, y in run_ahead(run.loader, ahead):
                run.criterion(run.model(x), y).backward()
                optimizer.step()
                scheduler.step()
                rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == len(rates[0])
    assert rates[0][-1] == 0


def run_ahead(batches, number):
    """The batches, each of which comes when that many further ones were asked for."""
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > number:
            yield waiting.pop(0)
    yield from waiting


def test_progress_lr_needs_a_function():
    net = nn.Linear(3, 2)
    optimizer = Recorder(net.parameters(), 0.1)
    run = attach(optimizer, net, thresher.FullData())
    with pytest.raises(TypeError, match="`fn` must map progress to a factor, got float"):
        thresher.ProgressLR(optimizer, run, 0.5)
