"""Tracing: AOTAutograd makes graphs of a module's forward and backward, and what they could not repeat is refused.

Imported where the first module is traced: it loads torch's compiler.
"""

import collections
import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols
from torch.fx.graph import _BoxedCodeGen

from thresher import rng
from thresher.loading.trees import leaves, map_leaves
from thresher.subset.graphs import CONSTANT, Graphs, Hole, Slot, Unsupported, own_attributes
from thresher.subset.rows import Layout

aten: Any = torch.ops.aten
CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)


def _refuse_size(size: Any) -> None:
    raise Unsupported(f"it returns a size that follows the batch ({size})")


def _without_caches(outputs: Any) -> Any:
    """Outputs with None for what a model keeps for generation, which a loss has no use for.

    Raises:
        Unsupported: Tensors inside an object that a new one cannot be made of.
    """
    for kind in {type(thing) for thing in _things(outputs) if _hides_tensors(thing)}:
        if not hasattr(kind, "get_seq_length"):
            raise Unsupported(f"it returns tensors inside a {kind.__name__}")
        outputs = map_leaves(lambda _: None, outputs, kind)
    return outputs


def _hides_tensors(thing: Any, depth: int = 3) -> bool:
    inside = getattr(thing, "__dict__", {})
    return any(True for _ in leaves(inside)) or (depth > 0 and any(_hides_tensors(part, depth - 1) for part in _things(inside)))


def _things(tree: Any) -> Iterator[Any]:
    """What a nested structure holds beside tensors and constants."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _things(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _things(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for member in fields(tree):
            yield from _things(getattr(tree, member.name))
    elif not isinstance(tree, (Tensor, *CONSTANT)):
        yield tree


class Flat(nn.Module):
    """The module as a function of a list of tensors to a tuple of tensors; remembers the structure it returned."""

    def __init__(self, module: nn.Module, rebuild: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.inner = module
        self._rebuild = rebuild
        self.returned: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the module; outputs are new tensors over the same memory, so that none is a view of another's input."""
        args, kwargs = self._rebuild(list(tensors))
        before = dict(self.inner.named_buffers())
        outputs = self.inner(*args, **kwargs)
        for name, buffer in self.inner.named_buffers():
            if before.get(name) is not buffer:
                raise Unsupported(f"its forward assigns buffer {name}, which a traced graph does not repeat")
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            map_leaves(_refuse_size, outputs, kind)
        outputs = _without_caches(outputs)
        count = itertools.count()
        found = list(leaves(outputs))
        self.returned = map_leaves(lambda _: Hole(next(count)), outputs)
        return tuple(aten._unsafe_view.default(leaf, leaf.shape) for leaf in found)


def trace(module: nn.Module, rebuild: Any, tensors: list[Tensor], batched: list[bool], rows: int) -> Graphs:
    """Trace a module at a symbolic batch size.

    Args:
        module: Any module.
        rebuild: Makes (args, kwargs) of a list of tensors.
        tensors: The tensors of one call.
        batched: Which of them have the batch as first dimension.
        rows: The number that stands for the batch size where tracing must compare it.

    Raises:
        Unsupported: It cannot be traced, or its batch size is not free.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = [_fake(mode, t, rows if is_batched else None) for t, is_batched in zip(tensors, batched, strict=True)]
    first = batched.index(True)
    shared = {i: len(t) for i, (t, is_batched) in enumerate(zip(tensors, batched, strict=True)) if t.dim() and not is_batched}
    size: Any = fakes[first].shape[0]
    symbol = size.node.expr
    flat = Flat(module, rebuild)
    flat.training = module.training  # not train(): parts of the module may be in another mode
    guarded = (_attributes_kept(module), _nothing_drawn(), _said_to_compile())
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for context in guarded:
            stack.enter_context(context)
        joint = aot_export_joint_with_descriptors(stack, flat, tuple(fakes), {})
        if env.replacements.get(symbol, symbol) != symbol or any(guard.expr.func is sympy.Eq for guard in env.guards):
            raise Unsupported("its batch size is compared with a number")
        graph = joint.graph_module
        _refuse_unseen(graph)
        _drop_detached(graph)
        metadata = joint._aot_state.fw_metadata
        forward, backward = default_partition(
            graph, None, num_fwd_outputs=metadata.num_forward, static_lifetime_input_indices=[]
        )
    return _assemble(graph, forward, backward, flat.returned, env, symbol, metadata.num_forward, first, shared)


def _fake(mode: FakeTensorMode, tensor: Tensor, rows: int | None) -> Tensor:
    """A tensor without data; with `rows`, its first dimension is symbolic and of that size where a size is asked for."""
    if rows is not None:
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        plain = tensor.new_empty((rows, *tensor.shape[1:])).requires_grad_(tensor.requires_grad)
        tensor = plain if not channels_last else torch.empty_like(plain, memory_format=torch.channels_last)
        tensor = tensor.detach().requires_grad_(plain.requires_grad)
    sizes = [DimDynamic.DUCK if rows is not None and d == 0 else DimDynamic.STATIC for d in range(tensor.dim())]
    return mode.from_tensor(tensor.detach().requires_grad_(tensor.requires_grad), symbolic_context=_context(sizes))


def _context(sizes: list[DimDynamic]) -> StatelessSymbolicContext[Any, Any]:
    return StatelessSymbolicContext(dynamic_sizes=sizes)


def _content(container: Any) -> list[int]:
    members = itertools.chain(container, container.values()) if isinstance(container, dict) else container
    return [id(member) for member in members]


@contextlib.contextmanager
def _said_to_compile() -> Iterator[None]:
    """Models that look at values to take a short cut ask `torch.compiler.is_compiling()` whether they may."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Numbers drawn outside the graph would be the same at every call.

    Raises:
        Unsupported: Some were drawn; the random state is as before.
    """
    cpu = torch.device("cpu")
    before = rng.capture(cpu)
    yield
    after = rng.capture(cpu)
    rng.restore(before, cpu)
    same = before["python"] == after["python"] and before["numpy"][2:] == after["numpy"][2:]
    if not (same and torch.equal(before["numpy"][1], after["numpy"][1]) and torch.equal(before["torch"], after["torch"])):
        raise Unsupported("its forward draws random numbers outside the graph, as random.random() does")


def _refuse_unseen(graph: fx.GraphModule) -> None:
    """Refuse what is trained but nobody's parameter, and sizes that follow values."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if isinstance(constant, Tensor) and constant.requires_grad:
                raise Unsupported(f"it uses a trained tensor of shape {tuple(constant.shape)} that is no parameter of it")
        value = node.meta.get("val")
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(part):
                raise Unsupported(f"{node.target} gives a size or number that follows values")


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """What the forward assigns to modules is taken back; a traced graph could not repeat it.

    Raises:
        Unsupported: It assigned something.
    """
    before = {part: dict(part.__dict__) for part in module.modules()}
    content = {part: {name: copy.copy(of) for name, of in own_attributes(part) if type(of) in CONTAINERS} for part in before}
    held: list[tuple[Any, Any]] = [
        (registry, dict(registry)) for part in before for registry in (part._parameters, part._buffers)
    ]
    changed: list[str] = []
    try:
        yield
    finally:
        for registry, kept in held:  # of a module with two names, tracing leaves its own tensors behind
            registry.clear()
            registry.update(kept)
        names = {part: name for name, part in module.named_modules()}
        for part, attributes in before.items():
            now = part.__dict__
            for name in [n for n in {**attributes, **now} if attributes.get(n, Hole) is not now.get(n, Hole)]:
                if not (isinstance(part, nn.RNNBase) and name.startswith("_flat_weight")):  # lists of its own parameters
                    changed.append(f"{names.get(part, '?') or 'model'}.{name}")
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]
            for name, kept in content[part].items():
                if _content(now[name]) != _content(kept):
                    now[name] = kept
                    if not isinstance(part, nn.RNNBase):
                        changed.append(f"{names.get(part, '?') or 'model'}.{name}")
    if changed:
        raise Unsupported(f"its forward assigns {', '.join(sorted(changed)[:3])}, which a traced graph does not repeat")


def _assemble(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    returned: Any,
    env: ShapeEnv,
    symbol: Any,
    num_forward: int,
    first: int,
    shared: dict[int, int],
) -> Graphs:
    """Read off the descriptors what each argument and result of the graphs is."""
    _drop_unused(backward)
    descriptors = _output_of(joint).meta["desc"]
    mutated = []
    outputs: dict[int, int] = {}
    for position, descriptor in enumerate(descriptors[:num_forward]):
        if isinstance(descriptor, InputMutationAOTOutput) and isinstance(descriptor.mutated_input, BufferAOTInput):
            mutated.append(descriptor.mutated_input.target.removeprefix("inner."))
        elif isinstance(descriptor, PlainAOTOutput):
            outputs[descriptor.idx] = position
        else:
            raise Unsupported("its forward changes its inputs or parameters in place")
    kinds = {node.name: _source(node.meta["desc"]) for node in joint.graph.nodes if node.op == "placeholder"}
    tangents = {
        node.name: node.meta["desc"].output.idx
        for node in joint.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta["desc"], TangentAOTInput)
    }
    fw_returns = [getattr(value, "name", None) for value in _returns(forward)]
    if sorted(outputs.values()) != list(range(len(mutated), len(mutated) + len(outputs))):
        raise Unsupported("it returns something other than new tensors")
    reads = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved = [Slot(fw_returns.index(node.name)) for node in reads if node.name not in tangents]
    grads = [
        _source(d.grad_of) if isinstance(d, GradAOTOutput) and value is not None else None
        for d, value in zip(descriptors[num_forward:], _returns(backward), strict=True)
    ]
    reached: dict[Any, set[int]] = {}
    for node in backward.graph.nodes:
        reached[node] = (
            {tangents[node.name]}
            if node.name in tangents
            else set().union(*(reached[source] for source in node.all_input_nodes))
        )
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unsupported(f"its backward pass draws random numbers ({node.target}), as dropout inside a checkpoint does")
    graphs = Graphs(
        forward=_boxed(forward),
        backward=_boxed(backward),
        forward_module=forward,
        backward_module=backward,
        inputs=[kinds[node.name] for node in forward.graph.nodes if node.op == "placeholder"],
        mutated=mutated,
        outputs=[],
        returned=returned,
        differentiable=[tangents[node.name] for node in reads if node.name in tangents],
        saved=saved,
        grads=grads,
        grad_layouts=[
            _layout(value.meta.get("val"), symbol, value) if isinstance(value, fx.Node) else None
            for value in _returns(backward)
        ],
        grads_of=[reached.get(value, set()) for value in _returns(backward)],
        env=env,
        symbol=symbol,
        num_forward=num_forward,
        first=first,
        shared=shared,
    )
    graphs.layouts = {node: _layouts_of(node, symbol) for node in forward.graph.nodes if node.op != "output"}
    return graphs


def place_rows(graphs: Graphs) -> None:
    """Write down where the samples are in outputs and saved values, from the layouts of the graph's nodes.

    Raises:
        Unsupported: A saved value that follows the batch, but not as whole rows.
    """
    returns = _returns(graphs.forward_module)
    first = len(graphs.mutated)
    graphs.outputs = [graphs.layouts[node] for node in returns[first : graphs.num_forward]]
    for slot in graphs.saved:
        node = returns[slot.index]
        found = graphs.layouts[node]
        if isinstance(found, Unsupported):
            raise found
        if isinstance(found, Layout):
            slot.layout = found
        elif found is not None:
            slot.per = found


def _layouts_of(node: fx.Node, symbol: Any) -> Any:
    """Layout of a tensor, multiple of a size, None where it does not follow the batch; a tuple for several results."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple(_layout(item, symbol, node) for item in value)
    return _layout(value, symbol, node)


def _layout(value: Any, symbol: Any, node: fx.Node) -> Any:
    if isinstance(value, torch.SymInt):
        return _multiple(value, symbol) if _follows(value, symbol) else None
    if not isinstance(value, FakeTensor):
        return None
    axes = [d for d, size in enumerate(value.shape) if _follows(size, symbol)]
    if not axes:
        return None
    if len(axes) > 1:
        return Unsupported(f"{node.target} gives a tensor with the batch in two dimensions")
    per = _multiple(value.shape[axes[0]], symbol)
    return per if isinstance(per, Unsupported) else Layout(axes[0], per)


def _follows(size: Any, symbol: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr.has(symbol)


def _multiple(size: Any, symbol: Any) -> Any:
    per = size.node.expr / symbol
    if per.is_Integer:
        return int(per)
    return Unsupported(f"a size is {size.node.expr}, which is not a whole number of rows a sample")


def _source(descriptor: Any) -> tuple[str, Any] | None:
    if isinstance(descriptor, ParamAOTInput):
        return "param", descriptor.target.removeprefix("inner.")
    if isinstance(descriptor, BufferAOTInput):
        return "buffer", descriptor.target.removeprefix("inner.")
    if isinstance(descriptor, PlainAOTInput):
        return "leaf", descriptor.idx
    return None


def _drop_detached(joint: fx.GraphModule) -> None:
    """Take out `detach`, which does nothing in a graph but have the same values saved, and taken rows of, twice."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)


def _drop_unused(backward: fx.GraphModule) -> None:
    """Take out what no gradient needs: dead random draws, and saved values that only those had read."""
    backward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in backward.graph.find_nodes(op="placeholder"):
        if not node.users and not node.name.startswith("tangents"):
            backward.graph.erase_node(node)


def _output_of(module: fx.GraphModule) -> fx.Node:
    return next(iter(reversed(module.graph.nodes)))


def _returns(module: fx.GraphModule) -> list[Any]:
    """The nodes that a graph returns, in order."""
    returned: Any = _output_of(module).args[0]
    return list(returned)


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of a list that it empties, so that what was saved is freed as soon as it was used."""
    for node in module.graph.nodes:
        if node.target is aten.view.default:  # fewer rows may have other strides than those that were traced
            node.target = aten.reshape.default
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one of several results."""
    return node.target is operator.getitem
