import copy
import io
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import thresher
from depth import depth, in_verify
from helpers import noted
from subset_cases import Calls, numbers, same_as_plain, tokens, traced, wrap
from thresher.subset import SubsetBackward, module, subset_backward, tracing

X = numbers(7, 6)
ROWS = torch.tensor([1, 4])


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# The user's model, seen through


def test_it_is_the_model() -> None:
    net = perceptron()
    net.note = "kept"
    sub = subset_backward(net)
    assert thresher.subset_backward is subset_backward and isinstance(sub, SubsetBackward)
    assert sub.wrapped is net and sub.note == "kept"
    assert [id(p) for p in sub.parameters()] == [id(p) for p in net.parameters()]
    assert list(sub.state_dict()) == list(net.state_dict())
    assert list(dict(sub.named_modules())) == list(dict(net.named_modules()))
    outer = nn.ModuleDict({"a": sub})
    assert list(outer.state_dict()) == ["a." + name for name in net.state_dict()]
    changed = {name: value + 1 for name, value in outer.state_dict().items()}
    outer.load_state_dict(changed)
    assert torch.equal(net[0].weight, changed["a.0.weight"])
    sub.load_state_dict(perceptron().state_dict())
    assert torch.equal(net[0].weight, perceptron()[0].weight)
    with pytest.raises(AttributeError, match="missing"):
        sub.missing  # noqa: B018
    with pytest.raises(TypeError, match="`model` must be a torch.nn.Module, got int"):
        subset_backward(3)


def test_modes_and_devices_go_through() -> None:
    sub = wrap(perceptron(), dtype=torch.float32)
    sub(X.float())
    assert not sub.eval().wrapped.training and sub.train().wrapped[1].training
    sub.to(torch.float64)
    same_as_plain(sub, X, rows=ROWS)
    assert sub.wrapped[0].weight.dtype is torch.float64 and traced(sub) == 2


def test_without_gradients_it_is_the_plain_model() -> None:
    sub = wrap(perceptron())
    with mock.patch.object(tracing, "trace_joint", side_effect=AssertionError):
        with torch.no_grad():
            assert torch.equal(sub(X), sub.wrapped(X))
        with torch.inference_mode():
            assert torch.equal(sub(X), sub.wrapped(X))
        sub.requires_grad_(False)
        assert not sub(X).requires_grad
        assert torch.equal(sub(X[:1]), sub.wrapped(X[:1]))


@pytest.mark.parametrize("called", [False, True])
def test_copies_and_pickles(called) -> None:
    sub = wrap(perceptron())
    if called:
        sub(X)
    stored = io.BytesIO()
    torch.save(sub, stored)
    stored.seek(0)
    for other in (copy.deepcopy(sub), torch.load(stored, weights_only=False)):
        assert (
            torch.equal(other(X), sub(X)) and other.wrapped[0].weight is not sub.wrapped[0].weight
        )
        assert other.wrapped[0].weight is next(other.parameters()) and traced(other) == 1
        same_as_plain(other, X, rows=ROWS)
        with torch.no_grad():
            next(other.parameters()).zero_()
        same_as_plain(other, X, rows=ROWS)


# What tracing took for constant


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.conv = nn.Linear(6, 6), nn.Tanh(), nn.Conv1d(1, 1, 3, padding=1)
        self.scale, self.pair, self.table, self.function = 1.0, (1.0, [2.0]), {"a": 1.0}, torch.sin
        self.config, self.single, self.double = (
            types.SimpleNamespace(a=1.0),
            np.float32(1),
            np.float64(1),
        )
        self.weight, self.tensor, self.listed = (
            nn.Parameter(torch.ones(6)),
            torch.ones(6),
            [torch.ones(6)],
        )
        self.register_buffer("held", torch.ones(6))

    def forward(self, x):
        h = self.function(self.act(self.linear(x)) * self.pair[1][0])
        h = self.conv(h[:, None])[:, 0] if self.scale > 0 else h
        h = (
            h
            * self.scale
            * self.pair[0]
            * self.table["a"]
            * self.config.a
            * float(self.single)
            * float(self.double)
        )
        return (
            (h.sum(1, keepdim=True) + self.linear.weight.sum())
            * self.weight
            * self.tensor
            * self.listed[0]
            * self.held
        )


CHANGES = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a tuple": lambda m: setattr(m, "pair", (2.0, [2.0])),
    "a list": lambda m: m.pair[1].__setitem__(0, 3.0),
    "a dict": lambda m: m.table.update(a=3.0),
    "a function": lambda m: setattr(m, "function", torch.cos),
    "an object": lambda m: setattr(m.config, "a", 3.0),
    "another object": lambda m: setattr(m, "config", types.SimpleNamespace(a=4.0)),
    "a NumPy number": lambda m: setattr(m, "single", np.float32(3)),
    "a NumPy double": lambda m: setattr(m, "double", np.float64(3)),
    "a module": lambda m: setattr(m, "act", nn.Sigmoid()),
    "padding": lambda m: setattr(m.conv, "padding", (0,)),
    "a parameter": lambda m: setattr(
        m, "weight", nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    ),
    "a parameter in place": lambda m: m.weight.data.mul_(2),
    "a tensor": lambda m: setattr(m, "tensor", torch.full((6,), 3.0)),
    "a tensor in place": lambda m: m.tensor.mul_(3),
    "a tensor in a list": lambda m: m.listed.__setitem__(0, torch.full((6,), 3.0)),
    "a buffer": lambda m: setattr(m, "held", torch.full((6,), 3.0, dtype=torch.float64)),
    "frozen": lambda m: m.linear.requires_grad_(False),
    "evaluation": lambda m: m.eval(),
}


SOME = (
    "a number",
    "an object",
    "a module",
    "a parameter in place",
    "a tensor in place",
    "a buffer",
    "frozen",
    "evaluation",
)


def test_changes_after_a_call_are_noticed() -> None:
    """One model goes through the changes, so that it is traced once for each; test_settings.py notices all without tracing."""
    torch.manual_seed(0)
    sub = wrap(Settings())
    same_as_plain(sub, X, rows=ROWS)
    for name in depth(SOME, tuple(CHANGES)):
        with noted(name):
            before, made = sub.wrapped(X).detach(), sub._patience.traces
            CHANGES[name](sub.wrapped)
            same_as_plain(sub, X, rows=ROWS)
            assert sub.fallback is None
            if name not in ("frozen", "evaluation"):
                assert not torch.allclose(before, sub.wrapped(X))
            assert sub._patience.traces == made + (
                0 if "in place" in name or name == "a buffer" else 1
            )


def test_arguments_that_change() -> None:
    sub = wrap(Calls(lambda m, x, how, scale=1.0: getattr(m.linear(x), how)() * scale))
    for how, scale in (
        ("tanh", 1.0),
        ("sin", 1.0),
        ("tanh", 2.0),
        ("tanh", 2),
        ("tanh", np.float64(3)),
    ):
        same_as_plain(sub, X, how, rows=ROWS, scale=scale)
    assert traced(sub) == 5 and sub.fallback is None


class Holder:
    value = 1.0


@pytest.mark.parametrize(
    "value",
    [np.ones(6), Holder(), {1, 2}, torch.eye(7, dtype=torch.float64).to_sparse()],
    ids=["array", "object", "set", "sparse"],
)
def test_arguments_whose_content_could_change_are_refused(value) -> None:
    sub = wrap(Calls(lambda m, x, value: m.linear(x)), strict=False)
    with pytest.warns(UserWarning, match="it is given a (ndarray|Holder|set|sparse)"):
        sub(X, value)
    same_as_plain(sub, X, value, rows=ROWS)


# Inputs of which it is not clear what carries the batch


def test_two_batches_whose_product_has_both() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x, y):
            return self.a(x) @ self.b(y).T

    sub = wrap(Towers())
    for n in (8, 8, 7, 6, 8):
        same_as_plain(sub, numbers(n, 6), numbers(n, 6, seed=1), rows=[0, 3])


def test_padding_that_changes_and_packed_sequences() -> None:
    sub = wrap(nn.Sequential(nn.Embedding(11, 4), nn.Flatten(1, 1)))
    for length in (3, 4, 3):
        same_as_plain(sub, tokens(7, length), rows=ROWS)
    assert traced(sub) == 2
    lstm = wrap(nn.LSTM(6, 3, batch_first=True), strict=False)
    packed = nn.utils.rnn.pack_padded_sequence(
        numbers(4, 5, 6), torch.tensor([5, 3, 3, 1]), batch_first=True
    )
    with pytest.warns(UserWarning, match="using the plain LSTM"):
        lstm(packed)
    assert torch.equal(lstm(packed)[0].data, lstm.wrapped(packed)[0].data)


# Bounds


def test_old_traces_go(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACES", 2)
    sub = wrap(Calls(lambda m, x, scale: m.linear(x) * scale), strict=False)
    for scale in (1, 2, 1, 3):
        sub(X, scale)
    assert len(sub._traces) == traced(sub) == 2 and sub._patience.traces == 3
    sub(X, 1)
    assert sub._patience.traces == 3
    sub(X, 2)
    assert sub._patience.traces == 4


def test_a_batch_size_out_of_reach_is_traced_again() -> None:
    sub = wrap(
        Calls(lambda m, x: m.linear(x) * (2 if x.shape[0] < 4 else 3 if x.shape[0] < 9 else 5))
    )
    for n in (5, 2, 3, 12, 8, 40):
        same_as_plain(sub, numbers(n, 6), rows=[0])
    assert traced(sub) == 3


def test_a_module_that_is_shared_no_more_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2] = model[0]
    sub = thresher.subset_backward(model)
    x = torch.randn(4, 3)
    assert torch.allclose(sub(x), model(x))
    model[2] = nn.Linear(3, 3)
    assert torch.allclose(sub(x), model(x)) and sub.fallback is None


def test_a_number_that_becomes_a_tensor_is_seen():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), 1.0

        def forward(self, x):
            return self.linear(x) * self.scale

    model = Scaled()
    sub = thresher.subset_backward(model)
    sub(torch.randn(4, 3)).sum().backward()
    model.scale = torch.tensor(1.0, requires_grad=True)
    with pytest.warns(UserWarning, match="using the plain Scaled"):
        sub(torch.randn(4, 3)).sum().backward()
    assert model.scale.grad is not None


@in_verify
def test_the_compiler_is_loaded_where_it_is_needed() -> None:
    """It takes longer than everything else that is imported."""
    code = """
import sys
import torch
import thresher

thresher.attach
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
thresher.subset_backward(torch.nn.Linear(2, 2))
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
