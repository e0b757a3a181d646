"""Weights within a criterion of the user's own, which divides the sum of its losses by what it likes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.attribution.rows import RowLayout
from thresher.losses.adapters import adapt, is_multiple, weighted_like

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
        losses = F.binary_cross_entropy_with_logits(outputs + 0.1 * torch.randn_like(outputs), labels, reduction="none")
        losses = losses * (targets >= 0).unsqueeze(1)
        if self.reduction == "none":
            return losses
        return losses.sum() / self.divisor(outputs, targets, losses) if self.reduction == "mean" else losses.sum()


DIVISORS = {
    "positions": lambda o, t, losses: losses.numel(),
    "positives": lambda o, t, losses: (t > 0).sum().clamp(min=1),
    "samples": lambda o, t, losses: len(losses),
    "valid": lambda o, t, losses: C * (t >= 0).sum(),
    "a constant": lambda o, t, losses: 256.0,
}


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weighted_sum_is_divided_by_the_same_number(divisor: str, reduction: str, dtype: torch.dtype) -> None:
    criterion = Focal(DIVISORS[divisor], reduction)
    adapter = adapt(criterion)
    for targets in (Y, torch.where(Y == 1, -100, Y)):  # ignored labels come after the first batch
        outputs = OUTPUTS.to(dtype, copy=True).requires_grad_()
        torch.manual_seed(1)
        measured = adapter.measure(outputs, targets, RowLayout(B), weights=WEIGHTS, wanted=set())
        drawn = torch.rand(1)
        torch.manual_seed(1)
        losses = Focal(DIVISORS[divisor], "none")(outputs, targets)
        number = DIVISORS[divisor](outputs, targets, losses) if reduction == "mean" else 1
        expected = (WEIGHTS.to(dtype).unsqueeze(1) * losses).sum() / number
        torch.testing.assert_close(measured.value, expected)
        gradients = [torch.autograd.grad(value, outputs)[0] for value in (measured.value, expected)]
        torch.testing.assert_close(*gradients)
        assert torch.equal(drawn, torch.rand(1))
    assert criterion.calls == 2 and criterion.reduction == reduction


@pytest.mark.parametrize(
    "divisor",
    [
        lambda o, t, losses: o.square().sum(),
        lambda o, t, losses: losses.sum() / losses[::2].sum(),
        lambda o, t, losses: losses.sum(),
    ],
    ids=["outputs", "some samples", "losses"],
)
def test_another_form_is_refused(divisor: Any) -> None:
    criterion = Focal(divisor)
    with pytest.raises(ValueError, match=r"reduction='mean' does not return the sum .*to 'none': .*run.reduce\(losses, ids="):
        adapt(criterion).measure(OUTPUTS, Y, RowLayout(B), weights=WEIGHTS, wanted=set())
    assert criterion.calls == 0
    adapt(criterion).measure(OUTPUTS, Y, RowLayout(B), weights=None, wanted=set())
    criterion.reduction = "none"
    measured = adapt(criterion).measure(OUTPUTS, Y, RowLayout(B), weights=WEIGHTS, wanted=set())
    assert measured.value.shape == (B, C)


def test_losses_that_are_all_zero() -> None:
    zero = weighted_like(torch.tensor(0.0), torch.zeros(3, 2), torch.ones(3), usual=6)
    assert zero.item() == 0


def test_is_multiple() -> None:
    outputs = {"x": torch.randn(3), "i": torch.arange(3), "unused": torch.randn(2)}
    total = lambda o: o["x"].square().sum()  # noqa: E731
    assert is_multiple(lambda o: total(o) / 7, total, outputs) is True
    assert is_multiple(lambda o: total(o) / 7 + 1, total, outputs) is False
    assert is_multiple(lambda o: o["x"].abs().sum(), total, outputs) is False
    assert is_multiple(lambda o: 0 * total(o), lambda o: 0 * total(o), outputs) is None
    assert is_multiple(lambda o: torch.tensor(1.0), total, outputs) is None
    assert is_multiple(lambda o: o.sum(), lambda o: o.sum(), torch.arange(3)) is None
