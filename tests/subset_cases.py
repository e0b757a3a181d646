"""What the tests of `subset_backward` share: small models, and the comparison with the plain model."""

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.subset import SubsetBackward, subset_backward
from thresher.subset.graphs import Graphs
from thresher.subset.trace_key import Settings
from thresher.trees import leaves

VISION = ("torchvision", "timm")


def optional(name: str) -> Any:
    """A package that is not needed to run the library; the test is skipped where it is missing or does not load."""
    try:
        with warnings.catch_warnings(action="ignore"):
            if name.partition(".")[0] not in VISION:
                return importlib.import_module(name)
            from thresher_lab.tasks import (
                vision,
            )  # needs the packages of the extra lab, which a machine with a GPU may lack

            return vision.optional(name)
    except (ImportError, RuntimeError, ValueError) as error:
        return pytest.skip(f"{name} does not load: {error}")


def wrap(
    model: nn.Module, *, strict: bool = True, dtype: torch.dtype = torch.float64
) -> SubsetBackward:
    return subset_backward(model.to(dtype), strict=strict)


def masked(outputs: Any, rows: Tensor) -> Tensor:
    """A loss of some samples, with another weight for every entry; nothing of it is the same for two samples."""
    drawing = torch.Generator().manual_seed(11)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves(outputs):
        if leaf.requires_grad and leaf.dim():
            weights = torch.randn(leaf.shape, generator=drawing, dtype=torch.float64)
            total = total + (leaf * weights).square()[rows].sum() + (leaf * weights)[rows].sum()
    return total


@dataclass
class Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    drawn: Tensor


def outcome(model: nn.Module, args: Any, kwargs: Any, rows: Tensor, loss: Any = masked) -> Outcome:
    """One forward and backward from the same random state; buffers of the model are put back."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    given = [leaf for leaf in leaves((args, kwargs)) if leaf.requires_grad]
    for leaf in given:
        leaf.grad = None
    torch.manual_seed(5)
    outputs = model(*args, **kwargs)
    drawn = torch.get_rng_state()
    loss(outputs, rows).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"input {i}": leaf.grad for i, leaf in enumerate(given)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return Outcome([leaf.detach().clone() for leaf in leaves(outputs)], gradients, buffers, drawn)


def distance(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> float:
    """The largest difference of two gradients, relative to the largest entry of the first where that is above one."""
    assert list(a) == list(b)
    for name in a:
        assert (a[name] is None) == (b[name] is None), (
            f"gradient of {name}: {a[name]} and {b[name]}"
        )
    pairs = [(a[name], b[name]) for name in a if a[name] is not None and a[name].numel()]
    largest = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0) / max(largest, 1.0)


def same_as_plain(
    sub: SubsetBackward,
    *args: Any,
    rows: Any,
    tolerance: float = 1e-11,
    loss: Any = masked,
    **kwargs: Any,
) -> None:
    """Outputs, updated buffers, random state and gradients are those of the plain model."""
    rows = torch.as_tensor(rows, dtype=torch.int64)
    plain = outcome(sub.wrapped, args, kwargs, rows, loss)
    found = outcome(sub, args, kwargs, rows, loss)
    assert len(plain.outputs) == len(found.outputs)
    for x, y in zip(plain.outputs, found.outputs, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain.drawn, found.drawn)
    assert distance(plain.gradients, found.gradients) <= tolerance


def traced(sub: SubsetBackward) -> int:
    """How many graphs a wrapped model holds."""
    return sum(len(known) for known in sub._traces.values())


_ARCHITECTURES: dict[Any, tuple[Graphs, nn.Module]] = {}
"""Graphs by the settings of a model and the kind of its input, with the model, which must stay alive: its key has ids."""


def trace_once_per_architecture(trace: Any) -> Any:
    """A method to put in the place of `SubsetBackward._trace`, which is `trace`: it traces models of one tensor only once."""

    def found(
        self: SubsetBackward,
        settings: Any,
        tensors: list[Tensor],
        rebuild: Any,
        sizes: Any,
        varying: Any = (),
    ) -> Graphs:
        args, kwargs = rebuild(tensors)
        if varying or len(tensors) > 1 or len(args) != 1 or args[0] is not tensors[0] or kwargs:
            return trace(self, settings, tensors, rebuild, sizes, varying)
        (x,) = tensors
        kind = (
            x.shape[1:],
            x.dtype,
            x.requires_grad,
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        )
        key = (
            Settings(self.wrapped).key,
            tuple(name for name, _ in self.wrapped.named_parameters()),
            kind,
        )
        graphs, _ = _ARCHITECTURES.get(key, (None, None))
        if graphs is None or not graphs.fits(tensors):
            graphs = trace(self, settings, tensors, rebuild, sizes)
            _ARCHITECTURES[key] = graphs, self.wrapped
        return graphs

    return found


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(*shape: int, vocabulary: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


class Calls(nn.Module):
    """A linear layer and a function of it."""

    def __init__(self, function: Any, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def conv_net(channels: int = 8, classes: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.GroupNorm(2, channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, groups=channels, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(channels * 16, classes),
    )


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(h))) * self.scale).permute(0, 3, 1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        h = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout
        )
        return self.out(h.transpose(1, 2).reshape(n, length, width))


class Causal(nn.Module):
    """A language model of one block; the mask is asked for by SDPA, made inside, or an argument."""

    def __init__(
        self, kind: str, width: int = 8, vocabulary: int = 11, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2, dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        h = self.embed(ids) + self.place(torch.arange(length, device=ids.device))
        if self.kind == "inside":
            mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        h = h + self.attention(self.norm(h), mask, causal=self.kind == "sdpa")
        return self.head(h)


class ViT(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.place = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.randn(1, 5, width)),
        )
        self.block = nn.TransformerEncoderLayer(
            width, 2, 16, dropout, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.place
        return self.head(self.block(h)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = kind(4, 5, num_layers=2, batch_first=batch_first, dropout=dropout)
        self.head = nn.Linear(5, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.layers(x)[0][:, -1])
        return self.head(self.layers(x.transpose(0, 1))[0][-1])


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down, self.middle = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 3, padding=1),
        )
        self.up, self.norm = (
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.GroupNorm(2, 2 * width),
        )
        self.head = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.down(x))
        coarse = self.up(F.relu(self.middle(F.max_pool2d(fine, 2))))
        coarse = coarse + F.interpolate(
            fine.mean((2, 3), keepdim=True), size=coarse.shape[2:], mode="bilinear"
        )
        return self.head(self.norm(torch.cat([fine, coarse], 1)))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.reduce, self.expand = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.conv(x))
        gate = self.expand(F.relu(self.reduce(F.adaptive_avg_pool2d(h, 1))))
        return (h * gate.sigmoid()).mean((2, 3))


class SmallResNet(nn.Module):
    """Three residual blocks with batch normalization."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        blocks = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        self.blocks = nn.ModuleList(self._block(*block) for block in blocks)
        self.short = nn.ModuleList(
            nn.Conv2d(a, b, 1, stride=s, bias=False) if a != b else nn.Identity()
            for a, b, s in blocks
        )
        self.head = nn.Linear(2 * width, classes)

    @staticmethod
    def _block(inside: int, outside: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, stride=stride, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        for block, short in zip(self.blocks, self.short, strict=True):
            h = F.relu(block(h) + short(h))
        return self.head(h.mean((2, 3)))
