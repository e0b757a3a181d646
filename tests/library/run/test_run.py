"""attach and Run: what is refused before anything changes, and what a run computes, records, counts and refreshes."""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import thresher
from thresher import EpochPlan

N, B, C = 48, 8, 4


@dataclass(frozen=True)
class Fixed:
    """A method that answers with given plans, epoch by epoch; the last one goes on."""

    plans: tuple = field(repr=False)
    signals: tuple = ()
    stage = "epoch"
    requires = thresher.Requirements(records=False)

    def columns(self):
        columns = {"loss": thresher.Column(torch.float32, fill=float("-inf"))}
        return columns | {name: thresher.Column(torch.float32) for name in self.signals}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return self.plans[min(epoch, len(self.plans) - 1)]


def everything():
    return EpochPlan(torch.arange(N))


def hiding(ids, **settings):
    hidden = torch.tensor(sorted(ids))
    kept = torch.tensor(sorted(set(range(N)) - set(ids)))
    return EpochPlan(kept, refresh=hidden, **settings)


def make(
    method=None, *, targets=None, net=None, criterion=None, loader=None, epochs=4, out=C, **settings
):
    torch.manual_seed(0)
    x = torch.randn(N, 6)
    y = torch.arange(N) % C if targets is None else targets
    net = net or nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, out))
    optimizer = settings.pop("optimizer", "sgd")
    optimizer = torch.optim.SGD(net.parameters(), 0.1) if optimizer == "sgd" else optimizer
    run = thresher.attach(
        method or thresher.FullData(),
        loader=loader or DataLoader(TensorDataset(x, y), B, shuffle=True),
        criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
        model=settings.pop("model", net),
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, net, optimizer, (x, y)


def train(run, optimizer, epochs=1):
    for _ in range(epochs):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


# attach


def test_a_list_of_one_method():
    run, *_ = make([thresher.UniformSubset(keep=0.5)])
    assert len(run.plan.ids) == N // 2


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (None, TypeError, "must return a thresher.EpochPlan, got NoneType"),
        (EpochPlan(torch.tensor([0, N])), ValueError, rf"within \[0, {N}\)"),
        (EpochPlan(torch.tensor([2, 1])), ValueError, "ascending"),
    ],
)
def test_plans_are_checked(plan, error, message):
    run, *_ = make(Fixed((plan,)))
    with pytest.raises(error, match=message):
        iter(run.loader)


def test_plans_that_need_what_was_not_given():
    run, *_ = make(Fixed((EpochPlan(torch.arange(N), lr_scale=2.0),)), optimizer=None)
    with pytest.raises(ValueError, match=r"scales the learning rate: pass attach\(optimizer"):
        _ = run.plan
    run, *_ = make(Fixed((hiding([1]),)), optimizer=None, model=None)
    with pytest.raises(ValueError, match="makes extra forward passes: pass attach"):
        _ = run.plan
    with pytest.raises(ValueError, match="the run was created without a model"):
        _ = run.model


# The criterion in the loop


def test_weighted_plan():
    weights = torch.rand(N) + 0.5
    run, net, _, (x, y) = make(Fixed((EpochPlan(torch.arange(N), weights=weights),)))
    for bx, by in run.loader:
        value = run.criterion(run.model(bx), by)
        losses = F.cross_entropy(net(bx), by, reduction="none")
        torch.testing.assert_close(value, (losses * weights[run.ids]).mean())
    torch.testing.assert_close(
        run.records["loss"], F.cross_entropy(net(x), y, reduction="none").detach()
    )


@pytest.mark.parametrize("method", [thresher.Kakurenbo(tau=0.0), thresher.InfoBatch()])
def test_dense_targets(method):
    targets = torch.arange(N * 3).view(N, 3) % C
    net = nn.Sequential(nn.Linear(6, C * 3), nn.Unflatten(1, (C, 3)))
    run, net, optimizer, (x, y) = make(method, targets=targets, net=net)
    train(run, optimizer, 3)
    run, net, _, (x, y) = make(method, targets=targets, net=net)
    outputs = net(x)
    run.criterion(
        outputs, y, ids=torch.arange(N)
    )  # of a batch of its own, before the loader yielded one
    expected = F.cross_entropy(outputs, y, reduction="none").mean(1).detach()
    torch.testing.assert_close(run.records["loss"], expected)
    if "correct" in run.records:
        right = (outputs.argmax(1) == y).float().mean(1) >= 0.5
        assert torch.equal(run.records["correct"], right)
        torch.testing.assert_close(
            run.records["confidence"], outputs.softmax(1).amax(1).mean(1).detach()
        )


def test_under_no_grad_it_is_the_plain_criterion():
    run, net, *_ = make(Fixed((EpochPlan(torch.arange(N), weights=torch.full((N,), 3.0)),)))
    x, y = next(iter(run.loader))
    with torch.no_grad():
        assert torch.equal(run.criterion(run.model(x), y), F.cross_entropy(net(x), y))
        assert torch.equal(run.reduce(torch.ones(3)), torch.ones(()))
    assert not torch.isfinite(run.records["loss"]).any()
    assert run.cost.forward == 0


def test_autocast_and_grad_scaler():
    run, net, optimizer, _ = make(thresher.Kakurenbo(max_fraction=0.5, tau=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(3):
        for x, y in run.loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = run.model(x)
                assert outputs.dtype == torch.bfloat16
                loss = run.criterion(outputs, y)
                assert torch.equal(loss, F.cross_entropy(outputs, y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert run.model.autocast == torch.bfloat16
    assert torch.isfinite(run.records["loss"]).all()
    assert run.cost.refresh > 0


def test_half_precision_losses_are_recorded():
    """Losses of a pure bfloat16 model go into float32 records."""
    run, net, *_ = make(net=nn.Linear(6, C).to(torch.bfloat16))
    for x, y in run.loader:
        run.criterion(run.model(x.bfloat16()), y).backward()
    assert run.records["loss"].dtype == torch.float32
    assert torch.isfinite(run.records["loss"]).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_models(inside):
    """Compiled before attach, or `run.model` compiled after it: the criterion stays outside."""
    net = nn.Linear(6, C)
    compiled = torch.compile(net, backend="eager")
    run, _, optimizer, _ = make(
        thresher.Kakurenbo(max_fraction=0.4, tau=0.0), net=net, model=net if inside else compiled
    )
    call = torch.compile(run.model, backend="eager") if inside else run.model
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(call(x), y).backward()
            optimizer.step()
    assert torch.isfinite(run.records["loss"]).all()
    assert run.cost.forward - run.cost.comparing == 2 * N


def test_the_watched_model_is_the_users():
    run, net, *_ = make()
    assert list(run.model.state_dict()) == list(net.state_dict())
    assert [id(p) for p in run.model.parameters()] == [id(p) for p in net.parameters()]
    assert (
        run.model[0] is net[0]
        if hasattr(type(run.model), "__getitem__")
        else run.model.module is net
    )
    run.model.eval()
    assert not net.training
    run.model.load_state_dict(
        {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    )
    assert not any(p.any() for p in net.parameters())
    net.note = "seen through"
    assert run.model.note == "seen through"
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = run.model.nothing_here


def test_criterion_none():
    run, net, *_ = make(thresher.FullData(), criterion=F.cross_entropy)
    x, y = next(iter(run.loader))
    assert torch.equal(run.criterion(run.model(x), y), F.cross_entropy(net(x), y))
    loader = DataLoader(TensorDataset(torch.randn(N, 6), torch.arange(N)), B)
    run = thresher.attach(thresher.FullData(), loader=loader, criterion=None, model=net, epochs=1)
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    with pytest.raises(ValueError, match="criterion=None; use run.reduce"):
        run.criterion(outputs, y)
    run.reduce(outputs.logsumexp(1), targets=y)
    assert run.cost.forward == B


def test_reduce_refuses_what_is_not_per_sample():
    run, *_ = make()
    x, y = next(iter(run.loader))
    with pytest.raises(TypeError, match="must be a tensor, got float"):
        run.reduce(1.0)
    with pytest.raises(ValueError, match="is a scalar"):
        run.reduce(run.model(x).mean(), targets=y)
    with pytest.raises(ValueError, match="first dimension must be the samples'"):
        run.reduce(run.model(x).mean(0), targets=y)
    assert not run.trained.any() and run.cost.backward == 0


def test_reduce_with_a_method_that_needs_signals():
    run, net, *_ = make(thresher.Kakurenbo())
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    with pytest.raises(
        ValueError, match="Kakurenbo needs confidence, correct: pass outputs= and targets="
    ):
        run.reduce(losses, targets=y)
    run.reduce(losses, outputs=outputs, targets=y)
    torch.testing.assert_close(
        run.records["confidence"][run.ids], outputs.softmax(1).amax(1).detach()
    )


def test_weighted_reduce_of_several_criteria():
    weights = torch.rand(N) + 0.5
    run, net, *_ = make(Fixed((EpochPlan(torch.arange(N), weights=weights),)))
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    losses = F.cross_entropy(outputs, y, reduction="none") + 0.1 * outputs.square().mean(1)
    torch.testing.assert_close(
        run.reduce(losses, outputs=outputs), (losses * weights[run.ids]).mean()
    )


@pytest.mark.parametrize("way", ["outputs", "run.ids", "ids of a copy", "criterion"])
def test_an_epoch_without_weights_has_none_of_the_epoch_before(way):
    plans = EpochPlan(torch.arange(N), weights=torch.full((N,), 2.0)), everything()
    loader = DataLoader(TensorDataset(torch.randn(N, 6), torch.arange(N) % C), 24, shuffle=True)
    run, _, optimizer, _ = make(Fixed(plans), loader=loader)
    for weight in (2, 1):
        for x, y in run.loader:
            outputs = run.model(x)
            losses = F.cross_entropy(outputs, y, reduction="none")
            if way == "outputs":
                loss = run.reduce(losses, outputs=outputs, targets=y)
            elif way == "run.ids":
                loss = run.reduce(losses, ids=run.ids)
            else:
                settings = {"ids": run.ids} if way == "ids of a copy" else {}
                loss = run.criterion(outputs, y.clone() if settings else y, **settings)
            torch.testing.assert_close(loss, weight * losses.mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_users_signals():
    def signals(outputs, targets):
        error = (outputs - targets).abs().mean(1)
        return {"correct": error < 1, "confidence": (1 - error).clamp(0, 1), "unused": error}

    targets = torch.randn(N, C)
    run, net, optimizer, _ = make(
        thresher.Kakurenbo(max_fraction=0.5, tau=0.1),
        criterion=nn.MSELoss(),
        targets=targets,
        signals=signals,
    )
    train(run, optimizer, 3)
    assert run.history[1]["refreshed"] > 0
    run, *_ = make(
        thresher.Kakurenbo(),
        criterion=nn.MSELoss(),
        targets=targets,
        signals=lambda o, t: {"correct": o, "confidence": o},
    )
    x, y = next(iter(run.loader))
    with pytest.raises(
        ValueError,
        match=r"`signals` must return tensors of shape \(8,\), got \(8, 4\) for 'correct'",
    ):
        run.criterion(run.model(x), y)
    assert not run.trained.any()


def test_signals_that_a_callable_does_not_give():
    run, *_ = make(
        thresher.Kakurenbo(),
        criterion=lambda o, t: (o - t).square().mean(1),
        targets=torch.randn(N, C),
    )
    x, y = next(iter(run.loader))
    with pytest.raises(ValueError, match="Cannot read|not defined"):
        run.criterion(run.model(x), y)
    assert not run.trained.any()


# Refresh


class Modes(nn.Module):
    """Remembers in which mode it saw which inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, C), nn.BatchNorm1d(C), nn.Dropout(0.5)
        self.norm.eval()
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, self.norm.training, torch.is_grad_enabled(), len(x)))
        return self.drop(self.norm(self.layer(x)))


@dataclass(frozen=True)
class FixedTrainMode(Fixed):
    requires = thresher.Requirements(refresh="train")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_refresh(mode):
    kind = Fixed if mode == "eval" else FixedTrainMode
    net = Modes()
    hidden = list(range(3, 23))
    run, _, optimizer, (x, y) = make(kind((everything(), hiding(hidden))), net=net)
    train(run, optimizer, 1)
    net.seen.clear()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    train(run, optimizer, 1)
    passes = [entry for entry in net.seen if not entry[2]][
        -3:
    ]  # before them, one is compared with the loop's
    assert [entry[3] for entry in passes] == [8, 8, 4]
    assert {entry[0] for entry in passes} == {mode == "train"}
    assert net.training
    assert not net.norm.training
    assert run.cost.refresh == 20
    assert run.cost.forward - run.cost.comparing == 2 * N
    assert run.cost.backward == 2 * N - 20
    if mode == "eval":
        with torch.no_grad():
            net.eval()
            expected = F.cross_entropy(net(x), y, reduction="none")
        torch.testing.assert_close(run.records["loss"][hidden], expected[hidden])
    assert not torch.equal(states[0], torch.get_rng_state())


def test_refresh_draws_nothing_that_the_loop_notices():
    """Augmentation and dropout of the refresh pass come from other random numbers than the loop's."""

    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn(6) + float(np.random.rand()), y

    def after(plans):
        np.random.seed(1)
        data = Noisy(torch.randn(N, 6), torch.arange(N) % C)
        run, _, optimizer, _ = make(
            FixedTrainMode(plans), loader=DataLoader(data, B, shuffle=True), net=Modes()
        )
        torch.manual_seed(1)
        train(run, optimizer, 1)
        return torch.get_rng_state(), np.random.get_state()[1]

    kept = everything().ids[:40]
    with_refresh = after((EpochPlan(kept, refresh=torch.arange(40, N)),))
    without = after((EpochPlan(kept),))
    assert torch.equal(with_refresh[0], without[0])
    assert (with_refresh[1] == without[1]).all()


def test_forward_is_asked_for_before_training():
    def as_dict(samples):
        x, y = torch.utils.data.default_collate(samples)
        return {"x": x, "y": y}

    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % C)
    loader = DataLoader(data, B, shuffle=True, collate_fn=as_dict)
    run, *_ = make(thresher.Kakurenbo(), loader=loader)
    with pytest.raises(ValueError, match=r"`forward` is needed.*dict.*Pass forward=lambda"):
        next(iter(run.loader))
    run.detach()
    run, net, optimizer, _ = make(
        thresher.Kakurenbo(max_fraction=0.5, tau=0.0),
        loader=loader,
        forward=lambda model, b: (model(b["x"]), b["y"]),
    )
    for _ in range(3):
        for batch in run.loader:
            run.criterion(run.model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.refresh > 0


def test_refresh_of_single_tensor_batches():
    """An autoencoder: the batch is input and target."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return torch.full((6,), float(i) / N)

    run, net, optimizer, _ = make(
        thresher.Kakurenbo(max_fraction=0.5, move_back=False, reduce_fraction=False),
        loader=DataLoader(Rows(), B, shuffle=True),
        criterion=nn.MSELoss(),
        net=nn.Linear(6, 6),
    )
    for _ in range(3):
        for x in run.loader:
            run.criterion(run.model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.refresh == 2 * N // 2
    assert torch.isfinite(run.records["loss"]).all()


def test_refresh_needs_rows_that_are_samples():
    def turn(samples):
        x, y, index = torch.utils.data.default_collate(samples)
        return x.flip(0), y.flip(0), index.flip(0)

    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % C, torch.arange(N))
    run, _, optimizer, _ = make(
        Fixed((hiding([1, 2]),)), loader=DataLoader(data, B, collate_fn=turn)
    )
    with pytest.raises(
        thresher.AttributionError,
        match="Cannot refresh losses.*turn sorts or mixes.*keeps the order",
    ):
        for x, y, index in run.loader:
            run.criterion(run.model(x), y, ids=index).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_method_that_will_refresh_is_refused_with_the_first_batch_whose_rows_are_moved():
    def turn(samples):
        x, y, index = torch.utils.data.default_collate(samples)
        return x.flip(0), y.flip(0), index.flip(0)

    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % C, torch.arange(N))
    forward = lambda model, batch: (model(batch[0]), batch[1])  # noqa: E731
    run, *_ = make(
        thresher.Kakurenbo(), loader=DataLoader(data, B, collate_fn=turn), forward=forward
    )
    with pytest.raises(
        thresher.AttributionError,
        match="Cannot run the forward passes of .*turn sorts or mixes.*keeps the order",
    ):
        next(iter(run.loader))


def test_an_epoch_that_draws_each_sample_many_times_is_told():
    data = TensorDataset(torch.randn(4, 6), torch.arange(4) % C)
    for number, told in ((400, False), (404, True)):
        loader = DataLoader(
            data, 2, sampler=RandomSampler(data, replacement=True, num_samples=number)
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            make(thresher.InfoBatch(), loader=loader)
        assert (
            any(
                "draws 404 samples from 4. InfoBatch chooses once" in str(one.message)
                for one in said
            )
            == told
        )


# Non-finite losses


def with_bad_samples(**settings):
    x = torch.randn(N, 6)
    x[[3, 17]] = float("nan")
    data = TensorDataset(x, torch.arange(N) % C)
    return make(
        thresher.Kakurenbo(max_fraction=0.5, move_back=False, reduce_fraction=False),
        loader=DataLoader(data, 1, shuffle=True),
        **settings,
    )


def test_nonfinite_losses_are_kept_counted_and_said_once():
    run, _, optimizer, _ = with_bad_samples()
    with pytest.warns(
        UserWarning, match=r"2 samples have a loss that is not finite \(ids \[3, 17\]\).*given once"
    ):
        for x, y in run.loader:
            run.criterion(run.model(x), y)
            optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in run.loader:
            run.criterion(run.model(x), y)
            optimizer.step()
    assert {3, 17} <= set(run.plan.ids.tolist())
    assert len(run.plan.ids) == N // 2
    assert [entry["nonfinite"] for entry in run.history] == [2, 2]


def test_nonfinite_losses_raise_on_demand():
    run, *_ = with_bad_samples(on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"2 samples.*on_nonfinite='keep'"):
        for x, y in run.loader:
            run.criterion(run.model(x), y)


# What it counts and reports


def test_cost_and_history():
    run, _, optimizer, _ = make(
        Fixed((everything(), hiding(range(20), lr_scale=1.5, facts={"note": 0.25})))
    )
    assert math.isnan(run.cost.ratio())
    train(run, optimizer, 3)
    cost = run.cost
    assert (cost.forward - cost.comparing, cost.backward, cost.refresh, cost.scoring) == (
        3 * N,
        3 * N - 40,
        40,
        0,
    )
    assert cost.comparing == B
    assert (cost.full_forward, cost.full_backward, cost.steps) == (3 * N, 3 * N, 6 + 4 + 4)
    assert cost.ratio(2.0) == pytest.approx((3 * N + B + 2 * (3 * N - 40)) / (9 * N))
    entry = run.history[1]
    assert entry["kept"] == N - 20
    assert entry["refreshed"] == 20
    assert entry["lr_scale"] == 1.5
    assert entry["note"] == 0.25
    assert (entry["forward"], entry["backward"], entry["steps"]) == (N + B, N - 20, 4)
    assert [e["epoch"] for e in run.history] == [0, 1, 2]
    assert "of full training" in str(cost)
    assert "epoch 3 of 4" in repr(run)


def test_last_step_of_a_prefetcher_counts():
    run, _, optimizer, _ = make(thresher.InfoBatch(), epochs=3)
    for _ in range(2):
        ahead = None
        for batch in [*run.loader, None]:
            if ahead is not None:
                run.criterion(run.model(ahead[0]), ahead[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            ahead = batch
    assert torch.isfinite(run.records["loss"]).all()
    assert run.history[0]["forward"] == N
    assert run.history[0]["steps"] == 6
    assert sum(e["forward"] for e in run.history) == run.cost.forward


def test_backward_to_forward_is_measured_without_effect():
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    data = TensorDataset(torch.randn(512, 256), torch.randn(512, 256))
    run, _, optimizer, _ = make(
        net=net, loader=DataLoader(data, 64), criterion=nn.MSELoss(), epochs=9
    )
    assert run.cost.backward_to_forward is None
    train(run, optimizer, 3)
    assert 0.5 < run.cost.backward_to_forward < 8


def test_between_epochs_and_after_the_last():
    run, _, optimizer, _ = make(thresher.UniformSubset(keep=0.5), epochs=2)
    first = run.plan
    assert torch.equal(run.plan.ids, first.ids)
    train(run, optimizer, 1)
    assert run.epoch == 1
    assert not torch.equal(run.plan.ids, first.ids)
    with pytest.warns(UserWarning, match=r"Epoch 3 begins, but the run was created with epochs=2"):
        train(run, optimizer, 2)
    assert run.progress == 1.0
    assert run.epoch == 3


def test_the_same_seed_plans_the_same():
    plans = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(plans))
        run, _, optimizer, _ = make(thresher.UniformSubset(keep=0.5), seed=seed)
        plans.append(run.plan.ids)
    assert torch.equal(plans[0], plans[1])
    assert not torch.equal(plans[0], plans[2])


def test_detach():
    run, _, optimizer, _ = make(Fixed((EpochPlan(torch.arange(N), lr_scale=3.0),)))
    train(run, optimizer, 1)
    run.detach()
    assert "step" not in vars(optimizer)
    steps = run.cost.steps
    optimizer.step()
    assert run.cost.steps == steps
    with pytest.raises(
        RuntimeError, match=r"run.loader was closed by run.detach\(\). Use your own DataLoader"
    ):
        next(iter(run.loader))


def test_without_an_optimizer_batches_count_as_steps():
    run, *_ = make(optimizer=None)
    for x, y in run.loader:
        (run.criterion(run.model(x), y) + run.criterion(run.model(x), y)).backward()
    assert run.cost.steps == 6


def test_accelerate_wrapped_optimizer():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(6, C)
    prepared, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % C)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4, tau=0.0),
        loader=DataLoader(data, B, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=prepared,
        optimizer=optimizer,
        epochs=3,
    )
    for _ in range(3):
        for x, y in run.loader:
            accelerator.backward(run.criterion(run.model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.steps == sum(-(-(entry["kept"]) // B) for entry in run.history)
    assert run.cost.refresh > 0
