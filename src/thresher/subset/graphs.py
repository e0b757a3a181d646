"""A traced module: its forward and backward as graphs over a symbolic batch size, and where samples are in what they save."""

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from thresher.loading.trees import leaves, map_leaves
from thresher.subset.rows import Layout

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

REGISTRIES = frozenset(nn.Module().__dict__) - {"training"}
CONSTANT = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, enum.Enum, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""What its value tells; anything else can have another content the next time."""


class Unsupported(Exception):  # noqa: N818
    """Why a module's backward pass cannot be run on some rows; the sentence is shown to the user."""


@dataclass(frozen=True)
class Hole:
    """Stands for the i-th tensor of a nested structure."""

    index: int


def take_apart(tree: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a nested structure, and a function that puts others in their place."""
    tensors = list(leaves(tree))

    def rebuild(others: list[Tensor]) -> Any:
        following = iter(others)
        return map_leaves(lambda _: next(following), tree)

    return tensors, rebuild


@dataclass
class Slot:
    """One value that the forward graph saves for the backward graph.

    Args:
        index: Position among what the forward graph returns.
        layout: Where its samples are; None where every row needs all of it.
        per: For sizes that follow the batch: size / n, else 0.
    """

    index: int
    layout: Layout | None = None
    per: int = 0


@dataclass
class Graphs:
    """A traced module. Calls are boxed: a list of arguments that is emptied as it is read.

    Attributes:
        inputs: For each argument of the forward graph: ("param" | "buffer" | "leaf", name or position).
        mutated: Buffers whose new values come first in what the forward graph returns.
        outputs: For each output tensor its layout; None where it has no sample dimension.
        differentiable: Positions of outputs that can have a gradient, in the order of the backward graph's tangents.
        saved: What the backward graph takes before the tangents, in order.
        grads: For each result of the backward graph: what it is the gradient of, like `inputs`; None where there is none.
        num_forward: How many values the forward graph returns before those that it saves.
        first: Position of the first leaf that has the batch as first dimension.
        shared: First dimensions of the leaves that all samples share, by position.
        grad_layouts: For each of them where its samples are; None where it is a sum over samples.
        grads_of: For each of them the positions of the outputs that it is a gradient of.
        tried: Rows that the graphs were tried out on.
        mixing: Operations that mix samples and are allowed to, by name.
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
    saved: list[Slot]
    grads: list[Any]
    grad_layouts: list[Layout | None]
    grads_of: list[set[int]]
    env: "ShapeEnv"
    symbol: Any
    num_forward: int
    first: int
    shared: dict[int, int]
    tried: int = 0
    mixing: tuple[str, ...] = ()
    layouts: dict[fx.Node, Any] = field(default_factory=dict)
    _valid: dict[int, bool] = field(default_factory=dict)

    def holds_for(self, n: int) -> bool:
        """Whether what tracing assumed of the batch size is true of n."""
        if n not in self._valid:
            self._valid[n] = n > 1 and all(bool(guard.expr.subs({self.symbol: n})) for guard in self.env.guards)
        return self._valid[n]

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether these leaves, of the kind that was traced, have the sizes that tracing assumed."""
        return self.holds_for(len(tensors[self.first])) and all(len(tensors[i]) == size for i, size in self.shared.items())

    def rebuild(self, outputs: list[Any]) -> Any:
        """What the module returns, from its output tensors; the list is emptied, so that nothing else holds them."""
        returned = map_leaves(lambda hole: outputs[hole.index], self.returned, Hole)
        outputs.clear()
        return returned


def own_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """What a module's class has set on it."""
    return [(name, value) for name, value in part.__dict__.items() if name not in REGISTRIES]
