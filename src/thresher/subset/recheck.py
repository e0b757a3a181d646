"""Comparison of a traced forward with the module itself, now and then: a trace takes what it cannot see for constant."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thresher import rng
from thresher.loading.trees import leaves
from thresher.subset.graphs import Graphs
from thresher.subset.kinds import dense
from thresher.subset.mixing import TOLERANCE
from thresher.subset.settings import GraphTensors
from thresher.subset.tracing import without_caches

DRAWS = frozenset({"rand", "rand_like", "randn", "randn_like", "uniform", "normal", "exponential"})
CHANCES = frozenset({"dropout_p", "dropout", "p"})
"""Names of the arguments that are the share of what an operation drops."""


FEW = (16, 13, 19)
"""Numbers of samples of a batch that are compared, the first that the trace holds for: whole batches would take a noticeable
share of a short training."""


def differs(module: nn.Module, graphs: Graphs, own: GraphTensors, tensors: list[Tensor], rebuild: Any) -> bool:
    """Runs a module and its graphs on a few samples of a call, and checks whether outputs or updated buffers differ.

    Random states, buffers and gradients are as before afterwards. Dropout drops nothing in both, because a graph may draw in
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
            expected = [leaf.detach() for leaf in leaves(without_caches(module(*args, **kwargs)), objects=False)]
        with torch.no_grad(), torch._C._DisableAutocast():
            returned = graphs.forward(inputs)
    count = len(graphs.mutated)
    found = returned[count : graphs.num_forward]
    updated = {id(buffer): value for buffer, value in zip(own.buffers, returned[:count], strict=True)}
    if len(found) != len(expected):
        return True
    pairs = [*zip(expected, found, strict=True), *((value, updated.get(place)) for place, value in changed.items())]
    return any(new is None or _differ(old, new) for old, new in pairs)


def _some_samples(graphs: Graphs, tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors of a call with fewer samples, other ones in each call; all where the trace needs the batch size."""
    n = len(tensors[graphs.first])
    lengths = graphs.lengths_of(tensors)
    few = next((few for few in FEW if few < n and graphs.holds_for(few, lengths)), n)
    start = graphs.calls * few % (n - few + 1)
    return [
        tensor[start : start + few] if tensor.dim() and place not in graphs.shared else tensor
        for place, tensor in enumerate(tensors)
    ]


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Puts buffers back that the block updates, and returns their new values by the identity of the buffer."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    changed: dict[int, Tensor] = {}
    yield changed
    with torch.no_grad():
        for buffer, values in before:
            if not torch.equal(buffer, values):  # writing to others would make the saved tensors of earlier calls outdated
                changed[id(buffer)] = buffer.clone()
                buffer.copy_(values)


class _NothingDrawn(TorchDispatchMode):
    """Makes random operations give constants: dropout drops nothing, and a random number is one half."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        torch.manual_seed(0)
        name, arguments = func.overloadpacket.__name__.removesuffix("_"), func._schema.arguments
        names = [argument.name for argument in arguments]
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= {**dict(zip(names, args, strict=False)), **kwargs}
        if name == "bernoulli":
            drawn, share = func(*args, **kwargs), given.get("p", given["self"])
            return drawn.copy_(share) if isinstance(share, Tensor) else drawn.fill_(share)
        if name in DRAWS:
            return func(*args, **kwargs).fill_(0.5)
        args = [
            0.0 if part in CHANCES and isinstance(value, float) else value for part, value in zip(names, args, strict=False)
        ]
        return func(*args, **{part: 0.0 if part in CHANCES else value for part, value in kwargs.items()})


def _differ(old: Tensor, new: Tensor) -> bool:
    """Checks whether two values differ by more than rounding; waits for the device."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return True
    if not old.numel():
        return False
    if not (old.is_floating_point() or old.is_complex()):
        return float((old != new).double().mean()) > 0.05  # a rounding error may move a largest entry
    kind = old.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else old.dtype
    scale = float(old.abs().nan_to_num(0, 0, 0).max())
    tolerance = TOLERANCE.get(precision, 1e-3)
    return not torch.allclose(old, new, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
