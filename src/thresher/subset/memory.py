"""Results written over operands that nothing reads any more, as in-place modules and autograd's own sums do."""

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

aten: Any = torch.ops.aten

IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}


def reuse_memory(module: fx.GraphModule) -> None:
    """Have elementwise operations write over their first operand where it is new, and theirs alone.

    Args:
        module: A functional graph that was tried out; the graphs that examination compares must be functional.
    """
    written: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not node.args or not _may_overwrite(node, written):
            continue
        if node.target in IN_PLACE:
            node.target = IN_PLACE[node.target]
            written.add(node)
        elif node.target is aten.threshold_backward.default:
            node.target = aten.threshold_backward.grad_input
            node.kwargs = {"grad_input": node.args[0]}
            written.add(node)
    module.recompile()


def _may_overwrite(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether the first operand is new memory, read here for the last and only time, and of the result's form."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node) or len(operand.users) != 1 or list(node.all_input_nodes).count(operand) != 1:
        return False
    if any(argument is operand for argument in node.args[1:]):
        return False
    result, value = node.meta.get("val"), operand.meta.get("val")
    if not isinstance(result, FakeTensor) or not isinstance(value, FakeTensor):
        return False
    shapes = [[str(size) for size in fake.shape] for fake in (result, value)]  # comparing sizes would add guards
    same = result.dtype == value.dtype and shapes[0] == shapes[1] and result.device == value.device
    return same and _is_new(operand, written)


def _is_new(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether a value is in memory of its own; those `written` over a dead operand have taken over its memory."""
    if node in written:
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        shares = any(returned.alias_info is not None for returned in node.target._schema.returns)
        return not shares and "view" not in node.target._schema.name
    parent = node.args[0]
    return isinstance(parent, fx.Node) and _is_new(parent, written)  # one of several results
