"""A traced model is compared with the model now and then, which has no other effect than to notice what a trace cannot see."""

import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.module_tracker import ModuleTracker

from subset_cases import Calls, conv_net, numbers, outcome, same_as_plain, wrap

X = numbers(7, 6)
ROWS = torch.tensor([1, 4])


class Inner:
    def __init__(self) -> None:
        self.scale = 1.0


class Outer:
    """An object whose numbers are inside another object, where a trace does not look."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.calls: list[int] = []


def deep():
    model = Calls(lambda m, x: m.linear(x) * m.deep.inner.scale)
    model.deep = Outer()
    return model


def test_a_change_that_cannot_be_seen_is_found_by_a_comparison() -> None:
    sub = wrap(deep(), strict=False)
    for _ in range(5):
        same_as_plain(sub, X, rows=ROWS)
    sub.deep.inner.scale = 3.0
    with pytest.warns(
        UserWarning, match="in call 8 .*differ from the model's.*may be wrong.*given once"
    ) as caught:
        for _ in range(4):
            sub(X)
    assert len(caught) == 1 and "in call 8" in sub.fallback
    for scale in (3.0, 5.0):
        sub.deep.inner.scale = scale
        same_as_plain(sub, X, rows=ROWS)
        same_as_plain(copy.deepcopy(sub), X, rows=ROWS)


def test_strict_raises_where_outputs_differ() -> None:
    sub = wrap(deep())
    sub(X)
    sub.deep.inner.scale = 3.0
    with pytest.raises(
        RuntimeError,
        match="strict=True: in call 2 of the traced model its outputs differ from the model",
    ):
        sub(X)


def test_buffers_that_a_trace_updates_in_another_way_are_found() -> None:
    def run(m, x):
        m.seen.add_(m.deep.inner.scale)
        return m.linear(x)

    model = Calls(run)
    model.deep = Outer()
    model.register_buffer("seen", torch.zeros(1))
    sub = wrap(model, strict=False)
    sub(X)
    model.deep.inner.scale = 3.0
    with pytest.warns(UserWarning, match="differ from the model's"):
        sub(X)
    assert float(model.seen) == 4.0


def test_a_comparison_leaves_no_trace() -> None:
    torch.manual_seed(0)
    sub = wrap(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3)))
    plain = copy.deepcopy(sub.wrapped)
    for step in range(9):
        found, expected = (outcome(model, (X,), {}, torch.arange(7)) for model in (sub, plain))
        assert all(map(torch.equal, found.outputs, expected.outputs)) and torch.equal(
            found.drawn, expected.drawn
        )
        for name, value in expected.buffers.items():
            assert torch.equal(found.buffers[name], value), (step, name)
    sub.zero_grad()
    waiting = [sub(X) for _ in range(9)]  # no comparison changes what an earlier call saved
    sum(out.sum() for out in waiting).backward()
    assert sub.fallback is None


@pytest.mark.parametrize(
    "last",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.alpha_dropout(x, 0.3, True),
        lambda x: x * torch.rand_like(x) + torch.randn(x.shape[1], dtype=x.dtype),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)) + torch.empty_like(x).exponential_(),
        lambda x: nn.functional.scaled_dot_product_attention(
            *[x[:, None, :, None]] * 3, dropout_p=0.5
        )[:, 0],
    ],
    ids=["half", "alpha", "numbers", "tensor", "attention"],
)
def test_random_operations_do_not_differ(last) -> None:
    sub = wrap(Calls(lambda m, x: last(m.linear(x))), strict=False)
    sub(X)
    assert sub.fallback is None or "not those" not in sub.fallback


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (torch.rand_like, None),
        (lambda x: torch.empty_like(x).bernoulli_(0.5), None),
        # Torch has one operation for this and for `bernoulli_`, which draws in the order of the memory.
        (lambda x: torch.bernoulli(x, 0.5), "draw other random numbers"),
    ],
    ids=["rand_like", "bernoulli_", "bernoulli"],
)
def test_small_draws_are_compared_with_other_draws(noise, reason) -> None:
    model = Calls(lambda m, x: m.linear(x) + 1e-4 * noise(x))
    sub = wrap(model, strict=False, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        sub(torch.randn(7, 2, 3, 6).to(memory_format=torch.channels_last))
    assert sub.fallback is reason or reason in sub.fallback


def test_low_precision_does_not_differ() -> None:
    torch.manual_seed(0)
    sub = wrap(conv_net(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        sub(numbers(6, 3, 8, 8).float())
    assert sub.fallback is None


# Globals, closures and hooks

SCALE, LOG, COUNT = 1.0, [], 0
CONFIG = {"scale": 1.0}
ARRAY = np.ones(6)


def helped(x):
    return x * SCALE


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.linear(x)) * CONFIG["scale"]

    def last(self, x):
        return helped(x)


def test_globals_that_a_forward_reads_are_seen_at_once(monkeypatch) -> None:
    sub = wrap(Reads())
    for _ in range(3):
        same_as_plain(sub, X, rows=ROWS)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    same_as_plain(sub, X, rows=ROWS)
    monkeypatch.setitem(CONFIG, "scale", 5.0)
    same_as_plain(sub, X, rows=ROWS)
    monkeypatch.setitem(globals(), "helped", lambda x: x.tanh())
    same_as_plain(sub, X, rows=ROWS)
    assert sub._patience.traces == 4


def test_a_closure_that_a_forward_reads_is_seen_at_once() -> None:
    scale = 1.0
    sub = wrap(Calls(lambda m, x: m.linear(x) * scale))
    same_as_plain(sub, X, rows=ROWS)
    scale = 3.0
    same_as_plain(sub, X, rows=ROWS)


class Counts(Reads):
    def forward(self, x):
        global COUNT
        COUNT += 1
        LOG.append(COUNT)
        return self.linear(x)


def test_a_forward_with_effects_on_globals_has_them_as_often_as_it_is_called() -> None:
    sub = wrap(Counts(), strict=False)
    with pytest.warns(UserWarning, match="forward changes COUNT, LOG"):
        for _ in range(5):
            sub(X)
    assert COUNT == 5 and LOG == [1, 2, 3, 4, 5] and sub._patience.traces == 4


class Slots:
    __slots__ = ("scale",)


@pytest.mark.parametrize("kind", ["an array", "slots", "a nested object"])
def test_changes_inside_attributes_are_seen_at_once(kind) -> None:
    model = Calls(
        lambda m, x: m.linear(x) * float(m.array[0]) * m.slots.scale * m.config["a"].b.scale
    )
    model.array, model.slots, model.config = np.ones(3), Slots(), {"a": SimpleNamespace(b=Inner())}
    model.slots.scale = 1.0
    sub = wrap(model)
    same_as_plain(sub, X, rows=ROWS)
    if kind == "an array":
        model.array[0] = 3.0
    else:
        (model.slots if kind == "slots" else model.config["a"].b).scale = 3.0
    same_as_plain(sub, X, rows=ROWS)
    assert sub._patience.traces == 2


def test_hooks_for_all_modules_are_called() -> None:
    sub, called = wrap(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), strict=False), []
    sub(X)
    handle = register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    with pytest.warns(
        UserWarning,
        match="hooks are registered for all modules, which a traced graph does not call",
    ):
        sub(X)
    assert called == ["Linear", "Tanh", "Sequential", "SubsetContainer"]
    handle.remove()
    with ModuleTracker(), warnings.catch_warnings():
        sub(X)  # the hooks by which torch names modules in a profile
    assert sub.fallback is None
