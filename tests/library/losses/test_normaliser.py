"""Weights within a criterion of the user's own: taken where it returns the mean, or the sum, of its losses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loss_cases import measure
from thresher.losses import adapt

B, C = 8, 4
GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(B, C, generator=GENERATOR)
Y = torch.arange(B) % C
WEIGHTS = torch.arange(1.0, B + 1)


class Focal(nn.Module):
    """A loss whose "mean" is the sum divided by what `divisor` says; it draws random numbers and remembers its calls."""

    def __init__(self, divisor: Any, reduction: str = "mean") -> None:
        super().__init__()
        self.divisor, self.reduction, self.calls = divisor, reduction, 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        labels = F.one_hot(targets.clamp(min=0), C).to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(
            outputs + 0.1 * torch.randn_like(outputs), labels, reduction="none"
        )
        losses = losses * (targets >= 0).unsqueeze(1)
        if self.reduction == "none":
            return losses
        return (
            losses.sum() / self.divisor(outputs, targets, losses)
            if self.reduction == "mean"
            else losses.sum()
        )


def mean(outputs: Tensor, targets: Tensor, losses: Tensor) -> int:
    return losses.numel()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_or_sum_of_its_losses_is_weighted(reduction: str, dtype: torch.dtype) -> None:
    criterion = Focal(mean, reduction)
    adapter = adapt(criterion)
    for _ in range(2):
        outputs = OUTPUTS.to(dtype, copy=True).requires_grad_()
        torch.manual_seed(1)
        measured = measure(adapter, outputs, Y, B, weights=WEIGHTS)
        drawn = torch.rand(1)
        torch.manual_seed(1)
        losses = Focal(mean, "none")(outputs, Y)
        expected = (WEIGHTS.to(dtype).unsqueeze(1) * losses).sum() / (
            losses.numel() if reduction == "mean" else 1
        )
        torch.testing.assert_close(measured.value, expected)
        gradients = [torch.autograd.grad(value, outputs)[0] for value in (measured.value, expected)]
        torch.testing.assert_close(*gradients)
        assert torch.equal(drawn, torch.rand(1))
    assert criterion.calls == 2 and criterion.reduction == reduction


@pytest.mark.parametrize(
    "divisor",
    [
        lambda o, t, losses: (t > 0).sum(),
        lambda o, t, losses: len(losses),
        lambda o, t, losses: 256.0,
        lambda o, t, losses: o.square().sum(),
        lambda o, t, losses: losses.sum() / losses[::2].sum(),
        lambda o, t, losses: losses.sum(),
        lambda o, t, losses: losses.new_full((3,), losses.numel()),
    ],
    ids=["positives", "samples", "a constant", "outputs", "some samples", "losses", "no scalar"],
)
def test_another_form_is_refused(divisor: Any) -> None:
    criterion = Focal(divisor)
    with pytest.raises(
        ValueError,
        match=r"reduction='mean' does not return the mean .*run.reduce\(losses, ids=.*to 'none': ",
    ):
        measure(adapt(criterion), OUTPUTS, Y, B, weights=WEIGHTS)
    assert criterion.calls == 0
    criterion.reduction = "none"
    measured = measure(adapt(criterion), OUTPUTS, Y, B, weights=WEIGHTS)
    assert measured.value.shape == (B, C)


def test_a_loss_of_nothing_shows_nothing() -> None:
    """Ignored labels alone: the sum is 0, whatever it is divided by. The next batch decides."""
    adapter = adapt(Focal(lambda o, t, losses: 7.0))
    measure(adapter, OUTPUTS, torch.full_like(Y, -1), B, weights=WEIGHTS)
    with pytest.raises(ValueError, match="does not return the mean"):
        measure(adapter, OUTPUTS, Y, B, weights=WEIGHTS)


def test_without_weights_it_is_called_as_it_is() -> None:
    criterion = Focal(lambda o, t, losses: o.square().sum())
    torch.manual_seed(1)
    measured = measure(adapt(criterion), OUTPUTS, Y, B)
    torch.manual_seed(1)
    assert torch.equal(measured.value, criterion(OUTPUTS, Y))
