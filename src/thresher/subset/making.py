"""Builds the graphs of a module: traces the module, examines its graphs, and compiles them if asked to.

This module is imported when the first module is wrapped, because it loads torch's compiler.
"""

import contextlib
import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor

from thresher.subset import tracing
from thresher.subset.assembly import assemble
from thresher.subset.graphs import Graphs, Unclear, Unsupported, aten
from thresher.subset.mixing import examine, trial, trial_arguments
from thresher.subset.simplify import RESHAPES, bind, simplify, undropped, undropped_
from thresher.subset.trace_budget import Budget, OverBudget
from thresher.subset.trace_key import check_traceable
from thresher.subset.verify import same_results

IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}


def reuse_memory(module: fx.GraphModule) -> None:
    """Makes elementwise operations overwrite their first operand if it is new memory that no other operation reads.

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
        elif node.target is undropped:
            node.target = undropped_
            written.add(node)
    module.recompile()


def _may_overwrite(node: fx.Node, written: set[fx.Node]) -> bool:
    """Checks that the first operand is new memory, is read only here and once, and has the shape and dtype of the result."""
    operand: Any = node.args[0]
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if (
        not isinstance(operand, fx.Node)
        or len(operand.users) != 1
        or list(node.all_input_nodes).count(operand) != 1
    ):
        return False
    while (
        operand.target in RESHAPES
        and len(operand.users) == 1
        and isinstance(operand.args[0], fx.Node)
    ):
        # A reshape that only this operation reads: the memory that it views is what counts.
        operand = operand.args[0]
    if len(operand.users) != 1 or operand in node.all_input_nodes[1:]:
        return False
    # `all_input_nodes` has each node once, so only the arguments show `s + s`.
    if any(argument is operand for argument in node.args[1:]):
        return False
    result = node.meta.get("val")
    if not isinstance(result, FakeTensor) or not isinstance(value, FakeTensor):
        return False
    shapes = [
        [str(size) for size in fake.shape] for fake in (result, value)
    ]  # comparing sizes would add guards
    same = result.dtype == value.dtype and shapes[0] == shapes[1] and result.device == value.device
    return same and _is_new(operand, written)


def _is_new(node: fx.Node, written: set[fx.Node]) -> bool:
    """Checks that a value has its own memory. Values in `written` do: nothing else needs the operand whose memory they took."""
    if node in written:
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        shares = any(returned.alias_info is not None for returned in node.target._schema.returns)
        return not shares and "view" not in node.target._schema.name
    parent = node.args[0]
    return isinstance(parent, fx.Node) and _is_new(parent, written)  # one of several results


ATTEMPTS = 4
"""Number of assumptions about which inputs carry the batch that are tried."""


def make_graphs(
    module: nn.Module,
    tensors: list[Tensor],
    rebuild: Any,
    sizes: Counter[int],
    options: dict[str, Any] | None = None,
    varying: Sequence[tuple[int, int]] = (),
) -> Graphs:
    """Returns graphs of a module; the likeliest assumption about which inputs carry the batch is tried first.

    Args:
        module: Any module.
        tensors: Tensors of one call.
        rebuild: Function that builds (args, kwargs) from a list of tensors.
        sizes: How many tensors have a first dimension of each size.
        options: Settings with which Inductor compiles the graphs; None to leave them uncompiled. Default: None.
        varying: Dimensions, besides the batch, whose size differs from call to call, as pairs (position of the tensor,
            dimension). Default: none.

    Raises:
        Unsupported: The module cannot be traced, or its samples affect each other.
    """
    check_traceable(module)
    state = _tensors_by_source(module)
    first_reason = None
    # For all attempts together.
    budget = Budget()
    for batched in itertools.islice(_likely_batched(tensors, sizes), ATTEMPTS):
        try:
            with budget:
                graphs = _trace_free(
                    module,
                    rebuild,
                    tensors,
                    batched,
                    [(i, d) for i, d in varying if d or not batched[i]],
                )
                examine(graphs, state, tensors, batched)
                _examine_shorter(graphs, state, tensors, batched)
        except OverBudget:
            raise
        except Exception as error:
            # The first assumption is the likeliest one, so the user reads why that one failed.
            first_reason = first_reason or as_unsupported(error)
        else:
            compiled = graphs
            if options is not None:
                compiled = _compile(graphs, module, rebuild, tensors, batched, state, options)
            # Fewer calls help graphs that run operation by operation. Inductor merges operations by itself.
            if compiled is graphs:
                with trial(tensors, state):
                    arguments, _ = trial_arguments(graphs, state, tensors, batched, graphs.tried)
                    return _shortened(graphs, arguments)
            for one in (graphs, compiled):
                _reuse_memory_of(one)
            return compiled
    assert first_reason is not None
    raise first_reason


def _shortened(graphs: Graphs, arguments: list[Any]) -> Graphs:
    """Returns shorter graphs if a comparison shows that they compute the same, else `graphs`.

    Args:
        graphs: Graphs that were examined.
        arguments: Arguments of the forward graph, for the number of samples that was tried.
    """
    # Only the graphs are copied: the tensors that they read, which the module may change in place, stay the same objects.
    modules = (graphs.forward_module, graphs.backward_module)
    forward, backward = (fx.GraphModule(module, copy.deepcopy(module.graph)) for module in modules)
    short = replace(graphs, forward_module=forward, backward_module=backward)
    try:
        simplify(short)
        _reuse_memory_of(short)
        short.forward = bind(forward)
        short.backward = bind(backward)
        same = same_results(short, graphs, arguments)
    except Exception:  # a graph that `simplify` cannot handle: it is right as it is
        same = False
    if same:
        return short
    _reuse_memory_of(graphs)
    return graphs


def _reuse_memory_of(graphs: Graphs) -> None:
    for module in (graphs.forward_module, graphs.backward_module):
        reuse_memory(module)
    graphs.forward = graphs.forward_module.forward
    graphs.backward = graphs.backward_module.forward


def _examine_shorter(
    graphs: Graphs, state: Any, tensors: list[Tensor], batched: list[bool]
) -> None:
    """Examines graphs at a second, shorter length, if lengths differ from call to call.

    Raises:
        Unsupported: Samples affect each other at those lengths.
    """
    if not graphs.free:
        return
    # About half, and at least 2, because a size of 1 is special to a trace.
    lengths = tuple((length + 2) // 2 for length in graphs.lengths)
    narrowed = list(tensors)
    for places, length in zip(graphs.free.values(), lengths, strict=True):
        for i, d in places:
            narrowed[i] = narrowed[i].narrow(d, 0, length).contiguous()
    if graphs.holds_for(graphs.tried, lengths):
        with contextlib.suppress(
            Unclear
        ):  # only these values allow no check; the graphs passed before
            # A copy, because `examine` sets layouts, and the graphs must keep those of the length that was traced.
            examine(
                replace(graphs, lengths=lengths, layouts=dict(graphs.layouts), _valid={}),
                state,
                narrowed,
                batched,
            )


def _trace_free(
    module: nn.Module,
    rebuild: Any,
    tensors: list[Tensor],
    batched: list[bool],
    varying: list[tuple[int, int]],
) -> Graphs:
    """Traces with the batch size of the call; if that fails, with other batch sizes, in case it equals another size."""
    n = next(len(t) for t, is_batched in zip(tensors, batched, strict=True) if is_batched)
    reason = Unsupported("its forward depends on the batch size")
    # If the batch size equals another size, a comparison of the two holds by chance. With another batch size it does not.
    for rows in (n, n + 1, n + 7, 2 * n + 1)[: 2 if varying else 4]:
        try:
            joint = tracing.trace_joint(module, rebuild, tensors, batched, rows, varying)
            outputs = joint.num_forward
            parts = default_partition(
                joint.graph, None, num_fwd_outputs=outputs, static_lifetime_input_indices=[]
            )
            graphs = assemble(joint, *parts)
        except OverBudget:
            raise
        except Exception as error:
            reason = as_unsupported(error)
        else:
            if graphs.holds_for(n):
                return graphs
    raise reason


def _compile(graphs: Graphs, *arguments: Any) -> Graphs:
    """Returns compiled graphs, or `graphs` with the reason in `uncompiled` if compilation fails."""
    with warnings.catch_warnings(
        action="ignore", category=DeprecationWarning
    ):  # of torch, about a part of itself
        from thresher.subset.inductor import compile_graphs
    # Whatever Inductor raises, the examined graphs are right, and still save the cost of the rows that are left out.
    try:
        return compile_graphs(graphs, *arguments)
    except Exception as error:
        graphs.uncompiled = str(as_unsupported(error))
        return graphs


def _likely_batched(tensors: list[Tensor], sizes: Counter[int]) -> Iterator[list[bool]]:
    """Yields assumptions about which tensors carry the batch, likeliest first: all of one size, then all but one of them."""
    for n, _ in sizes.most_common():
        # A size of 1 cannot be symbolic: tracing assumes that each symbol is larger.
        if n < 2:
            continue
        whole = [t.dim() > 0 and len(t) == n for t in tensors]
        yield whole
        members = [i for i, is_batched in enumerate(whole) if is_batched]
        if len(members) > 1:
            for left_out in reversed(members):
                yield [is_batched and i != left_out for i, is_batched in enumerate(whole)]


def _tensors_by_source(module: nn.Module) -> dict[tuple[str, Any], Tensor]:
    # Tied weights and shared modules have several names, and a trace may use any one of them.
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {
        **{("param", name): p for name, p in parameters},
        **{("buffer", name): b for name, b in buffers},
    }


def as_unsupported(error: Exception) -> Unsupported:
    """Returns the reason why a module cannot be traced, for any error of the attempt."""
    if isinstance(error, Unsupported):
        return error
    reason = Unsupported(
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    )
    reason.__cause__ = error
    return reason
