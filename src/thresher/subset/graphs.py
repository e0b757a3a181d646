"""The forward and backward graph of a traced module, and where the samples are in the values that pass between them."""

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn

from thresher.loading.trees import leaves, map_leaves
from thresher.subset.rows import Layout

aten: Any = torch.ops.aten
REGISTRIES = frozenset(nn.Module().__dict__) - {"training"}
"""Names of the attributes that every module has."""
CONSTANT_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, enum.Enum, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose value cannot change; an object of any other type can have other contents in the next call."""


MOST_SIZES = 4096
"""Number of combinations of sizes for which it is remembered whether graphs hold."""


class Unsupported(Exception):  # noqa: N818
    """Reason why the backward pass of a module cannot be run on some rows; the user reads the message."""


class Unclear(Unsupported):
    """Reason that lies in the values of one batch, so that the module is traced with another one later."""


class HasEffects(Unsupported):
    """Reason that may be gone in the next call: the forward changes something, as where it makes a table once."""


class TooManyKinds(Unsupported):
    """Reason why a kind of call is not traced yet, although it can be."""


class Uncompiled(Unsupported):
    """Reason why graphs of a module run without torch.compile."""


class Outdated(Unsupported):
    """Reason why no trace of a module is used any more: the module computes something else than its graphs."""


@dataclass(frozen=True)
class LeafIndex:
    """Placeholder for the tensor number `index` of a nested structure."""

    index: int


def flatten_tensors(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Returns the tensors of a nested structure, and a function that makes the same structure of other tensors."""
    tensors = list(leaves(tree, objects=False))

    def rebuild(others: list[Tensor]) -> Any:
        following = iter(others)
        return map_leaves(lambda _: next(following), tree, objects=False)

    return tensors, rebuild


@dataclass
class SavedValue:
    """One value that the forward graph saves for the backward graph.

    Args:
        index: Position among the values that the forward graph returns.
        layout: Place of the samples in the value; None where every row needs all of it.
        follows: Whether the value is a size that follows the batch.
        counts: Whether the value is 0 to n - 1 and says where each row is, so that for k rows it is 0 to k - 1.
    """

    index: int
    layout: Layout | None = None
    follows: bool = False
    counts: bool = False


class CompiledBackward(Protocol):
    """A compiled backward graph."""

    def holds_for(self, k: int, lengths: tuple[int, ...] | None = None) -> bool:
        """Checks whether so many rows, and lengths of a call, satisfy everything that compiling assumed."""
        ...

    def __call__(self, arguments: list[Any]) -> Any:
        """Runs the graph on a list of arguments, which it empties."""
        ...


@dataclass
class Graphs:
    """A traced module. Both graphs are called with a list of arguments, which they empty so that memory is freed early.

    Attributes:
        forward: Forward graph as a function.
        backward: Backward graph as a function.
        forward_module: Forward graph as a module.
        backward_module: Backward graph as a module.
        inputs: Source of each argument of the forward graph: ("param" | "buffer" | "leaf", name or position).
        mutated: Names of the buffers whose new values come first among the values that the forward graph returns.
        outputs: Layout of each output tensor; None where it has no sample dimension.
        returned: Structure that the module returns, with a `LeafIndex` in place of each tensor.
        differentiable: Positions of the outputs that can have a gradient, in the order of the backward graph's tangents.
        saved: Values that the backward graph takes before the tangents, in order.
        grads: Source of each result of the backward graph, the tensor of which it is the gradient, in the form of `inputs`;
            None where there is none.
        grad_layouts: Layout of each result of the backward graph; None where it is a sum over the samples.
        grads_of: Positions of the outputs on whose gradients each result of the backward graph depends.
        guards: Conditions on the batch size that tracing assumed.
        symbol: Symbol of the batch size.
        num_forward: Number of values that the forward graph returns before those that it saves.
        first: Position of the first leaf whose first dimension is the batch.
        shared: First dimensions of the leaves that all samples share, by position; None where it may differ from call to call.
        rows: Batch size of the call that was traced, or a number near it.
        lengths: Sizes of that call that may differ in other calls, besides the batch size.
        free: Symbol of each of these sizes, with its places: pairs of a leaf and a dimension.
        fixed: Sizes of the other dimensions where there are such symbols, by leaf and dimension.
        tried: Number of rows that the graphs were tried out with.
        calls: Number of calls that used the graphs.
        mixing: Names of the operations that mix samples and are allowed to.
        layouts: Layouts of the values of the forward graph, by node.
        examined: Graphs that were examined, where these are compiled; None where these were.
        compiled_backward: Compiled form of the backward graph; None where there is none.
        uncompiled: Reason why graphs that were to be compiled are not; None where there is none.
    """

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    forward_module: fx.GraphModule
    backward_module: fx.GraphModule
    inputs: list[Any]
    mutated: list[str]
    outputs: list[Layout | None]
    returned: Any
    differentiable: list[int]
    saved: list[SavedValue]
    grads: list[Any]
    grad_layouts: list[Layout | None]
    grads_of: list[set[int]]
    guards: list[Any]
    symbol: Any
    num_forward: int
    first: int
    shared: dict[int, int | None]
    rows: int
    lengths: tuple[int, ...]
    free: dict[Any, list[tuple[int, int]]]
    fixed: dict[tuple[int, int], int]
    tried: int = 0
    calls: int = 0
    mixing: tuple[str, ...] = ()
    layouts: dict[fx.Node, Any] = field(default_factory=dict)
    examined: "Graphs | None" = None
    compiled_backward: CompiledBackward | None = None
    uncompiled: str | None = None
    _valid: dict[Any, bool] = field(default_factory=dict)

    def holds_for(self, n: int, lengths: tuple[int, ...] | None = None) -> bool:
        """Checks whether a batch size satisfies everything that tracing assumed.

        Args:
            n: Batch size.
            lengths: Sizes of a call that may differ from those that were traced. Default: those that were traced.
        """
        lengths = self.lengths if lengths is None else lengths
        if (n, lengths) not in self._valid:
            own = guards_hold(self.guards, {self.symbol: n, **dict(zip(self.free, lengths, strict=True))})
            if len(self._valid) >= MOST_SIZES:
                self._valid.clear()
            self._valid[n, lengths] = own and (self.examined is None or self.examined.holds_for(n, lengths))
        return self._valid[n, lengths]

    def lengths_of(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """Returns the sizes of a call that may differ from those that were traced."""
        return tuple(tensors[places[0][0]].shape[places[0][1]] for places in self.free.values())

    def fits(self, tensors: list[Tensor]) -> bool:
        """Checks whether leaves of the kind that was traced have the sizes that tracing assumed."""
        if any(size is not None and len(tensors[i]) != size for i, size in self.shared.items()):
            return False
        lengths = self.lengths_of(tensors)
        if self.free:
            if any(tensors[i].shape[d] != size for (i, d), size in self.fixed.items()):
                return False
            both = zip(self.free.values(), lengths, strict=True)
            if any(tensors[i].shape[d] != length for places, length in both for i, d in places):
                return False
        return self.holds_for(len(tensors[self.first]), lengths)

    def rebuild(self, outputs: list[Any]) -> Any:
        """Returns the module's result from its output tensors, and empties the list so that nothing else keeps them."""
        returned = map_leaves(lambda leaf: outputs[leaf.index], self.returned, LeafIndex, objects=False)
        outputs.clear()
        return returned


def guards_hold(guards: list[Any], sizes: dict[Any, int]) -> bool:
    """Checks whether sizes are larger than 1, as tracing assumes of each, and satisfy all guards.

    Args:
        guards: Conditions on symbols.
        sizes: Size for each symbol.
    """
    return min(sizes.values()) > 1 and all(bool(guard.subs(sizes)) for guard in guards)


def own_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """Returns the names and values of the attributes that a module has beyond those of every `nn.Module`."""
    return [(name, value) for name, value in part.__dict__.items() if name not in REGISTRIES]
