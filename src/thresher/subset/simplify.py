"""Shortens graphs that were examined: fewer views and copies, cheaper masks, and direct calls of operations.

On a transformer of width 64, a third of the time of a step went into calls that compute nothing. Every rewrite keeps all values
bit for bit, except the sign of zeros; only strides and the number of calls change. `making` compares the shorter graphs with
the original ones, and uses the original ones if they differ.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from thresher.subset.graphs import Graphs, aten, returned_nodes

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""Operations that change the shape and keep the order of the values."""

SHOWN = "thresher_shown"
"""Key in the `meta` of nodes whose values the forward graph returns, other than saved values."""

MOVES = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
"""Operations that only move dimensions."""


def simplify(graphs: Graphs) -> None:
    """Makes both graphs of a module shorter, in place.

    Args:
        graphs: Graphs that were examined, whose modules nothing else uses.
    """
    for node in returned_nodes(graphs.forward_module)[: graphs.num_forward]:
        if isinstance(node, fx.Node):
            node.meta[SHOWN] = True
    for module in (graphs.forward_module, graphs.backward_module):
        module.graph.eliminate_dead_code(is_impure_node=_stays)
        # The order matters: copies keep moves and reshapes apart, so these come again after them, and gradients can be
        # stacked only when nothing stands between them and their sum.
        for rewrite in (
            _merge_sizes,
            _moves,
            _reshapes,
            _copies,
            _moves,
            _reshapes,
            _stacks,
            _moves,
            _move_stacks,
        ):
            rewrite(module)
            module.graph.eliminate_dead_code(is_impure_node=_stays)
    _byte_masks(graphs)
    # Last, because only now is it certain what the backward graph reads.
    _drop_unread(graphs)
    for module in (graphs.forward_module, graphs.backward_module):
        module.graph.eliminate_dead_code(is_impure_node=_stays)
        # `lint` raises an error for an invalid graph; `making` then uses the examined graphs.
        module.graph.lint()
        module.recompile()


def _nodes(module: fx.GraphModule) -> list[Any]:
    """Returns the nodes of a graph, typed as Any, because the types of their arguments depend on their targets."""
    return list(module.graph.nodes)


def _stays(node: Any) -> bool:
    """Whether a node stays although nothing reads it: without a random draw, the later ones would give other numbers."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op in ("placeholder", "output") or random


def _shape(node: Any) -> list[str]:
    """Returns the sizes as text: comparing symbolic sizes would add guards."""
    return [str(size) for size in node.meta["val"].shape]


def _is_output(node: Any) -> bool:
    """Whether a value is returned to the user; it must not share memory with an input, or be the same tensor as another one."""
    return SHOWN in node.meta


def _insert(
    graph: fx.Graph, before: fx.Node, target: Any, args: tuple[Any, ...], value: Any
) -> fx.Node:
    with graph.inserting_before(before):
        inserted = graph.call_function(target, args)
    inserted.meta["val"] = value
    return inserted


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _merge_sizes(module: fx.GraphModule) -> None:
    """Computes equal sizes only once."""
    first: dict[str, fx.Node] = {}
    for node in _nodes(module):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        # By their text, because comparing symbolic sizes would add guards.
        known = first.setdefault(str(value.node.expr), node)
        if known is not node:
            node.replace_all_uses_with(known)
            if node.op != "placeholder":
                module.graph.erase_node(node)


def _moves(module: fx.GraphModule) -> None:
    """Replaces several operations that only move dimensions by one permutation."""
    chains: dict[fx.Node, tuple[fx.Node, list[int | None]]] = {}
    for node in _nodes(module):
        if node.target not in MOVES:
            continue
        source: Any = node.args[0]
        root, dims = chains.get(source, (source, list(range(source.meta["val"].dim()))))
        dims = list(dims)
        rest = node.args[1:]
        if node.target is aten.t.default:
            dims = dims[::-1]
        elif node.target is aten.transpose.int:
            a, b = rest
            dims[a], dims[b] = dims[b], dims[a]
        elif node.target is aten.permute.default:
            dims = [dims[d] for d in rest[0]]
        elif node.target is aten.unsqueeze.default:
            # None stands for an inserted dimension, which no permutation of the root has.
            dims.insert(rest[0] if rest[0] >= 0 else rest[0] + len(dims) + 1, None)
        # A squeeze of the root's own dimension depends on its size and ends the chain.
        elif dims[rest[0]] is None:
            del dims[rest[0]]
        else:
            continue
        chains[node] = root, dims
        if None in dims or len(dims) != root.meta["val"].dim():
            continue
        if dims == list(range(len(dims))) and not _is_output(node):
            _replace(node, root)
        elif source is not root:
            permuted = _insert(
                module.graph, node, aten.permute.default, (root, dims), node.meta["val"]
            )
            chains[permuted] = root, dims
            del chains[node]
            _replace(node, permuted)


def _reshapes(module: fx.GraphModule) -> None:
    """Removes reshapes and copies that a reshape follows, and reshapes and expansions to the same shape."""
    for node in _nodes(module):
        if (
            node.target is aten.expand.default
            and _shape(node) == _shape(node.args[0])
            and not _is_output(node)
        ):
            _replace(node, node.args[0])
            continue
        if node.target not in RESHAPES:
            continue
        source: Any = node.args[0]
        # A copy of an input stays: without it the output could share memory with the input.
        while source.target in RESHAPES or (
            _is_copy(source) and len(source.users) == 1 and source.args[0].op != "placeholder"
        ):
            source = source.args[0]
            node.args = (source, node.args[1])
            node.target = aten.reshape.default
        if _shape(node) == _shape(source) and not _is_output(node):
            _replace(node, source)


def _is_copy(node: Any) -> bool:
    return node.target is aten.clone.default


def _is_fresh(node: Any) -> bool:
    """Whether a value is a view of memory that an operation of the graph made."""
    while node.op == "call_function" and (
        node.target in (*RESHAPES, *MOVES, aten.select.int, aten.expand.default)
    ):
        node = node.args[0]
    return node.op != "placeholder" and node.op != "get_attr"


def _copies(module: fx.GraphModule) -> None:
    """Removes copies of new memory: those that stand for dropout with p = 0, and those that are only read part by part."""
    for node in _nodes(module):
        if not _is_copy(node) or not _is_fresh(node.args[0]):
            continue
        # A copy with a memory format changes the strides. Readers need that, except `select`, which takes any strides.
        parts = all(user.target is aten.select.int for user in node.users)
        same = not node.kwargs and not any(
            user.target is aten._unsafe_view.default and _is_output(user) for user in node.users
        )
        if (parts or same) and not _is_output(node):
            _replace(node, node.args[0])


def _stacks(module: fx.GraphModule) -> None:
    """Replaces a sum of tensors, each zero except in one part, by a stack of these parts.

    The gradient of the packed projection of nn.MultiheadAttention is such a sum of three parts.
    """
    for node in _nodes(module):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        # Only the last sum in a chain of sums has all parts.
        if any(user.target is aten.add.Tensor and _parts(user) for user in node.users):
            continue
        parts = _parts(node)
        if parts is None:
            continue
        sizes = parts[0].args[1]
        dim = parts[0].args[2]
        count = sizes[dim]
        index = {
            part.args[3] % count: part.args[0] for part in parts if part.args[1:3] == (sizes, dim)
        }
        # Each part exactly once: a missing one would have to be zeros, and a repeated one a sum.
        if type(count) is int and len(parts) == count == len(index):
            stacked = _insert(
                module.graph,
                node,
                aten.stack.default,
                ([index[i] for i in range(count)], dim),
                node.meta["val"],
            )
            _replace(node, stacked)


def _parts(node: Any) -> list[Any] | None:
    """Returns the gradients of single parts that a node adds up; None if it adds something else."""
    if node.target is aten.select_backward.default:
        return [node] if len(node.users) == 1 else None
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    left, right = (
        _parts(operand) if isinstance(operand, fx.Node) else None for operand in node.args[:2]
    )
    return None if left is None or right is None else left + right


def _move_stacks(module: fx.GraphModule) -> None:
    """Stacks along the final dimension, instead of moving the stacked dimension there, and without copying reshaped parts."""
    for node in _nodes(module):
        if node.target is not aten.permute.default or node.args[0].target is not aten.stack.default:
            continue
        stack = node.args[0]
        dims = list(node.args[1])
        parts = stack.args[0]
        dim = (stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)) % len(dims)
        dims = [d % len(dims) for d in dims]
        others = [d for d in dims if d != dim]
        # The stack can be rewritten only if the permutation moves nothing but the stacked dimension.
        if len(stack.users) != 1 or others != sorted(others):
            continue
        at = dims.index(dim)
        stacked = _insert(module.graph, node, aten.stack.default, (parts, at), node.meta["val"])
        _replace(node, stacked)
        reshaped = [
            part.target in RESHAPES and part.args[0].target is aten.permute.default
            for part in parts
        ]
        if all(reshaped) and at == len(dims) - 2:  # merged last dimensions stay apart, as views
            wide = [part.args[0] for part in parts]
            shapes = {tuple(_shape(part)) for part in wide}
            users = list(stacked.users)
            if (
                len(shapes) == 1
                and len(next(iter(shapes))) == len(dims)
                and all(_reshaped_only(user) for user in users)
            ):
                value = torch.stack([part.meta["val"] for part in wide], at)
                whole = _insert(module.graph, stacked, aten.stack.default, (wide, at), value)
                stacked.replace_all_uses_with(whole)
                module.graph.erase_node(stacked)


def _reshaped_only(user: Any) -> bool:
    """Whether the shape of a value does not matter to the node that reads it, because the node reshapes it."""
    return user.target in RESHAPES or (
        _is_copy(user) and all(after.target in RESHAPES for after in user.users)
    )


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Computes aten.native_dropout with a mask of bytes: products with bools take three times as long on a CPU."""
    # A comparison with the model replaces random operations.
    if torch._C._len_torch_dispatch_stack():
        dropped, mask = aten.native_dropout.default(x, p, True)
        return dropped, mask.view(torch.uint8)
    # `bernoulli_` draws the same numbers for bytes as for bools, and the products are those of native_dropout on a CPU: the
    # same bits.
    mask = torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - p)
    return x.mul(mask).mul_(1 / (1 - p)), mask


def undropped(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the gradient of `dropout`."""
    return gradient.mul(mask).mul_(scale)


def undropped_(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the gradient of `dropout`, in the memory of `gradient`."""
    return gradient.mul_(mask).mul_(scale)


def _byte_masks(graphs: Graphs) -> None:
    """Replaces dropout on the CPU by `dropout`, whose masks are bytes."""
    arguments = [node for node in graphs.backward_module.graph.nodes if node.op == "placeholder"]
    returned = returned_nodes(graphs.forward_module)
    of = dict(zip((returned[saved.index] for saved in graphs.saved), arguments, strict=False))
    for node in _nodes(graphs.forward_module):
        if (
            node.target is not aten.native_dropout.default
            or not 0 < node.args[1] < 1
            or node.args[2] is False
        ):
            continue
        value = node.args[0].meta["val"]
        masks = [user for user in node.users if user.args[1] == 1]
        readers = [of[mask] for mask in masks if mask in of]
        # Products with bools are slow on a CPU. On a GPU one fused kernel does all of it.
        if value.device.type != "cpu" or value.dtype != torch.float32 or len(masks) > 1:
            continue
        # Anything else that reads the mask expects bools.
        if any(user.op != "output" for mask in masks for user in mask.users) or len(readers) != len(
            masks
        ):
            continue
        if any(
            user.target is not aten.native_dropout_backward.default
            for one in readers
            for user in one.users
        ):
            continue
        node.target = dropout
        node.args = node.args[:2]
        for reader in readers:
            for user in list(reader.users):
                user.target = undropped


def _drop_unread(graphs: Graphs) -> None:
    """Removes saved values that the backward graph does not read, and duplicates of saved values."""
    arguments = [node for node in graphs.backward_module.graph.nodes if node.op == "placeholder"]
    returned = returned_nodes(graphs.forward_module)
    first: dict[Any, fx.Node] = {}
    kept = []
    for saved, argument in zip(graphs.saved, arguments, strict=False):
        source = returned[saved.index]
        known = first.setdefault(source, argument)
        # Row numbers become 0 to k - 1 for k rows, so they cannot stand for the same `arange` that is read as values.
        if known is not argument and not saved.counts:
            argument.replace_all_uses_with(known)
        if argument.users:
            kept.append(saved)
        else:
            graphs.backward_module.graph.erase_node(argument)
    out = _nodes(graphs.forward_module)[-1]
    out.args = ((*returned[: graphs.num_forward], *(returned[saved.index] for saved in kept)),)
    graphs.saved = [replace(saved, index=graphs.num_forward + i) for i, saved in enumerate(kept)]


# A call of one of these functions takes 1.3 us, and one through torch.ops 2.2.
DIRECT: dict[Any, Any] = {
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.reshape.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.select.int: torch.select,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze,
    aten.clone.default: torch.clone,
    aten.stack.default: torch.stack,
    aten.cat.default: torch.cat,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul.Scalar: torch.mul,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.tanh.default: torch.tanh,
    aten.sum.dim_IntList: torch.sum,
    aten.mean.dim: torch.mean,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.native_group_norm.default: torch.native_group_norm,
    aten.convolution.default: torch.convolution,
    aten.embedding.default: torch.embedding,
    aten.where.self: torch.where,
}
METHODS: dict[Any, str] = {
    aten.sym_size.int: "size",
    aten.expand.default: "expand",
    aten.add_.Tensor: "add_",
    aten.mul_.Tensor: "mul_",
}


def bind(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Returns a graph as a function that calls `torch.mm` and the like, because calls through torch.ops take longer.

    Args:
        module: Graph that is not examined or rewritten afterwards.
    """
    for node in _nodes(module):
        if node.op != "call_function":
            continue
        if node.target in METHODS:
            node.op = "call_method"
            node.target = METHODS[node.target]
        # `_unsafe_view` hides from autograd that memory is shared. torch.reshape in its place would give the user a view.
        elif not _is_output(node):
            node.target = DIRECT.get(node.target, node.target)
    module.recompile()
    return module.forward
