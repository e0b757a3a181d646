"""Graphs that Inductor compiled: exact for every number of rows, and compiled once."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from depth import depth
from subset_cases import (
    Calls,
    Causal,
    SmallResNet,
    ViT,
    conv_net,
    distance,
    numbers,
    outcome,
    same_as_plain,
    tokens,
    traced,
)
from thresher.subset import SubsetBackward, subset_backward
from thresher.subset.graphs import Graphs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

N = 12


class Mixed(nn.Module):
    """Batch normalization, rows chosen by their number, and a size of the batch, in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        h = self.embed(ids)
        chosen = h[torch.arange(ids.shape[0]), last]
        return self.head(F.relu(self.norm(chosen * h.mean(1))))


def of_images(*size: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: (numbers(n, 3, *size),)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "batch norm": (Mixed, lambda n: (tokens(n, 5), torch.arange(n) % 5)),
    "conv": (conv_net, of_images(8, 8)),
    "resnet": (SmallResNet, of_images(8, 8)),
    "vit": (ViT, of_images(8, 8)),
    "causal": (lambda: Causal("inside", dropout=0.2), lambda n: (tokens(n, 5),)),
}


def as_examined(model: nn.Module) -> SubsetBackward:
    return subset_backward(model, strict=True, compile=False)


@pytest.mark.parametrize("name", depth(("batch norm",), tuple(CASES)))
def test_compiled_graphs_are_exact_for_all_numbers_of_rows(name) -> None:
    """One pair of compilations for all of them; with batch normalization as without a compiler."""
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    with config.patch(fallback_random=True):  # dropout as without a compiler
        sub, plain = subset_backward(model, strict=True, compile=True), as_examined(model)
        for n in (N, N + 5):
            given = inputs(n)
            for k in (*range(1, n, depth(3, 1)), n):
                rows = torch.randperm(n)[:k].sort().values
                found, expected = outcome(sub, given, {}, rows), outcome(plain, given, {}, rows)
                assert torch.equal(found.drawn, expected.drawn)
                torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(found.buffers, expected.buffers, rtol=1e-12, atol=1e-12)
                assert distance(expected.gradients, found.gradients) <= 1e-12
                if name != "batch norm" and name != "resnet":
                    same_as_plain(sub, *given, rows=rows)
    assert sub.compilations == 2 and traced(sub) == 1 and sub.fallback is None


@pytest.mark.skipif(not depth(False, True), reason="make verify")
def test_dropout_of_the_compiler_has_one_mask_in_both_passes() -> None:
    torch.manual_seed(0)
    sub = subset_backward(ViT(dropout=0.3).double(), strict=True, compile=True)
    x = numbers(9, 3, 8, 8)
    for k in range(1, 10):
        out = sub(x)
        weights = torch.zeros_like(out)
        weights[:k] = numbers(k, 5)
        some = torch.autograd.grad(
            (out[:k] * weights[:k]).sum(), list(sub.parameters()), retain_graph=True
        )
        whole = torch.autograd.grad((out * weights).sum() + 0 * out.sum(), list(sub.parameters()))
        torch.testing.assert_close(some, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not depth(False, True), reason="make verify")
def test_two_hundred_steps_compile_once() -> None:
    torch.manual_seed(0)
    model: Any = torch.compile(conv_net())
    sub = subset_backward(model, strict=True)
    x = torch.randn(32, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings(action="error"):
        for step in range(200):
            sub(x)[: 1 + step % 32].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sub.compilations == 2 and traced(sub) == 1


# What is computed again


def marked(model: nn.Module, *inputs: Tensor, monkeypatch: Any) -> tuple[dict[str, str], Graphs]:
    """Operations whose values are always saved, each with how its samples lie; nothing is compiled."""
    found: dict[str, str] = {}

    def stop(joint: Any, *_: Any, **__: Any) -> Any:
        for node in joint.graph.nodes:
            if node.meta.get("recompute") is not None:
                found[node.target.__name__.partition(".")[0]] = type(
                    node.meta[inductor.LAYOUTS]
                ).__name__
        raise RuntimeError("seen enough")

    from thresher.subset import inductor

    monkeypatch.setattr(inductor, "min_cut_rematerialization_partition", stop)
    sub = subset_backward(model, compile=True)
    with pytest.warns(UserWarning, match="seen enough"):
        sub(*inputs)
    ((graphs,),) = sub._traces.values()
    return found, graphs


def test_sums_over_the_batch_random_numbers_and_numbers_of_rows_are_saved(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mixed": Mixed(), "dropout": nn.Dropout(0.5)}).double()
    both = Calls(lambda _, ids, last: model["dropout"](model["mixed"](ids, last)))
    both.inside = model
    found, _ = marked(both, tokens(N, 5), torch.arange(N) % 5, monkeypatch=monkeypatch)
    assert {"var_mean", "iota", "inductor_random"} <= set(found)
    assert not {"relu", "mul", "embedding", "addmm", "mean", "sum", "full"} & set(found)


# Guards


def compared_in(path: str, name: str, size: Any) -> bool:
    """Compares a symbolic size with a number, in a function of that name and file."""
    space: dict[str, Any] = {}
    code = compile(
        f"def {name}(size):\n    return bool(size > 7)\n", f"/anywhere/torch/{path}", "exec"
    )
    exec(code, space)
    return space[name](size)


def test_heuristics_set_no_guards() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from thresher.subset.inductor import CompilingSizes

    env = CompilingSizes()
    mode = FakeTensorMode(shape_env=env)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size = mode.from_tensor(torch.ones(9), symbolic_context=context).shape[0]
    assert compared_in("_inductor/codegen/cpp.py", "need_use_acc_helper", size) and not env.guards
    assert (
        compared_in("_inductor/codegen/simd.py", "can_use_32bit_indexing", size)
        and len(env.guards) == 1
    )


def test_numbers_of_rows_that_guards_exclude_run_without_the_compiler() -> None:
    from thresher.subset.inductor import InductorBackward

    k = sympy.Symbol("k", integer=True)
    backward = InductorBackward(lambda given: given, [], [k * 10 <= 40], [k])
    assert [backward.holds_for(n) for n in range(1, 7)] == [False, True, True, True, False, False]


def test_memory_that_is_laid_out_in_another_way_is_copied() -> None:
    from thresher.subset.inductor import InductorBackward

    passed: list[Any] = []
    symbol = sympy.Symbol("k")
    fakes = [torch.empty(4, 3, 2), torch.empty(4, 2, 3).transpose(1, 2), 5]
    backward = InductorBackward(passed.extend, fakes, [], [symbol])
    same, other = torch.rand(4, 3, 2), torch.rand(4, 3, 2)
    backward([same, other, 5])
    assert (
        passed[0] is same
        and passed[1].stride() == (6, 1, 3)
        and torch.equal(passed[1], other)
        and passed[2] == 5
    )
    passed.clear()
    backward([torch.rand(1, 3, 2).expand(4, 3, 2), as_is := torch.rand(4, 2, 3).transpose(1, 2), 5])
    assert passed[0].stride() == (6, 2, 1) and passed[1] is as_is


# Refusals


def refused(monkeypatch, name: str, function: Any, match: str) -> None:
    from thresher.subset import inductor

    monkeypatch.setattr(inductor, name, function)
    sub = subset_backward(nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double(), compile=True)
    with pytest.warns(UserWarning, match=match):
        sub(numbers(N, 6))
    same_as_plain(sub, numbers(N, 6), rows=[1, 4])


def test_a_decomposition_that_mixes_samples_is_refused(monkeypatch) -> None:
    from thresher.subset import mixing

    def mixes(graphs: Graphs, *arguments: Any) -> Any:
        returned, _ = mixing.run_on_few_rows(graphs, *arguments)
        return returned, [
            node for node in graphs.forward_module.graph.nodes if node.op == "call_function"
        ][-1:]

    refused(
        monkeypatch, "run_on_few_rows", mixes, "its compiled graph mixes the samples of a batch"
    )


def test_guards_that_exclude_the_call_are_refused(monkeypatch) -> None:
    def compile_for_few(graphs: Graphs, *_: Any) -> None:
        graphs.guards = [graphs.symbol < N]

    refused(
        monkeypatch,
        "_compile",
        compile_for_few,
        "the compiler made a wrong assumption about the batch size",
    )
