"""Attention kernels as they are on CUDA, simulated: tagged as random, with memory that was never written in their results."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from thresher.subset import kept_rows, subset_backward

HALF = (torch.float16, torch.bfloat16)
CALLS = itertools.count(1)
SEEDED = (torch.Tag.nondeterministic_seeded,)
OPS = torch.library.Library("thresher_tests", "DEF")
HALF_ONLY = {"efficient": False, "flash": True}

for kind in HALF_ONLY:
    inputs = "Tensor query, Tensor key, Tensor value"
    OPS.define(f"{kind}({inputs}, float dropout_p=0.0) -> (Tensor, Tensor, Tensor)", tags=SEEDED)
    OPS.define(
        f"{kind}_backward(Tensor grad, {inputs}, Tensor sums, Tensor seed, float dropout_p) -> Tensor[]",
        tags=SEEDED,
    )


def scores(query, key):
    return (query.float() @ key.float().mT) / query.shape[-1] ** 0.5


def mask_of(seed, dropout_p, like):
    """Which weights stay; as in Philox, it depends on the place in the batch."""
    drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(int(seed)))
    return (drawn >= dropout_p) / (1 - dropout_p)


def forward(half_only):
    def kernel(query, key, value, dropout_p=0.0):
        if half_only and query.dtype not in HALF:
            raise RuntimeError("this kernel supports fp16 and bf16 only")
        call = next(CALLS)  # memory that was never written has other content in each call
        seed = torch.randint(1000, ()) if dropout_p else torch.tensor(call)
        weights = scores(query, key)
        sums = torch.full((*weights.shape[:-2], 8 * (weights.shape[-2] // 8 + 1)), float(call))
        sums[..., : weights.shape[-2]] = weights.logsumexp(-1)
        weights = weights.softmax(-1)
        kept = weights * mask_of(seed, dropout_p, weights) if dropout_p else weights
        return (kept @ value.float()).to(query.dtype), sums, seed

    return kernel


def backward(grad, query, key, value, sums, seed, dropout_p):
    """Gradients from the sums that the forward pass has saved, without their padding."""
    weights = (scores(query, key) - sums[..., : query.shape[-2], None]).exp()
    mask = mask_of(seed, dropout_p, weights) if dropout_p else 1
    grad, scale = grad.float(), query.shape[-1] ** -0.5
    into = (grad @ value.float().mT) * mask
    into = weights * (into - (into * weights).sum(-1, keepdim=True))
    found = scale * into @ key.float(), scale * into.mT @ query.float(), (weights * mask).mT @ grad
    return [one.to(query.dtype) for one in found]


def padded(length):
    return 8 * (length // 8 + 1)


for kind, half_only in HALF_ONLY.items():
    OPS.impl(kind, forward(half_only), "CPU")
    OPS.impl(f"{kind}_backward", backward, "CPU")
    torch.library.register_fake(
        f"thresher_tests::{kind}",
        lambda q, k, v, dropout_p=0.0: (
            torch.empty_like(q),
            q.new_empty((*q.shape[:-1][:-1], padded(q.shape[-2])), dtype=torch.float32),
            torch.empty((), dtype=torch.int64),
        ),
        lib=OPS,
    )
    torch.library.register_fake(
        f"thresher_tests::{kind}_backward",
        lambda grad, q, k, v, *_: [torch.empty_like(one) for one in (q, k, v)],
        lib=OPS,
    )

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3], *output[1:])
        ctx.dropout_p = inputs[3] if len(inputs) > 3 else 0.0

    def back(ctx, grad, *_, kind=kind):
        return (
            *getattr(torch.ops.thresher_tests, f"{kind}_backward")(
                grad, *ctx.saved_tensors, ctx.dropout_p
            ),
            None,
        )

    torch.library.register_autograd(f"thresher_tests::{kind}", back, setup_context=setup, lib=OPS)


class Attention(nn.Module):
    """Two layers: their kernels stand beside each other in one graph."""

    def __init__(self, kind, dropout=0.0):
        super().__init__()
        self.first, self.second, self.out, self.dropout = (
            nn.Linear(16, 48),
            nn.Linear(16, 48),
            nn.Linear(16, 4),
            dropout,
        )
        self.kernel = getattr(torch.ops.thresher_tests, kind)

    def forward(self, x):
        n, length, _ = x.shape
        for qkv in (self.first, self.second):
            q, k, v = qkv(x).view(n, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
            x = self.kernel(q, k, v, self.dropout)[0].transpose(1, 2).reshape(n, length, 16)
        return self.out(x.mean(1))


@pytest.mark.parametrize(
    ("kind", "half"), [("efficient", False), ("efficient", True), ("flash", True)]
)
def test_attention_without_dropout_gets_the_subset_backward(kind, half):
    torch.manual_seed(0)
    model, x, rows = Attention(kind), torch.randn(12, 6, 16), torch.tensor([1, 4, 5])
    fast = subset_backward(model, strict=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        out = fast(x)
        wanted = model(x)[rows]
    kept_rows(out, rows).float().pow(2).sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    wanted.float().pow(2).sum().backward()
    assert fast.fallback is None
    for mine, plain in zip(found, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(
            mine, plain, rtol=0, atol=(2e-2 if half else 1e-5) * float(plain.abs().max())
        )


@pytest.mark.parametrize(("kind", "half"), [("efficient", False), ("flash", True)])
def test_attention_with_dropout_is_refused(kind, half):
    """Its mask depends on the place of a sample in the batch: the kept samples would get the masks of others."""
    torch.manual_seed(0)
    fast = subset_backward(Attention(kind, 0.1))
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        warnings.simplefilter("ignore")
        fast(torch.randn(12, 6, 16))
    assert fast.fallback is not None and "random" in fast.fallback
