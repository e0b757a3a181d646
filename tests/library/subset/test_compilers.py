"""Models that torch.compile has compiled: how they are recognized, and what is said where Inductor cannot compile."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from subset_cases import numbers, same_as_plain
from thresher.subset import SubsetBackward, compilers, subset_backward

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("newer_torch"),
]
X = numbers(7, 6)
compile_model: Any = torch.compile


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def other_backend(graph, _):
    return graph.forward


def in_place(net: nn.Module, **settings) -> nn.Module:
    net.compile(**settings)
    return net


def with_a_part(net: Any) -> nn.Module:
    net[2] = compile_model(net[2], options={"max_fusion_size": 3})
    return net


MODELS = {
    "plain": (lambda net: net, None, None),
    "compiled": (compile_model, {}, None),
    "with settings": (
        lambda net: compile_model(net, options={"max_fusion_size": 3}),
        {"max_fusion_size": 3},
        None,
    ),
    "eager": (lambda net: compile_model(net, backend="eager"), None, None),
    "another backend": (
        lambda net: compile_model(net, backend=other_backend),
        None,
        "other_backend",
    ),
    "in place": (in_place, {}, None),
    "in place with settings": (
        lambda net: in_place(net, options={"max_fusion_size": 3}),
        {"max_fusion_size": 3},
        None,
    ),
    "a part": (with_a_part, {"max_fusion_size": 3}, None),
    "a part in place": (lambda net: nn.Sequential(in_place(net)), {}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_how_a_model_was_compiled(name) -> None:
    make, options, other = MODELS[name]
    net = perceptron()
    model = make(net)
    found = compilers.given(model)
    assert found.options == options
    assert found.other is None if other is None else other in found.other
    assert found.module is getattr(model, "_orig_mod", model)


def test_a_model_is_compiled_as_another_one() -> None:
    net, inside = perceptron(), perceptron()
    assert compilers.compiled_like(net, inside) is inside
    again = compilers.compiled_like(compile_model(net, options={"max_fusion_size": 3}), inside)
    assert again._orig_mod is inside and compilers.given(again).options == {"max_fusion_size": 3}


def test_the_names_are_those_of_the_model_inside() -> None:
    net = perceptron()
    sub: Any = subset_backward(compile_model(net))
    assert sub.wrapped is net and list(sub.state_dict()) == list(net.state_dict()) and len(sub) == 3
    assert [id(p) for p in sub.parameters()] == [id(p) for p in net.parameters()]


def test_eager_backends_leave_the_graphs_as_they_are() -> None:
    net = perceptron()
    sub = subset_backward(compile_model(net, backend="eager"), strict=True)
    same_as_plain(sub, X, rows=[1, 4])
    assert sub.compilations == 0
    assert subset_backward(compile_model(net), compile=False, strict=True)._options is None


def test_another_backend_is_named() -> None:
    with pytest.warns(UserWarning, match="backend .*other_backend.* only Inductor can compile"):
        sub = subset_backward(compile_model(perceptron(), backend=other_backend))
    same_as_plain(sub, X, rows=[1, 4])
    with pytest.raises(RuntimeError, match="backend .*other_backend"):
        subset_backward(compile_model(perceptron(), backend=other_backend), strict=True)


@pytest.fixture
def no_compiler():
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_said_in_words() -> None:
    words = r"Inductor finds no C\+\+ compiler .*Install g\+\+ or clang\+\+, or name one in the variable CXX"
    with pytest.raises(RuntimeError, match=f"cannot be compiled: {words}; or set compile=False"):
        subset_backward(perceptron(), compile=True)
    with pytest.warns(UserWarning, match=f"run without torch.compile.*{words}"):
        sub = subset_backward(compile_model(perceptron()))
    same_as_plain(sub, X, rows=[1, 4])
    with torch.no_grad():
        assert torch.equal(sub(X), sub.wrapped(X))
    with pytest.raises(RuntimeError, match=words):
        subset_backward(compile_model(perceptron()), strict=True)
    assert compilers.lacks_compiler(perceptron().to("meta")) is None


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("there is no such instruction")


def test_where_compiling_fails_the_graphs_run_without(monkeypatch) -> None:
    monkeypatch.setattr("thresher.subset.inductor.compile_fx_inner", failing)
    sub = subset_backward(perceptron(), compile=True)
    with pytest.warns(
        UserWarning, match="run without torch.compile.*no such instruction.*given once"
    ):
        sub(X)
    with warnings.catch_warnings(action="error"):
        same_as_plain(sub, X, rows=[1, 4])
        same_as_plain(sub, X[:, None], rows=[1, 4])
    assert isinstance(sub, SubsetBackward) and sub.compilations == 0 and sub.fallback is None
    with pytest.raises(
        RuntimeError,
        match="strict=True: its graphs cannot be compiled: RuntimeError: there is no such",
    ):
        subset_backward(perceptron(), compile=True, strict=True)(X)
