"""Traces the forward and backward of a module with AOTAutograd, and refuses a forward that a graph cannot repeat.

This module is imported when the first module is traced, because it loads torch's compiler.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._decomp import decompositions as torch_decompositions
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)

from thresher import rng
from thresher.subset.assembly import Joint, TracedSizes
from thresher.subset.graphs import CONSTANT_TYPES, LeafIndex, Unsupported, aten
from thresher.subset.side_effects import effects_undone
from thresher.trees import leaves, map_leaves


class FlatModule(nn.Module):
    """Wraps a module as a function of tensors that returns a tuple of tensors.

    Args:
        module: Module that is traced.
        rebuild: Function that builds (args, kwargs) from a list of tensors.

    Attributes:
        returned: Last return value of the module, with a `LeafIndex` in place of each tensor.
    """

    def __init__(self, module: nn.Module, rebuild: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.inner = module
        self._rebuild = rebuild
        self.returned: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the module; returns new tensors with the memory of its outputs, so none is a view of an input or output."""
        args, kwargs = self._rebuild(list(tensors))
        before = dict(self.inner.named_buffers())
        outputs = self.inner(*args, **kwargs)
        for name, buffer in self.inner.named_buffers():
            if before.get(name) is not buffer:
                raise Unsupported(
                    f"its forward assigns buffer {name}, which a traced graph does not repeat"
                )
        # Returned as it is, such a size would be a symbol of the trace, or in every later call the size of the traced call.
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            map_leaves(_refuse_size, outputs, kind, objects=False)
        outputs = without_caches(outputs)
        count = itertools.count()
        tensors_out = list(leaves(outputs, objects=False))
        self.returned = map_leaves(lambda _: LeafIndex(next(count)), outputs, objects=False)
        return tuple(aten._unsafe_view.default(leaf, leaf.shape) for leaf in tensors_out)


def trace_joint(
    module: nn.Module,
    rebuild: Any,
    tensors: list[Tensor],
    batched: list[bool],
    rows: int,
    varying: Sequence[tuple[int, int]] = (),
    *,
    env: ShapeEnv | None = None,
    decompositions: Any = None,
) -> Joint:
    """Traces the forward and backward of a module as one graph, at a symbolic batch size.

    Args:
        module: Any module.
        rebuild: Function that builds (args, kwargs) from a list of tensors.
        tensors: Tensors of one call.
        batched: Flag for each tensor: whether its first dimension is the batch.
        rows: Example of a batch size, for comparisons during tracing.
        varying: Other dimensions whose size is symbolic, too, as pairs (position of the tensor, dimension). Default: none.
        env: Environment of the symbolic sizes. Default: a new one.
        decompositions: Functions that replace operations by simpler ones, by operation. Default: none.

    Raises:
        Unsupported: The module cannot be traced, or its graphs hold for some sizes only.
    """
    env = ShapeEnv() if env is None else env
    # Tensors in plain attributes of the module, such as masks, are not inputs: they become constants of the graph.
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = [
        _fake(mode, t, rows if is_batched else None, [d for at, d in varying if at == i])
        for i, (t, is_batched) in enumerate(zip(tensors, batched, strict=True))
    ]
    sizes = _sizes_of(fakes, tensors, batched, rows, varying)
    symbols = [sizes.symbol, *sizes.free]
    decompositions = {aten.bernoulli.p: _draw_in_memory_order, **(decompositions or {})}
    flat = FlatModule(module, rebuild)
    # Not by `train()`: parts of the module may be in another mode.
    flat.training = module.training
    # `effects_undone` comes first and so ends last: objects are restored even if another context raises an error at its end.
    guarded = (
        effects_undone(module.named_modules()),
        _no_random_numbers(),
        _compiling_flag_set(),
        _recurrent_layers_corrected(),
    )
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for context in guarded:
            stack.enter_context(context)
        # Parts of the module that torch.compile has compiled could not be traced.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # torch.export has no backward graph, and torch.compile does not show its backends which argument is which parameter.
        joint = aot_export_joint_with_descriptors(
            stack, flat, tuple(fakes), {}, decompositions=decompositions
        )
        replaced = any(env.replacements.get(symbol, symbol) != symbol for symbol in symbols)
        # A symbol that equals a number makes graphs for this one batch size.
        if replaced or any(guard.expr.func is sympy.Eq for guard in env.guards):
            raise Unsupported(
                f"its {'sizes are' if varying else 'batch size is'} compared with a number"
            )
        graph = joint.graph_module
        _refuse_hidden_inputs(graph)
        _refuse_dependence_on_rows(graph)
        _refuse_communication(graph)
        _drop_detached(graph)
        num_forward = joint._aot_state.fw_metadata.num_forward
    # Tracing adds guards until it ends.
    sizes = sizes._replace(guards=[guard.expr for guard in env.guards])
    return Joint(graph, flat.returned, num_forward, sizes, mode)


def _sizes_of(
    fakes: list[Tensor], tensors: list[Tensor], batched: list[bool], rows: int, varying: Any
) -> TracedSizes:
    """Returns the symbols of a trace; equal sizes have the same symbol.

    Raises:
        Unsupported: The batch size is also another size of this call.
    """
    first = batched.index(True)
    free = dict[Any, list[tuple[int, int]]]()
    size: Any = fakes[first].shape[0]
    for i, d in varying:
        other: Any = fakes[i].shape[d]
        free.setdefault(other.node.expr, []).append((i, d))
    if size.node.expr in free:
        raise Unsupported("its batch size equals another size")
    lengths = tuple(tensors[places[0][0]].shape[places[0][1]] for places in free.values())
    places = [(i, d) for i, t in enumerate(tensors) for d in range(t.dim()) if d or not batched[i]]
    if free:
        fixed = {(i, d): tensors[i].shape[d] for i, d in places if (i, d) not in varying}
    else:
        fixed = {}
    shared = {
        i: None if (i, 0) in varying else len(t)
        for i, t in enumerate(tensors)
        if t.dim() and not batched[i]
    }
    return TracedSizes([], size.node.expr, first, shared, rows, lengths, free, fixed)


def _fake(mode: FakeTensorMode, tensor: Tensor, rows: int | None, varying: Sequence[int]) -> Tensor:
    """Returns a tensor without data. With `rows`, its first dimension is symbolic, with `rows` as an example of its size.

    Args:
        mode: Mode of the tensor.
        tensor: Tensor of a call.
        rows: Batch size; None if the tensor does not carry the batch.
        varying: Other dimensions that are symbolic, too.
    """
    if rows is not None:
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(
            memory_format=torch.channels_last
        )
        # In the format that `dense` gives the tensors of each call, since strides are a part of the trace.
        contiguous = tensor.new_empty((rows, *tensor.shape[1:])).requires_grad_(
            tensor.requires_grad
        )
        if not channels_last:
            tensor = contiguous
        else:
            tensor = torch.empty_like(contiguous, memory_format=torch.channels_last)
        tensor = tensor.detach().requires_grad_(contiguous.requires_grad)
    symbolic = {*varying, *([] if rows is None else [0])}
    # DUCK gives equal sizes one symbol, as all inputs with the batch must have.
    sizes = [DimDynamic.DUCK if d in symbolic else DimDynamic.STATIC for d in range(tensor.dim())]
    return mode.from_tensor(
        tensor.detach().requires_grad_(tensor.requires_grad),
        symbolic_context=StatelessSymbolicContext(sizes),
    )


# Outputs


def _refuse_size(size: Any) -> None:
    raise Unsupported(f"it returns a size that depends on the batch ({size})")


def without_caches(outputs: Any) -> Any:
    """Replaces caches for generation in the outputs by None, because no loss needs them.

    Raises:
        Unsupported: Tensors are inside an object that cannot be rebuilt from other tensors.
    """
    for kind in {type(thing) for thing in _other_objects(outputs) if _hides_tensors(thing)}:
        # Caches of transformers, as in `past_key_values`, have this method.
        if not hasattr(kind, "get_seq_length"):
            raise Unsupported(f"it returns tensors inside a {kind.__name__}")
        outputs = map_leaves(lambda _: None, outputs, kind, objects=False)
    return outputs


def _hides_tensors(thing: Any, depth: int = 3) -> bool:
    inside = getattr(thing, "__dict__", {})
    if any(True for _ in leaves(inside)):
        return True
    # Bounded, because objects may refer to each other in a circle.
    return depth > 0 and any(_hides_tensors(part, depth - 1) for part in _other_objects(inside))


def _other_objects(tree: Any) -> Iterator[Any]:
    """Yields the objects in a nested structure that are neither tensors nor constants."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _other_objects(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _other_objects(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for member in fields(tree):
            yield from _other_objects(getattr(tree, member.name))
    elif not isinstance(tree, (Tensor, *CONSTANT_TYPES)):
        yield tree


# Effects of the forward that a graph does not repeat


@contextlib.contextmanager
def _compiling_flag_set() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` true: models check it before they take shortcuts that depend on values."""
    # torch.compiler has no function that sets it.
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _recurrent_layers_corrected() -> Iterator[None]:
    """Corrects how torch decomposes recurrent layers.

    Torch never drops values between layers. On CPUs, the operation that it uses for an LSTM of float32 inputs has no backward.
    """
    of_layers = torch_decompositions._rnn_helper

    def corrected(
        values: Tensor, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer_fn: Any,
    ) -> Any:  # fmt: skip
        if layer_fn is torch_decompositions.mkldnn_one_layer_lstm:
            layer_fn = torch_decompositions.one_layer_lstm
        values = values.transpose(0, 1) if batch_first else values
        directions = 2 if bidirectional else 1
        states = []
        for start in range(0, num_layers * directions, directions):
            if start:
                values = torch.dropout(values, dropout, train)
            part = slice(start, start + directions)
            values, last = of_layers(
                values, hidden[part], params[part], has_biases, 1, 0.0, False, bidirectional, False, layer_fn
            )  # fmt: skip
            states += last
        return values.transpose(0, 1) if batch_first else values, states

    torch_decompositions._rnn_helper = corrected
    try:
        yield
    finally:
        torch_decompositions._rnn_helper = of_layers


@contextlib.contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Refuses random numbers from outside the graph, which would be the same in every call; restores the global random states.

    Raises:
        Unsupported: Random numbers were drawn.
    """
    cpu = torch.device("cpu")
    before = rng.capture(cpu)
    try:
        yield
    finally:
        after = rng.capture(cpu)
        rng.restore(before, cpu)
    same = before["python"] == after["python"] and before["numpy"][2:] == after["numpy"][2:]
    if not (
        same
        and torch.equal(before["numpy"][1], after["numpy"][1])
        and torch.equal(before["torch"], after["torch"])
    ):
        raise Unsupported(
            "its forward draws random numbers outside the graph, as random.random() does"
        )


# The graph of forward and backward together


def _draw_in_memory_order(values: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    """Draws a mask as `bernoulli_` does, as for AlphaDropout.

    In a graph, `bernoulli_` becomes `bernoulli`, which draws the first number for the first entry in any memory format.
    """
    if values.is_contiguous():
        return NotImplemented
    order = sorted(range(values.dim()), key=lambda d: -values.stride(d))
    back = [order.index(d) for d in range(values.dim())]
    return aten.bernoulli.p(values.permute(order), p, generator=generator).permute(back)


def _refuse_hidden_inputs(graph: fx.GraphModule) -> None:
    """Refuses tensors that need a gradient and are not parameters, and sizes that follow values."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            # The graph holds it as a constant, so it would silently get no gradient.
            if isinstance(constant, Tensor) and constant.requires_grad:
                raise Unsupported(
                    f"it uses a tensor of shape {tuple(constant.shape)} that requires gradients but is no parameter of it"
                )
        value = node.meta.get("val")
        for part in value if isinstance(value, tuple | list) else (value,):
            # Such a size, as of the result of `nonzero`, is an unbacked symbol: it does not follow from the sizes of the
            # inputs.
            if isinstance(
                part, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool
            ) and free_unbacked_symbols(part):
                raise Unsupported(f"{node.target} returns a size or number that depends on values")


OF_ROWS = frozenset(
    {"lengths", "offsets", "offs", "batch_sizes", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k"}
)  # fmt: skip
"""Names of arguments that hold numbers of rows or positions of rows."""


def _refuse_dependence_on_rows(graph: fx.GraphModule) -> None:
    """Refuses operations that depend on which rows, or how many, are in the batch."""
    for node in graph.graph.nodes:
        if hasattr(node.target, "_schema"):
            names = [argument.name for argument in node.target._schema.arguments]
        else:
            names = ()
        arguments = dict(zip(names, node.args, strict=False), **node.kwargs)
        if arguments.get("scale_grad_by_freq"):
            raise Unsupported(
                "an embedding has scale_grad_by_freq=True: its gradients depend on all rows of the batch"
            )
        # With fewer rows, torch's kernels would read and write beyond the end of their memory: few check this.
        for name in OF_ROWS & arguments.keys():
            if arguments[name] is not None:
                raise Unsupported(f"{node.target} takes positions or numbers of rows (`{name}`)")


def _refuse_communication(graph: fx.GraphModule) -> None:
    """Refuses communication: a process that keeps no row runs no backward graph, and the others would wait for it."""
    for node in graph.graph.nodes:
        if "c10d" in getattr(node.target, "namespace", ""):
            raise Unsupported(f"it communicates with other processes ({node.target})")


def _drop_detached(joint: fx.GraphModule) -> None:
    """Removes `detach`: in a graph its only effect is that the same value is saved, and its rows are selected, twice."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
