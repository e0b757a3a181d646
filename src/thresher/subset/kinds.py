"""Kinds of calls: what tells two calls apart for a trace, and which kinds come up often enough to be worth a trace."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from thresher.subset.graphs import CONSTANT_TYPES, Unsupported

FREE_TRACES = 8
"""Number of traces that are made for each module without a question."""
CALLS_PER_TRACE = 32
"""Number of calls of one kind with the plain model before a further trace is made for this kind."""
EVERY = 256
"""Number of calls after which graphs are compared again; before that, at calls 1, 2, 4, 8 and so on."""
MAX_REMEMBERED = 4096
"""Number of kinds without a trace whose calls are counted."""


class Patience:
    """Decides which kinds of calls are traced: the first few at once, a further one when it has come up often enough.

    A trace takes as long as hundreds of steps of a small model. A kind that comes up a few times does not save that much.

    Args:
        free: Number of traces that are made at once.

    Attributes:
        made: Number of traces that were tried.
        seconds: Time that they took.
    """

    def __init__(self, free: int) -> None:
        self.free, self.made, self.seconds = free, 0, 0.0
        self._calls: Counter[int] = Counter()
        self._traces: Counter[int] = Counter()

    def is_due(self, kind: Hashable, *, at_once: bool = True) -> bool:
        """Counts a call of a kind that has no trace, and returns whether it is to be traced now.

        Args:
            kind: Description of the call.
            at_once: Whether the kind may be among the first few. Default: True.
        """
        if at_once and self.made < self.free:
            return True
        place = hash(kind)
        if len(self._calls) >= MAX_REMEMBERED:
            self._calls.clear()
        self._calls[place] += 1
        return self._calls[place] >= CALLS_PER_TRACE << self._traces[place]

    def reason(self) -> str:
        """Returns why a kind is not traced now."""
        return (
            f"it was traced {self.made} times for different kinds of inputs or settings, which took {self.seconds:.1f} s. A "
            f"further kind is traced only after it has come up {CALLS_PER_TRACE} times. Pad inputs to few lengths, and pass "
            "a number that changes in every step as a tensor"
        )

    def count(self, kind: Hashable, seconds: float) -> None:
        """Counts a trace; should its kind need another one, it must come up twice as often first.

        Args:
            kind: Description of the call.
            seconds: Time that the trace took.
        """
        place = hash(kind)
        self.made, self.seconds = self.made + 1, self.seconds + seconds
        if self._calls.pop(place, None) is not None:
            self._traces[place] += 1


def is_due(calls: int) -> bool:
    """Checks whether a call is one of those in which graphs are compared with the model.

    Args:
        calls: Number of calls that used the graphs, this one included.
    """
    return not calls & (calls - 1) or not calls % EVERY


def dense(tensor: Tensor) -> Tensor:
    """Returns a tensor in the form that is traced: its memory has the order of its dimensions, or that of channels_last.

    Raises:
        Unsupported: The tensor has another layout.
    """
    if tensor.is_nested:
        raise Unsupported("it is given a nested tensor; pass a padded tensor and a mask instead")
    if tensor.layout is not torch.strided:
        raise Unsupported("it is given a sparse tensor")
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


def describe(tree: Any, n: int, *, sizes: bool = True) -> Any:
    """Returns a hashable description of nested arguments.

    Args:
        tree: Arguments of a call.
        n: Batch size; a first dimension of this size is taken for that of the batch.
        sizes: Whether the sizes of the other dimensions are a part of it, or only their number. Default: True.

    Raises:
        Unsupported: The arguments hold an object that can change, and that a trace would take for constant.
    """
    if isinstance(tree, Tensor):
        others = (lambda shape: tuple(shape)) if sizes else len
        shape = ("n", others(tree.shape[1:])) if tree.dim() and len(tree) == n else others(tree.shape)
        channels_last = tree.dim() == 4 and tree.is_contiguous(memory_format=torch.channels_last)
        return shape, tree.dtype, tree.device, tree.requires_grad, channels_last
    if isinstance(tree, Mapping):
        return type(tree), tuple((key, describe(value, n, sizes=sizes)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return type(tree), tuple(describe(value, n, sizes=sizes) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), tuple(describe(getattr(tree, field.name), n, sizes=sizes) for field in fields(tree))
    if isinstance(tree, CONSTANT_TYPES):
        return type(tree), tree
    raise Unsupported(f"it is given a {type(tree).__name__}, whose content a trace would take for constant")


class Shapes:
    """Shapes of the first call of each kind, by which dimensions are found that have another size in later calls."""

    def __init__(self) -> None:
        self._first: OrderedDict[Hashable, tuple[int, list[torch.Size]]] = OrderedDict()

    def varying(self, kind: Hashable, tensors: list[Tensor], n: int) -> list[tuple[int, int]]:
        """Returns the dimensions whose size is another one than in the first call of a kind, without that of the batch.

        Args:
            kind: Description of the call without sizes.
            tensors: Tensors of the call.
            n: Batch size.

        Returns:
            Pairs of the number of a tensor and a dimension; none where one of them has the size 0 or 1, which is special.
        """
        before, shapes = self._first.setdefault(kind, (n, [tensor.shape for tensor in tensors]))
        if len(self._first) > MAX_REMEMBERED:
            self._first.popitem(last=False)
        found = [
            (i, d)
            for i, (first, tensor) in enumerate(zip(shapes, tensors, strict=True))
            for d, (old, new) in enumerate(zip(first, tensor.shape, strict=True))
            if old != new and not (d == 0 and (old, new) == (before, n))
        ]
        return found if all(tensors[i].shape[d] > 1 for i, d in found) else []


def autocast(tensors: list[Tensor]) -> torch.dtype | None:
    """Returns the dtype of autocast on the device of the inputs; None without autocast."""
    kind = tensors[0].device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
