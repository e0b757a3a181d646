"""Builds the graphs of a trace: what each argument and result is, and which of its dimensions holds the samples."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors as aot
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen

from thresher.subset.graphs import (
    Graphs,
    Layout,
    SavedValue,
    Unsupported,
    aten,
    is_random,
    output_node,
    returned_nodes,
)

prims: Any = torch.ops.prims


class TracedSizes(NamedTuple):
    """Symbolic sizes of a trace; `Graphs` has the same attributes, and documents them."""

    guards: list[Any]
    symbol: Any
    first: int
    shared: dict[int, int | None]
    rows: int
    lengths: tuple[int, ...]
    free: dict[Any, list[tuple[int, int]]]
    fixed: dict[tuple[int, int], int]


class Joint(NamedTuple):
    """A traced module whose forward and backward pass are still one graph.

    Attributes:
        graph: Graph of the forward and backward pass. AOTAutograd's descriptors, in `meta["desc"]` of its nodes, tell what each
            argument and result is.
        returned: Return value of the module, with a `LeafIndex` in place of each tensor.
        num_forward: Number of values that the forward graph returns before the values that it saves for the backward graph.
        sizes: Symbolic sizes.
        mode: FakeTensorMode of the trace.
    """

    graph: fx.GraphModule
    returned: Any
    num_forward: int
    sizes: TracedSizes
    mode: FakeTensorMode


def assemble(joint: Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> Graphs:
    """Builds the graphs of a trace; its descriptors tell what each argument and result is.

    Args:
        joint: Traced module.
        forward: Forward graph, cut out of the joint graph.
        backward: Backward graph, cut out of the joint graph.

    Raises:
        Unsupported: The module changes inputs or parameters in place, returns something other than new tensors, or draws
            random numbers in its backward pass.
    """
    num_forward = joint.num_forward
    symbol = joint.sizes.symbol
    # Before the check for random draws in the backward pass: a draw that no gradient needs is no reason to refuse the model.
    drop_unused(backward)
    descriptors = output_node(joint.graph).meta["desc"]
    inputs = [node for node in joint.graph.graph.nodes if node.op == "placeholder"]
    sources = {node.name: _source(node.meta["desc"]) for node in inputs}
    tangents = {
        node.name: node.meta["desc"].output.idx
        for node in inputs
        if isinstance(node.meta["desc"], aot.TangentAOTInput)
    }
    mutated = _mutated_buffers(descriptors[:num_forward])
    # The partitioner copies nodes into two graphs, where a value that goes from one to the other keeps its name.
    saved_names = [getattr(value, "name", None) for value in returned_nodes(forward)]
    arguments = [node for node in backward.graph.nodes if node.op == "placeholder"]
    gradients = returned_nodes(backward)
    reached = _outputs_reached(backward, tangents)
    graphs = Graphs(
        forward=_boxed(forward),
        backward=_boxed(backward),
        forward_module=forward,
        backward_module=backward,
        inputs=[sources[node.name] for node in forward.graph.nodes if node.op == "placeholder"],
        mutated=mutated,
        outputs=[],
        returned=joint.returned,
        differentiable=[tangents[node.name] for node in arguments if node.name in tangents],
        saved=[
            SavedValue(position, counts=_counts_rows(returned_nodes(forward)[position], node))
            for node, position in (
                (n, saved_names.index(n.name)) for n in arguments if n.name not in tangents
            )
        ],
        grads=[
            _source(descriptor.grad_of)
            if isinstance(descriptor, aot.GradAOTOutput) and value is not None
            else None
            for descriptor, value in zip(descriptors[num_forward:], gradients, strict=True)
        ],
        grad_layouts=[
            layouts_of(value, symbol) if isinstance(value, fx.Node) else None for value in gradients
        ],
        grads_of=[reached.get(value, set()) for value in gradients],
        num_forward=num_forward,
        **joint.sizes._asdict(),
    )
    graphs.layouts = {
        node: layouts_of(node, symbol) for node in forward.graph.nodes if node.op != "output"
    }
    return graphs


def place_rows(graphs: Graphs) -> None:
    """Sets the layouts of outputs and saved values, from the layouts of the forward graph's nodes.

    Args:
        graphs: Graphs whose `layouts` are complete.

    Raises:
        Unsupported: A saved value grows with the batch size, but no single dimension holds a whole number of entries per
            sample.
    """
    nodes = returned_nodes(graphs.forward_module)
    graphs.outputs = [
        graphs.layouts[node] for node in nodes[len(graphs.mutated) : graphs.num_forward]
    ]
    for saved in graphs.saved:
        layout = graphs.layouts[nodes[saved.index]]
        if isinstance(layout, Unsupported):
            raise layout
        if isinstance(layout, Layout):
            saved.layout = layout
            # `arange(n * per)` numbers positions rather than rows.
            saved.counts = saved.counts and layout == Layout(0)
        elif layout is not None:
            # A size: its layout is the number of entries per sample.
            saved.follows = True


# Arguments and results


def _source(descriptor: Any) -> tuple[str, Any] | None:
    # The traced module is `FlatModule`, which holds the user's module as `inner`. The names returned here lack that prefix.
    if isinstance(descriptor, aot.ParamAOTInput):
        return "param", descriptor.target.removeprefix("inner.")
    if isinstance(descriptor, aot.BufferAOTInput):
        return "buffer", descriptor.target.removeprefix("inner.")
    if isinstance(descriptor, aot.PlainAOTInput):
        return "leaf", descriptor.idx
    return None


def _mutated_buffers(descriptors: list[Any]) -> list[str]:
    """Returns the names of the buffers that the forward updates.

    Args:
        descriptors: Descriptors of the values that the forward graph returns, without those that it saves.

    Raises:
        Unsupported: The forward updates something else, or returns something other than new tensors.
    """
    mutated = []
    outputs = {}
    for position, descriptor in enumerate(descriptors):
        if isinstance(descriptor, aot.InputMutationAOTOutput) and isinstance(
            descriptor.mutated_input, aot.BufferAOTInput
        ):
            mutated.append(descriptor.mutated_input.target.removeprefix("inner."))
        elif isinstance(descriptor, aot.PlainAOTOutput):
            outputs[descriptor.idx] = position
        else:
            raise Unsupported("its forward changes its inputs or parameters in place")
    # `Graphs` finds outputs by their place, right after the new values of buffers.
    if sorted(outputs.values()) != list(range(len(mutated), len(mutated) + len(outputs))):
        raise Unsupported("it returns values that are not new tensors")
    return mutated


def _outputs_reached(backward: fx.GraphModule, tangents: dict[str, int]) -> dict[Any, set[int]]:
    """Returns, for each node of the backward graph, the positions of the outputs whose gradients the node depends on.

    Raises:
        Unsupported: The backward pass draws random numbers.
    """
    reached: dict[Any, set[int]] = {}
    for node in backward.graph.nodes:
        if node.name in tangents:
            reached[node] = {tangents[node.name]}
        else:
            # A graph lists every node after its sources, so these are known.
            reached[node] = set().union(*(reached[source] for source in node.all_input_nodes))
        if is_random(node):
            # Fewer rows would draw other random numbers than the whole batch, so the gradients would be wrong.
            raise Unsupported(
                f"its backward pass draws random numbers ({node.target}), as dropout inside a checkpoint does"
            )
    return reached


def _counts_rows(source: Any, argument: fx.Node) -> bool:
    """Checks whether a saved value is `arange(n)` and only used as a row index, as in `logits[arange(n), lengths]`.

    Args:
        source: Node of the forward graph that makes the value.
        argument: Placeholder of the backward graph that takes it.
    """
    # A cast keeps the numbers, as in `arange(n).to(torch.int32)`.
    while source.target in (aten._to_copy.default, prims.convert_element_type.default):
        source = cast(fx.Node, source.args[0])
    starts_at_zero = (
        source.target is aten.arange.default
        or (source.target is aten.arange.start and source.args[0] == 0)
        # Inductor's decompositions turn arange into this operation.
        or (
            source.target is prims.iota.default
            and (source.kwargs["start"], source.kwargs["step"]) == (0, 1)
        )
    )
    # In any other use the numbers are values, and each kept row must keep the number that it had in the batch.
    return starts_at_zero and all(
        user.target in (aten.index.Tensor, aten.index_put.default)
        and cast(Any, user.args[1])[0] is argument
        and [*cast(Any, user.args[1]), *user.args[2:], user.args[0]].count(argument) == 1
        for user in argument.users
    )


# Layouts


def layouts_of(node: fx.Node, symbol: Any) -> Any:
    """Returns which dimension holds the samples in the values of a node, as their symbolic shapes show it.

    Args:
        node: Node of a graph.
        symbol: Symbol of the batch size.

    Returns:
        For a tensor, its `Layout`. For a size, how many times the batch size it is (0 if this factor is symbolic, too). None if
        the value does not depend on the batch size. An `Unsupported`, with the reason, if no layout fits. For a node with
        several results, a tuple of these.
    """
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple(_layout_of_value(item, symbol, node) for item in value)
    return _layout_of_value(value, symbol, node)


def _layout_of_value(value: Any, symbol: Any, node: fx.Node) -> Any:
    if isinstance(value, torch.SymInt):
        if _follows_batch(value, symbol):
            return _multiple(value, symbol)
        return None
    if not isinstance(value, FakeTensor):
        return None
    axes = [d for d, size in enumerate(value.shape) if _follows_batch(size, symbol)]
    if not axes:
        return None
    # For example, `h @ h.T` compares every sample with every other.
    if len(axes) > 1:
        return Unsupported(f"{node.target} returns a tensor with the batch in two dimensions")
    per = _multiple(value.shape[axes[0]], symbol)
    return per if isinstance(per, Unsupported) else Layout(axes[0], per)


def _follows_batch(size: Any, symbol: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr.has(symbol)


def _multiple(size: Any, symbol: Any) -> Any:
    per = size.node.expr / symbol
    if per.is_Integer:
        return int(per)
    # The number of positions is symbolic, too: 0 means that it is read from the size of each tensor.
    if not per.has(symbol) and per.is_integer:
        return 0
    return Unsupported(
        f"a size is {size.node.expr}, which is not a whole number of rows per sample"
    )


# Graphs as functions


def drop_unused(backward: fx.GraphModule) -> None:
    """Removes from a graph what no gradient needs: unused random draws, and saved values that only such draws use."""
    # By default fx would keep random draws, which it takes for impure.
    backward.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )
    for node in backward.graph.find_nodes(op="placeholder"):
        # Tangents are passed by position, so they stay even if nothing reads them.
        if not node.users and not node.name.startswith("tangents"):
            backward.graph.erase_node(node)


def as_input(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns a gradient in the memory format of an input.

    On CPUs, the backward pass of GroupNorm computes wrong numbers if the two differ, and autograd makes them equal beforehand.
    Only the real tensors show whether they do: a loss may permute the outputs, and some activations, such as ReLU6, return a
    gradient in another format than their fake tensors have.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last and not x.is_contiguous() and x.is_contiguous(memory_format=channels_last):
        return gradient.contiguous(memory_format=channels_last)
    return gradient.contiguous()


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Returns the graph as a function that empties its list of arguments, so values are freed right after their last use."""
    for node in module.graph.nodes:
        # Fewer rows may have other strides than the traced ones.
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        if node.target is aten.native_group_norm_backward.default:
            gradient: Any = node.args[0]
            with module.graph.inserting_before(node):
                formatted = module.graph.call_function(as_input, node.args[:2])
            formatted.meta = {**gradient.meta}
            node.update_arg(0, formatted)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward
