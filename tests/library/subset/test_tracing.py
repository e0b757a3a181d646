"""What a traced graph could not repeat: the plain model is used, and is as it was before."""

import collections
import random
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives

from depth import depth
from subset_cases import Calls, numbers, same_as_plain, wrap
from thresher.subset import SubsetBackward, subset_backward, trace_budget, tracing

X = numbers(7, 6)
ROWS = torch.tensor([1, 4])
OUTSIDE = nn.Parameter(numbers(6, seed=9))


def put(m, x):
    h, chosen = m.linear(x), x[:, 0] > 0
    out = torch.zeros_like(h)
    out[chosen] = m.linear(h[chosen])
    return out


def assign(name, value):
    def run(m, x):
        h = m.linear(x)
        setattr(m, name, value(m, h))
        return h

    return run


def remember(m, x):
    if "mask" not in m.table:
        m.table["mask"] = torch.arange(6.0, dtype=torch.float64)
    return m.linear(x) * m.table["mask"]


def count(m, x):
    m.seen.append(1)
    return m.linear(x) * len(m.seen)


def stored(m, x):
    y = m.linear(x) * m.held.clone()
    m.held = m.held * 0.9
    return y


REFUSED = {
    "a branch on values": (
        lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(x).tanh(),
        "data-dependent",
    ),
    "a value as a number": (lambda m, x: m.linear(x) * x.sum().item(), "u0|data|values|mixes"),
    "rows by value": (lambda m, x: m.linear(x[x[:, 0] > 0]), "depends on values"),
    "rows by value, put back": (put, "depends on values"),
    "the length of the batch": (lambda m, x: m.linear(x) * len(x), "compared with a number"),
    "Python's random": (lambda m, x: m.linear(x) * random.random(), "draws random numbers outside"),
    "NumPy's random": (
        lambda m, x: m.linear(x) * float(np.random.rand()),
        "draws random numbers outside",
    ),
    "a parameter of nobody": (
        lambda m, x: m.linear(x) * OUTSIDE,
        r"tensor of shape \(6,\) that requires gradients",
    ),
    "an attribute": (assign("last", lambda m, h: h.detach()), "changes model.last"),
    "a counter": (assign("calls", lambda m, h: 1), "changes model.calls"),
    "a buffer": (stored, "assigns buffer held"),
    "a list": (count, "changes model.seen"),
    "a table": (remember, "changes model.table|fake buffer|in tensor_tracker"),
    "an input": (lambda m, x: m.linear(x.mul_(2)), "in place"),
    "a distribution": (
        lambda m, x: torch.distributions.Normal(m.linear(x), 1.0, validate_args=False),
        "returns tensors inside a Normal",
    ),
    "a size": (lambda m, x: (m.linear(x), x.shape[0]), "size that depends on the batch"),
    "a root of a size": (
        lambda m, x: (m.linear(x), x.shape[0] ** 0.5),
        "size that depends on the batch",
    ),
}


class Result:
    def __init__(self, value):
        self.inside = [value]


def made(function):
    torch.manual_seed(0)
    model = Calls(function)
    model.table, model.seen = {}, []
    model.register_buffer("held", torch.ones(6))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_the_plain_model_is_used_with_one_warning(name) -> None:
    function, why = REFUSED[name]
    sub = wrap(made(function), strict=False)
    random.seed(0)
    np.random.seed(0)
    state = random.getstate(), np.random.get_state()[2]
    with pytest.raises(RuntimeError, match=f"cannot be used with strict=True.*({why})") as refused:
        subset_backward(sub.wrapped, strict=True)(X.clone())
    assert sub.wrapped.seen == [] and sub.wrapped.table == {} and not hasattr(sub.wrapped, "last")
    assert (random.getstate(), np.random.get_state()[2]) == state and not sub.wrapped.held.ne(
        1
    ).any()
    assert all(type(p) is nn.Parameter for p in sub.parameters())
    # Without `strict` the model is traced in the same way, which `make test` does not repeat.
    same_reason = mock.patch.object(SubsetBackward, "_trace", side_effect=refused.value.__cause__)
    with (
        depth(same_reason, nullcontext()),
        pytest.warns(UserWarning, match="This warning is given once") as caught,
    ):
        sub(X.clone())
        sub(X.clone())
        sub(numbers(9, 6))
    assert len(caught) == 1 and caught[0].filename == __file__
    if name not in ("an input", "a distribution", "rows by value"):
        sub.wrapped.seen.clear()

        def loss(out, rows):
            random.seed(0)
            np.random.seed(0)
            return (out[0] if isinstance(out, tuple) else out)[rows].square().sum()

        if name != "a list":
            random.seed(0)
            np.random.seed(0)
            same_as_plain(sub, X.clone(), rows=ROWS, loss=loss)


@pytest.mark.usefixtures("group_of_one")
def test_communication_with_other_processes() -> None:
    def scaled(m, x):
        return m.linear(x) * functional_collectives.all_reduce(
            m.held, "sum", torch.distributed.group.WORLD
        )

    sub = wrap(made(scaled), strict=False)
    with pytest.warns(UserWarning, match="communicates with other processes"):
        same_as_plain(sub, X.clone(), rows=ROWS)
    assert sub.fallback is not None


def test_trained_tensors_hidden_from_the_module() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.parts = nn.Linear(6, 6), [nn.Linear(6, 6).double()]

        def forward(self, x):
            return self.parts[0](self.linear(x))

    sub = wrap(Hidden(), strict=False)
    with pytest.warns(UserWarning, match="no parameter of it"):
        sub(X)[ROWS].sum().backward()
    assert sub.wrapped.parts[0].weight.grad.any()


def test_what_is_hidden_in_an_object_but_no_tensor() -> None:
    note = Result("text")
    sub = wrap(Calls(lambda m, x: {"out": m.linear(x), "note": note}))
    assert sub(X)["note"] is note
    hidden = wrap(Calls(lambda m, x: (m.linear(x), Result(x * 2))), strict=False)
    with pytest.warns(UserWarning, match="returns tensors inside a Result"):
        assert torch.equal(hidden(X)[1].inside[0], X * 2)


def test_hooks_on_parts_are_called() -> None:
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
    ):
        sub, called = wrap(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), strict=False), []
        sub(X)
        assert sub.fallback is None
        handle = getattr(sub.wrapped[0], register)(lambda *args, called=called: called.append(1))
        with pytest.warns(
            UserWarning, match="module '0' has hooks, which a traced graph does not call"
        ):
            sub(X.clone().requires_grad_()).sum().backward()
        assert called == [1], register
        handle.remove()
        same_as_plain(sub, X, rows=ROWS)
        assert called == [1]


def test_hooks_on_the_wrapper_are_called() -> None:
    sub, called = wrap(nn.Linear(6, 6)), []
    sub.register_forward_hook(lambda *args: called.append(1))
    same_as_plain(sub, X, rows=ROWS)
    assert called == [1]


def test_parameters_without_a_shape() -> None:
    sub = subset_backward(nn.Sequential(nn.LazyLinear(4), nn.Tanh()))
    with pytest.warns(
        UserWarning, match="parameters without a shape yet; call it once before wrapping it"
    ):
        assert sub(X.float()).shape == (7, 4)
    sub.double()
    same_as_plain(sub, X, rows=ROWS)


def test_the_same_output_twice_and_outputs_without_gradient() -> None:
    sub = wrap(Calls(lambda m, x: (lambda h: {"a": h, "b": [h, h.argmax(1)]})(m.linear(x).tanh())))
    same_as_plain(sub, X, rows=ROWS)
    nothing = wrap(Calls(lambda m, x: m.linear(x).argmax(1)), strict=False)
    with pytest.warns(UserWarning, match="using the plain Calls"):
        assert torch.equal(nothing(X), nothing.wrapped(X))


Pair = collections.namedtuple("Pair", "a b")


def test_kinds_of_containers_are_kept() -> None:
    sub = wrap(
        Calls(
            lambda m, x: collections.OrderedDict(
                p=Pair(m.linear(x), 3), l=[x.shape[1], torch.arange(3)]
            )
        )
    )
    found = sub(X)
    assert type(found) is collections.OrderedDict and type(found["p"]) is Pair and found["p"].b == 3
    assert found["l"][0] == 6 and torch.equal(found["l"][1], torch.arange(3))


@pytest.mark.parametrize("limit", ["MOST_OPERATIONS", "MOST_SECONDS", "MEMORY_SHARE"])
def test_a_long_trace_is_given_up(monkeypatch, limit) -> None:
    def loops(m, x):
        for _ in range(40):
            x = x + m.linear(x).tanh()
        return x

    least = {"MOST_OPERATIONS": 300, "MOST_SECONDS": 0.0, "MEMORY_SHARE": -0.01}
    monkeypatch.setattr(trace_budget, limit, least[limit])
    make = mock.Mock(wraps=tracing.trace_joint)
    monkeypatch.setattr(tracing, "trace_joint", make)
    model = Calls(loops)
    x = torch.randn(8, 6)
    sub = subset_backward(model.to(x.dtype), strict=False)
    with pytest.warns(UserWarning, match="tracing it takes more than") as caught:
        outputs = sub(x)
    assert torch.equal(sub(x), outputs)
    assert torch.equal(outputs, model(x))
    assert len(caught) == 1
    assert make.call_count <= 1  # no other assumption about the batch is tried
