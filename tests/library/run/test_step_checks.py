"""Steps that are scaled twice, not seen or not scaled, and schedules that end early: an error or a warning, never silence."""

import gc
import inspect
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B = 40, 8


@pytest.fixture(autouse=True)
def same_weights():
    torch.manual_seed(0)


def loader_of(n=N):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.arange(n) % 2), B, shuffle=True)


def attach(optimizer, net, method=None, *, loader=None, epochs=10, **settings):
    method = method or thresher.Kakurenbo(max_fraction=0.4, tau=0.5)
    return thresher.attach(
        method,
        loader=loader or loader_of(),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )


class SAM(torch.optim.Optimizer):
    """Steps twice; only the optimizer inside makes the second step."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        self.moved = [(p, p.grad * 0.05) for group in self.param_groups for p in group["params"]]
        for p, by in self.moved:
            p.add_(by)

    @torch.no_grad()
    def second_step(self):
        for p, by in self.moved:
            p.sub_(by)
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Rates(torch.optim.SGD):
    """Remembers the learning rate of each step."""

    @torch.no_grad()
    def step(self, closure=None):
        self.used = [*getattr(self, "used", []), float(self.param_groups[0]["lr"])]
        return super().step(closure)


def train(run, net, *, step, epochs, after=lambda: None):
    for _ in range(epochs):
        for x, y in run.loader:
            loss = run.criterion(run.model(x), y)
            net.zero_grad()
            loss.backward()
            step(x, y)
            after()


# One run at a time


def test_a_second_attach_to_the_same_optimizer_is_refused():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    first = attach(optimizer, net)
    hook_count = len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(
        ValueError,
        match=r"`optimizer`: this SGD still belongs to another run.*two runs would act on its steps.*run\.detach\(\)",
    ):
        attach(optimizer, net)
    assert len(optimizer._optimizer_step_pre_hooks) == hook_count == 1
    first.detach()
    assert attach(optimizer, net).epoch == 0


def test_a_second_attach_to_the_same_loader_is_refused():
    net, loader = nn.Linear(3, 2), loader_of()
    first = attach(None, net, thresher.FullData(), loader=loader)
    with pytest.raises(
        ValueError,
        match=r"`loader`: this DataLoader still belongs to another run.*run\.detach\(\)",
    ):
        attach(None, net, thresher.FullData(), loader=loader)
    first.detach()
    assert len(attach(None, net, thresher.FullData(), loader=loader).loader) == N // B


@pytest.mark.parametrize("held", ["outside", "inside"])
def test_the_optimizer_inside_another_is_taken_too(held):
    net = nn.Linear(3, 2)
    sam = SAM(net.parameters(), torch.optim.SGD, lr=0.1)
    pair = [sam, sam.base_optimizer]
    first, second = pair if held == "outside" else pair[::-1]
    run = attach(first, net)
    with pytest.raises(ValueError, match="still belongs to another run"):
        attach(second, net)
    run.detach()
    assert "step" not in vars(sam) and "step" not in vars(sam.base_optimizer)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_run_that_nobody_holds_is_no_run(scheduled):
    net = nn.Linear(3, 2)
    optimizer, loader = Rates(net.parameters(), 0.1), loader_of()
    run = attach(optimizer, net, loader=loader)
    run._timeline.steps.hooks.scale = 5.0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100) if scheduled else None
    gone = weakref.ref(run._timeline)
    del run
    again = attach(optimizer, net, loader=loader)
    assert gone() is None
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    optimizer.step()
    assert optimizer.used == [0.1]
    assert again.cost.steps == 1
    del again, scheduler
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert scheduled or "step" not in vars(optimizer)


def test_a_run_lives_as_long_as_its_loader():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = attach(optimizer, net).loader
    with pytest.raises(ValueError, match="still belongs to another run"):
        attach(optimizer, net)
    assert len(batches) == N // B


def test_a_refused_attach_takes_nothing():
    net = nn.Linear(3, 2)
    optimizer, loader = torch.optim.SGD(net.parameters(), 0.1), loader_of()
    for _ in range(2):
        with pytest.raises(ValueError, match="`epochs`"):
            attach(optimizer, net, loader=loader, epochs=0)
    assert attach(optimizer, net, loader=loader).epoch == 0


def test_a_learning_rate_that_cannot_be_scaled_is_refused():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(
        ValueError,
        match="Kakurenbo scales the learning rate, but SGD has a parameter group with lr=None",
    ):
        attach(optimizer, net)


# Optimizers that hold another


@pytest.mark.parametrize("way", ["two calls", "closure"])
def test_sam_is_counted_and_scaled(way):
    net = nn.Linear(3, 2)
    sam = SAM(net.parameters(), Rates, lr=0.1)
    run = attach(sam, net)
    assert run.plan.lr_scale == 1

    def step(x, y):
        def again():
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()

        if way == "closure":
            sam.step(again)
        else:
            sam.first_step()
            again()
            sam.second_step()

    train(run, net, step=step, epochs=3)
    used = sam.base_optimizer.used
    scales = [entry["lr_scale"] for entry in run.history for _ in range(entry["steps"])]
    assert run.cost.steps == len(used) == len(scales)
    assert used == pytest.approx([0.1 * scale for scale in scales], rel=1e-12)
    assert max(scales) > 1.1
    assert sam.param_groups[0]["lr"] == 0.1


class Both(torch.optim.Optimizer):
    """Two optimizers that step together."""

    def __init__(self, one, other):
        self.optimizers = [one, other]
        super().__init__([*one.param_groups, *other.param_groups], {})

    def step(self, closure=None):
        for one in self.optimizers:
            one.step(closure)


def test_several_optimizers_in_one_make_one_step():
    net = nn.Linear(3, 2)
    one, other = Rates([net.weight], 0.1), Rates([net.bias], 0.2)
    both = Both(one, other)
    run = attach(both, net)
    run._timeline.steps.hooks.scale = 3.0
    run._timeline.steps.hooks._trains = lambda: True
    both.step()
    assert (one.used, other.used) == ([pytest.approx(0.3)], [pytest.approx(0.6)])
    assert run.cost.steps == 1
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.2]


def test_a_step_that_raises_inside_leaves_the_rates():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("inside")

    net = nn.Linear(3, 2)
    sam = SAM(net.parameters(), Fails, lr=0.1)
    run = attach(sam, net)
    run._timeline.steps.hooks.scale = 3.0
    net(torch.ones(1, 3)).sum().backward()
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="inside"):
            sam.step(lambda: None)
        assert sam.param_groups[0]["lr"] == 0.1
    assert run.cost.steps == 0


# Steps that were not seen, or not scaled


def test_losses_without_a_step_warn_once():
    net = nn.Linear(3, 2)
    attached, used = (torch.optim.SGD(net.parameters(), 0.1) for _ in range(2))
    run = attach(attached, net, thresher.FullData(), epochs=3)
    with pytest.warns(
        UserWarning, match=r"In epoch 0, 40 samples had a loss, but the SGD of the run made no step"
    ) as seen:
        train(run, net, step=lambda *_: used.step(), epochs=3)
        run.detach()
    assert len(seen) == 1


def test_an_optimizer_that_was_replaced_is_said_with_the_scale():
    net = nn.Linear(3, 2)
    first, second = (torch.optim.SGD(net.parameters(), 0.1) for _ in range(2))
    run = attach(first, net, epochs=4)
    train(run, net, step=lambda *_: first.step(), epochs=2)
    train(run, net, step=lambda *_: second.step(), epochs=1)
    with pytest.warns(
        UserWarning,
        match=r"In epoch 2, .* made no step.* was not multiplied by 1\.\d+, as the method asks",
    ):
        run.detach()


def test_a_second_optimizer_beside_is_not_scaled_and_said():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    one, other = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    run = attach(one, net, epochs=4)

    def step(*_):
        one.step()
        other.step()

    with pytest.warns(
        UserWarning, match="In epoch 1, parameters were updated that the attached SGD does not have"
    ):
        train(run, net, step=step, epochs=4)


def test_frozen_parameters_are_no_second_optimizer():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
    run = attach(optimizer, net, epochs=4)
    train(run, net, step=lambda *_: optimizer.step(), epochs=4)
    assert run.history[-1]["lr_scale"] > 1


# Schedules that count steps


def one_cycle(optimizer, total):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total)


@pytest.mark.parametrize("tensor", [False, True])
def test_a_schedule_by_steps_that_ends_early_is_said_once(tensor):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), torch.tensor(0.1) if tensor else 0.1)
    run = attach(optimizer, net, epochs=4)
    schedule = one_cycle(optimizer, 4 * len(run.loader))
    with pytest.warns(
        UserWarning, match=r"epoch 1 had 3 batches.* all samples has 5.*ProgressLR"
    ) as seen:
        train(run, net, step=lambda *_: optimizer.step(), after=schedule.step, epochs=4)
    assert len(seen) == 1
    assert float(optimizer.param_groups[0]["lr"]) > 0.01


@pytest.mark.parametrize(
    "kind", ["by epoch", "by progress", "own use of run.progress", "full epochs"]
)
def test_schedules_that_end_in_time_are_not_warned_about(kind):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = attach(optimizer, net, thresher.FullData() if kind == "full epochs" else None, epochs=4)
    if kind == "by epoch":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(4):
            train(run, net, step=lambda *_: optimizer.step(), epochs=1)
            schedule.step()
        return
    if kind == "by progress":
        schedule = thresher.ProgressLR(optimizer, run, lambda p: 1 - p)
    elif kind == "full epochs":
        schedule = one_cycle(optimizer, 20)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - run.progress)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, net, step=lambda *_: optimizer.step(), after=schedule.step, epochs=4)
    assert len(run.history) == 4


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_signature_of_step_stays(scheduled):
    """GradScaler looks for `grad_scaler` in it; a step that takes nothing but the optimizer has one, too."""

    class Plain(torch.optim.SGD):
        def step(self):
            return super().step()

    for kind in (torch.optim.SGD, Plain):
        net = nn.Linear(3, 2)
        optimizer, loader = kind(net.parameters(), 0.1), loader_of()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100) if scheduled else None
        before = inspect.signature(optimizer.step)
        run = attach(optimizer, net, loader=loader)
        assert inspect.signature(optimizer.step) == before, (kind, scheduler)
        del run
        again = attach(optimizer, net, loader=loader)
        assert inspect.signature(optimizer.step) == before and again is not None


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", ["second optimizer", "group"])
def test_parameters_that_are_added_in_mid_training(how, frozen):
    """Gradual unfreezing: a group of the attached optimizer is scaled; a second optimizer is not, and that is said."""
    body, head = nn.Linear(3, 8), nn.Linear(8, 2)
    net = nn.Sequential(body, nn.ReLU(), head)
    body.requires_grad_(not frozen)
    optimizers = [torch.optim.SGD(head.parameters(), 0.1)]
    run = attach(optimizers[0], net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(8):
            if epoch == 2:
                body.requires_grad_(True)
                if how == "group":
                    optimizers[0].add_param_group({"params": list(body.parameters()), "lr": 0.1})
                else:
                    optimizers.append(torch.optim.SGD(body.parameters(), 0.1))
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    elsewhere = [str(one.message) for one in said if "does not have" in str(one.message)]
    assert any(entry["lr_scale"] != 1 for entry in run.history)
    assert len(elsewhere) == (how == "second optimizer")
