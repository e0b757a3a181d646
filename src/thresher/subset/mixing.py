"""Finds operations that let samples of a batch affect each other: changes one row, and checks that the others stay the same."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from thresher import rng
from thresher.subset.assembly import place_rows
from thresher.subset.function import run_backward
from thresher.subset.graphs import (
    Graphs,
    Layout,
    Unclear,
    Unsupported,
    aten,
    attention_dropout,
    is_getitem,
    is_random,
)

CHANGED = 1
"""Position of the row that is changed."""
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
BATCH_NORM = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def examine(
    graphs: Graphs, state: dict[tuple[str, Any], Tensor], leaves: list[Tensor], batched: list[bool]
) -> None:
    """Finds where the samples are in every saved value, and verifies the gradients that the graphs give for some rows.

    Runs the graphs on a few rows, and leaves the global random states as they were. Graphs with values of half precision are
    verified with all values in float32, whose rounding errors are too small to hide a wrong row, and then run once as they are.
    Attention keeps its precision, as some kernels take half precision alone. If gradients differ, the check is repeated in
    float64: a gradient that should be 0, as of a bias before batch normalization, is only rounding error in float32.

    Args:
        graphs: Graphs of a module; sets the layouts of their outputs and saved values.
        state: Parameters and buffers by source, such as ("param", name).
        leaves: Tensors of one call.
        batched: Flag for each tensor: whether its first dimension is the batch.

    Raises:
        Unsupported: An operation other than batch normalization mixes samples, or gradients of some rows are wrong.
    """
    try:
        _examine(graphs, state, leaves, batched, LOW_PRECISION, torch.float32)
    except DifferentGradients as reason:
        try:
            _examine(graphs, state, leaves, batched, (*LOW_PRECISION, torch.float32), torch.float64)
        except Unsupported:
            raise
        except Exception:  # an operation that float64 does not have
            raise reason from None


class DifferentGradients(Unsupported):
    """Gradients of some rows differ from those of the batch by more than rounding explains."""


def _examine(
    graphs: Graphs,
    state: dict[tuple[str, Any], Tensor],
    leaves: list[Tensor],
    batched: list[bool],
    low: tuple[torch.dtype, ...],
    high: torch.dtype,
) -> None:
    """Examines graphs, computing values of the dtypes `low` in the dtype `high`."""
    with trial(leaves, state):
        with in_precision(graphs, low, high) as precise:
            returned, mixing = run_on_few_rows(graphs, precise(state), precise(leaves), batched)
            graphs.mixing = tuple(dict.fromkeys(str(node.target) for node in mixing))
            others = [node for node in mixing if not _is_batch_norm(node)]
            if others:
                names = ", ".join(dict.fromkeys(_operation_name(node) for node in others))
                raise Unsupported(f"it mixes the samples of a batch ({names})")
            place_rows(graphs)
            _verify(graphs, returned)
        # An operation may refuse half precision, which does not show in float32, so the graphs run once as they are.
        if precise is not unchanged:
            arguments, _ = trial_arguments(graphs, state, leaves, batched, graphs.tried)
            _run_all_rows(graphs, graphs.forward(arguments))


LOW_PRECISION = (torch.bfloat16, torch.float16)


def unchanged(tensors: Any) -> Any:
    """Returns tensors as they are."""
    return tensors


class InOwnPrecision:
    """An attention kernel in a graph of higher precision: takes and returns that precision, but computes in the original one.

    Args:
        node: Node of the kernel.
        low: Data types that are replaced.
        high: Data type that replaces them.
    """

    def __init__(self, node: fx.Node, low: tuple[torch.dtype, ...], high: torch.dtype) -> None:
        self.kernel: Any = node.target
        # Attributes of an operation that `is_random`, `attention_dropout` and fx read.
        self.tags = self.kernel.tags
        self._schema = self.kernel._schema
        self.__name__ = "in_own_precision"
        self._low = low
        self._high = high
        self._dtypes = [
            getattr(_value(given), "dtype", None) for given in tree_leaves((node.args, node.kwargs))
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the results of the kernel in the higher precision."""
        leaves, form = tree_flatten((args, kwargs))
        cast = [
            x.to(dtype) if isinstance(x, Tensor) else x
            for x, dtype in zip(leaves, self._dtypes, strict=True)
        ]
        args, kwargs = tree_unflatten(cast, form)
        return tree_map_only(
            Tensor,
            lambda t: t.to(self._high) if t.dtype in self._low else t,
            self.kernel(*args, **kwargs),
        )

    def __str__(self) -> str:
        return str(self.kernel)


def _value(given: Any) -> Any:
    return given.meta.get("val") if isinstance(given, fx.Node) else given


@contextlib.contextmanager
def in_precision(
    graphs: Graphs, low: tuple[torch.dtype, ...], high: torch.dtype
) -> Iterator[Callable[[Any], Any]]:
    """Makes both graphs compute in a higher precision, and yields the function that converts their arguments.

    Args:
        graphs: Graphs of a module.
        low: Data types that are replaced.
        high: Data type that replaces them.
    """

    def convert(tensors: Any) -> Any:
        return tree_map(lambda t: t.detach().to(high) if t.dtype in low else t, tensors)

    def precise_dtype(given: Any) -> Any:
        return high if given in low else given

    modules = (graphs.forward_module, graphs.backward_module)
    values = [
        value
        for module in modules
        for node in module.graph.nodes
        for value in tree_leaves(node.meta.get("val"))
    ]
    if not any(isinstance(value, Tensor) and value.dtype in low for value in values):
        yield unchanged
        return
    with contextlib.ExitStack() as stack:

        def replace_attribute(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        # The stack runs its callbacks from the last to the first, so this one runs when everything is restored.
        stack.callback(_recompile, graphs)
        for module in modules:
            for node in module.graph.nodes:
                # Before the arguments: the kernel reads its own precision from them.
                if attention_dropout(node) is not None:
                    replace_attribute(node, "target", InOwnPrecision(node, low, high))
                # Casts have their dtype as an argument: `_to_copy(x, dtype=torch.bfloat16)`.
                replace_attribute(node, "args", map_aggregate(node.args, precise_dtype))
                replace_attribute(node, "kwargs", map_aggregate(node.kwargs, precise_dtype))
                if node.op != "get_attr":
                    continue
                constant = getattr(module, node.target)
                if isinstance(constant, Tensor):
                    replace_attribute(module, node.target, convert([constant])[0])
        _recompile(graphs)
        yield convert


def _recompile(graphs: Graphs) -> None:
    for module in (graphs.forward_module, graphs.backward_module):
        module.recompile()
    graphs.forward = graphs.forward_module.forward
    graphs.backward = graphs.backward_module.forward


def _run_all_rows(graphs: Graphs, returned: list[Any]) -> None:
    """Runs the backward graph once in its own precision, to see that each operation accepts the dtypes of its arguments.

    Raises:
        Unclear: The gradients are not finite.
    """
    outputs = returned[len(graphs.mutated) :]
    tangents = [torch.ones_like(outputs[position]) for position in graphs.differentiable]
    gradients = graphs.backward([*(returned[value.index] for value in graphs.saved), *tangents])
    if not all(
        bool(gradient.isfinite().all()) for gradient in gradients if isinstance(gradient, Tensor)
    ):
        raise Unclear("its gradients are not finite")


@contextlib.contextmanager
def trial(leaves: list[Tensor], state: dict[tuple[str, Any], Tensor]) -> Iterator[None]:
    """Seeds the random numbers of the block, and restores the global random states afterwards."""
    device = next((t.device for t in (*leaves, *state.values())), torch.device("cpu"))
    # The casts of autocast are already operations of the graphs; autocast would cast again what they cast back.
    with rng.undisturbed(device), torch.no_grad(), torch._C._DisableAutocast():
        torch.manual_seed(0)
        yield


def run_on_few_rows(
    graphs: Graphs, state: dict[tuple[str, Any], Tensor], leaves: list[Tensor], batched: list[bool]
) -> tuple[list[Any], list[fx.Node]]:
    """Runs the forward graph on a few rows, twice, and finds the layout of each of its values.

    Args:
        graphs: Graphs of a module; sets their `layouts` and `tried`.
        state: Parameters and buffers by source, such as ("param", name).
        leaves: Tensors of one call.
        batched: Flag for each tensor: whether its first dimension is the batch.

    Returns:
        Values that the forward graph returns, and the nodes that mix samples.
    """
    graphs.tried = n = choose_row_count(graphs)
    return _run_both(graphs, *trial_arguments(graphs, state, leaves, batched, n))


def choose_row_count(graphs: Graphs, least: int = 5) -> int:
    """Returns how many rows to try: a number that the graphs hold for and, if possible, that divides no number in them.

    With a divisor of a number in them, a shift of the rows by that number would go unnoticed.

    Args:
        graphs: Graphs of a module.
        least: Smallest number of rows that is tried first. Default: 5.

    Raises:
        Unsupported: The graphs hold for no small number of rows.
    """
    nodes = graphs.forward_module.graph.nodes
    # Numbers from 2**31 on are no sizes: a slice to the end has 2**63 - 1 in its arguments.
    numbers = set(graphs.lengths) | {
        x
        for node in nodes
        for x in tree_leaves((node.args, node.kwargs))
        if type(x) is int and 1 < abs(x) < 2**31
    }
    # Below 5 rows, nearly every graph has a multiple among its numbers, so they are not checked there.
    for n in (*range(least, 64), *range(min(least, 64) - 1, 1, -1)):
        if graphs.holds_for(n) and (n < 5 or all(number % n for number in numbers)):
            return n
    raise Unsupported("it does not take a batch of a few rows")


def trial_arguments(
    graphs: Graphs, state: Any, tensors: list[Tensor], batched: list[bool], n: int
) -> Iterator[list[Tensor]]:
    """Yields the arguments of the forward graph twice, for the same few rows, the second time with one row changed.

    Random numbers replace parameters of almost zero, which would hide the effect of everything that they scale.
    """
    own = []
    other = []
    for kind, name in graphs.inputs:
        tensor = tensors[name] if kind == "leaf" else state[kind, name]
        if kind == "leaf" and batched[name]:
            base = tensor[torch.arange(n, device=tensor.device) % len(tensor)]
            differing = (tensor != base[CHANGED]).reshape(len(tensor), base[CHANGED].numel()).sum(1)
            changed = base.clone()
            # Replaced by the sample that differs most from it, because an equal sample would show no mixing.
            changed[CHANGED] = tensor[differing.argmax()]
            if tensor.is_floating_point():
                # A batch with NaN is only one batch, and no reason to refuse the model.
                base, changed = (torch.where(rows.isnan(), 0, rows) for rows in (base, changed))
                # Noise, because rows of real data are often equal or mostly zeros, which would hide an effect.
                base, noise = (
                    base + 0.1 * torch.randn_like(base),
                    0.1 * torch.randn_like(base[CHANGED]),
                )
                noise = changed[CHANGED] + noise
                changed = base.clone()
                changed[CHANGED] = noise
        else:
            base = changed = tensor.detach()
            if (
                kind == "param"
                and tensor.is_floating_point()
                and tensor.numel()
                and float(tensor.abs().max()) < 1e-2
            ):
                base = changed = 0.1 * torch.randn_like(tensor)
        own.append(base)
        other.append(changed)
    if all(x is y or torch.equal(x, y) for x, y in zip(own, other, strict=True)):
        raise Unclear(
            "all samples of the batch are equal, so mixing cannot be detected; use a batch of different samples"
        )
    yield own
    yield other


def _run_both(
    graphs: Graphs, own: list[Tensor], other: list[Tensor]
) -> tuple[list[Any], list[fx.Node]]:
    """Runs the forward graph on both lists of arguments, node by node, and undoes each effect of one sample on others.

    Returns:
        Values that the forward graph returns for the first list, and the nodes that mix samples.
    """
    runner = fx.Interpreter(graphs.forward_module, garbage_collect_values=False)
    a: dict[fx.Node, Any] = {}
    b: dict[fx.Node, Any] = {}
    mixing: list[fx.Node] = []
    inputs = iter(zip(own, other, strict=True))
    for node in graphs.forward_module.graph.nodes:
        if node.op == "output":
            returned = [
                a.get(value) if isinstance(value, fx.Node) else value for value in node.args[0]
            ]
            return returned, _reaching_rows(mixing, graphs)
        if node.op == "placeholder":
            a[node], b[node] = next(inputs)
            continue
        random = is_random(node)
        # Both runs draw the same numbers, or different dropout masks would look like an effect of the changed row.
        before = rng.capture(own[0].device) if random else None
        a[node] = _run_node(runner, node, a)
        if before is not None:
            rng.restore(before, own[0].device)
        b[node] = _run_node(runner, node, b)
        # Memory that was never written may hold anything, so both runs get the same.
        if "empty" in str(node.target):
            b[node] = a[node]
        # The next operations get the value as if nothing had mixed, so that each one is judged by its own effect.
        b[node], mixes = _undo_mixing(graphs, node, a, b[node])
        if mixes and not is_getitem(node):
            mixing.append(node)
    raise AssertionError("every graph has an output")


def _run_node(runner: fx.Interpreter, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    return getattr(runner, node.op)(node.target, args, kwargs)


def _undo_mixing(
    graphs: Graphs, node: fx.Node, values: dict[fx.Node, Any], other: Any
) -> tuple[Any, bool]:
    """Returns the second value of a node without effects of one sample on another, and whether there were any."""
    layouts: Any = graphs.layouts[node]
    own = values[node]
    n = graphs.tried
    before = [
        layout for source in node.all_input_nodes for layout in several(graphs.layouts[source])
    ]
    if (
        node.target in (*VIEWS, aten.repeat.default)
        and isinstance(layouts, Layout)
        and isinstance(before[0], Layout)
    ):
        # A merged size does not show whether samples or positions come first, nor do values that are equal in both orders, such
        # as a mask without padding. The numbers of the samples, reshaped in the same way, do show it.
        labels = before[0].labels(values[node.all_input_nodes[0]], n)
        times: Any = None if node.target in VIEWS else fx.map_arg(node.args[1], values.get)
        labels = labels.reshape(own.shape) if times is None else labels.repeat(times)
        before = [
            layout for layout in _candidates(layouts) if torch.equal(labels, layout.labels(own, n))
        ]
    if not isinstance(own, tuple | list):
        unmixed, layout, mixes = _undo_in_tensor(own, other, layouts, before, n)
        graphs.layouts[node] = layout
        return unmixed, mixes
    if attention_dropout(node) == 0:
        # On CUDA, the seeds of attention without dropout, and the padding of its sums, are memory that was never written.
        other = type(own)(
            [
                other[0],
                *(
                    _with_row(x, y, at, n)
                    for x, y, at in zip(own[1:], other[1:], several(layouts)[1:], strict=True)
                ),
            ]
        )
    parts = [
        _undo_in_tensor(x, y, layout, before, n)
        for x, y, layout in zip(own, other, several(layouts), strict=True)
    ]
    graphs.layouts[node] = tuple(layout for _, layout, _ in parts)
    return type(own)(unmixed for unmixed, _, _ in parts), any(mixes for _, _, mixes in parts)


def _candidates(layout: Layout) -> list[Layout]:
    if layout.per == 1:
        return [layout]
    return [layout, replace(layout, inner=True)]


def _undo_in_tensor(
    own: Any, other: Any, layout: Any, before: list[Any], n: int
) -> tuple[Any, Any, bool]:
    if not isinstance(own, Tensor) or isinstance(layout, Unsupported):
        return own, layout, isinstance(layout, Unsupported)
    if layout is None:
        return own, layout, bool(_differ(own, other).any())
    if not isinstance(layout, Layout):
        return own, layout, False
    orders = {(source.per, source.inner) for source in before if isinstance(source, Layout)}
    # A value that is the same for all samples fits both orders. The order of a source comes first: a dropout mask has that of
    # the tensor that it masks.
    for candidate in sorted(
        _candidates(layout), key=lambda candidate: (candidate.per, candidate.inner) not in orders
    ):
        reached = candidate.any(_differ(own, other), n)
        if not bool(torch.cat([reached[:CHANGED], reached[CHANGED + 1 :]]).any()):
            return other, candidate, False
    return _with_row(own, other, layout, n), layout, True


def _with_row(own: Any, other: Any, layout: Any, n: int) -> Any:
    """Returns a value in which the changed row is taken from `other`; the value itself if it has no rows."""
    if not isinstance(own, Tensor) or not isinstance(layout, Layout):
        return own
    x, axis = layout.split(own, n)
    y, _ = layout.split(other, n)
    unmixed = x.clone()
    unmixed.select(axis, CHANGED).copy_(y.select(axis, CHANGED))
    return unmixed.reshape(own.shape)


def _differ(own: Tensor, other: Tensor) -> Tensor:
    if not own.is_floating_point():
        return own != other
    # Without infinite entries: as the scale, one of them would make every difference small.
    scale = own.abs().nan_to_num(0, 0, 0).max() if own.numel() else 0
    close = (own - other).abs() <= TOLERANCE.get(own.dtype, 1e-3) * 1e-1 * scale
    return ~(close | (own == other) | (own.isnan() & other.isnan()))


def _reaching_rows(mixing: list[fx.Node], graphs: Graphs) -> list[fx.Node]:
    """Returns the nodes whose mixing affects a value with rows; statistics that are only stored affect no gradient."""
    reaching = []
    for node in mixing:
        seen: set[fx.Node] = set()
        ahead = [node]
        while ahead:
            here = ahead.pop()
            if here in seen or here.op == "output":
                continue
            seen.add(here)
            ahead.extend(here.users)
        follow = [
            found for found in seen if found in graphs.layouts and _has_rows(graphs.layouts[found])
        ]
        if follow:
            reaching.append(node)
    return reaching


def _has_rows(layout: Any) -> bool:
    return any(isinstance(part, Layout | Unsupported) for part in several(layout))


def several(layout: Any) -> tuple[Any, ...]:
    """Returns the layouts of a node's values as a tuple, also for a single value."""
    return layout if isinstance(layout, tuple) else (layout,)


def _is_batch_norm(node: fx.Node) -> bool:
    return any(str(node.target).removeprefix("aten.").startswith(name) for name in BATCH_NORM)


def _operation_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _verify(graphs: Graphs, returned: list[Any]) -> None:
    """Compares the gradients of some rows, and of all rows in another order, with those of the whole batch.

    Args:
        graphs: Graphs with complete layouts.
        returned: Values that the forward graph returned for the rows that were tried.

    Raises:
        Unsupported: The gradients differ.
    """
    n = graphs.tried
    saved = [returned[value.index] for value in graphs.saved]
    outputs = returned[len(graphs.mutated) :]
    tangents = []
    for position in graphs.differentiable:
        tangent = torch.randn_like(outputs[position])
        # The backward pass of an output without rows, such as a loss of the whole batch, always runs on all rows, so there is
        # nothing to compare.
        tangents.append(
            tangent if graphs.outputs[position] is not None else torch.zeros_like(tangent)
        )
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    # Batch normalization mixes samples by design, so some rows are compared with its statistics held constant: everything else
    # in the model must still be exact. All rows in another order are compared with the graphs as they are.
    apart = _statistics_constant(graphs) if graphs.mixing else graphs
    # Another order than that of the batch, to detect a gradient that depends on the position of a row.
    every = [*range(n - 2, -1, -1), n - 1]
    for tried, rows in (
        (graphs, every),
        (apart, [0, 2] if n > 2 else [0]),
        (apart, [1]),
        (apart, [n - 1]),
    ):
        chosen = torch.tensor(rows, device=tangents[0].device)
        selected = [
            t if at is None else at.take(t, chosen, n)
            for t, at in zip(tangents, layouts, strict=True)
        ]
        masked = [
            t if at is None else at.put(t, chosen, n)
            for t, at in zip(selected, layouts, strict=True)
        ]
        whole = tried.backward([*saved, *masked])
        some = run_backward(tried, list(saved), selected, chosen, n)
        compare_gradients(tried, whole, some, chosen)


def _statistics_constant(graphs: Graphs) -> Graphs:
    """Returns graphs that treat the statistics of the batch as constants, as in evaluation; these must not mix samples."""
    backward = copy.deepcopy(graphs.backward_module)
    for node in backward.graph.nodes:
        if "batch_norm" in str(node.target) and node.op == "call_function":
            arguments = dict(
                zip(
                    (argument.name for argument in node.target._schema.arguments),
                    node.args,
                    strict=False,
                )
            )
            # The kernels of cudnn and miopen have other names for the same arguments.
            mean = arguments["save_mean"]
            spread = arguments["save_invstd" if "save_invstd" in arguments else "save_var"]
            gradient, eps = (
                arguments[a if a in arguments else b]
                for a, b in (("grad_out", "grad_output"), ("eps", "epsilon"))
            )
            wanted = arguments.get("output_mask", [True] * 3)
            # `False` stands for evaluation. The spread is passed in the place of a variance, so the gradients are not those of
            # the model. But both compared results come from this graph, and only an effect of one row on another can make them
            # differ.
            node.target = aten.native_batch_norm_backward.default
            node.args = (
                gradient,
                arguments["input"],
                arguments["weight"],
                mean,
                spread,
                mean,
                spread,
                False,
                eps,
                wanted,
            )
    backward.recompile()
    return replace(graphs, backward=backward.forward)


def compare_gradients(graphs: Graphs, whole: Any, some: Any, rows: Tensor) -> None:
    """Compares two results of the backward graph.

    Args:
        graphs: Graphs of a module.
        whole: Result for all rows that were tried.
        some: Result for some of them.
        rows: Positions of these rows, shape (k,), int64.

    Raises:
        Unsupported: The results differ.
        Unclear: The results are not finite.
    """
    pairs = [
        (a, b if at is None else at.put(b, rows, graphs.tried), source)
        for a, b, at, source in zip(whole, some, graphs.grad_layouts, graphs.grads, strict=True)
        if source is not None and a.numel()
    ]
    largest = max((float(a.abs().max()) for a, _, _ in pairs), default=0.0)
    for a, b, (_, name) in pairs:
        # A gradient that is tiny compared with the others may be nothing but rounding error.
        scale = max(float(a.abs().max()), 1e-3 * largest)
        error = float((a - b).abs().max())
        if not math.isfinite(scale):
            raise Unclear(f"the gradient of {name} is not finite")
        # Not `>`, which an error of NaN would pass.
        if not error <= TOLERANCE.get(a.dtype, 1e-3) * scale:
            raise DifferentGradients(
                f"gradients of some rows differ from those of the batch by a relative {error / scale:.1e} (of {name})"
            )
