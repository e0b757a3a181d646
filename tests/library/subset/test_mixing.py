"""Models whose samples reach each other, in ways that are easy to miss: the plain model is used, and gradients are exact."""

import copy
import re

import pytest
import torch
from torch import nn

from depth import depth
from subset_cases import Calls, SmallResNet, masked, numbers, outcome, same_as_plain, tokens, wrap
from thresher.subset import mixes_samples, subset_backward

X = numbers(24, 6)


def attention(m, x):
    h = m.linear(x)
    return (h @ h.T).softmax(1) @ h


def centered_ids(m, ids):
    h = m.linear(m.embed(ids).mean(1))
    return h - h.mean(0)


class Centring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


MIXING = {
    "mean": (lambda m, x: m.linear(x) - m.linear(x).mean(0), "mean"),
    "weak mean": (lambda m, x: m.linear(x) - 1e-6 * m.linear(x).mean(0), "mean"),
    "mean behind a large number": (
        lambda m, x: torch.cat([1e9 * x, m.linear(x) - m.linear(x).mean(0)], 1)[:, 6:],
        "mean",
    ),
    "flip": (lambda m, x: m.linear(x) * m.linear(x).flip(0), "flip"),
    "sort": (lambda m, x: m.linear(x).sort(0).values * x, "sort"),
    "cumulated": (lambda m, x: m.linear(x).cumsum(0), "cumsum"),
    "attention across the batch": (attention, "dimensions|mixes"),
    "largest of all": (lambda m, x: m.linear(x) / m.linear(x).abs().max(), "max"),
    "largest of a column": (
        lambda m, x: m.linear(x) * m.linear(x).sum(1, keepdim=True).amax(0),
        "amax|differ",
    ),
    "roll by 1": (lambda m, x: m.linear(x) * m.linear(x).roll(1, 0), "roll"),
    "roll by 4": (lambda m, x: m.linear(x) * m.linear(x).roll(4, 0), "roll"),
    "roll by 5": (lambda m, x: m.linear(x) * m.linear(x).roll(5, 0), "roll"),
    "roll by 20": (lambda m, x: m.linear(x) * m.linear(x).roll(20, 0), "roll"),
    "roll by half": (lambda m, x: m.linear(x) * m.linear(x).roll(x.shape[0] // 2, 0), "roll"),
    "one sample for all": (lambda m, x: m.linear(x) - m.linear(x)[9], "select"),
    "a range for all": (lambda m, x: m.linear(x) - m.linear(x)[8:9].sum(0), "sum|slice|differ"),
    "picked samples for all": (
        lambda m, x: m.linear(x) - m.linear(x)[torch.tensor([9, 10])].sum(0),
        "index",
    ),
    "a permutation": (
        lambda m, x: m.linear(x).tanh() + m.linear(x)[torch.randperm(x.shape[0])],
        "index|differ",
    ),
    "a permutation by sorting": (
        lambda m, x: m.linear(x) + m.linear(x)[torch.rand(x.shape[0]).argsort()],
        "index|differ",
    ),
    "divided by the batch size": (
        lambda m, x: m.linear(x).tanh() / x.shape[0],
        "gradients of some rows differ",
    ),
    "only backward": (
        lambda m, x: Centring.apply(m.linear(x)).tanh(),
        "gradients of some rows differ",
    ),
    "groups of samples": (
        lambda m, x: m.linear(x).view(4, -1, 6).softmax(0).reshape(-1, 6),
        "compared|size|batch",
    ),
    "convolution over the batch": (
        lambda m, x: (
            nn.functional.conv1d(
                m.linear(x).T[None], m.linear.weight[:, :, None].expand(-1, -1, 3), padding=1
            )[0].T
        ),
        "convolution",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_the_plain_model_is_used(name) -> None:
    function, named = MIXING[name]
    torch.manual_seed(0)
    sub = wrap(Calls(function), strict=False)
    with pytest.warns(UserWarning, match="using the plain Calls") as caught:
        sub(X)
    assert len(caught) == 1 and sub.fallback
    assert re.search(named, sub.fallback), sub.fallback
    for rows in ([0], [3, 9], list(range(0, 24, 2))):
        same_as_plain(sub, X, rows=rows, tolerance=1e-14)
    if name not in depth(("mean", "divided by the batch size"), MIXING):
        return
    strict = subset_backward(sub.wrapped, strict=True)
    with pytest.raises(
        RuntimeError, match="subset_backward: Calls cannot be used with strict=True"
    ):
        strict(X)


def test_mixing_of_what_is_trained_behind_integers() -> None:
    for first in (
        torch.zeros(9, 5, dtype=torch.int64),
        (torch.arange(9) % 3 == 0).long()[:, None].expand(9, 5),
    ):
        model = Calls(centered_ids)
        model.embed = nn.Embedding(11, 6)
        sub = wrap(model, strict=False)
        with pytest.warns(UserWarning, match="are equal|mean"):
            sub(first)
        same_as_plain(sub, tokens(9, 5), rows=[0, 3, 5])


def test_statistics_that_are_only_stored_disturb_nobody() -> None:
    def run(model, x):
        with torch.no_grad():
            model.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return model.linear(x)

    model = Calls(run)
    model.register_buffer("seen", torch.zeros(6))
    sub = wrap(model)
    for _ in range(3):
        same_as_plain(sub, X, rows=[1, 2])
        sub(X)
    assert sub.seen.any()


def test_a_loss_of_the_whole_batch_beside_outputs() -> None:
    sub = wrap(
        Calls(lambda m, x: (m.linear(x), m.linear(x).square().mean(), m.linear(x).logsumexp(0)))
    )
    same_as_plain(sub, X, rows=[1, 2], loss=lambda out, rows: out[0][rows].sum())
    same_as_plain(sub, X, rows=[1, 2], loss=lambda out, rows: out[1] + out[2].sum())


def test_whatever_is_tried_out_leaves_no_trace() -> None:
    torch.manual_seed(0)
    sub = wrap(SmallResNet())
    plain, x, state = copy.deepcopy(sub.wrapped), numbers(5, 3, 8, 8), torch.get_rng_state()
    out = sub(x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(out, plain(x))
    for name, value in sub.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert all(p.grad is None for p in sub.parameters())


def test_parameters_of_zero_do_not_hide_what_they_scale() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.linear(x) + self.gate * self.linear(x).mean(0)

    sub = wrap(Gated(), strict=False)
    with pytest.warns(UserWarning, match="mean"):
        sub(X)


def test_mixes_samples() -> None:
    net = nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
        nn.BatchNorm1d(6, track_running_stats=False),
    )
    assert mixes_samples(net) == ("BatchNorm1d '1'", "BatchNorm1d '3'")
    net.eval()
    assert mixes_samples(net) == ("BatchNorm1d '3'",)
    assert mixes_samples(nn.Linear(2, 2)) == ()
    sub = wrap(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    assert mixes_samples(sub) == ("BatchNorm1d '1'",)
    sub(X)
    assert len(mixes_samples(sub)) == 2 and "batch_norm" in mixes_samples(sub)[1]
    assert mixes_samples(nn.ModuleList([sub]))[-1] == mixes_samples(sub)[1]
    assert len(mixes_samples(subset_backward(nn.BatchNorm1d(6)))) == 1
    with pytest.raises(
        TypeError, match="mixes_samples: `model` must be a torch.nn.Module, got int"
    ):
        mixes_samples(3)


@pytest.mark.parametrize("kwargs", [{"affine": False}, {"track_running_stats": False}])
def test_kinds_of_batch_norm_cost_only_the_kept_rows(kwargs) -> None:
    torch.manual_seed(0)
    sub = wrap(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **kwargs), nn.Tanh(), nn.Linear(6, 3))
    )
    rows = torch.arange(0, 24, 3)
    plain, found = (outcome(model, (X,), {}, rows, masked) for model in (sub.wrapped, sub))
    torch.testing.assert_close(found.outputs, plain.outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.buffers, plain.buffers, rtol=1e-12, atol=1e-12)
    a, b = (torch.cat([g.flatten() for g in which.gradients.values()]) for which in (plain, found))
    assert a @ b / (a.norm() * b.norm()) > 0.8
    same_as_plain(sub, X, rows=range(24))


@pytest.mark.parametrize("size", [24, depth(48, 96)])
def test_a_bias_before_batch_normalization_is_no_difference(size) -> None:
    """Its gradient is 0 in theory and rounding alone in float32, which says nothing of samples that mix."""
    torch.manual_seed(0)
    parts = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
    ]
    model = nn.Sequential(*parts, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.rand(16, 3, size, size)
    model(x)
    sub = subset_backward(model, strict=True)
    sub(x)[:3].sum().backward()
    assert model[0].weight.grad.isfinite().all() and sub.fallback is None
