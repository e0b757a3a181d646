"""Compilation of both graphs by Inductor, with the batch size symbolic in the forward and the number of rows in the backward.

The module is traced a second time with Inductor's decompositions. Values that are cheap to compute are then not saved: the
backward graph computes them again, from the kept rows only. That is right if each row of a value depends only on the same row
of other values. All other values are saved: sums over the batch, random numbers, and row numbers. The compiled graphs are then
compared with the graphs that `mixing` has examined.

This module is imported when the first module is compiled.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from thresher.subset.assembly import Joint, assemble, drop_unused, layouts_of, place_rows
from thresher.subset.graphs import (
    MOST_SIZES,
    Graphs,
    Layout,
    Unsupported,
    aten,
    guards_hold,
    is_getitem,
    is_random,
    returned_nodes,
)
from thresher.subset.mixing import (
    choose_row_count,
    run_on_few_rows,
    several,
    trial,
    trial_arguments,
)
from thresher.subset.tracing import trace_joint
from thresher.subset.verify import check_agreement

HEURISTICS = frozenset(
    {
        ("_inductor/codegen/cpp.py", "need_use_acc_helper"),
        ("_inductor/codegen/cpp.py", "_select_tiling"),
        ("_inductor/decomposition.py", "addmm"),
        ("_inductor/decomposition.py", "bmm"),
        ("_inductor/decomposition.py", "mm"),
        ("_inductor/scheduler.py", "can_fuse"),
    }
)
"""Functions of Inductor that compare sizes only to choose the faster of two ways that are both correct for all sizes."""
NAMED = "inductor_node"
OWN_SETTINGS = {
    "triton.cudagraphs": False,
    "cpp.descriptive_names": NAMED,
    "triton.descriptive_names": NAMED,
}
"""Settings of Inductor that override the user's. CUDA graphs would be recorded again whenever the number of rows changes. The
names of kernels are part of the key under which Inductor caches a compiled graph on disk; with other names, it does not reuse
an equal graph of the user's, which has the guards of heuristics."""
DEEPEST = 24
"""Number of stack frames that are searched for a function of `HEURISTICS`."""
LAYOUTS = "thresher_layouts"
"""Key in the `meta` of a node for the layouts of its values."""
SAME_IN_ALL_ROWS = frozenset(
    {aten.full.default, aten.expand.default, aten.scalar_tensor.default, aten.empty.memory_format}
)


class CompilingSizes(ShapeEnv):
    """Symbolic sizes without guards from Inductor's heuristics, because such guards force needless compilations."""

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the value of an expression for the traced sizes, and sets a guard, except in a heuristic."""
        with self.suppress_guards() if _in_heuristic() else contextlib.nullcontext():
            return super().evaluate_expr(*args, **kwargs)


def _in_heuristic() -> bool:
    # Frames 0 and 1 are this function and `evaluate_expr`.
    frame = sys._getframe(2)
    for _ in range(DEEPEST):
        if frame is None:
            return False
        path = frame.f_code.co_filename.replace("\\", "/").rpartition("/torch/")[2]
        if (path, frame.f_code.co_name) in HEURISTICS:
            return True
        frame = frame.f_back
    return False


class InductorBackward:
    """A compiled backward graph.

    Args:
        compiled: Function of a list of arguments, which it empties.
        fakes: Arguments without data that it was compiled for.
        guards: Conditions on the sizes.
        symbols: Symbol of the number of rows, then the symbols of other sizes that differ from call to call.
        lengths: The other sizes in the traced call. Default: none.
    """

    def __init__(
        self,
        compiled: Callable[[list[Any]], Any],
        fakes: list[Any],
        guards: list[Any],
        symbols: list[Any],
        lengths: tuple[int, ...] = (),
    ) -> None:
        self._compiled = compiled
        self._guards = guards
        self._symbols = symbols
        self._lengths = lengths
        self._strides = [_fixed_strides(fake) for fake in fakes]
        self._orders = [_order(fake) if isinstance(fake, Tensor) else [] for fake in fakes]
        self._dense = [isinstance(fake, Tensor) and _follows_dense(fake) for fake in fakes]
        self._valid: dict[Any, bool] = {}

    def holds_for(self, k: int, lengths: tuple[int, ...] | None = None) -> bool:
        """Checks whether compiling assumed nothing that k rows, or these lengths of a call, contradict."""
        sizes = (k, *(self._lengths if lengths is None else lengths))
        if sizes not in self._valid:
            if len(self._valid) >= MOST_SIZES:
                self._valid.clear()
            self._valid[sizes] = guards_hold(
                self._guards, dict(zip(self._symbols, sizes, strict=True))
            )
        return self._valid[sizes]

    def __call__(self, arguments: list[Any]) -> Any:
        """Runs the graph; arguments whose memory is laid out in another way are copied first."""
        for position, wanted in enumerate(self._strides):
            value = arguments[position]
            order = self._orders[position]
            dense = self._dense[position]
            # Compiled kernels have the strides built in, and would read wrong entries of memory with another layout.
            if wanted is not None and not (
                _has_strides(value, wanted) and (not dense or _is_dense(value, order))
            ):
                arguments[position] = _lay_out(value, order)
                del value
        return self._compiled(arguments)


def compile_graphs(
    examined: Graphs,
    module: nn.Module,
    rebuild: Any,
    tensors: list[Tensor],
    batched: list[bool],
    state: dict[tuple[str, Any], Tensor],
    options: dict[str, Any],
) -> Graphs:
    """Compiles both graphs of a module.

    Args:
        examined: Graphs of the module that were examined. They stay as they are.
        module: The module.
        rebuild: Function that builds (args, kwargs) from a list of tensors.
        tensors: Tensors of one call.
        batched: Flag for each tensor: whether its first dimension is the batch.
        state: Parameters and buffers by source, such as ("param", name).
        options: Settings of Inductor.

    Returns:
        Graphs whose functions are compiled.

    Raises:
        Unsupported: The module cannot be compiled, or the compiled graphs give other results than the examined ones.
    """
    with config.patch({**options, **OWN_SETTINGS}):
        joint = trace_joint(
            *(module, rebuild, tensors, batched, examined.rows),
            varying=[place for places in examined.free.values() for place in places],
            env=CompilingSizes(),
            decompositions=select_decomp_table(),
        )
        with _at_work(joint.mode):
            # These rewrites need forward and backward together, so they come before the split, as in torch.compile.
            _recursive_joint_graph_passes(
                joint.graph, input_device=tensors[joint.sizes.first].device
            )
            _mark_saved(joint, examined, state, tensors, batched)
            forward, backward = min_cut_rematerialization_partition(
                joint.graph,
                None,
                num_fwd_outputs=joint.num_forward,
                static_lifetime_input_indices=[],
            )
        # Before the copies, which must take the same arguments as the graphs that `assemble` describes.
        drop_unused(backward)
        # Copies are compiled, because compiling changes a graph, and `assemble` reads the originals.
        copies = copy.deepcopy(forward), copy.deepcopy(backward)
        graphs = assemble(joint, forward, backward)
        # Layouts from the trial run replace those read from shapes, which do not show whether samples or positions come first.
        graphs.layouts |= {
            node: node.meta[LAYOUTS] for node in graphs.layouts if LAYOUTS in node.meta
        }
        place_rows(graphs)
        graphs.examined = examined
        graphs.mixing = examined.mixing
        with _at_work(joint.mode):
            graphs.compiled_backward = backward_of = _compile(graphs, *copies)
    # Inductor adds guards while it compiles, such as one on 32-bit indices.
    if not graphs.holds_for(len(tensors[graphs.first])):
        raise Unsupported("the compiler made a wrong assumption about the batch size")
    # Guards may exclude small numbers of rows. Half of the tested rows must be enough for the compiled backward graph, or the
    # comparison for some of the rows would run the uncompiled one.
    least = next((k for k in range(2, 64) if backward_of.holds_for(k)), 2)
    graphs.tried = choose_row_count(graphs, least=2 * least + 1)
    with trial(tensors, state):
        check_agreement(
            graphs, examined, next(trial_arguments(graphs, state, tensors, batched, graphs.tried))
        )
    return graphs


@contextlib.contextmanager
def _at_work(mode: FakeTensorMode) -> Iterator[None]:
    """Enters the contexts that Inductor expects."""
    with contextlib.ExitStack() as stack:
        for context in (
            torch.no_grad(),
            torch._C._DisableAutocast(),
            V.set_fake_mode(mode),
            tracing(TracingContext(mode)),
        ):
            stack.enter_context(context)
        stack.enter_context(compiled_autograd._disable())
        yield


# Values that are computed once


def _mark_saved(
    joint: Joint, examined: Graphs, state: Any, tensors: list[Tensor], batched: list[bool]
) -> None:
    """Marks values that cannot be computed again from the kept rows as saved, and stores the layout of each value in its node.

    Raises:
        Unsupported: The compiled graph mixes samples, and the examined graphs do not.
    """
    graph, nodes = _without_tangents(joint)
    layouts = {copied: layouts_of(copied, joint.sizes.symbol) for copied in nodes.values()}
    whole = replace(
        examined,
        **joint.sizes._asdict(),
        forward_module=graph,
        layouts=layouts,
        examined=examined,
        _valid={},
    )
    with trial(tensors, state):
        _, mixing = run_on_few_rows(whole, state, tensors, batched)
    mixing = [node for node in mixing if _gives_tensors(node)]
    # Here batch normalization is several operations, so its mixing has other names than in the examined graphs.
    if mixing and not examined.mixing:
        raise Unsupported(f"its compiled graph mixes the samples of a batch ({mixing[0].target})")
    for node, copied in nodes.items():
        node.meta[LAYOUTS] = layouts[copied]
        if _is_made_once(copied, layouts):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _without_tangents(joint: Joint) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Returns a graph of all values that need no gradient of an output, and its nodes by those of the joint graph."""
    made = fx.Graph()
    nodes = dict[fx.Node, fx.Node]()
    dependent = set[fx.Node]()
    for node in joint.graph.graph.nodes:
        if node.op == "output":
            made.output(
                [
                    nodes[value] if isinstance(value, fx.Node) else value
                    for value in node.args[0][: joint.num_forward]
                ]
            )
        elif isinstance(node.meta.get("desc"), TangentAOTInput) or not dependent.isdisjoint(
            node.all_input_nodes
        ):
            dependent.add(node)
        else:
            nodes[node] = made.node_copy(node, nodes.__getitem__)
    return fx.GraphModule(joint.graph, made), nodes


def _is_made_once(node: fx.Node, layouts: dict[fx.Node, Any]) -> bool:
    """Checks whether a value cannot be computed again from only some rows of the batch."""
    if node.op != "call_function" or is_getitem(node):
        return False
    if is_random(node):
        return True
    results = [made for made in several(layouts[node]) if not isinstance(made, int)]
    if not results or not _gives_tensors(node):
        return False
    sources = [made for source in node.all_input_nodes for made in several(layouts[source])]
    of_rows = any(isinstance(made, Layout | Unsupported) for made in sources)
    of_size = any(isinstance(made, int) for made in sources)
    # A value without rows that is computed from rows, such as a sum over the batch: the kept rows have another sum.
    if any(made is None for made in results):
        return of_rows or of_size
    # Rows that are not computed from rows, such as `arange(n)`: the kept rows need the numbers that they had in the batch.
    return not of_rows and node.target not in SAME_IN_ALL_ROWS


def _gives_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return any(
        isinstance(part, Tensor)
        for part in (value if isinstance(value, tuple | list) else (value,))
    )


# Inductor


def _compile(graphs: Graphs, forward: fx.GraphModule, backward: fx.GraphModule) -> InductorBackward:
    """Compiles copies of both graphs; returns the backward one, which takes saved values with the strides of selected rows."""
    env = _environment(forward)
    context = TracingContext.get()
    context.fakify_first_call = True
    nodes = returned_nodes(forward)
    visible = range(len(graphs.mutated), graphs.num_forward)
    # What the user gets keeps the strides of the module's outputs. For all other values Inductor may choose faster ones.
    forward.graph.output_node().meta["user_visible_output_idxs"] = [
        i for i in visible if isinstance(nodes[i], fx.Node)
    ]
    with TracingContext.report_output_strides() as strides:
        graphs.forward = compile_fx_inner(forward, _fakes(forward), is_backward=False)
    # Read before the backward is compiled in the same environment: what that assumes of the number of kept rows must not
    # limit the size of the batch.
    graphs.guards = [guard.expr for guard in env.guards]
    fakes = _fakes(backward)
    nodes = returned_nodes(graphs.forward_module)
    for position, saved in enumerate(graphs.saved):
        if isinstance(fakes[position], Tensor):
            # An input is saved as it is, with its own strides.
            if not strides or nodes[saved.index].op == "placeholder":
                stride = None
            else:
                stride = strides[saved.index]
            fakes[position] = _as_given(fakes[position], stride, saved.layout)
    backward.graph.output_node().meta["user_visible_output_idxs"] = []
    compiled = compile_fx_inner(backward, list(fakes), is_backward=True)
    guards = [guard.expr for guard in env.guards]
    return InductorBackward(compiled, fakes, guards, [graphs.symbol, *graphs.free], graphs.lengths)


def _environment(module: fx.GraphModule) -> ShapeEnv:
    mode = next(fake.fake_mode for fake in _fakes(module) if isinstance(fake, FakeTensor))
    assert mode.shape_env is not None
    return mode.shape_env


def _fakes(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _as_given(fake: Any, strides: Any, layout: Layout | None) -> Any:
    """Returns a saved value with the strides that the backward graph gets: of the compiled forward, or of `Layout.take`."""
    with fake.fake_mode:
        if strides is not None:
            fake = fake.new_empty_strided(fake.shape, strides)
        # `Layout.take` leaves an expanded value expanded, and returns any other without gaps, in the same order.
        if layout is None or _number(fake.stride(layout.axis)) == 0:
            return fake
        dense = _steps(fake.shape, _order(fake))
        return fake.new_empty_strided(fake.shape, dense)


def _number(size: Any) -> int:
    """Returns a size as a number; for a symbolic size, its value in the traced call. Comparing symbols would add guards."""
    return size if isinstance(size, int) else size.node.hint


def _order(fake: Tensor) -> list[int]:
    """Returns the dimensions from the slowest to the fastest."""
    return sorted(range(fake.dim()), key=lambda d: -_number(fake.stride(d)))


def _fixed_strides(fake: Any) -> list[int | None] | None:
    """Returns the stride of each dimension, None if it follows the number of rows; None for anything that is not a tensor."""
    if not isinstance(fake, Tensor):
        return None
    return [stride if isinstance(stride, int) else None for stride in fake.stride()]


def _has_strides(value: Tensor, wanted: list[int | None]) -> bool:
    # The stride of a dimension with one entry is never used.
    return all(
        w is None or w == s or size == 1
        for w, s, size in zip(wanted, value.stride(), value.shape, strict=True)
    )


def _follows_dense(fake: Tensor) -> bool:
    """Checks whether a tensor has symbolic strides and no gaps in memory, which must then hold in each call."""
    shape = [_number(size) for size in fake.shape]
    strides = [_number(stride) for stride in fake.stride()]
    # A symbolic stride cannot be compared with a number, so all strides are compared at the sizes of the traced call.
    symbolic = any(not isinstance(stride, int) for stride in fake.stride())
    return symbolic and _steps(shape, _order(fake)) == strides


def _steps(shape: Sequence[Any], order: list[int]) -> list[Any]:
    """Returns the strides of memory that is filled without gaps, its dimensions in an order from the slowest to the fastest."""
    strides = list[Any]([1] * len(shape))
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return strides


def _is_dense(value: Tensor, order: list[int]) -> bool:
    both = zip(_steps(value.shape, order), value.stride(), value.shape, strict=True)
    return all(wanted == stride or size == 1 for wanted, stride, size in both)


def _lay_out(value: Tensor, order: list[int]) -> Tensor:
    # With the dimensions in the wanted memory order, contiguous means without gaps.
    return value.permute(order).contiguous().permute([order.index(d) for d in range(value.dim())])
