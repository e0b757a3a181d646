"""`run.reduce` with positions that count or not: the value of the criterion with an ignored index, for every way to select."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.records import NEVER_SEEN

N, B, T, C = 24, 8, 6, 5


@dataclass(frozen=True)
class Lottery:
    """Keeps random rows, with random weights."""

    stage = "batch"
    requires = thresher.Requirements(signals=("loss",))

    def init_state(self):
        return {}

    def count(self, n):
        return n // 2

    def plan_batch(self, signals, state, *, step, generator):
        n = len(signals["loss"])
        rows = torch.randperm(n, generator=generator)[: n // 2].sort().values
        return thresher.BatchPlan(
            rows, weights=0.5 + torch.rand(n // 2, generator=generator)
        ), state


METHODS = {
    "all": (thresher.FullData(), {}),
    "weights of an epoch": (thresher.InfoBatch(prune_fraction=0.7), {}),
    "once": (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
    "twice": (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
    "once with weights": (Lottery(), {"forward_passes": "once"}),
    "both": ([thresher.InfoBatch(prune_fraction=0.7), Lottery()], {"forward_passes": "once"}),
}


def tokens():
    """Padded sequences of 0 to 6 tokens; sample 3 has none."""
    torch.manual_seed(1)
    x = torch.randint(C, (N, T))
    lengths = torch.randint(1, T + 1, (N,))
    lengths[3] = 0
    return x, torch.where(torch.arange(T) < lengths[:, None], x.roll(1, 1), -100)


def attached(method, *, criterion=None, batch=B, **settings):
    x, y = tokens()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(C, 8), nn.Linear(8, C))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    data = DataLoader(
        TensorDataset(x, y), batch, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    forward = {"forward": lambda model, batch: (model(batch[0]).mT, batch[1])}
    run = thresher.attach(
        method,
        loader=data,
        criterion=criterion or nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=4,
        **forward,
        **settings,
    )
    return run, model, optimizer


def by_criterion(run, x, y):
    return run.criterion(run.model(x).mT, y)


def by_reduce(run, x, y, *, total=None):
    outputs = run.model(x)
    losses = F.cross_entropy(outputs.mT, y, reduction="none")
    return run.reduce(losses, outputs=outputs.mT, targets=y, valid=y != -100, total=total)


def flattened(run, x, y):
    """As Transformers has it: one row per token."""
    outputs = run.model(x)
    losses = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
    return run.reduce(losses, ids=run.ids, repeat=T, valid=y.flatten() != -100)


def trained(name, call, epochs=3):
    method, settings = METHODS[name]
    run, model, optimizer = attached(method, **settings)
    values = []
    for _ in range(epochs):
        for x, y in run.loader:
            value = call(run, x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.detach())
    return run, model, torch.stack(values)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("call", [by_reduce, flattened])
def test_it_is_the_criterion_with_an_ignored_index(name, call):
    run, model, values = trained(name, by_criterion)
    ours, reduced, reduced_values = trained(name, call)
    torch.testing.assert_close(reduced_values, values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        dict(reduced.named_parameters()), dict(model.named_parameters()), rtol=1e-5, atol=1e-6
    )
    for column in run.records:
        torch.testing.assert_close(ours.records[column], run.records[column], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.trained, run.trained)
    counts = ("forward", "backward", "scoring", "steps", "full_forward", "full_backward")
    assert [getattr(ours.cost, one) for one in counts] == [getattr(run.cost, one) for one in counts]


def test_records_are_means_over_the_positions_that_count():
    run, model, _ = attached(thresher.FullData())
    for x, y in run.loader:
        by_reduce(run, x, y)
    x, y = tokens()
    losses, valid = F.cross_entropy(model(x).mT, y, reduction="none").detach(), y != -100
    expected = torch.tensor(
        [row[ok].mean() if ok.any() else NEVER_SEEN for row, ok in zip(losses, valid, strict=True)]
    )
    torch.testing.assert_close(run.records["loss"], expected)
    assert run.records["loss"][3] == NEVER_SEEN and run.trained.tolist() == [1] * N


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_total_over_three_micro_batches(kind):
    """The sum of the values, and of the gradients, is the mean over the positions of all of them."""
    run, model, _ = attached(thresher.FullData())
    batches = list(run.loader)  # three batches ahead
    total = sum(int((y != -100).sum()) for _, y in batches)
    values = [by_reduce(run, x, y, total=kind(total)) for x, y in batches]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = F.cross_entropy(model(x).mT, y, ignore_index=-100)
    torch.testing.assert_close(sum(values), expected, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(sum(values), [*model.parameters()])
    torch.testing.assert_close(
        ours, torch.autograd.grad(expected, [*model.parameters()]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("method", [thresher.SelectiveBackprop(keep=0.5), Lottery()])
def test_with_a_total_kept_rows_stand_for_their_batch(method):
    """Each micro-batch adds the mean over its kept positions, times its share of all positions."""
    alone, _, _ = attached(method, forward_passes="once")
    means = [by_reduce(alone, x, y) for x, y in alone.loader]
    run, _, _ = attached(method, forward_passes="once")
    batches = list(run.loader)
    counts = [int((y != -100).sum()) for _, y in batches]
    for (x, y), mean, count in zip(batches, means, counts, strict=True):
        torch.testing.assert_close(
            by_reduce(run, x, y, total=sum(counts)), mean * count / sum(counts)
        )


def test_with_a_total_everything_kept_is_the_plain_mean():
    everything, _, _ = attached(thresher.SelectiveBackprop(keep=1.0), forward_passes="once")
    plain, _, _ = attached(thresher.FullData())
    for (x, y), (x2, y2) in zip(everything.loader, plain.loader, strict=True):
        torch.testing.assert_close(
            by_reduce(everything, x, y, total=50), by_reduce(plain, x2, y2, total=50)
        )


@dataclass(frozen=True)
class OnlyPadding:
    """Keeps the row that has no label."""

    stage = "batch"
    requires = thresher.Requirements(signals=("loss",))

    def init_state(self):
        return {}

    def count(self, n):
        return 1

    def plan_batch(self, signals, state, *, step, generator):
        assert signals["loss"].isfinite().all()
        return thresher.BatchPlan(signals["loss"].argmin()[None]), state


@pytest.mark.parametrize("total", [None, 30])
def test_kept_rows_without_a_position_that_counts_teach_nothing(total):
    run, model, _ = attached(OnlyPadding(), batch=N, forward_passes="once")
    ((x, y),) = run.loader
    value = by_reduce(run, x, y, total=total)
    value.backward()
    assert value.item() == 0 and all((p.grad == 0).all() for p in model.parameters())
    assert run.trained.nonzero().flatten().tolist() == [3]


def test_under_autocast():
    run, model, _ = attached(thresher.SelectiveBackprop(keep=1.0), forward_passes="once")
    x, y = next(iter(run.loader))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run.model(x)
        losses = F.cross_entropy(outputs.mT, y, reduction="none")
        value = run.reduce(
            losses, outputs=outputs, targets=y, valid=y != -100, total=(y != -100).sum()
        )
        expected = F.cross_entropy(model(x).mT, y)
    assert value.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_without_gradients_it_is_the_plain_mean():
    run, model, _ = attached(thresher.InfoBatch())
    x, y = next(iter(run.loader))
    with torch.no_grad():
        losses = F.cross_entropy(model(x).mT, y, reduction="none")
        torch.testing.assert_close(
            run.reduce(losses, valid=y != -100), F.cross_entropy(model(x).mT, y)
        )
        torch.testing.assert_close(run.reduce(losses, valid=y != -100, total=7), losses.sum() / 7)
    assert not run.trained.any() and run.cost.forward == 0


def test_a_loss_of_another_model_is_the_plain_mean():
    run, model, _ = attached(thresher.SelectiveBackprop(keep=0.5), forward_passes="once")
    teacher = nn.Embedding(C, C)
    x, y = next(iter(run.loader))
    by_reduce(run, x, y)
    losses = F.cross_entropy(teacher(x).mT, y, reduction="none")
    torch.testing.assert_close(
        run.reduce(losses, targets=y, valid=y != -100), F.cross_entropy(teacher(x).mT, y)
    )


def test_bad_arguments_change_nothing():
    run, _, _ = attached(thresher.SelectiveBackprop(keep=0.5), forward_passes="once")
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    losses = F.cross_entropy(outputs.mT, y, reduction="none")
    for wrong in (
        {"valid": torch.ones(T + 1)},
        {"total": 0},
        {"total": -1.0},
        {"valid": y},
        {"valid": y[:, 0] != -100},
    ):
        with pytest.raises(ValueError, match="run.reduce: `(valid|total)`"):
            run.reduce(losses, outputs=outputs, targets=y, **wrong)
    assert (
        not run.trained.any() and run.cost.backward == 0 and run._timeline.selection.stage.step == 0
    )
    run.reduce(losses, outputs=outputs, targets=y, valid=y != -100)
    assert run.trained.sum() == B // 2


def test_as_many_positions_as_samples():
    """The samples can be along either dimension; flattened losses with ids are certain."""
    run, model, _ = attached(thresher.FullData(), batch=T)
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    losses = F.cross_entropy(outputs.mT, y, reduction="none")
    with pytest.raises(
        thresher.AttributionError, match=r"If they are along the first, pass ids=run.ids, repeat=1"
    ):
        run.reduce(losses, outputs=outputs, targets=y, valid=y != -100)
    value = run.reduce(
        losses.flatten(), ids=run.ids, repeat=losses[0].numel(), valid=(y != -100).flatten()
    )
    torch.testing.assert_close(value, F.cross_entropy(model(x).mT, y))
    other, model, _ = attached(thresher.FullData(), batch=T)
    x, y = next(iter(other.loader))
    losses = F.cross_entropy(other.model(x).mT, y, reduction="none")
    torch.testing.assert_close(
        other.reduce(losses, other.ids, repeat=1, valid=y != -100), F.cross_entropy(model(x).mT, y)
    )
    torch.testing.assert_close(other.records["loss"], run.records["loss"], equal_nan=True)


def kept_tokens(y):
    """Every second position, some of which do not count."""
    return (torch.arange(y.numel()).view(y.shape) + y[:1].sum().abs()) % 2 == 0


def by_kept(run, x, y, *, total=None):
    outputs = run.model(x)
    losses = F.cross_entropy(outputs.mT, y, reduction="none")
    return run.reduce(
        losses, outputs=outputs.mT, targets=y, valid=y != -100, total=total, keep=kept_tokens(y)
    )


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.SelectiveBackprop(keep=0.5)])
def test_positions_that_are_kept(method):
    """The value is their mean; records, and the choice of rows, are by all positions that count."""
    run, model, _ = attached(method, forward_passes="once")
    plain, _, _ = attached(method, forward_passes="once")
    for (x, y), (x2, y2) in zip(run.loader, plain.loader, strict=True):
        value = by_kept(run, x, y)
        by_reduce(plain, x2, y2).backward()
        losses, kept = (
            F.cross_entropy(model(x).mT, y, reduction="none"),
            kept_tokens(y) & (y != -100),
        )
        kept &= run.trained[run.ids].bool()[:, None]
        torch.testing.assert_close(value, losses[kept].mean())
        gradient = torch.autograd.grad(value, [*model.parameters()])
        torch.testing.assert_close(
            gradient, torch.autograd.grad(losses[kept].mean(), [*model.parameters()])
        )
    torch.testing.assert_close(run.records["loss"], plain.records["loss"])
    assert torch.equal(run.trained, plain.trained)
    assert run.cost.backward == plain.cost.backward


def test_with_a_total_kept_positions_stand_for_all_that_count():
    alone, _, _ = attached(thresher.FullData())
    means = [by_kept(alone, x, y) for x, y in alone.loader]
    run, _, _ = attached(thresher.FullData())
    batches = list(run.loader)
    counts = [int((y != -100).sum()) for _, y in batches]
    for (x, y), mean, count in zip(batches, means, counts, strict=True):
        torch.testing.assert_close(
            by_kept(run, x, y, total=sum(counts)), mean * count / sum(counts)
        )


def test_no_position_is_kept():
    run, model, _ = attached(thresher.FullData())
    x, y = next(iter(run.loader))
    losses = F.cross_entropy(run.model(x).mT, y, reduction="none")
    value = run.reduce(losses, targets=y, valid=y != -100, total=9, keep=torch.zeros_like(y))
    value.backward()
    assert value.item() == 0 and not any(p.grad.any() for p in model.parameters())
    with pytest.raises(ValueError, match="run.reduce: `keep` of shape"):
        run.reduce(losses, targets=y, keep=torch.ones(T + 1))
    with torch.no_grad():
        torch.testing.assert_close(
            run.reduce(losses, keep=y == y[0, 0]), losses[y == y[0, 0]].mean()
        )


@pytest.mark.parametrize(
    ("method", "does"),
    [
        (
            0.5,
            r"draws the rows of its smaller batches uniformly\. .*pass .*, or use Winnow\(score='loss'\)\.",
        ),
        (thresher.Winnow(0.5, score="loss"), r"judges no labels\. .*tensor}\.$"),
    ],
)
def test_a_share_trains_with_losses_that_the_loop_computes(method, does):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    loader = torch.utils.data.DataLoader(data, 10, shuffle=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(
        UserWarning, match=f"no `uncertainty` if the loop computes its losses and {does}"
    ):
        run = thresher.attach(
            method, loader=loader, model=model, optimizer=optimizer, criterion=None, epochs=3
        )
    for _ in range(3):
        for x, y in run.loader:
            run.reduce(
                torch.nn.functional.cross_entropy(run.model(x), y, reduction="none")
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.backward == 60 and run.records["loss"].isfinite().sum() > 30


def test_a_batch_method_needs_no_criterion_where_the_loop_computes_its_losses():
    run, _, optimizer = attached(thresher.SelectiveBackprop(keep=0.5), criterion=None)
    for x, y in run.loader:
        optimizer.zero_grad()
        run.reduce(
            F.cross_entropy(run.model(x).mT, y, reduction="none").mean(1), targets=y
        ).backward()
        optimizer.step()
    assert run.cost.full_backward == N and 0 < run.cost.backward < N


@pytest.mark.parametrize("given", [{"targets": True}, {"outputs": True}, {}])
def test_a_share_trains_by_losses_of_the_loop_beside_a_criterion_whatever_is_passed(given):
    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.arange(24) % 2
    model = nn.Linear(3, 2)
    data = [(x[i], int(y[i])) for i in range(24)]  # a dataset that shows no classes
    run = thresher.attach(
        0.5,
        loader=DataLoader(data, 8, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for inputs, targets in run.loader:
                outputs = run.model(inputs)
                losses = F.cross_entropy(outputs, targets, reduction="none")
                more = {name: {"targets": targets, "outputs": outputs}[name] for name in given}
                run.reduce(losses, ids=run.ids, **more).backward()
    assert run.cost.backward == 24


def test_signals_of_outputs_that_were_not_passed_say_what_to_pass():
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    model = nn.Linear(3, 2)
    run = thresher.attach(0.5, loader=DataLoader(data, 4, shuffle=True), criterion=None, model=model, epochs=2,
                          signals=lambda outputs, targets: {"uncertainty": 1 - outputs.softmax(1).square().sum(1)})  # fmt: skip
    inputs, targets = next(iter(run.loader))
    losses = F.cross_entropy(run.model(inputs), targets, reduction="none")
    with pytest.raises(
        ValueError,
        match=r"got outputs=None and targets=None.*Pass outputs= and targets= to run.reduce",
    ):
        run.reduce(losses, ids=run.ids)
