"""The forward and backward graph of a traced module, and which dimension of each value holds the samples."""

import enum
import functools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx

from thresher.trees import leaves, map_leaves


# A model saves tensors with few different strides, and the same ones in every step.
@functools.lru_cache(4096)
def _memory_order(strides: tuple[int, ...], axis: int) -> tuple[list[int] | None, int, list[int]]:
    """Returns the dimensions in memory order (None if it is 0, 1, ...), the position of `axis` in it, and its inverse."""
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    if order == list(range(len(strides))):
        return None, axis, order
    return order, order.index(axis), [order.index(d) for d in range(len(strides))]


@dataclass(frozen=True)
class Layout:
    """Which entries of a tensor belong to which of the n samples of a batch.

    Args:
        axis: Dimension that holds the samples; it has n * per entries.
        per: Number of entries per sample along `axis`: more than 1 if the model has merged positions, such as tokens, into the
            batch dimension; 0 if this number differs from call to call and is read from the size of the tensor. Default: 1.
        inner: Whether entry i belongs to sample i % n (positions first) instead of i // per (samples first). Default: False.

    Example:
        >>> values = torch.arange(6.0)  # three samples with two entries each
        >>> Layout(0, per=2).take(values, torch.tensor([0, 2]), 3)
        tensor([0., 1., 4., 5.])
    """

    axis: int
    per: int = 1
    inner: bool = False

    def entries(self, size: int, n: int) -> int:
        """Returns the number of entries per sample if n samples have `size` entries."""
        return self.per or size // n

    def split(self, value: Tensor, n: int) -> tuple[Tensor, int]:
        """Returns a view with a dimension of exactly n entries, one per sample, and the position of that dimension."""
        if self.per == 1:
            return value, self.axis
        per = self.entries(value.shape[self.axis], n)
        sizes = (per, n) if self.inner else (n, per)
        return value.unflatten(self.axis, sizes), self.axis + self.inner

    def take(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """Returns the entries of some samples, in the memory format of the whole tensor.

        Args:
            value: Tensor that holds n samples.
            rows: Positions of the samples in the batch, shape (k,), int64.
            n: Number of samples in the batch.
        """
        # An expanded tensor has the same memory for every sample: a shorter view of it costs nothing.
        if value.stride(self.axis) == 0:
            return value.narrow(self.axis, 0, len(rows) * self.entries(value.shape[self.axis], n))
        parts, axis = self.split(value, n)
        sizes = [-1 if d == axis else size for d, size in enumerate(parts.shape)]
        # Other expanded dimensions (stride 0) stay expanded: copied, they would be the innermost in memory, which attention
        # kernels misread.
        for d, stride in enumerate(parts.stride()):
            parts = parts if stride else parts.narrow(d, 0, min(1, parts.shape[d]))
        order, place, back = _memory_order(parts.stride(), axis)
        if order is None:
            selected = parts.index_select(axis, rows)
        else:
            # `index_select` returns contiguous memory. Applied to the dimensions in memory order, it keeps channels_last and
            # the strides of attention heads, for which the kernels of the backward pass were traced.
            selected = parts.permute(order).index_select(place, rows).permute(back)
        selected = selected.expand(sizes)
        if self.per == 1:
            return selected
        return selected.flatten(self.axis, self.axis + 1)

    def put(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """Reverses `take`: returns a tensor of all n samples, with zeros for samples not in `rows`, and sums for repeated ones.

        Args:
            value: Tensor that holds the samples at `rows` only.
            rows: Positions of these samples in the batch, shape (k,), int64.
            n: Number of samples in the batch.
        """
        parts, axis = self.split(value, len(rows))
        shape = list(parts.shape)
        shape[axis] = n
        whole = parts.new_zeros(shape).index_add_(axis, rows, parts)
        if self.per == 1:
            return whole
        return whole.flatten(self.axis, self.axis + 1)

    def carries(self, value: Tensor, n: int) -> Tensor:
        """Returns which samples have an entry that is not zero, shape (n,), bool."""
        # `amax` takes no complex tensor, and needs an entry in each row.
        if not value.numel() or value.is_complex():
            return self.any(value != 0, n)
        parts, axis = self.split(value, n)
        # NaN is both the largest and the smallest entry of its row, so a row with NaN carries gradient, too.
        flat = parts.movedim(axis, 0).reshape(n, -1)
        return (flat.amax(1) != 0) | (
            flat.amin(1) != 0
        )  # takes a tenth of the time of comparing every entry

    def any(self, flags: Tensor, n: int) -> Tensor:
        """Returns which samples have an entry that is true, shape (n,), bool."""
        parts, axis = self.split(flags, n)
        return parts.movedim(axis, 0).reshape(n, flags.numel() // n).any(1)

    def labels(self, value: Tensor, n: int) -> Tensor:
        """Returns the number of the sample that each entry of a tensor belongs to, in the shape of the tensor, int64."""
        parts, axis = self.split(value, n)
        sample = torch.arange(n, device=value.device).view(
            [n if d == axis else 1 for d in range(parts.dim())]
        )
        return sample.expand(parts.shape).reshape(value.shape)


class Taker:
    """Selects the same rows of many tensors; memory that several tensors share is copied once.

    Args:
        rows: Positions of the samples in the batch, shape (k,), int64.
        n: Number of samples in the batch.
    """

    def __init__(self, rows: Tensor, n: int) -> None:
        self.rows = rows
        self.n = n
        self._selected: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def __call__(self, value: Tensor, layout: Layout) -> Tensor:
        """Returns the rows of one tensor.

        Args:
            value: Tensor that holds n samples.
            layout: Layout of the samples in `value`.
        """
        # Views can share their selected rows only if memory is contiguous with the samples first: a row is then the same in
        # each.
        if layout.axis or layout.inner or not value.numel() or not value.is_contiguous():
            return layout.take(value, self.rows, self.n)
        # All values exist before the first one is freed, so no address is reused for another value. The shape is not in the
        # key, because views of the same memory share the selected rows.
        key = (value.data_ptr(), value.dtype, value.numel())
        flat = self._selected.get(key)
        if flat is None:
            parts = value if layout.per == 1 else value.view(self.n, -1)
            flat = self._selected[key] = parts.index_select(0, self.rows)
            if layout.per == 1:
                return flat
        return flat.view(len(self.rows) * layout.entries(len(value), self.n), *value.shape[1:])


aten: Any = torch.ops.aten
CONSTANT_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, enum.Enum, np.generic),
    *(
        types.FunctionType,
        types.BuiltinFunctionType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
)
"""Immutable types. An object of any other type may have other contents in the next call."""


MOST_SIZES = 4096
"""Number of combinations of sizes for which the result of `holds_for` is cached."""


class Unsupported(Exception):  # noqa: N818
    """Reason why the backward pass of a module cannot run on a part of the rows; the message is shown to the user."""


class Unclear(Unsupported):
    """The values of one batch, such as equal samples, do not allow a check of the graphs; the next batch is tried."""


class HasEffects(Unsupported):
    """The forward of a model changes Python objects. The next call tries again: the forward may only fill a table once."""


class TooManyKinds(Unsupported):
    """A kind of call is not traced yet, because too many kinds are traced already."""


class Uncompiled(Unsupported):
    """Reason why graphs of a module run without torch.compile."""


class Outdated(Unsupported):
    """Reason why a module's traces are dropped: its graphs no longer compute what the module computes."""


@dataclass(frozen=True)
class LeafIndex:
    """Placeholder for the tensor number `index` of a nested structure."""

    index: int


def flatten_tensors(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Returns the tensors of a nested structure, and a function that builds the same structure from other tensors."""
    # `describe` refuses other objects, so no tensor hides in one.
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
        layout: Layout of the samples in the value; None if every row needs the whole value.
        follows: Whether the value is a size that is a multiple of the batch size.
        counts: Whether the value is `arange(n)` and used as a row index, so that for k rows it becomes `arange(k)`.
    """

    index: int
    layout: Layout | None = None
    follows: bool = False
    counts: bool = False


class CompiledBackward(Protocol):
    """A compiled backward graph."""

    def holds_for(self, k: int, lengths: tuple[int, ...] | None = None) -> bool:
        """Checks whether compiling assumed nothing that k rows, or these lengths of a call, contradict."""
        ...

    def __call__(self, arguments: list[Any]) -> Any:
        """Runs the graph on a list of arguments, which it empties."""
        ...


@dataclass
class Graphs:
    """A traced module. Both graphs take a list of arguments and empty it, so that memory is freed early.

    Attributes:
        forward: Forward graph as a function.
        backward: Backward graph as a function.
        forward_module: Forward graph as a module.
        backward_module: Backward graph as a module.
        inputs: Source of each argument of the forward graph: ("param" or "buffer", name), or ("leaf", position) for a tensor of
            the call.
        mutated: Names of the buffers whose new values come first among the values that the forward graph returns.
        outputs: Layout of each output tensor; None if it has no sample dimension.
        returned: Return value of the module, with a `LeafIndex` in place of each tensor.
        differentiable: Positions of the outputs that can have a gradient, in the order of the backward graph's tangents.
        saved: Values that the backward graph takes before the tangents, in order.
        grads: For each result of the backward graph, the tensor whose gradient it is, given as in `inputs`; None if it is no
            gradient.
        grad_layouts: Layout of each result of the backward graph; None if it is a sum over the samples.
        grads_of: Positions of the outputs on whose gradients each result of the backward graph depends.
        guards: Conditions on the batch size and the other symbolic sizes that tracing assumed.
        symbol: Symbol of the batch size.
        num_forward: Number of values that the forward graph returns before the values that it saves for the backward graph.
        first: Position of the first tensor of the call whose first dimension is the batch.
        shared: Size of the first dimension of each tensor of the call that all samples share, by position; None if it may
            differ from call to call.
        rows: Batch size of the call that was traced, or a number near it.
        lengths: Sizes of that call that may differ in other calls, besides the batch size.
        free: Symbols of the sizes in `lengths`; for each, the dimensions of that size, as pairs (position of the tensor,
            dimension).
        fixed: Sizes of all other dimensions by (position of the tensor, dimension); empty if `free` is empty.
        tried: Number of rows with which the graphs were tested.
        calls: Number of calls that used the graphs.
        mixing: Names of the operations that mix samples and are allowed to.
        layouts: Layouts of the values of the forward graph, by node.
        examined: For compiled graphs, the uncompiled ones that `mixing.examine` has verified; None for uncompiled graphs.
        compiled_backward: Compiled form of the backward graph, or None.
        uncompiled: Reason why graphs that should be compiled are not; None if there is none.
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
        """Checks whether tracing assumed nothing that a batch size, or the lengths of a call, contradict.

        Args:
            n: Batch size.
            lengths: Sizes of a call in the order of `free`. Default: those of the traced call.
        """
        lengths = self.lengths if lengths is None else lengths
        # sympy takes too long for every call, and the sizes of a training come again.
        if (n, lengths) not in self._valid:
            holds = guards_hold(
                self.guards, {self.symbol: n, **dict(zip(self.free, lengths, strict=True))}
            )
            if len(self._valid) >= MOST_SIZES:
                self._valid.clear()
            self._valid[n, lengths] = holds and (
                self.examined is None or self.examined.holds_for(n, lengths)
            )
        return self._valid[n, lengths]

    def lengths_of(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """Returns the sizes of the input tensors that may differ between calls, in the order of `free`."""
        return tuple(tensors[places[0][0]].shape[places[0][1]] for places in self.free.values())

    def fits(self, tensors: list[Tensor]) -> bool:
        """Checks whether the tensors of a call of the traced kind have the sizes that tracing assumed."""
        if any(size is not None and len(tensors[i]) != size for i, size in self.shared.items()):
            return False
        lengths = self.lengths_of(tensors)
        # Without symbols all other sizes are a part of the key that the graphs were found by.
        if self.free:
            if any(tensors[i].shape[d] != size for (i, d), size in self.fixed.items()):
                return False
            both = zip(self.free.values(), lengths, strict=True)
            if any(tensors[i].shape[d] != length for places, length in both for i, d in places):
                return False
        return self.holds_for(len(tensors[self.first]), lengths)

    def rebuild(self, outputs: list[Any]) -> Any:
        """Builds the module's result from its output tensors. Empties the list, so that the list keeps no tensor alive."""
        returned = map_leaves(
            lambda leaf: outputs[leaf.index], self.returned, LeafIndex, objects=False
        )
        outputs.clear()
        return returned


def guards_hold(guards: list[Any], sizes: dict[Any, int]) -> bool:
    """Checks whether all sizes are larger than 1, as tracing assumes, and satisfy the guards.

    Args:
        guards: Conditions on symbols.
        sizes: Size for each symbol.
    """
    return min(sizes.values()) > 1 and all(bool(guard.subs(sizes)) for guard in guards)


def returned_nodes(module: fx.GraphModule) -> list[Any]:
    """Returns the nodes whose values a graph returns, in order."""
    returned: Any = output_node(module).args[0]
    return list(returned)


def is_getitem(node: fx.Node) -> bool:
    """Checks whether a node selects one of several results."""
    return node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Checks whether an operation draws random numbers, also one by which Inductor has replaced an operation of PyTorch."""
    # On CUDA, attention kernels and their backward passes are tagged as random even without dropout.
    seeded = (
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        and attention_dropout(node) != 0
    )
    return seeded or str(node.target).startswith(("prims.inductor_rand", "prims.inductor_seed"))


def attention_dropout(node: fx.Node) -> float | None:
    """Returns the dropout probability of an attention kernel, or of its backward pass; None for any other operation."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            arguments: Any = dict(node.kwargs)
            return arguments.get(
                "dropout_p",
                node.args[position] if position < len(node.args) else argument.default_value,
            )
    return None


def output_node(module: fx.GraphModule) -> fx.Node:
    """Returns the output node of a graph."""
    return next(iter(reversed(module.graph.nodes)))
