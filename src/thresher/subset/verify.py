"""Comparisons of traced and compiled graphs with the module itself."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thresher import rng
from thresher.subset.function import run_backward
from thresher.subset.graphs import Graphs, Unclear, Unsupported, is_random
from thresher.subset.mixing import TOLERANCE, compare_gradients
from thresher.subset.trace_key import GraphTensors, dense
from thresher.subset.tracing import without_caches
from thresher.trees import leaves

SAME_BUT_FOR_ROUNDING = {
    torch.float64: 1e-6,
    torch.float32: 2e-2,
    torch.float16: 1e-1,
    torch.bfloat16: 2e-1,
}
"""Largest norm of the difference of two results, divided by the norm of the expected one. A rounding error in the forward can
switch off a unit whose input is almost zero; for 33 samples of a ResNet-20, this changes gradients by a relative 2e-3. Wrong
rows change them by 0.1 to 1."""


def check_agreement(graphs: Graphs, examined: Graphs, arguments: list[Any]) -> None:
    """Compares outputs and gradients of compiled graphs with those of the examined ones, for all rows and for some.

    Args:
        graphs: Compiled graphs; `tried` is the number of samples in `arguments`.
        examined: Graphs of the same module that were examined.
        arguments: Arguments of the forward graph.

    Raises:
        Unsupported: The results differ.
        Unclear: The results are not finite.
    """
    # Inductor draws other random numbers than the examined graphs, so that the two cannot be compared with each other.
    if any(is_random(node) for node in graphs.forward_module.graph.nodes):
        if not graphs.mixing:
            _compare_with_itself(graphs, arguments)
        return
    n = graphs.tried
    share = _allowed(graphs.forward_module)
    found = graphs.forward(list(arguments))
    expected = examined.forward(list(arguments))
    _check_close("outputs", _outputs(graphs, found), _outputs(examined, expected), share)
    drawn = [
        torch.randn_like(_outputs(examined, expected)[position])
        for position in graphs.differentiable
    ]
    for rows in _chosen_rows(graphs, drawn[0].device):
        tangents = _tangents(graphs, drawn, rows)
        wanted = run_backward(examined, _saved(examined, expected), list(tangents), rows, n)
        of_rows = run_backward(graphs, _saved(graphs, found), tangents, rows, n)
        _check_close(f"gradients of {len(rows)} of {n} rows", of_rows, wanted, share)


ROUNDING = 16
"""Allowed difference, in units of rounding, of operations that add up in another order each time, as on a GPU."""


def same_results(short: Graphs, graphs: Graphs, arguments: list[Any]) -> bool:
    """Checks whether shorter graphs give the same values, gradients and random states as the original graphs.

    Args:
        short: Shorter graphs.
        graphs: Graphs that were examined; `tried` is the number of samples in `arguments`.
        arguments: Arguments of the forward graph.
    """
    n = graphs.tried
    device = next(tensor.device for tensor in arguments if isinstance(tensor, Tensor))
    returned = []
    states = []
    # The same seed for both, and equal states afterwards: if a rewrite drew more or fewer numbers, the later draws of the loop
    # would change.
    for one in (graphs, short):
        torch.manual_seed(0)
        returned.append(one.forward(list(arguments)))
        states.append(rng.capture(device))
    whole, shortened = returned
    count = graphs.num_forward
    if not (rng.equal(*states) and all(map(_as_exact, whole[:count], shortened[:count]))):
        return False
    drawn = [
        torch.randn_like(_outputs(graphs, whole)[position]) for position in graphs.differentiable
    ]
    for rows in _chosen_rows(graphs, device):
        tangents = _tangents(graphs, drawn, rows)
        wanted = run_backward(graphs, _saved(graphs, whole), list(tangents), rows, n)
        gradients = run_backward(short, _saved(short, shortened), tangents, rows, n)
        if not all(map(_as_exact, wanted, gradients)):
            return False
    return True


def _as_exact(wanted: Any, found: Any) -> bool:
    """Checks whether two results are the same, as far as the order of summing allows."""
    if not isinstance(wanted, Tensor):
        return wanted == found
    if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
        return False
    if wanted.is_cpu or not wanted.is_floating_point():
        # If the wanted value is NaN, any value passes.
        return bool(((wanted == found) | (wanted != wanted)).all())
    scale = float(wanted.abs().nan_to_num(0, 0, 0).max()) if wanted.numel() else 0.0
    near = ROUNDING * torch.finfo(wanted.dtype).eps
    return torch.allclose(found, wanted, rtol=near, atol=near * scale, equal_nan=True)


def _allowed(module: fx.GraphModule) -> float:
    """Returns the allowed relative difference of results, by the least precise dtype in a graph."""
    values = [value for node in module.graph.nodes for value in tree_leaves(node.meta.get("val"))]
    # The least precise value decides: errors of half precision stay in a result that was cast to float32.
    return max(
        SAME_BUT_FOR_ROUNDING.get(value.dtype, 1e-6)
        for value in values
        if isinstance(value, Tensor)
    )


def _check_close(
    what: str, found: Any, wanted: Any, share: float, checked: str = "compiled graphs"
) -> None:
    """Checks that results agree with the expected results.

    Args:
        what: Name of the results, for the message.
        found: Results of the graphs.
        wanted: Expected results.
        share: Largest norm of a difference, divided by the norm of the result.
        checked: Name of the graphs, for the message. Default: "compiled graphs".

    Raises:
        Unsupported: The results differ.
        Unclear: The results are not finite.
    """
    pairs = [
        (x, y) for x, y in zip(found, wanted, strict=True) if isinstance(y, Tensor) and y.numel()
    ]
    largest = max(
        (float(torch.linalg.vector_norm(y)) for _, y in pairs if y.is_floating_point()), default=0.0
    )
    for x, y in pairs:
        if not (y.is_floating_point() or y.is_complex()):
            continue
        # At least 1e-3 of the largest norm: a result that is tiny compared with the others may be only rounding error.
        scale = max(float(torch.linalg.vector_norm(y)), 1e-3 * largest)
        error = float(torch.linalg.vector_norm(x - y))
        if not math.isfinite(scale):
            raise Unclear(f"its {what} are not finite")
        # Not `>`, which an error of NaN would pass.
        if not error <= share * scale:
            raise Unsupported(
                f"its {checked} return other {what}, with a relative difference of {error / scale:.1e}"
            )


def _compare_with_itself(graphs: Graphs, arguments: list[Any]) -> None:
    """Compares a backward pass on some rows with one on the whole batch, with zeros as the gradients of all other rows.

    Both follow the same forward pass, because a second one would draw other random numbers. If samples mix, the two differ by
    design.

    Raises:
        Unsupported: The gradients differ.
    """
    n = graphs.tried
    values = graphs.forward(list(arguments))
    drawn = [
        torch.randn_like(_outputs(graphs, values)[position]) for position in graphs.differentiable
    ]
    for rows in _chosen_rows(graphs, drawn[0].device):
        tangents = _tangents(graphs, drawn, rows)
        layouts = [graphs.outputs[position] for position in graphs.differentiable]
        masked = [
            t if at is None else at.put(t, rows, n) for t, at in zip(tangents, layouts, strict=True)
        ]
        whole = run_backward(graphs, _saved(graphs, values), masked, None, n)
        compare_gradients(
            graphs, whole, run_backward(graphs, _saved(graphs, values), tangents, rows, n), rows
        )


def _chosen_rows(graphs: Graphs, device: torch.device) -> Iterator[Tensor]:
    """Yields choices of rows, as positions: all rows in another order, then fewer and fewer, at last a single row."""
    n = graphs.tried
    for rows in (
        [n - 1, *range(n - 1)],
        list(range(1, n)),
        list(range(0, n, 2)),
        [0, n - 2, n - 1],
        [n - 1],
    ):
        yield torch.tensor(rows, device=device)


def _tangents(graphs: Graphs, drawn: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Returns the gradients of the outputs for some rows; zeros for outputs that have no rows."""
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    return [
        torch.zeros_like(t) if at is None else at.take(t, rows, graphs.tried)
        for t, at in zip(drawn, layouts, strict=True)
    ]


def _outputs(graphs: Graphs, returned: Any) -> Any:
    return returned[len(graphs.mutated) : graphs.num_forward]


def _saved(graphs: Graphs, returned: Any) -> list[Any]:
    return [returned[value.index] for value in graphs.saved]


DRAWS = frozenset(
    {
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "uniform",
        "normal",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
    }
)
CHANCES = frozenset({"dropout_p", "dropout", "p"})
"""Names of the arguments that are a dropout probability."""


FEW = (16, 13, 19)
"""Numbers of samples of a batch to compare; the first that the trace holds for is used. Comparing whole batches would take a
noticeable share of a short training run.
"""


def differs(
    module: nn.Module, graphs: Graphs, own: GraphTensors, tensors: list[Tensor], rebuild: Any
) -> bool:
    """Runs a module and its graphs on a few samples of a call, and checks whether outputs or updated buffers differ.

    Leaves random states, buffers and gradients as they were. Dropout is off in both, because a graph may draw random numbers in
    another order.

    Args:
        module: Module that was traced.
        graphs: Graphs of the module.
        own: Tensors of the module that the graphs read and update.
        tensors: Tensors of the call.
        rebuild: Function that returns args and kwargs of a call from its tensors.
    """
    few = _some_samples(graphs, tensors)
    args, kwargs = rebuild(few)
    inputs = [dense(few[i]) if isinstance(i, int) else i for i in own.inputs]
    with rng.undisturbed(tensors[0].device), _NothingDrawn():
        with _buffers_kept(module) as changed:
            expected = [
                leaf.detach()
                for leaf in leaves(without_caches(module(*args, **kwargs)), objects=False)
            ]
        # After the block above, which has restored the buffers: both must begin with the same values.
        with torch.no_grad(), torch._C._DisableAutocast():
            returned = graphs.forward(inputs)
    count = len(graphs.mutated)
    results = returned[count : graphs.num_forward]
    updated = {
        id(buffer): value for buffer, value in zip(own.buffers, returned[:count], strict=True)
    }
    # A branch that returns something else is a change that a trace cannot see.
    if len(results) != len(expected):
        return True
    pairs = [
        *zip(expected, results, strict=True),
        *((value, updated.get(place)) for place, value in changed.items()),
    ]
    return any(new is None or _differ(old, new) for old, new in pairs)


def _some_samples(graphs: Graphs, tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors of a call with fewer samples, others in each call; all samples if the trace needs the batch size."""
    n = len(tensors[graphs.first])
    lengths = graphs.lengths_of(tensors)
    few = next((few for few in FEW if few < n and graphs.holds_for(few, lengths)), n)
    start = graphs.calls * few % (n - few + 1)
    return [
        tensor[start : start + few] if tensor.dim() and place not in graphs.shared else tensor
        for place, tensor in enumerate(tensors)
    ]


def check_against_module(
    module: nn.Module, graphs: Graphs, own: GraphTensors, tensors: list[Tensor], rebuild: Any
) -> None:
    """Compares outputs, random draws and gradients of graphs with those of their module, on a few samples of a call.

    Leaves random states, buffers and gradients as they were, and runs no hook of a parameter.

    Args:
        module: Module that was traced.
        graphs: Graphs of the module, not compiled, because Inductor draws other random numbers.
        own: Tensors of the module that the graphs read and update.
        tensors: Tensors of the call, in the memory formats of the caller.
        rebuild: Function that returns args and kwargs of a call from its tensors.

    Raises:
        Unsupported: The results differ.
        Unclear: The gradients are not finite.
    """
    few = [
        _without_nan(tensor.detach()).requires_grad_(tensor.requires_grad)
        for tensor in _some_samples(graphs, tensors)
    ]
    inputs = [dense(few[i]).detach() if isinstance(i, int) else i for i in own.inputs]
    n = len(few[graphs.first])
    device = tensors[0].device
    with rng.undisturbed(device):
        before = rng.capture(device)
        with torch.no_grad(), torch._C._DisableAutocast():
            returned = graphs.forward(inputs)
        after = rng.capture(device)
        others = [] if rng.equal(before, after) else _outputs_now(module, rebuild, few)
        rng.restore(before, device)
        # Up to the end of the backward pass, in which checkpoints call parts of the module again.
        # Hooks of its own, because a checkpoint around this call counts what its own hooks save.
        with (
            _tensors_replaced(module) as replicas,
            saved_tensors_hooks(Tensor.detach, Tensor.detach),
        ):
            args, kwargs = rebuild(few)
            outputs = list(leaves(without_caches(module(*args, **kwargs)), objects=False))
            same = rng.equal(after, rng.capture(device))
            pairs = [
                (output.detach(), result)
                for output, result in zip(outputs, _outputs(graphs, returned), strict=True)
            ]
            same = same and not any(_differ(*pair) for pair in pairs)
            if not same or any(map(_draws_differ, pairs, others)):
                raise Unsupported("its graphs return other outputs or draw other random numbers")
            outputs = [outputs[position] for position in graphs.differentiable]
            rows, tangents = _tangents_of_some(graphs, outputs, n)
            reached = [
                pair for pair in zip(outputs, tangents, strict=True) if pair[0].requires_grad
            ]
            # Not `torch.autograd.grad`, which reentrant checkpoints do not support.
            torch.autograd.backward(
                [output for output, _ in reached], [tangent for _, tangent in reached]
            )
    wanted = {key: leaf.grad for key, leaf in (*replicas.items(), *enumerate(few))}
    with torch.no_grad(), torch._C._DisableAutocast():
        for chosen, given in _forms(graphs, rows, tangents, n):
            computed = run_backward(graphs, _saved(graphs, returned), given, chosen, n)
            _check_gradients(graphs, own, computed, wanted, chosen, n)


def _outputs_now(module: nn.Module, rebuild: Any, few: list[Tensor]) -> list[Tensor]:
    """Returns the outputs of a module with the random numbers that come next."""
    with torch.no_grad(), _tensors_replaced(module):
        args, kwargs = rebuild(few)
        return list(leaves(without_caches(module(*args, **kwargs)), objects=False))


def _without_nan(tensor: Tensor) -> Tensor:
    """Replaces NaN by 0, because a batch with NaN is only one batch, and no reason to refuse the model."""
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        return tensor.nan_to_num(0, math.inf, -math.inf)
    return tensor


def _tangents_of_some(
    graphs: Graphs, outputs: list[Tensor], n: int
) -> tuple[Tensor | None, list[Tensor]]:
    """Draws gradients of outputs that are zero for every second sample.

    Returns:
        Positions of the other samples, and the gradients; None and gradients of all samples if all of them are needed.
    """
    drawn = [torch.randn_like(output) for output in outputs]
    layouts = [graphs.outputs[position] for position in graphs.differentiable]
    # Normalization of the batch needs the gradients of all samples, as does an output without samples.
    if graphs.mixing or None in layouts:
        return None, drawn
    rows = torch.arange(0, n, 2, device=outputs[0].device)
    pairs = zip(drawn, layouts, strict=True)
    return rows, [at.put(at.take(t, rows, n), rows, n) for t, at in pairs if at is not None]


def _forms(
    graphs: Graphs, rows: Tensor | None, tangents: list[Tensor], n: int
) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
    """Yields the same gradients of outputs as a backward pass may get them: in two memory formats, and without zeros."""
    yield None, list(tangents)
    # The gradient of a loss that permutes the outputs, as for one loss per pixel.
    permuted = [
        t.movedim(1, -1).contiguous().movedim(-1, 1)
        if t.dim() > 2 and t.is_contiguous()
        else t.contiguous()
        for t in tangents
    ]
    yield None, list(permuted)
    if rows is not None:
        layouts = [graphs.outputs[position] for position in graphs.differentiable]
        pairs = zip(permuted, layouts, strict=True)
        yield rows, [at.take(t, rows, n) for t, at in pairs if at is not None]


def _check_gradients(
    graphs: Graphs,
    own: GraphTensors,
    computed: Any,
    wanted: dict[int, Tensor | None],
    rows: Tensor | None,
    n: int,
) -> None:
    """Compares gradients with those of the module, by the `id` of a parameter or the position of an input.

    Raises:
        Unsupported: The gradients differ.
        Unclear: The gradients are not finite.
    """
    triples = zip(computed, graphs.grad_layouts, graphs.grads, strict=True)
    results = [
        gradient if layout is None or rows is None else layout.put(gradient, rows, n)
        for gradient, layout, source in triples
        if source is not None
    ]
    keys = [key if isinstance(key, int) else id(key) for key in own.differentiated]
    found: dict[int, Tensor] = {}
    # A tied weight has one gradient for each of its names.
    for key, gradient in zip(keys, results, strict=True):
        found[key] = found[key] + gradient if key in found else gradient
    # No gradient counts as zeros: autograd gives none to a parameter that the outputs do not depend on.
    pairs = [
        (_or_zeros(found.get(key), gradient), _or_zeros(gradient, found.get(key)))
        for key, gradient in wanted.items()
        if gradient is not None or key in found
    ]
    share = _allowed(graphs.forward_module)
    gradients = [result for result, _ in pairs]
    _check_close("gradients", gradients, [gradient for _, gradient in pairs], share, "graphs")


def _or_zeros(gradient: Tensor | None, other: Any) -> Tensor:
    return torch.zeros_like(other) if gradient is None else gradient


@contextlib.contextmanager
def _tensors_replaced(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Gives a module parameters without hooks, in the memory of its own, and copies of its buffers, until the block ends.

    Yields:
        The parameters, by the `id` of those that they replace.
    """
    replicas = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    tensors: dict[str, Tensor] = {name: replicas[id(p)] for name, p in module.named_parameters()}
    tensors |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    cached = torch.is_autocast_cache_enabled()
    # The cache would keep casts of these parameters until the caller leaves autocast.
    torch.set_autocast_cache_enabled(False)
    try:
        # Parts that torch.compile has compiled are not compiled again for these tensors.
        with (
            torch.compiler.set_stance("force_eager"),
            _reparametrize_module(module, tensors, tie_weights=True),
        ):
            yield replicas
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Restores buffers that the block updates; yields a dict, filled at the end, of their new values by `id(buffer)`."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    changed: dict[int, Tensor] = {}
    yield changed
    with torch.no_grad():
        for buffer, values in before:
            # Writing to the others would increase their version counters, and so invalidate tensors that earlier calls have
            # saved.
            if not torch.equal(buffer, values):
                changed[id(buffer)] = buffer.clone()
                buffer.copy_(values)


class _NothingDrawn(TorchDispatchMode):
    """Replaces random operations by constants: dropout drops nothing, and a random number is 0.5."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # Seeded before each operation, so that draws without a constant do not depend on the order of the operations.
        torch.manual_seed(0)
        name = func.overloadpacket.__name__.removesuffix("_")
        schema = func._schema.arguments
        names = [argument.name for argument in schema]
        arguments = {
            argument.name: argument.default_value
            for argument in schema
            if argument.has_default_value()
        }
        arguments |= {**dict(zip(names, args, strict=False)), **kwargs}
        if name == "bernoulli":
            drawn = func(*args, **kwargs)
            share = arguments.get("p", arguments["self"])
            if isinstance(share, Tensor):
                return drawn.copy_(share)
            return drawn.fill_(share)
        # Other draws, such as a permutation, stay as the seed has them.
        if name in DRAWS:
            return func(*args, **kwargs).fill_(0.5)
        args = [
            0.0 if part in CHANCES and isinstance(value, float) else value
            for part, value in zip(names, args, strict=False)
        ]
        return func(
            *args, **{part: 0.0 if part in CHANCES else value for part, value in kwargs.items()}
        )


def _draws_differ(pair: tuple[Tensor, Tensor], other: Tensor) -> bool:
    """Checks whether two values differ by more than half of what other random numbers change, unless that is only rounding.

    Args:
        pair: Output of the module and of the graphs.
        other: The same output of the module with other random numbers.
    """
    old, new = pair
    if not (old.is_floating_point() or old.is_complex()):
        return False
    norm, error, change = (
        float(torch.linalg.vector_norm(value.nan_to_num(0, 0, 0)))
        for value in (old, old - new, old - other)
    )
    rounding = 100 * torch.finfo(_precision(old)).eps * norm
    return change > rounding and error > change / 2


def _precision(value: Tensor) -> torch.dtype:
    """Returns the dtype in which a value was computed: under autocast, a result in float32 was computed in half precision."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _differ(old: Tensor, new: Tensor) -> bool:
    """Checks whether two values differ by more than rounding; waits for the device."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return True
    if not old.numel():
        return False
    if not (old.is_floating_point() or old.is_complex()):
        # A rounding error may change an argmax, so a few of these values may differ.
        return float((old != new).double().mean()) > 0.05
    scale = float(old.abs().nan_to_num(0, 0, 0).max())
    tolerance = TOLERANCE.get(_precision(old), 1e-3)
    return not torch.allclose(old, new, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
