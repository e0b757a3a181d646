"""Comparison of compiled graphs with those that were examined: results must be the same but for rounding."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from thresher.subset.assembly import is_random
from thresher.subset.function import run_backward
from thresher.subset.graphs import Graphs, Unclear, Unsupported
from thresher.subset.mixing import compare_gradients

SAME_BUT_FOR_ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 2e-1}
"""Largest norm of the difference of two results over that of one. A rounding error of the forward can turn a unit off whose
input is almost zero; of 33 samples of a ResNet-20 that moves gradients by a relative 2e-3. Wrong rows move them by 0.1 to 1."""


def check_agreement(graphs: Graphs, examined: Graphs, arguments: list[Any]) -> None:
    """Compares outputs and gradients of compiled graphs with those of the examined ones, for all rows and for some.

    Args:
        graphs: Compiled graphs; `tried` is the number of samples in `arguments`.
        examined: Graphs of the same module that were examined.
        arguments: Arguments of the forward graph.

    Raises:
        Unsupported: They differ.
        Unclear: They are not finite.
    """
    if any(is_random(node) for node in graphs.forward_module.graph.nodes):
        if not graphs.mixing:
            _compare_with_itself(graphs, arguments)
        return
    n, share = graphs.tried, _allowed(graphs.forward_module)
    found, expected = graphs.forward(list(arguments)), examined.forward(list(arguments))
    _check_close("outputs", _outputs(graphs, found), _outputs(examined, expected), share)
    drawn = [torch.randn_like(_outputs(examined, expected)[position]) for position in graphs.differentiable]
    for rows in _chosen_rows(graphs, drawn[0].device):
        tangents = _tangents(graphs, drawn, rows)
        wanted = run_backward(examined, _saved(examined, expected), list(tangents), rows, n)
        own = run_backward(graphs, _saved(graphs, found), tangents, rows, n)
        _check_close(f"gradients of {len(rows)} of {n} rows", own, wanted, share)


def _allowed(module: fx.GraphModule) -> float:
    """Returns how far results may be apart, by the least precise values of a graph."""
    values = [value for node in module.graph.nodes for value in tree_leaves(node.meta.get("val"))]
    return max(SAME_BUT_FOR_ROUNDING.get(value.dtype, 1e-6) for value in values if isinstance(value, Tensor))


def _check_close(what: str, found: Any, wanted: Any, share: float) -> None:
    """Checks that results are those that were expected.

    Args:
        what: Name of the results, for the message.
        found: Results of the compiled graphs.
        wanted: Results of the examined graphs.
        share: Largest norm of a difference over that of the result.

    Raises:
        Unsupported: They are not.
        Unclear: They are not finite.
    """
    pairs = [(x, y) for x, y in zip(found, wanted, strict=True) if isinstance(y, Tensor) and y.numel()]
    largest = max((float(torch.linalg.vector_norm(y)) for _, y in pairs if y.is_floating_point()), default=0.0)
    for x, y in pairs:
        if not (y.is_floating_point() or y.is_complex()):
            continue
        scale = max(float(torch.linalg.vector_norm(y)), 1e-3 * largest)
        error = float(torch.linalg.vector_norm(x - y))
        if not math.isfinite(scale):
            raise Unclear(f"its {what} are not finite")
        if not error <= share * scale:
            raise Unsupported(f"its compiled graphs give other {what}: they differ by a relative {error / scale:.1e}")


def _compare_with_itself(graphs: Graphs, arguments: list[Any]) -> None:
    """Compares the gradients of some rows with those of the batch with zeros elsewhere, which needs one forward pass only.

    Two forward passes would draw other random numbers. Where samples mix, these gradients would differ by design.

    Raises:
        Unsupported: They differ.
    """
    n, values = graphs.tried, graphs.forward(list(arguments))
    drawn = [torch.randn_like(_outputs(graphs, values)[position]) for position in graphs.differentiable]
    for rows in _chosen_rows(graphs, drawn[0].device):
        tangents = _tangents(graphs, drawn, rows)
        layouts = [graphs.outputs[position] for position in graphs.differentiable]
        masked = [t if at is None else at.put(t, rows, n) for t, at in zip(tangents, layouts, strict=True)]
        whole = run_backward(graphs, _saved(graphs, values), masked, None, n)
        compare_gradients(graphs, whole, run_backward(graphs, _saved(graphs, values), tangents, rows, n), rows)


def _chosen_rows(graphs: Graphs, device: torch.device) -> Iterator[Tensor]:
    """Yields positions of rows: all in another order, some of each size of interest, one."""
    n = graphs.tried
    for rows in ([n - 1, *range(n - 1)], list(range(1, n)), list(range(0, n, 2)), [0, n - 2, n - 1], [n - 1]):
        yield torch.tensor(rows, device=device)


def _tangents(graphs: Graphs, drawn: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Returns the gradients of the outputs for some rows; zeros for outputs that have no rows."""
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    return [torch.zeros_like(t) if at is None else at.take(t, rows, graphs.tried) for t, at in zip(drawn, layouts, strict=True)]


def _outputs(graphs: Graphs, returned: Any) -> Any:
    return returned[len(graphs.mutated) : graphs.num_forward]


def _saved(graphs: Graphs, returned: Any) -> list[Any]:
    return [returned[value.index] for value in graphs.saved]
