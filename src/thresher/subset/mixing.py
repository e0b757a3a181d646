"""Which operations let one sample of a batch reach another: seen on a few rows, by changing one and looking at the others."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thresher import rng
from thresher.subset.function import run_backward
from thresher.subset.graphs import Graphs, Unsupported, is_getitem, place_rows
from thresher.subset.rows import Layout

ROWS = 4
CHANGED = 1
BATCH_NORM = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of normalisations that use the statistics of the batch at hand."""
    return tuple(
        f"{type(part).__name__} {name!r}"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    )


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
        arguments = _arguments(graphs, state, leaves, batched)
        returned, mixing = _compare(graphs, *arguments)
        graphs.mixing = tuple(dict.fromkeys(str(node.target) for node in mixing))
        others = [node for node in mixing if not _is_batch_norm(node)]
        if others:
            names = ", ".join(dict.fromkeys(_name(node) for node in others))
            raise Unsupported(f"it mixes the samples of a batch ({names})")
        place_rows(graphs)
        _verify(graphs, returned)


def _arguments(graphs: Graphs, state: Any, tensors: list[Tensor], batched: list[bool]) -> Iterator[list[Tensor]]:
    """A few rows twice, the second time with one row changed. Parameters of almost zero would hide what they scale."""
    own, other = [], []
    for kind, name in graphs.inputs:
        tensor = tensors[name] if kind == "leaf" else state[kind, name]
        if kind == "leaf" and batched[name]:
            n = len(tensor)
            rows = torch.arange(ROWS, device=tensor.device) % n
            base, another = tensor[rows], tensor[(rows + n // 2) % n]
            if tensor.is_floating_point():
                base, another = (t + 0.1 * torch.randn_like(t) for t in (base, another))
            changed = base.clone()
            changed[CHANGED] = another[CHANGED]
        else:
            base = changed = tensor.detach()
            if kind == "param" and tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) < 1e-2:
                base = changed = 0.1 * torch.randn_like(tensor)
        own.append(base)
        other.append(changed)
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
        b[node], mixes = _heal(graphs, node, a[node], b[node])
        if mixes and not is_getitem(node):
            mixing.append(node)
    raise AssertionError("a graph has an output")


def _run(runner: fx.Interpreter, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    return getattr(runner, node.op)(node.target, args, kwargs)


def _heal(graphs: Graphs, node: fx.Node, own: Any, other: Any) -> tuple[Any, bool]:
    """The second value as it were if no sample had reached another, and whether one had."""
    layouts = graphs.layouts[node]
    before = [graphs.layouts[source] for source in node.all_input_nodes]
    if not isinstance(own, tuple | list):
        healed, layout, mixes = _heal_tensor(own, other, layouts, before)
        graphs.layouts[node] = layout
        return healed, mixes
    parts = [_heal_tensor(x, y, layout, before) for x, y, layout in zip(own, other, layouts, strict=True)]
    graphs.layouts[node] = tuple(layout for _, layout, _ in parts)
    return type(own)(healed for healed, _, _ in parts), any(mixes for _, _, mixes in parts)


def _heal_tensor(own: Any, other: Any, layout: Any, before: list[Any]) -> tuple[Any, Any, bool]:
    if not isinstance(own, Tensor) or isinstance(layout, Unsupported):
        return own, layout, isinstance(layout, Unsupported)
    if layout is None:
        return own, layout, bool(_differ(own, other).any())
    if not isinstance(layout, Layout):
        return own, layout, False
    candidates = [layout]
    if layout.per > 1:
        candidates.append(Layout(layout.axis, layout.per, inner=True))
        candidates.sort(key=lambda candidate: candidate not in before)  # a dropout mask is laid out as what it masks
    for candidate in candidates:
        x, axis = candidate.split(own, ROWS)
        y, _ = candidate.split(other, ROWS)
        reached = _differ(x, y).movedim(axis, 0).reshape(ROWS, -1).any(1)
        if not bool(torch.cat([reached[:CHANGED], reached[CHANGED + 1 :]]).any()):
            return other, candidate, False
    x, axis = layout.split(own, ROWS)
    y, _ = layout.split(other, ROWS)
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
    return any(isinstance(part, Layout | Unsupported) for part in (layout if isinstance(layout, tuple) else (layout,)))


def _is_batch_norm(node: fx.Node) -> bool:
    return any(str(node.target).removeprefix("aten.").startswith(name) for name in BATCH_NORM)


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _verify(graphs: Graphs, returned: list[Any]) -> None:
    """Hold gradients of some rows, and of all rows in another order, against those of the whole batch."""
    saved = [returned[slot.index] if slot.layout else _scaled(slot, returned, ROWS) for slot in graphs.saved]
    outputs = returned[len(graphs.mutated) :]
    tangents = []
    for position in graphs.differentiable:
        made = torch.randn_like(outputs[position])
        tangents.append(made if graphs.outputs[position] is not None else torch.zeros_like(made))
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    for rows in ([2, 0, 3, 1],) if graphs.mixing else ([2, 0, 3, 1], [0, 2]):
        chosen = torch.tensor(rows, device=tangents[0].device)
        taken = [t if at is None else at.take(t, chosen, ROWS) for t, at in zip(tangents, layouts, strict=True)]
        masked = [t if at is None else at.put(t, chosen, ROWS) for t, at in zip(taken, layouts, strict=True)]
        whole = graphs.backward([*saved, *masked])
        some = run_backward(graphs, list(saved), taken, chosen, ROWS)
        _hold_against(graphs, whole, some, chosen)


def _scaled(slot: Any, returned: list[Any], n: int) -> Any:
    return slot.per * n if slot.per else returned[slot.index]


def _hold_against(graphs: Graphs, whole: Any, some: Any, rows: Tensor) -> None:
    pairs = [
        (a, b if at is None else at.put(b, rows, ROWS), source)
        for a, b, at, source in zip(whole, some, graphs.grad_layouts, graphs.grads, strict=True)
        if source is not None and a.numel()
    ]
    largest = max((float(a.abs().max()) for a, _, _ in pairs), default=0.0)
    for a, b, (_, name) in pairs:
        scale = max(float(a.abs().max()), 1e-3 * largest)
        error = float((a - b).abs().max())
        if not error <= TOLERANCE.get(a.dtype, 1e-3) * scale:
            raise Unsupported(f"gradients of some rows differ from those of the batch by {error / scale:.1e} (of {name})")
