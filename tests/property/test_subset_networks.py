"""Networks drawn at random, and torch's own samples of operations and modules: gradients of some rows are those of autograd.

A network is drawn from its seed and its size alone, so each case can be run again by itself.
"""

import copy
import functools
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depth import depth, in_verify
from subset_cases import Attention, outcome
from thresher.subset import subset_backward
from thresher.trees import leaves

N = 6

# Networks


class Moved(nn.Module):
    """A part that sees the dimensions in another order."""

    def __init__(self, part: nn.Module, there: tuple[int, ...], back: tuple[int, ...]) -> None:
        super().__init__()
        self.part, self.there, self.back = part, there, back

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.permute(self.there)).permute(self.back)


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Heads(nn.Module):
    """A body and heads that all read its result."""

    def __init__(self, layers: list[nn.Module], heads: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.heads = nn.Sequential(*layers), nn.ModuleList(heads)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        return tuple(head(h) for head in self.heads)


ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Softplus, nn.Hardswish, nn.LeakyReLU, nn.Mish)  # fmt: skip
DROPS = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)


def image_layer(draw: random.Random, x: Tensor) -> nn.Module:
    """A layer of images."""
    channels, height = x.shape[1], min(x.shape[2:])
    groups = draw.choice([g for g in (1, 2, channels) if channels % g == 0])
    size = draw.choice([1, 3])
    conv = functools.partial(
        nn.Conv2d, channels, kernel_size=size, padding=size // 2, groups=groups
    )
    wide = groups * draw.choice([1, 2, 4])
    smaller = [
        # On CPUs torch crashes in the backward of convolutions of channels_last with kernel_size=1 and stride=2.
        lambda: conv(wide, stride=2, kernel_size=3, padding=1),
        lambda: nn.MaxPool2d(2),
        lambda: nn.AvgPool2d(3, 2, 1),
        lambda: nn.AdaptiveAvgPool2d(2),
    ]
    rows_last, channels_first = (0, 2, 3, 1), (0, 3, 1, 2)
    kinds = [
        lambda: conv(wide, bias=draw.random() < 0.5),
        lambda: nn.ConvTranspose2d(channels, 4, 3, padding=1),
        lambda: nn.GroupNorm(groups, channels),
        lambda: nn.GroupNorm(groups, channels),
        lambda: nn.BatchNorm2d(channels).eval(),
        lambda: (
            nn.InstanceNorm2d(channels, affine=True) if height > 1 else nn.GroupNorm(1, channels)
        ),
        lambda: nn.LayerNorm(x.shape[1:]),
        lambda: Moved(nn.LayerNorm(channels), rows_last, channels_first),
        lambda: Moved(nn.Linear(channels, wide), rows_last, channels_first),
        lambda: Residual(nn.Sequential(conv(channels), draw.choice(ACTIVATIONS)())),
        lambda: Function(lambda h: h.to(memory_format=torch.channels_last)),
        lambda: Function(lambda h: h.transpose(2, 3)),
        lambda: Function(lambda h: F.interpolate(h, scale_factor=2.0)),
        lambda: Function(lambda h: h * h.mean((2, 3), keepdim=True).sigmoid()),
        lambda: Function(lambda h: h.flatten(2).transpose(1, 2)),
        draw.choice(ACTIVATIONS),
        lambda: draw.choice(DROPS)(0.3),
    ]
    return draw.choice([*kinds, *(smaller if height > 3 else ())])()


def token_layer(draw: random.Random, x: Tensor) -> nn.Module:
    """A layer of tokens, (samples, positions, width)."""
    length, width = x.shape[1:]
    heads = 2 if width % 2 == 0 else 1
    swap = (0, 2, 1)
    kinds = [
        lambda: nn.Linear(width, draw.choice([4, 6, 8])),
        lambda: nn.LayerNorm(width),
        lambda: nn.RMSNorm(width),
        lambda: Residual(Attention(width, heads)),
        lambda: Residual(SelfAttention(width, heads, batch_first=True)),
        lambda: nn.TransformerEncoderLayer(width, heads, 8, 0.0, batch_first=True),
        lambda: Moved(nn.Conv1d(width, 6, 3, padding=1), swap, swap),
        lambda: Moved(nn.GroupNorm(1, width), swap, swap),
        lambda: Residual(Moved(nn.Linear(length, length), swap, swap)),
        lambda: Function(lambda h: h.softmax(-1)),
        lambda: Function(lambda h: h.cumsum(1)),
        lambda: Function(lambda h: torch.cat([h.mean(1, keepdim=True), h], 1)[:, :-1]),
        lambda: Function(lambda h: h.transpose(1, 2).unsqueeze(-1)),
        draw.choice(ACTIVATIONS),
        lambda: nn.Dropout(0.3),
    ]
    return draw.choice(kinds)()


def head(draw: random.Random, x: Tensor) -> nn.Module:
    width = x.shape[1] if x.dim() == 4 else x.shape[2]
    if x.dim() == 4:
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
        return draw.choice([nn.Conv2d(width, 3, 1), nn.GroupNorm(1, width), pooled, nn.Identity()])
    pooled = nn.Sequential(Function(lambda h: h[:, 0]), nn.Linear(width, 3))
    return draw.choice([nn.Linear(width, 3), nn.LayerNorm(width), pooled])


def network(seed: int, most: int = 8) -> tuple[nn.Module, Tensor]:
    """Draws a network of at most `most` layers and half as many heads, and its input."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(["images", "images", "channels last", "channels last", "ids", "tokens"])
    layers: list[nn.Module] = []
    if kind == "ids":
        x = torch.randint(11, (N, 5))
        layers.append(nn.Embedding(11, 6, padding_idx=draw.choice([None, 0])))
    elif kind == "tokens":
        x = torch.randn(N, 5, 6)
    else:
        x = torch.randn(N, 4, 8, 8)
    if kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    x = x.requires_grad_(x.is_floating_point() and draw.random() < 0.3)
    # On CPUs torch crashes in the backward of GroupNorm if its input is channels_last and gets no gradient.
    if x.dim() == 4 and not x.requires_grad:
        layers.append(nn.Conv2d(4, 4, 3, padding=1))
    with torch.no_grad():
        h = layers[0](x) if layers else x
        for _ in range(draw.randint(most // 4 or 1, most)):
            layer = image_layer(draw, h) if h.dim() == 4 else token_layer(draw, h)
            layers.append(layer)
            h = layer(h)
    heads = min(draw.choice([1, 1, 2, 3]), most // 2)
    model = Heads(layers, [head(draw, h) for _ in range(heads)])
    # So that no gain or shift of a normalization is trivial.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, x


def losses(seed: int, outputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """One loss for each of some rows: sums, or losses per position that permute the outputs first."""
    drawing = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    total = torch.zeros(len(rows), dtype=outputs[0].dtype)
    for output in outputs:
        kind = draw.choice(["sum", "permuted", "class", "square"])
        if kind in ("permuted", "class"):
            output = output.movedim(1, -1)
        weights = torch.randn(output.shape[1:], generator=drawing, dtype=torch.float64)
        kept = output[rows] if len(output) == N else output
        if kind == "class":
            total = total - kept.log_softmax(-1)[..., 0].reshape(len(rows), -1).sum(1)
        elif kind == "sum":
            total = total + kept.flatten(1).sum(1)
        else:
            total = total + (kept * weights.to(kept.dtype)).square().flatten(1).mean(1)
    return total


def gradients(model: nn.Module, x: Tensor, seed: int, rows: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the losses of some rows, by the name of the parameter."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(seed)
    weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed))
    (losses(seed, model(x), rows) * weights).sum().backward()
    parameters = [*model.named_parameters(), ("input", x)]
    return {name: p.grad.double() for name, p in parameters if p.grad is not None}


def compare_network(seed: int, most: int = 8) -> str | None:
    """Compares a network with autograd; returns why it was not traced, or None."""
    model, x = network(seed, most)
    drawing = random.Random(seed)
    rows = torch.tensor(sorted(drawing.sample(range(N), drawing.randint(1, N - 1))))
    draws = any(isinstance(part, DROPS) for part in model.modules())
    exact = copy.deepcopy(model).double()
    double = x.detach().double() if x.is_floating_point() else x
    # The masks of dropout belong to the whole batch.
    given = double if draws else double[rows]
    given = given.detach().requires_grad_(x.requires_grad)
    truth = gradients(exact, given, seed, rows)
    plain = gradients(model, x, seed, rows)
    of_rows = subset_backward(model, strict=False)
    found = gradients(of_rows, x, seed, rows)
    if "input" in truth and not draws:
        whole = torch.zeros_like(double)
        whole[rows] = truth["input"]
        truth["input"] = whole
    assert found.keys() == plain.keys() == truth.keys()
    largest = max(float(right.norm()) for right in truth.values())
    for name, right in truth.items():
        usual = float((plain[name] - right).norm())
        error = float((found[name] - right).norm())
        assert error <= 10 * usual + 1e-5 * float(right.norm()) + 1e-6 * largest, (name, error)
    return of_rows.fallback


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(depth(8, 300)))
def test_gradients_of_a_random_network_are_those_of_autograd(seed) -> None:
    compare_network(seed, most=depth(2, 8))


# Samples of torch


class Operation(nn.Module):
    """An operation on inputs that a parameter scales."""

    def __init__(self, operation: Any, x: Tensor) -> None:
        super().__init__()
        self.operation = operation
        self.scale = nn.Parameter(torch.ones(x.shape[1:], dtype=x.dtype))

    def forward(self, x: Tensor, args: Any, kwargs: Any) -> Any:
        return self.operation(x * self.scale, *args, **kwargs)


def torch_samples() -> dict[str, Any]:
    """torch's samples of differentiable operations and of modules, by name."""
    pytest.importorskip("expecttest")  # which these modules of torch import
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal import common_methods_invocations, common_modules

    operations = {
        f"{op.name} {op.variant_test_name}": op
        for op in common_methods_invocations.op_db
        if op.supports_autograd and torch.float64 in op.dtypes
    }
    modules = {info.name: info for info in common_modules.module_db}
    return operations | modules


def cases(sample: Any) -> list[tuple[nn.Module, Any, Any]]:
    """Modules with their arguments, of which the first is a batch."""
    settings = {"dtype": torch.float64, "requires_grad": False}
    torch.manual_seed(0)
    if hasattr(sample, "sample_inputs"):
        found = [
            (Operation(sample.op, given.input), (given.input, given.args, given.kwargs), {})
            for given in sample.sample_inputs("cpu", **settings)
            if isinstance(given.input, Tensor) and given.input.dim() and len(given.input) > 1
        ]
        return found[:: max(1, len(found) // 2)][:2]
    found = []
    for given in sample.module_inputs_func(sample, device="cpu", training=True, **settings):
        if given.forward_input is None or given.constructor_input is None:
            continue
        args, kwargs = given.forward_input.args, given.forward_input.kwargs
        if args and isinstance(args[0], Tensor) and args[0].dim() and len(args[0]) > 1:
            made = given.constructor_input
            found.append((sample.module_cls(*made.args, **made.kwargs).double(), args, kwargs))
    return found[:: max(1, len(found) // 2)][:2]


def compare_sample(model: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Compares outputs, draws and gradients with the module itself; returns why it was not traced, or None."""
    n = len(args[0])
    rows = torch.arange(0, n, 2)
    if args[0].is_floating_point():
        args = (args[0].detach().requires_grad_(), *args[1:])

    def loss(outputs: Any, rows: Tensor) -> Tensor:
        parts = [leaf for leaf in leaves(outputs) if leaf.requires_grad]
        if not parts:
            pytest.skip("no gradient")
        parts = [part[rows] if part.dim() and len(part) == n else part for part in parts]
        return sum(
            (part.abs() * torch.linspace(1, 2, part.numel()).view(part.shape)).sum()
            for part in parts
        )

    with torch.random.fork_rng():
        plain = outcome(model, args, kwargs, rows, loss)
        of_rows = subset_backward(model, strict=False)
        found = outcome(of_rows, args, kwargs, rows, loss)
    assert torch.equal(found.drawn, plain.drawn)
    torch.testing.assert_close(found.outputs, plain.outputs, equal_nan=True)
    for name, right in plain.gradients.items():
        gradient = found.gradients[name]
        if gradient is None and right is not None:  # autograd has zeros for a few operations
            gradient = torch.zeros_like(right)
        torch.testing.assert_close(gradient, right, equal_nan=True)
    return of_rows.fallback


@in_verify  # importing the samples takes as long as ten networks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(40))
def test_gradients_of_samples_of_torch_are_those_of_autograd(part) -> None:
    samples = torch_samples()
    for name in sorted(samples)[part::40]:
        for model, args, kwargs in cases(samples[name]):
            compare_sample(model, args, kwargs)
