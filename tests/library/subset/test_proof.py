"""The first step compares the graphs of a model with the model itself: outputs, random draws and gradients."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thresher
from thresher.subset import assembly, making

N, KEPT = 6, [1, 3, 4]


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ELU(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
    )  # fmt: skip


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a loss per pixel, whose gradient has the channels last."""
    weights = torch.randn(N, 6 * 6 * 4, generator=torch.Generator().manual_seed(0))
    outputs = model(x).permute(0, 2, 3, 1).reshape(N, -1)
    (outputs * weights).mean(1)[KEPT].sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_wrong_gradients_are_found(monkeypatch) -> None:
    """Without the memory format of its input, GroupNorm has wrong gradients on CPUs."""
    monkeypatch.setattr(assembly, "as_input", lambda gradient, x: gradient)
    model = images()
    x = torch.randn(N, 3, 6, 6)
    expected = gradients(copy.deepcopy(model), x)
    of_rows = thresher.subset_backward(model)
    with pytest.warns(UserWarning, match="its graphs return other gradients") as caught:
        found = gradients(of_rows, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(caught) == 1
    of_rows(x)
    assert "other gradients" in (of_rows.fallback or "")
    with pytest.raises(RuntimeError, match="its graphs return other gradients"):
        thresher.subset_backward(model, strict=True)(x)


def test_outputs_that_differ_are_found(monkeypatch) -> None:
    make = making.make_graphs

    def wrong_graphs(*args):
        graphs = make(*args)
        forward = graphs.forward
        graphs.forward = lambda given: [2 * value for value in forward(given)]
        return graphs

    monkeypatch.setattr(making, "make_graphs", wrong_graphs)
    with pytest.warns(UserWarning, match="its graphs return other outputs"):
        thresher.subset_backward(nn.Linear(3, 2))(torch.randn(N, 3))


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.reentrant else x
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("kind", ["layers", "checkpoint", "reentrant checkpoint"])
def test_the_check_changes_nothing(kind) -> None:
    """No hook of a parameter runs, and gradients, buffers, random states and inputs stay as they were."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    )
    if kind != "layers":
        model = Recomputed(reentrant=kind.startswith("reentrant"))
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(calls.append)
        parameter.register_post_accumulate_grad_hook(calls.append)
    plain = copy.deepcopy(model)
    x = torch.randn(N, 3, requires_grad=True)
    x.register_hook(calls.append)
    of_rows = thresher.subset_backward(model)
    results = []
    for each in (plain, of_rows):
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            results.append((each(x.clone()), torch.get_rng_state()))
    (expected, state), (outputs, drawn) = results
    assert not calls
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    assert torch.equal(drawn, state)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_autocast_keeps_no_casts_of_the_check() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        of_rows = thresher.subset_backward(nn.Linear(64, 64), strict=True)
        of_rows(torch.randn(N, 64))
        assert torch.is_autocast_cache_enabled()
    assert of_rows.fallback is None


def noise(function):
    """A model whose forward draws."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.lstm = nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self, self.layer(x))

    torch.manual_seed(0)
    return Draws()


DRAWS = {
    "rrelu": lambda m, h: F.rrelu(h, training=True),
    "normal": lambda m, h: h + torch.normal(h.detach(), h.detach().abs()),
    "normal of a number": lambda m, h: h * torch.normal(0.3, h.detach().abs()),
    "bernoulli": lambda m, h: h * torch.bernoulli(h.detach().sigmoid()),
    "geometric": lambda m, h: h * torch.empty_like(h).geometric_(0.3),
    "multinomial": lambda m, h: h.gather(1, torch.multinomial(h.detach().softmax(1), 3)),
    "poisson": lambda m, h: h * torch.poisson(h.detach().exp()),
    "everything dropped": lambda m, h: F.dropout(h, 1.0) + h,
    "alpha_dropout": lambda m, h: F.alpha_dropout(h, 0.3, training=True),
    "feature_dropout": lambda m, h: torch.feature_dropout(h[:, :, None], 0.3, True),
    "gumbel_softmax": lambda m, h: F.gumbel_softmax(h),
    "LSTM": lambda m, h: m.lstm(h[:, None].expand(-1, 4, -1))[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_model(name) -> None:
    model = noise(DRAWS[name])
    x = torch.randn(N, 6)
    torch.manual_seed(1)
    expected = model(x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        outputs = thresher.subset_backward(model)(x)
    # Not bit by bit: the graph of an LSTM rounds in another order than oneDNN.
    torch.testing.assert_close(outputs, expected)
    assert torch.equal(torch.get_rng_state(), state)
