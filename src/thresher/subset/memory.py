"""In-place operations in a graph: results overwrite operands that nothing reads any more, as autograd's own sums do."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from thresher.subset.graphs import aten

IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}


def reuse_memory(module: fx.GraphModule) -> None:
    """Makes elementwise operations overwrite their first operand where that is new memory which nothing else reads.

    Args:
        module: Graph without in-place operations. `examine` needs it in that form, so this function runs after it.
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
    """Checks that the first operand is new memory, is read only here and only once, and has the form of the result."""
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
    """Checks that a value has memory of its own; a value in `written` has the memory of an operand that is not needed."""
    if node in written:
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        shares = any(returned.alias_info is not None for returned in node.target._schema.returns)
        return not shares and "view" not in node.target._schema.name
    parent = node.args[0]
    return isinstance(parent, fx.Node) and _is_new(parent, written)  # one of several results
