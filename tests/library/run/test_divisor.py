"""`Requirements(divide="batch")`: the sum of the kept losses over the rows of the batch, however rows are chosen."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.methods.contract import Requirements
from thresher.plans import BatchPlan

pytestmark = pytest.mark.usefixtures("shared_traces")
N, B, C = 12, 6, 3


class LargestByBatch(thresher.BigLoss):
    """The largest losses, divided by the rows of the batch."""

    requires = Requirements(signals=("loss",), divide="batch")


class RandomByBatch(thresher.RandomBackprop):
    """Random rows, divided by the rows of the batch."""

    requires = replace(thresher.RandomBackprop.requires, divide="batch")


def made(
    criterion: Any,
    method: Any = None,
    *,
    targets: torch.Tensor | None = None,
    width: int = 1,
    **settings: Any,
) -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator)
    y = torch.arange(N) % C if targets is None else targets
    torch.manual_seed(1)
    model = (
        nn.Linear(4, C)
        if width == 1
        else nn.Sequential(nn.Linear(4, C * width), nn.Unflatten(1, (C, width)))
    )
    loader = DataLoader(TensorDataset(x, y), B)
    return thresher.attach(
        method or LargestByBatch(keep=0.4),
        loader=loader,
        criterion=criterion,
        model=model,
        epochs=1,
        **settings,
    )


def first_loss(run: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of the first batch that the loop sees, its outputs and targets."""
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    return run.criterion(outputs, y), outputs, y


def largest(losses: torch.Tensor, k: int = 2) -> torch.Tensor:
    return losses.argsort(stable=True)[-k:]


def test_the_sum_of_the_kept_losses_over_the_rows_of_the_batch():
    value, outputs, y = first_loss(made(nn.CrossEntropyLoss()))
    losses = F.cross_entropy(outputs, y, reduction="none").detach()
    assert value.item() == pytest.approx(losses[largest(losses)].sum().item() / B)


def test_by_default_it_is_their_mean():
    value, outputs, y = first_loss(made(nn.CrossEntropyLoss(), thresher.BigLoss(keep=0.4)))
    losses = F.cross_entropy(outputs, y, reduction="none").detach()
    assert value.item() == pytest.approx(losses[largest(losses)].mean().item())


def test_the_gradient_is_that_of_the_sum_over_the_batch():
    run = made(nn.CrossEntropyLoss())
    value, outputs, y = first_loss(run)
    losses = F.cross_entropy(outputs, y, reduction="none")
    (expected,) = torch.autograd.grad(
        losses[largest(losses.detach())].sum() / B, run.model.weight, retain_graph=True
    )
    value.backward()
    assert torch.allclose(run.model.weight.grad, expected)


def test_class_weights_and_ignored_labels_divide_as_in_the_batch():
    weight = torch.tensor([1.0, 5.0, 0.5])
    targets = torch.tensor([0, 1, 2, -100, 1, 0, 2, 2, 1, 0, 0, 1])
    value, outputs, y = first_loss(made(nn.CrossEntropyLoss(weight), targets=targets))
    plain = F.cross_entropy(outputs, y, reduction="none").detach()
    kept = largest(plain)
    weighted = F.cross_entropy(outputs, y, weight, reduction="none").detach()
    assert value.item() == pytest.approx((weighted[kept].sum() / weight[y[y >= 0]].sum()).item())


def test_tokens_divide_by_the_positions_of_the_batch_that_count():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (4, 7), generator=generator)
    labels = tokens.clone()
    labels[0, 2:], labels[1, 5:] = -100, -100
    torch.manual_seed(0)
    model = nn.Embedding(5, 5)
    loader = DataLoader(TensorDataset(tokens, labels), 4)
    run = thresher.attach(
        LargestByBatch(keep=0.5),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=1,
    )
    x, y = next(iter(run.loader))
    outputs = run.model(x).mT
    value = run.criterion(outputs, y)
    positions = F.cross_entropy(outputs, y, reduction="none").detach()
    kept = largest(positions.sum(1) / (y >= 0).sum(1))
    assert value.item() == pytest.approx((positions[kept].sum() / (y >= 0).sum()).item())


def test_a_sum_is_not_divided():
    value, outputs, y = first_loss(made(nn.CrossEntropyLoss(reduction="sum")))
    losses = F.cross_entropy(outputs, y, reduction="none").detach()
    assert value.item() == pytest.approx(losses[largest(losses)].sum().item())


@pytest.mark.parametrize("valid", [False, True])
def test_losses_of_the_loop_divide_by_the_batch(valid: bool):
    run = made(None, forward_passes="once")
    x, y = next(iter(run.loader))
    losses = F.cross_entropy(run.model(x), y, reduction="none")
    mask = torch.tensor([True, True, False, True, True, True]) if valid else None
    value = run.reduce(losses, valid=mask)
    plain = losses.detach() if mask is None else torch.where(mask, losses.detach(), 0)
    counts = B if mask is None else 5
    assert value.item() == pytest.approx(plain[largest(plain)].sum().item() / counts)


def test_with_a_total_the_kept_losses_are_divided_by_it():
    run = made(None, forward_passes="once")
    x, y = next(iter(run.loader))
    losses = F.cross_entropy(run.model(x), y, reduction="none")
    value = run.reduce(losses, total=100)
    assert value.item() == pytest.approx(
        losses.detach()[largest(losses.detach())].sum().item() / 100
    )


def test_rows_chosen_before_the_forward_pass():
    run = made(nn.CrossEntropyLoss(), RandomByBatch(keep=0.4))
    value, outputs, y = first_loss(run)
    assert len(y) == 2
    assert value.item() == pytest.approx(F.cross_entropy(outputs, y, reduction="sum").item() / B)


def test_rows_that_fill_batches_weigh_what_they_are_of_their_own():
    value, outputs, y = first_loss(made(nn.CrossEntropyLoss(), forward_passes="twice"))
    assert len(y) == 4  # two of each of the two candidate batches
    assert value.item() == pytest.approx(F.cross_entropy(outputs, y).item() * 2 / B)


class FirstByBatch(thresher.RandomBackprop):
    """The first rows with weights, divided by the rows of the batch."""

    requires = RandomByBatch.requires

    def plan_batch(self, signals, state, *, step, generator):
        rows = torch.arange(round(self.keep * len(signals["id"])))
        return BatchPlan(rows, weights=None if self.keep == 1 else rows * 2 + 2.0), state


def test_nothing_is_scaled_where_everything_is_kept():
    """Whole batches are trained on bit for bit as without the method."""
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        TensorDataset(torch.randn(1024, 4, generator=generator), torch.arange(1024) % C), 64
    )
    settings = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": nn.Linear(4, C),
        "epochs": 1,
    }
    run = thresher.attach(FirstByBatch(keep=1.0), **settings)
    for x, y in run.loader:
        outputs = run.model(x)
        assert len(y) == 64 and torch.equal(run.criterion(outputs, y), F.cross_entropy(outputs, y))


def test_weights_of_the_method_are_scaled():
    run = made(nn.CrossEntropyLoss(), FirstByBatch(keep=0.5))
    value, outputs, y = first_loss(run)
    losses = F.cross_entropy(outputs, y, reduction="none")
    assert value.item() == pytest.approx(((losses * torch.tensor([2.0, 4, 6])).sum() / B).item())


@pytest.mark.parametrize(
    ("criterion", "why"),
    [
        (nn.CrossEntropyLoss(torch.ones(C)), "class weights"),
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
    ],
)
def test_weights_that_a_criterion_cancels_are_refused_before_the_forward_pass(
    criterion: Any, why: str
):
    with pytest.raises(
        ValueError, match=f"`criterion`: LargestByBatch divides .* the criterion has {why}"
    ):
        made(criterion, forward_passes="twice")


class Misdeclared(thresher.BigLoss):
    """It declares a divisor that there is not."""

    requires = Requirements(signals=("loss",), divide="all")  # type: ignore[arg-type]


def test_a_divisor_that_is_none_is_refused_by_the_declaration():
    with pytest.raises(ValueError, match=r"Misdeclared declares Requirements\(divide='all'\)"):
        made(nn.CrossEntropyLoss(), Misdeclared())


def test_a_random_number_of_rows_never_switches_to_batches_that_are_filled_up():
    """Its weights are made for the rows of one batch: rows of several would be weighed wrongly."""
    assert made(nn.CrossEntropyLoss(), thresher.ThresholdKeep())._timeline.may_switch is False
    assert made(nn.CrossEntropyLoss())._timeline.may_switch is True


def test_labels_that_are_ignored_are_no_part_of_the_divisor():
    """The scalar is the sum of the kept losses over the valid labels of the batch."""
    targets = torch.arange(N) % C
    targets[1::2] = -100
    run = made(nn.CrossEntropyLoss(), targets=targets, forward_passes="once")
    value, *_ = first_loss(run)
    reference = made(nn.CrossEntropyLoss(), thresher.FullData(), targets=targets)
    x, y = next(iter(reference.loader))
    losses = F.cross_entropy(reference.model(x), y, reduction="none")
    assert value.item() == pytest.approx(
        losses.sort(descending=True).values[:2].sum().item() / 3, rel=1e-6
    )


def trained(run):
    """Trains for an epoch."""
    for x, y in run.loader:
        run.criterion(run.model(x), y)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        (None, {"forward_passes": "twice"}),
        (None, {"forward_passes": thresher.Scoring(losses=torch.linspace(0, 1, N))}),
        (RandomByBatch(keep=0.5), {}),
    ],
)
def test_a_share_of_rows_that_is_none_of_the_labels_is_said(method, given):
    """Where the labels of a whole batch are not known, the share of the rows is right for equal numbers of labels only."""
    several = torch.arange(4 * N).view(N, 4) % C
    uneven = several.clone()
    uneven[1::2, 1:] = -100
    for targets, warns in ((several, False), (uneven, True)):
        run = made(nn.CrossEntropyLoss(), method, width=4, targets=targets, **given)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trained(run)
            _ = run.history
        assert any("different numbers of labels" in str(one.message) for one in found) is warns


def test_a_share_of_rows_is_said_for_losses_of_the_loop_too():
    """`run.reduce` with a mask: the number of its positions differs between samples."""
    for width, warns in ((4, False), (1, True)):
        run = made(nn.CrossEntropyLoss(), RandomByBatch(keep=0.5))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for x, _ in run.loader:
                valid = (
                    torch.arange(4) < torch.where(torch.arange(len(x)) % 2 == 0, 4, width)[:, None]
                )
                run.reduce(run.model(x).sum(1, keepdim=True).expand(-1, 4), valid=valid)
            _ = run.history
        assert any("different numbers of labels" in str(one.message) for one in found) is warns


def test_long_half_precision_sequences_do_not_lose_their_divisor():
    """The number of labels of a batch may be more than the largest float16."""
    labels = torch.randint(5, (16, 9000), generator=torch.Generator().manual_seed(0))
    labels[:, 1::2] = -100
    model = nn.Embedding(5, 5).half()
    nn.init.zeros_(model.weight)  # the sum of the kept losses has a place in float16
    run = thresher.attach(
        LargestByBatch(keep=0.5),
        loader=DataLoader(TensorDataset(labels.clamp(min=0), labels), 16),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        epochs=1,
        forward=lambda net, batch: (net(batch[0]).transpose(1, 2), batch[1]),
        forward_passes="once",
    )
    x, y = next(iter(run.loader))
    value = run.criterion(run.model(x).transpose(1, 2), y).item()
    assert (
        len(x) == 16
        and 0.4 < value / F.cross_entropy(model(x).transpose(1, 2).float(), y).item() < 0.6
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (0.5, {}),
        (thresher.BigLoss(keep=0.5), {}),
        (thresher.RandomBackprop(keep=0.5), {}),
        (thresher.InfoBatch(), {"spend": "batches"}),
    ],
)
def test_a_sum_that_the_loop_may_divide_by_a_constant_warns_where_batches_become_smaller(
    method, settings
):
    with pytest.warns(
        UserWarning,
        match=r"has reduction='sum', and .* trains on fewer rows per step.*reduction='mean'",
    ):
        attached_with_shuffle(method, nn.CrossEntropyLoss(reduction="sum"), **settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (thresher.FullData(), {"spend": "batches"}),
        (thresher.InfoBatch(), {}),
        (0.5, {"spend": "steps"}),
        (thresher.BigLoss(keep=0.5), {"forward_passes": "twice"}),
        (LargestByBatch(keep=0.5), {}),
    ],
)
def test_a_sum_of_full_batches_does_not_warn(method, settings):
    attached_with_shuffle(method, nn.CrossEntropyLoss(reduction="sum"), **settings)
    attached_with_shuffle(0.5, nn.CrossEntropyLoss())


def attached_with_shuffle(method: Any, criterion: Any, **settings: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.randn(N, 4), torch.arange(N) % C), B, shuffle=True)
    return thresher.attach(
        method, loader=loader, criterion=criterion, model=nn.Linear(4, C), epochs=2, **settings
    )
