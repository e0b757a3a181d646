"""A wrapped model is used as the model: its attributes are set through it, and its parts are indexed."""

import copy
import logging
import random

import pytest
import torch
from torch import nn

from subset_cases import Calls, numbers, same_as_plain, wrap

X = numbers(7, 6)


def test_attributes_that_are_set_reach_the_model() -> None:
    model = Calls(lambda m, x: m.linear(x) * m.temperature)
    model.temperature = 1.0
    sub = wrap(model)
    before = sub(X).detach()
    sub.temperature = 0.5
    assert model.temperature == 0.5 and torch.allclose(sub(X), before / 2)
    same_as_plain(sub, X, rows=[1])
    sub.linear = nn.Linear(6, 2).double()
    assert model.linear is sub.linear and sub(X).shape == (7, 2)
    sub.linear.weight = nn.Parameter(torch.zeros(2, 6, dtype=torch.float64))
    assert torch.equal(sub(X), sub.linear.bias.expand(7, 2) / 2)
    assert (
        [name for name, _ in sub.named_parameters()]
        == list(sub.state_dict())
        == list(model.state_dict())
    )
    del sub.temperature
    assert not hasattr(model, "temperature")
    with pytest.raises(AttributeError, match="temperature"):
        del sub.temperature
    with pytest.raises(
        AttributeError,
        match="`wrapped` cannot be replaced; call subset_backward with the other model",
    ):
        sub.wrapped = nn.Linear(2, 2)


def test_attributes_of_the_wrapper_stay_its_own() -> None:
    sub = wrap(nn.Linear(6, 3))
    sub.strict = False
    sub.training = False
    assert "strict" not in vars(sub.wrapped) and not sub.wrapped.training
    sub.train()
    assert sub.training and sub.wrapped.training
    other = copy.deepcopy(sub)
    other.note = 3
    assert other.wrapped.note == 3 and not hasattr(sub, "note")


def test_parts_are_indexed_where_those_of_the_model_are() -> None:
    sub = wrap(nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    before = sub(X)
    assert (
        sub[0] is sub.wrapped[0]
        and len(sub) == 2
        and list(sub) == list(sub.wrapped)
        and sub[1] in sub
        and sub
    )
    sub[1] = nn.Identity()
    assert not torch.allclose(sub(X), before)
    del sub[1]
    assert len(sub.wrapped) == 1 and torch.equal(copy.deepcopy(sub)(X), sub(X))
    plain = wrap(nn.Linear(6, 4))
    assert plain and not hasattr(plain, "__len__")
    with pytest.raises(TypeError, match="not subscriptable"):
        plain[0]


def test_a_long_trace_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.subset.module.SECONDS_TO_TELL", -1.0)
    sub = wrap(nn.Linear(6, 3), strict=False)
    with caplog.at_level(logging.WARNING, "thresher"):
        sub(X)
        sub(X.unsqueeze(1))
    assert len(caplog.records) == 1 and caplog.messages[0].startswith(
        "subset_backward: tracing Linear took "
    )


def test_a_forward_that_fails_while_it_is_traced_leaves_the_random_states() -> None:
    def fails(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no layer {random.random()}")

    sub, state = wrap(Calls(fails)), random.getstate()
    with pytest.raises(RuntimeError, match="no layer"):
        sub(X)
    assert random.getstate() == state
