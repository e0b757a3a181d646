"""Which operations let one sample of a batch reach another: seen on a few rows, by changing one and looking at the others."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from thresher import rng
from thresher.subset.function import run_backward
from thresher.subset.graphs import Graphs, Unsupported
from thresher.subset.rows import Layout
from thresher.subset.tracing import aten, is_getitem, place_rows

CHANGED = 1
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
BATCH_NORM = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def examine(graphs: Graphs, state: dict[tuple[str, Any], Tensor], leaves: list[Tensor], batched: list[bool]) -> None:
    """Find where the samples are in every saved value, and make sure that leaving rows out gives the right gradients.

    Runs the graphs on a few rows; draws nothing that is seen outside.

    Args:
        graphs: A traced module; its outputs and saved slots are filled in.
        state: Parameters and buffers by their source.
        leaves: The tensors of one call.
        batched: Which of them have the batch as first dimension.

    Raises:
        Unsupported: An operation other than batch normalisation mixes samples, or gradients of some rows come out wrong.
    """
    device = next((t.device for t in (*leaves, *state.values())), torch.device("cpu"))
    with rng.undisturbed(device), torch.no_grad():
        torch.manual_seed(0)
        graphs.tried = n = _rows(graphs)
        arguments = _arguments(graphs, state, leaves, batched, n)
        returned, mixing = _compare(graphs, *arguments)
        graphs.mixing = tuple(dict.fromkeys(str(node.target) for node in mixing))
        others = [node for node in mixing if not _is_batch_norm(node)]
        if others:
            names = ", ".join(dict.fromkeys(_name(node) for node in others))
            raise Unsupported(f"it mixes the samples of a batch ({names})")
        place_rows(graphs)
        _verify(graphs, returned)


def _rows(graphs: Graphs) -> int:
    """How many rows to try: the graphs hold for them, and no number in them is a multiple (a shift that would not be seen)."""
    nodes = graphs.forward_module.graph.nodes
    numbers = {x for node in nodes for x in tree_leaves((node.args, node.kwargs)) if type(x) is int and 1 < abs(x) < 2**31}
    for n in (*range(5, 64), 4, 3, 2):
        if graphs.holds_for(n) and (n < 5 or all(number % n for number in numbers)):
            return n
    raise Unsupported("it does not take a batch of a few rows")


def _arguments(graphs: Graphs, state: Any, tensors: list[Tensor], batched: list[bool], n: int) -> Iterator[list[Tensor]]:
    """A few rows twice, the second time with one row changed. Parameters of almost zero would hide what they scale."""
    own, other = [], []
    for kind, name in graphs.inputs:
        tensor = tensors[name] if kind == "leaf" else state[kind, name]
        if kind == "leaf" and batched[name]:
            base = tensor[torch.arange(n, device=tensor.device) % len(tensor)]
            differing = (tensor != base[CHANGED]).reshape(len(tensor), base[CHANGED].numel()).sum(1)
            changed = base.clone()
            changed[CHANGED] = tensor[differing.argmax()]
            if tensor.is_floating_point():
                base, noise = base + 0.1 * torch.randn_like(base), 0.1 * torch.randn_like(base[CHANGED])
                noise, changed = changed[CHANGED] + noise, base.clone()
                changed[CHANGED] = noise
        else:
            base = changed = tensor.detach()
            if kind == "param" and tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) < 1e-2:
                base = changed = 0.1 * torch.randn_like(tensor)
        own.append(base)
        other.append(changed)
    if all(x is y or torch.equal(x, y) for x, y in zip(own, other, strict=True)):
        raise Unsupported("all samples of its first batch are alike, so that it cannot be told whether they mix")
    yield own
    yield other


def _compare(graphs: Graphs, own: list[Tensor], other: list[Tensor]) -> tuple[list[Any], list[fx.Node]]:
    """Run both, node by node; what one sample does to others is noted and taken back.

    Returns:
        What the forward graph returns for the first, and the nodes that mix.
    """
    runner = fx.Interpreter(graphs.forward_module, garbage_collect_values=False)
    a: dict[fx.Node, Any] = {}
    b: dict[fx.Node, Any] = {}
    mixing: list[fx.Node] = []
    inputs = iter(zip(own, other, strict=True))
    for node in graphs.forward_module.graph.nodes:
        if node.op == "output":
            return [a.get(value) if isinstance(value, fx.Node) else value for value in node.args[0]], _heard(mixing, graphs)
        if node.op == "placeholder":
            a[node], b[node] = next(inputs)
            continue
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        before = rng.capture(own[0].device) if random else None
        a[node] = _run(runner, node, a)
        if before is not None:
            rng.restore(before, own[0].device)
        b[node] = _run(runner, node, b)
        if "empty" in str(node.target):
            b[node] = a[node]  # whatever was in memory
        b[node], mixes = _heal(graphs, node, a, b[node])
        if mixes and not is_getitem(node):
            mixing.append(node)
    raise AssertionError("a graph has an output")


def _run(runner: fx.Interpreter, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    return getattr(runner, node.op)(node.target, args, kwargs)


def _heal(graphs: Graphs, node: fx.Node, values: dict[fx.Node, Any], other: Any) -> tuple[Any, bool]:
    """The second value as it were if no sample had reached another, and whether one had."""
    layouts: Any = graphs.layouts[node]
    own, n = values[node], graphs.tried
    before = [layout for source in node.all_input_nodes for layout in _several(graphs.layouts[source])]
    if node.target in (*VIEWS, aten.repeat.default) and isinstance(layouts, Layout) and isinstance(before[0], Layout):
        labels = before[0].labels(values[node.all_input_nodes[0]], n)
        times: Any = None if node.target in VIEWS else fx.map_arg(node.args[1], values.get)
        labels = labels.reshape(own.shape) if times is None else labels.repeat(times)
        before = [layout for layout in _candidates(layouts) if torch.equal(labels, layout.labels(own, n))]
    if not isinstance(own, tuple | list):
        healed, layout, mixes = _heal_tensor(own, other, layouts, before, n)
        graphs.layouts[node] = layout
        return healed, mixes
    parts = [_heal_tensor(x, y, layout, before, n) for x, y, layout in zip(own, other, _several(layouts), strict=True)]
    graphs.layouts[node] = tuple(layout for _, layout, _ in parts)
    return type(own)(healed for healed, _, _ in parts), any(mixes for _, _, mixes in parts)


def _candidates(layout: Layout) -> list[Layout]:
    return [layout] if layout.per == 1 else [layout, replace(layout, inner=True)]


def _heal_tensor(own: Any, other: Any, layout: Any, before: list[Any], n: int) -> tuple[Any, Any, bool]:
    if not isinstance(own, Tensor) or isinstance(layout, Unsupported):
        return own, layout, isinstance(layout, Unsupported)
    if layout is None:
        return own, layout, bool(_differ(own, other).any())
    if not isinstance(layout, Layout):
        return own, layout, False
    orders = {(source.per, source.inner) for source in before if isinstance(source, Layout)}
    # a value that is the same for all samples fits both; a dropout mask is laid out as what it masks
    for candidate in sorted(_candidates(layout), key=lambda candidate: (candidate.per, candidate.inner) not in orders):
        reached = candidate.any(_differ(own, other), n)
        if not bool(torch.cat([reached[:CHANGED], reached[CHANGED + 1 :]]).any()):
            return other, candidate, False
    x, axis = layout.split(own, n)
    y, _ = layout.split(other, n)
    healed = x.clone()
    healed.select(axis, CHANGED).copy_(y.select(axis, CHANGED))
    return healed.reshape(own.shape), layout, True


def _differ(own: Tensor, other: Tensor) -> Tensor:
    if not own.is_floating_point():
        return own != other
    scale = own.abs().nan_to_num(0, 0, 0).max() if own.numel() else 0
    close = (own - other).abs() <= TOLERANCE.get(own.dtype, 1e-3) * 1e-1 * scale
    return ~(close | (own == other) | (own.isnan() & other.isnan()))


def _heard(mixing: list[fx.Node], graphs: Graphs) -> list[fx.Node]:
    """The nodes whose mixing reaches a value with rows; statistics that are only stored disturb nobody."""
    heard = []
    for node in mixing:
        seen: set[fx.Node] = set()
        ahead = [node]
        while ahead:
            here = ahead.pop()
            if here in seen or here.op == "output":
                continue
            seen.add(here)
            ahead.extend(here.users)
        follow = [found for found in seen if found in graphs.layouts and _has_rows(graphs.layouts[found])]
        if follow:
            heard.append(node)
    return heard


def _has_rows(layout: Any) -> bool:
    return any(isinstance(part, Layout | Unsupported) for part in _several(layout))


def _several(layout: Any) -> tuple[Any, ...]:
    return layout if isinstance(layout, tuple) else (layout,)


def _is_batch_norm(node: fx.Node) -> bool:
    return any(str(node.target).removeprefix("aten.").startswith(name) for name in BATCH_NORM)


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _verify(graphs: Graphs, returned: list[Any]) -> None:
    """Hold gradients of some rows, and of all rows in another order, against those of the whole batch."""
    n = graphs.tried
    saved = [returned[slot.index] if slot.layout else _scaled(slot, returned, n) for slot in graphs.saved]
    outputs = returned[len(graphs.mutated) :]
    tangents = []
    for position in graphs.differentiable:
        made = torch.randn_like(outputs[position])
        tangents.append(made if graphs.outputs[position] is not None else torch.zeros_like(made))
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    apart = _statistics_constant(graphs) if graphs.mixing else graphs
    every = [*range(n - 2, -1, -1), n - 1]
    for tried, rows in (graphs, every), (apart, [0, 2] if n > 2 else [0]), (apart, [1]), (apart, [n - 1]):
        chosen = torch.tensor(rows, device=tangents[0].device)
        taken = [t if at is None else at.take(t, chosen, n) for t, at in zip(tangents, layouts, strict=True)]
        masked = [t if at is None else at.put(t, chosen, n) for t, at in zip(taken, layouts, strict=True)]
        whole = tried.backward([*saved, *masked])
        some = run_backward(tried, list(saved), taken, chosen, n)
        _hold_against(tried, whole, some, chosen)


def _statistics_constant(graphs: Graphs) -> Graphs:
    """The same with statistics of the batch as constants, as in evaluation: what is left must not mix samples."""
    backward = copy.deepcopy(graphs.backward_module)
    for node in backward.graph.nodes:
        if "batch_norm" in str(node.target) and node.op == "call_function":
            given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False))
            mean, spread = given["save_mean"], given["save_invstd" if "save_invstd" in given else "save_var"]
            gradient, eps = (given[a if a in given else b] for a, b in (("grad_out", "grad_output"), ("eps", "epsilon")))
            wanted = given.get("output_mask", [True] * 3)
            node.target = aten.native_batch_norm_backward.default
            node.args = (gradient, given["input"], given["weight"], mean, spread, mean, spread, False, eps, wanted)
    backward.recompile()
    return replace(graphs, backward=backward.forward)


def _scaled(slot: Any, returned: list[Any], n: int) -> Any:
    return slot.per * n if slot.per else returned[slot.index]


def _hold_against(graphs: Graphs, whole: Any, some: Any, rows: Tensor) -> None:
    pairs = [
        (a, b if at is None else at.put(b, rows, graphs.tried), source)
        for a, b, at, source in zip(whole, some, graphs.grad_layouts, graphs.grads, strict=True)
        if source is not None and a.numel()
    ]
    largest = max((float(a.abs().max()) for a, _, _ in pairs), default=0.0)
    for a, b, (_, name) in pairs:
        scale = max(float(a.abs().max()), 1e-3 * largest)
        error = float((a - b).abs().max())
        if not error <= TOLERANCE.get(a.dtype, 1e-3) * scale:
            raise Unsupported(f"gradients of some rows differ from those of the batch by {error / scale:.1e} (of {name})")
