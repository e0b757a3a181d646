"""Criteria of no kind in particular: callables, other modules with a reduction, and the signals that outputs define."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loss_cases import (
    PLAN_WEIGHTS,
    B,
    C,
    T,
    leaf,
    measure,
    rand,
    randn,
    signals,
)
from thresher.losses import adapt


def test_callables() -> None:
    outputs, targets = leaf(randn(B, 3)), randn(B, 3)
    measured = measure(
        adapt(lambda o, t: (o - t).square()),
        outputs,
        targets,
        B,
        weights=torch.tensor(PLAN_WEIGHTS),
    )
    squares = (outputs - targets).detach().square().mean(1)
    torch.testing.assert_close(measured.signals["loss"], squares)
    torch.testing.assert_close(measured.value, (squares * torch.tensor(PLAN_WEIGHTS)).mean())
    plain = measure(adapt(lambda o, t: (o - t).square()), outputs, targets, B)
    assert torch.equal(plain.value, (outputs - targets).square().mean())


def test_another_module_with_a_reduction() -> None:
    criterion = nn.SoftMarginLoss(reduction="sum")
    outputs, targets = randn(B, 3), randn(B, 3).sign()
    measured = measure(adapt(criterion), outputs, targets, B, weights=torch.tensor(PLAN_WEIGHTS))
    losses = torch.log(1 + torch.exp(-targets * outputs))
    torch.testing.assert_close(measured.signals["loss"], losses.mean(1))
    torch.testing.assert_close(measured.value, (losses.sum(1) * torch.tensor(PLAN_WEIGHTS)).sum())
    assert criterion.reduction == "sum"


def test_signals_of_each_kind() -> None:
    wanted = {"correct", "confidence"}
    logits, y = torch.tensor([[2.0, 0, 0], [0, 0, 1]]), torch.tensor([0, 1])
    top = [math.exp(2) / (math.exp(2) + 2), math.e / (math.e + 2)]
    for criterion, outputs, targets in (
        (nn.CrossEntropyLoss(), logits, y),
        (nn.CrossEntropyLoss(label_smoothing=0.1), logits, y),
        (nn.CrossEntropyLoss(), logits, F.one_hot(y, 3).float()),
        (nn.NLLLoss(), logits.log_softmax(1), y),
        (nn.KLDivLoss(reduction="batchmean"), logits.log_softmax(1), F.one_hot(y, 3).float()),
        (
            nn.KLDivLoss(reduction="batchmean", log_target=True),
            logits.log_softmax(1),
            F.one_hot(y, 3) * 20.0 - 20,
        ),
        (nn.MultiMarginLoss(), logits, y),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), logits, y),
    ):
        found = signals(adapt(criterion), outputs, targets, 2, wanted=wanted)
        assert found["correct"].tolist() == [True, False], criterion
        assert found["confidence"].tolist() == pytest.approx(top, rel=1e-5), criterion
    labels, y = torch.tensor([[1.0, -2], [3, 1]]), torch.tensor([[1.0, 0], [1, 0]])
    sure = [
        (1 / (1 + math.exp(-1)) + 1 / (1 + math.exp(-2))) / 2,
        (1 / (1 + math.exp(-3)) + 1 / (1 + math.exp(-1))) / 2,
    ]
    for criterion, outputs in ((nn.BCEWithLogitsLoss(), labels), (nn.BCELoss(), labels.sigmoid())):
        found = signals(adapt(criterion), outputs, y, 2, wanted=wanted)
        assert found["correct"].tolist() == [True, False]
        assert found["confidence"].tolist() == pytest.approx(sure, rel=1e-5)


@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 1.5, B)], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("mean", "losses"),
    [
        (F.mse_loss, lambda o, t: F.mse_loss(o, t, reduction="none").mean(1)),
        (
            functools.partial(F.cross_entropy, label_smoothing=0.1),
            lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1, reduction="none"),
        ),
    ],
)
def test_the_mean_of_a_callable_is_that_of_its_losses_of_single_rows(
    mean: Any, losses: Any, weights: Tensor | None
) -> None:
    outputs, targets = leaf(randn(B, C)), randn(B, C).softmax(1)
    value, found = measure(adapt(lambda o, t: mean(o, t)), outputs, targets, B, weights=weights)
    expected = losses(outputs, targets)
    torch.testing.assert_close(found["loss"], expected.detach())
    torch.testing.assert_close(
        value, expected.mean() if weights is None else (expected * weights).mean()
    )
    (gradient,) = torch.autograd.grad(value, outputs)
    (same,) = torch.autograd.grad(
        expected.mean() if weights is None else (expected * weights).mean(), outputs
    )
    torch.testing.assert_close(gradient, same)


@pytest.mark.parametrize("weights", [None, torch.ones(B)], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("criterion", "got"),
    [
        (lambda o, t: 0.5, "returned float"),
        (
            lambda o, t: (o - t).square().sum(),
            "returned one number, .*, but the mean of its values",
        ),
        (
            lambda o, t: o.std() + t.mean(),
            "returned one number, .*, but the mean of its values|fails for single",
        ),
        (lambda o, t: o.square().mean() if o.sum() > 0 else t.mean(), "fails for single rows"),
    ],
)
def test_a_callable_whose_number_is_no_mean_of_rows(
    criterion: Any, got: str, weights: Tensor | None
) -> None:
    outputs, targets = randn(B, C), randn(B, C).softmax(1)
    with pytest.raises(
        ValueError,
        match=rf"(?s)({got}).*: your function must return one loss per sample.*run\.reduce",
    ):
        measure(adapt(criterion), outputs, targets, B, weights=weights)


def test_a_module_that_averages_whatever_its_reduction() -> None:
    class Stubborn(nn.Module):
        reduction = "mean"

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs - targets).square().mean()

    with pytest.raises(
        ValueError,
        match=r"Stubborn\(\) returned a scalar although its reduction was set to 'none'.*run\.reduce",
    ):
        measure(adapt(Stubborn()), randn(B, 3), randn(B, 3), B)


def test_other_criteria_that_broadcast_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"broadcast its arguments to losses of shape \(6, 6\).*mixes samples"
    ):
        signals(adapt(nn.PoissonNLLLoss()), torch.rand(6, 1), torch.rand(6), 6)


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets"),
    [
        (nn.MSELoss(), (B, 3), (B, 3)),
        (lambda o, t: (o - t).square(), (B, 3), (B, 3)),
        (lambda o, t: o["loss"], None, None),
    ],
)
def test_signals_that_cannot_be_read(criterion: Any, outputs: Any, targets: Any) -> None:
    adapter = adapt(criterion)
    pair = ({"loss": rand(B)}, None) if outputs is None else (randn(*outputs), randn(*targets))
    assert signals(adapter, *pair, B).keys() == {"loss"}
    with pytest.raises(
        ValueError, match=r"not defined for criterion .* attach\(signals=function\) with function"
    ) as raised:
        signals(adapter, *pair, B, wanted={"correct", "confidence"})
    assert str(raised.value) == (
        f"`confidence` and `correct` are not defined for criterion {criterion!r}. Pass attach(signals=function) with "
        "function(outputs, targets) -> {'confidence': (n,) tensor, ...}."
    )


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((B, 1), (B,)),
        ((B, T, C), (B, T)),
        ((B, 1, C), (B, 1)),
        ((B, C, T), (B, T + 1)),
        ((B, C), (B + 1,)),
    ],
    ids=["one-logit", "classes-last", "classes-last-one-token", "other-positions", "other-rows"],
)
def test_outputs_of_a_callable_that_are_not_classes_along_dimension_one(
    outputs: Any, targets: Any
) -> None:
    """Read as classes, one logit a sample is always right where the target is 0, with confidence 1."""
    adapter = adapt(lambda o, t: o.flatten(1).mean(1))
    with pytest.raises(
        ValueError, match="`confidence` and `correct` are not defined for criterion"
    ):
        signals(
            adapter,
            randn(*outputs),
            torch.zeros(targets, dtype=torch.int64),
            B,
            wanted={"correct", "confidence"},
        )
