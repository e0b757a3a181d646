"""Results written over dead operands: which operations may, and that the graph still computes the same."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from thresher.subset.making import aten, reuse_memory


def graph_of(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def same_after(function, *inputs):
    """The targets after reuse; the values and the inputs must be what they were."""
    module = graph_of(function, *inputs)
    wanted, before = function(*inputs), [tensor.clone() for tensor in inputs]
    reuse_memory(module)
    assert torch.equal(module(*inputs), wanted)
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))
    return targets(module)


def test_a_chain_writes_over_what_it_wrote() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    found = same_after(lambda x, y: torch.sin(x).add(y).relu().sigmoid(), x, y)
    assert found == [aten.sin.default, aten.add_.Tensor, aten.relu_.default, aten.sigmoid_.default]


def test_inputs_and_what_is_read_again_are_left_alone() -> None:
    x = torch.randn(4, 3)
    assert same_after(lambda x: x.relu(), x) == [aten.relu.default]
    assert same_after(lambda x: (s := torch.sin(x)).relu() * s, x) == [
        aten.sin.default,
        aten.relu.default,
        aten.mul_.Tensor,
    ]
    assert same_after(lambda x: (s := torch.sin(x)) + s, x) == [aten.sin.default, aten.add.Tensor]


def test_reshapes_of_what_is_not_read_again_are_written_over() -> None:
    x = torch.randn(4, 1)
    assert aten.relu_.default in same_after(lambda x: torch.sin(x).view(2, 2).relu(), x)
    assert aten.relu_.default not in same_after(
        lambda x: (s := torch.sin(x)).view(2, 2).relu().view(4, 1) * s, x
    )
    assert aten.relu_.default not in same_after(lambda x: x.view(2, 2).relu(), x)
    assert aten.add_.Tensor not in same_after(lambda x: (v := torch.sin(x).view(2, 2)).t() + v, x)


def test_other_forms_are_left_alone() -> None:
    x, wide = torch.randn(4, 1), torch.randn(4, 3)
    assert aten.add_.Tensor not in same_after(lambda x, wide: torch.sin(x).add(wide), x, wide)


def test_the_end_of_a_residual_block() -> None:
    def block(x, shortcut, mean, var):
        return (functional.batch_norm(x, mean, var) + shortcut).relu()

    found = same_after(
        block, torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3), torch.zeros(2), torch.ones(2)
    )
    assert aten.relu_.default in found and aten.add_.Tensor in found
