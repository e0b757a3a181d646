"""Cross-entropy and negative log-likelihood: smoothing, class weights, ignored positions, probabilities, dense outputs."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from loss_cases import (
    CASES,
    CHECKS,
    CLASSES,
    PLAN_WEIGHTS,
    WEIGHT,
    B,
    C,
    T,
    Table,
    Weighing,
    everything,
    for_each,
    indices,
    leaf,
    measure,
    randn,
    signals,
)
from thresher.losses import adapt


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_case(check):
    for_each(CLASSES, check)


@pytest.mark.parametrize("weights", [None, tuple(PLAN_WEIGHTS)], ids=["plain", "weighted"])
@pytest.mark.parametrize("asks", [False, True], ids=["losses", "signals"])
@pytest.mark.parametrize("ignore", [-100, -1])
def test_targets_that_the_loop_masks(
    weights: tuple[float, ...] | None, asks: bool, ignore: int
) -> None:
    """No target of the batch is ignored when it is yielded, one is when the criterion is called."""
    wanted = frozenset({"correct", "confidence"} if asks else ())
    outputs, criterion = randn(B, C), nn.CrossEntropyLoss(ignore_index=ignore)
    model = Table(outputs)
    loader = DataLoader(TensorDataset(torch.arange(B), indices(B)), batch_size=B)
    run = thresher.attach(
        Weighing(weights, wanted), loader=loader, criterion=criterion, model=model, epochs=1
    )
    for i, targets in run.loader:
        targets[2] = ignore
        value = run.criterion(run.model(i), targets, ids=run.ids)
        valid = targets != ignore
        factors = torch.ones(B) if weights is None else torch.tensor(weights)
        losses = F.cross_entropy(outputs, targets, ignore_index=ignore, reduction="none")
        torch.testing.assert_close(value.detach(), (factors * losses).sum() / valid.sum())
        assert weights is not None or torch.equal(value, criterion(outputs, targets))
        torch.testing.assert_close(run.records["loss"].float(), losses.where(valid, 0))


@pytest.mark.parametrize("weights", [None, torch.tensor(PLAN_WEIGHTS)], ids=["plain", "weighted"])
def test_flattened_positions(weights: Tensor | None) -> None:
    """(B * T, C) outputs and (B * T,) targets of B samples are what (B, C, T) and (B, T) are."""
    case = CASES["ce-dense-all"]
    adapter, wanted = adapt(case.make("mean")), {"correct", "confidence"}
    flat = case.outputs.transpose(1, 2).reshape(B * T, C), case.targets.reshape(B * T)
    mine = measure(adapter, *flat, B, repeat=T, weights=weights, wanted=wanted)
    dense = measure(adapter, case.outputs, case.targets, B, weights=weights, wanted=wanted)
    torch.testing.assert_close(mine.value, dense.value)
    for name, signal in dense.signals.items():
        torch.testing.assert_close(mine.signals[name], signal)


def test_a_batch_without_any_valid_position_is_the_users_nan() -> None:
    adapter, targets = adapt(nn.CrossEntropyLoss()), torch.full((2, T), -100)
    for weights in (None, torch.tensor([1.0, 2.0])):
        measured = measure(
            adapter, randn(2, C, T), targets, 2, weights=weights, wanted={"correct", "confidence"}
        )
        assert measured.value.isnan()
        assert measured.signals["loss"].tolist() == [-math.inf, -math.inf]
        assert not measured.signals["correct"].any()


@pytest.mark.parametrize("ignore", [-100, 0])
@pytest.mark.parametrize("shape", [(2,), (2, T)], ids=["single", "dense"])
def test_a_sample_that_is_ignored_is_not_right(ignore: int, shape: tuple[int, ...]) -> None:
    """Also where the ignored index is a class, and the model predicts it."""
    outputs = torch.zeros(2, C, *shape[1:])
    outputs[:, 0] = 9.0
    targets = torch.full(shape, ignore)
    targets[1] = 1
    adapter, wanted = adapt(nn.CrossEntropyLoss(ignore_index=ignore)), {"correct", "confidence"}
    refreshed = signals(adapter, outputs, targets, 2, wanted=wanted)
    for weights in (None, torch.ones(2)):
        for found in (
            refreshed,
            measure(adapter, outputs, targets, 2, weights=weights, wanted=wanted).signals,
        ):
            assert found["loss"][0] == -math.inf and found["loss"][1] > 5
            assert found["correct"].tolist() == [False, False]


def test_batch_confidence_beside_the_own_value() -> None:
    case = CASES["ce"]
    adapter = adapt(nn.CrossEntropyLoss())
    measured = measure(
        adapter, case.outputs, case.targets, B, wanted={"batch_confidence", "correct"}
    )
    expected = np.exp(case.outputs.numpy())
    expected /= expected.sum(0, keepdims=True)
    np.testing.assert_allclose(
        measured.signals["batch_confidence"].numpy(), expected.max(1), rtol=1e-5
    )
    assert torch.equal(measured.value, nn.CrossEntropyLoss()(case.outputs, case.targets))


@pytest.mark.parametrize("name", ["ce", "ce-smoothing", "ce-weights"])
def test_autocast(name: str) -> None:
    case = CASES[name]
    criterion = case.make("mean")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = case.outputs.bfloat16()
        mine, own = leaf(outputs), leaf(outputs)
        measured = measure(adapt(criterion), mine, case.targets, case.n, wanted=everything(name))
        value = criterion(own, case.targets)
    assert measured.value.dtype == value.dtype
    assert torch.equal(measured.value, value)
    measured.value.backward()
    value.backward()
    assert mine.grad is not None and own.grad is not None
    assert torch.equal(mine.grad, own.grad)


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT.clone()), "weight"),
        (nn.NLLLoss(weight=WEIGHT.clone()), "weight"),
    ],
)
def test_weights_that_change_after_attaching_are_followed(criterion: nn.Module, name: str) -> None:
    """The user's criterion is moved to a device, cast or given other weights: no stale copy may be left."""
    adapter, outputs = adapt(criterion), randn(B, C).double().log_softmax(1)
    targets = indices(B)
    criterion.double()
    for _ in range(2):
        measured = measure(adapter, outputs, targets, B, weights=torch.ones(B))
        torch.testing.assert_close(measured.value, criterion(outputs, targets))
        setattr(criterion, name, WEIGHT.flip(0).double())


@pytest.mark.parametrize(
    ("criterion", "targets", "negatives"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([1, 2]), True),
        (nn.CrossEntropyLoss(ignore_index=0), torch.tensor([0, 2]), False),
        (nn.CrossEntropyLoss(), torch.tensor([[1], [-100]]), False),
        (nn.MSELoss(), torch.tensor([1.0, 2.0]), False),
    ],
)
def test_where_labels_that_are_not_negative_all_count(criterion, targets, negatives):
    assert adapt(criterion).ignores_negatives_of(targets) is negatives


def test_losses_without_a_dimension() -> None:
    with pytest.raises(ValueError, match=r"Losses of shape \(\) for 1 samples"):
        measure(adapt(nn.CrossEntropyLoss()), randn(C), torch.tensor(1), 1)


@pytest.mark.parametrize("weights", [None, tuple(PLAN_WEIGHTS)], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "name", ["ce", "ce-smoothing", "ce-weights", "ce-ignore", "ce-probabilities", "nll"]
)
def test_label_and_batch_loss_beside_the_own_value(
    name: str, weights: tuple[float, ...] | None
) -> None:
    case, wanted = CASES[name], {"label", "batch_loss"}
    plan = None if weights is None else torch.tensor(weights)
    found = measure(
        adapt(case.make("mean")), case.outputs, case.targets, case.n, weights=plan, wanted=wanted
    ).signals
    likeliest = case.targets.argmax(1) if case.targets.is_floating_point() else case.targets
    assert torch.equal(found["label"], likeliest)
    counted = found["loss"][found["loss"] != -math.inf]
    torch.testing.assert_close(found["batch_loss"], counted.mean().expand(case.n))


def test_each_batch_has_its_own_mean_where_signals_are_computed_together() -> None:
    """Small batches of a plain cross-entropy wait for each other, except where a signal depends on the batch."""
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2, torch.arange(40))
    model, losses = nn.Linear(3, 2), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, 4, shuffle=True)
    run = thresher.attach(
        thresher.RePb(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=1,
    )
    for x, y, ids in run.loader:
        loss = run.criterion(run.model(x), y)
        losses |= dict.fromkeys(ids.tolist(), loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(
        run.records["batch_loss"].numpy(), [losses[i] for i in range(40)], rtol=1e-6
    )


def test_several_positions_have_no_label() -> None:
    case = CASES["ce-dense"]
    with pytest.raises(ValueError, match="^one class per sample is needed"):
        signals(adapt(nn.CrossEntropyLoss()), case.outputs, case.targets, B, wanted={"label"})


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_values_and_independent_labels_have_no_label(criterion: nn.Module) -> None:
    with pytest.raises(ValueError, match="label"):
        signals(adapt(criterion), randn(B), torch.ones(B), B, wanted={"label"})
