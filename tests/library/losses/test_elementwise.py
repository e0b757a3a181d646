"""Distances, binary cross-entropy and the Kullback-Leibler divergence: losses by element."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loss_cases import (
    CASES,
    CHECKS,
    ELEMENTS,
    WEIGHT,
    B,
    C,
    T,
    everything,
    for_each,
    leaf,
    measure,
    rand,
    randn,
    signals,
)
from thresher.losses import adapt

# torch itself says that the mean of KLDiv is a peculiar one.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_case(check):
    for_each(ELEMENTS, check)


def test_flattened_batch_mean_of_divergences() -> None:
    """'batchmean' divides by rows, of which a flattened sample has several."""
    criterion = nn.KLDivLoss(reduction="batchmean")
    outputs, targets = randn(B * T, C).log_softmax(1), randn(B * T, C).softmax(1)
    measured = measure(adapt(criterion), outputs, targets, B, repeat=T, weights=torch.ones(B))
    torch.testing.assert_close(measured.value, criterion(outputs, targets))
    rows = F.kl_div(outputs, targets, reduction="none").sum(1).reshape(B, T)
    torch.testing.assert_close(measured.signals["loss"], rows.mean(1))


@pytest.mark.parametrize("name", ["mse"])
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


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
        nn.KLDivLoss,
    ],
)
def test_shapes_that_would_broadcast(kind: type[nn.Module]) -> None:
    outputs, targets = rand(B, 1), rand(B)
    message = rf"{kind.__name__}\(\): outputs of shape \({B}, 1\) and targets of shape \({B},\) would be broadcast .* equal"
    with pytest.raises(ValueError, match=message):
        measure(adapt(kind()), outputs, targets, B, weights=torch.ones(B))
    with pytest.raises(ValueError, match=message):
        signals(adapt(kind()), outputs, targets, B)
    with pytest.raises(
        ValueError, match=r"would be broadcast|must be the same as|is different to|deprecated"
    ):
        measure(adapt(kind()), outputs, targets, B)


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT.clone()), "pos_weight"),
    ],
)
def test_weights_that_change_after_attaching_are_followed(criterion: nn.Module, name: str) -> None:
    """The user's criterion is moved to a device, cast or given other weights: no stale copy may be left."""
    adapter, outputs = adapt(criterion), randn(B, C).double().log_softmax(1)
    targets = randn(B, C).double().sigmoid()
    criterion.double()
    for _ in range(2):
        measured = measure(adapter, outputs, targets, B, weights=torch.ones(B))
        torch.testing.assert_close(measured.value, criterion(outputs, targets))
        setattr(criterion, name, WEIGHT.flip(0).double())
