"""Memory formats: GroupNorm whose gradient comes in another one than its input, and draws in channels_last."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thresher
from depth import crossed, depth
from subset_cases import numbers, same_as_plain, wrap

N, KEPT = 6, [1, 3, 4]
WEIGHTS = torch.randn(N, 4 * 6 * 6, generator=torch.Generator().manual_seed(0))


class FromTokens(nn.Module):
    """Makes an image of tokens, whose channels come last."""

    def forward(self, x):
        return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, (6, 6))


LOSSES = {
    "flat": lambda outputs: (outputs.flatten(1) * WEIGHTS).mean(1),
    "sums": lambda outputs: outputs.sum((1, 2, 3)),
    "pixels": lambda outputs: (outputs.permute(0, 2, 3, 1).reshape(N, -1) * WEIGHTS).mean(1),
    "classes": lambda outputs: F.cross_entropy(
        outputs.mean((2, 3)), torch.arange(N) % 4, reduction="none"
    ),
}


@pytest.mark.parametrize(
    ("act", "layout", "loss"),
    crossed(
        depth([nn.ELU, nn.Identity], [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.ELU, nn.Identity]),
        [torch.contiguous_format, torch.channels_last, "tokens"],
        [*LOSSES],
    ),
    ids=str,
)
def test_gradients_are_those_of_the_module(act, layout, loss):
    torch.manual_seed(0)
    parts = [FromTokens()] if layout == "tokens" else []
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), *parts, nn.GroupNorm(2, 4), act(),
        nn.Conv2d(4, 4, 3, padding=1), *parts, nn.GroupNorm(2, 4), act(),
    )  # fmt: skip
    if layout is torch.channels_last:
        model = model.to(memory_format=layout)
    of_rows = copy.deepcopy(model)
    x = torch.randn(N, 3, 6, 6)
    LOSSES[loss](model(x))[KEPT].mean().backward()
    LOSSES[loss](thresher.subset_backward(of_rows, strict=True)(x))[KEPT].mean().backward()
    for found, expected in zip(of_rows.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.Dropout])
def test_masks_of_channels_last_are_those_of_the_module(kind) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(0.3), nn.Conv2d(4, 3, 1))
    sub = wrap(model, strict=True)
    same_as_plain(sub, numbers(N, 3, 4, 5).to(memory_format=torch.channels_last), rows=KEPT)
