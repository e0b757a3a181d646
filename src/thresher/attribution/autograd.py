"""The autograd graph between what the model returned and what the criterion is called with: which rows are these?

Every operation in between must be one that is known to keep rows in their order. An operation that is not in the lists of
`operations`, or acts along the rows, may have moved them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thresher.attribution.operations import ALONG, ELEMENTWISE, OPERANDS, ROW_MAJOR
from thresher.attribution.rows import Rows, TrackedTensor

MOST_OPERATIONS = 100_000
"""Largest number of operations that are followed."""


class Moved(NamedTuple):
    """Rows that may not be in the order of the batch any more.

    Attributes:
        by: Name of the operation.
        changed: Description of the inputs, where the model was given changed ones; None otherwise.
    """

    by: str
    changed: str | None = None


Followed = Rows | Moved | None
"""What is known of the rows of a tensor; None where it does not depend on a tensor that the model returned."""

GraphPlace = tuple[int, int]
"""Sequence number of an autograd node, and which of its results is meant."""


def follow_rows(outputs: Tensor, returned: Mapping[GraphPlace, TrackedTensor]) -> Followed:
    """Finds the rows that a tensor shows, from the operations since the model returned.

    Args:
        outputs: A tensor that the criterion is called with.
        returned: The tensors that the model returned, by their place in the autograd graph.

    Returns:
        The rows; or the operation that may have moved them; or None where `outputs` was not computed from a returned tensor.
    """
    if outputs.grad_fn is None or not returned:
        return None
    start = outputs.grad_fn._sequence_nr(), outputs.output_nr
    oldest, states = min(returned)[0], dict[GraphPlace, Followed]()
    todo: list[tuple[Any, GraphPlace]] = [(outputs.grad_fn, start)]
    while todo:
        node, place = todo[-1]
        if place in states:
            todo.pop()
            continue
        if place in returned:
            tracked = returned[place]
            states[place] = tracked.rows if tracked.changed is None else Moved("", tracked.changed)
            continue
        edges = [None if one is None else (one, (one._sequence_nr(), nr)) for one, nr in node.next_functions]
        known = [edge for edge in edges if edge is not None and oldest <= edge[1][0] and edge[0].next_functions]
        missing = [edge for edge in known if edge[1] not in states]
        if missing and len(states) + len(todo) < MOST_OPERATIONS:
            todo += missing
            continue
        if missing:
            return Moved("too many operations")
        operands = [
            None if edge is None or (state := states.get(edge[1])) is None else _Operand(i, _shape(edge[0], edge[1][1]), state)
            for i, edge in enumerate(edges)
        ]
        states[place] = _after(node, place[1], operands)
    return states[start]


class _Operand(NamedTuple):
    number: int
    shape: tuple[int, ...]
    state: Rows | Moved


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def _after(node: Any, number: int, all_operands: Sequence[_Operand | None]) -> Followed:
    """Returns what an operation makes of the rows of its operands."""
    operands = [one for one in all_operands if one is not None]
    if not operands:
        return None
    name, shape = node.name(), _shape(node, number)
    kind = name.split("Backward")[0]
    if kind in ROW_MAJOR:
        return _reshaped(operands[0].state, shape, name)
    if kind == "Cat" and 0 in _dims(node, len(shape)):
        return _joined(all_operands, name)
    if kind in {"Slice", "Split", "SplitWithSizes"} and 0 in _dims(node, len(shape)):
        return _part(operands[0], *_range(node, kind, number, operands[0].shape[0]), shape[0], name)
    in_order = [one.state for one in operands if one.shape[:1] == shape[:1] != () and _keeps(node, kind, one, shape)]
    states = set(in_order)
    if len(states) == 1 and isinstance(found := in_order[0], Rows):
        return found
    return next((state for state in in_order if isinstance(state, Moved)), Moved(name))


def _keeps(node: Any, kind: str, operand: _Operand, shape: tuple[int, ...]) -> bool:
    """Whether row i of the result is computed from row i of an operand with as many rows."""
    if kind in ELEMENTWISE:
        return len(operand.shape) == len(shape)
    if kind in OPERANDS:
        return operand.number in OPERANDS[kind]
    if kind == "Permute":
        return _positive(node._saved_dims[:1], len(shape)) == {0}
    if kind == "Repeat":
        return len(operand.shape) == len(shape) and node._saved_repeats[0] == 1
    if kind == "ConstantPadNd":
        return len(node._saved_pad) < 2 * len(shape)
    if kind == "Index":
        return _indexes_in_order(node._saved_indices, shape[0])
    if kind not in ALONG:
        return False
    dims = _dims(node, len(shape) if kind == "Stack" else len(operand.shape))
    return bool(dims) and 0 not in dims


def _dims(node: Any, dimensions: int) -> set[int]:
    """Dimensions that an operation acts along; empty where they are not known, or are all."""
    names = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1", "_saved_dimension")
    found = [getattr(node, name) for name in names if hasattr(node, name)]
    dims = [dim for one in found if one is not None for dim in (one if isinstance(one, tuple | list) else (one,))]
    return _positive(dims, dimensions)


def _positive(dims: Sequence[int], dimensions: int) -> set[int]:
    """Negative dimensions are saved as unsigned numbers."""
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]
    return {dim + dimensions if dim < 0 else dim for dim in signed}


def _indexes_in_order(indices: Sequence[Tensor | None], rows: int) -> bool:
    """Whether advanced indexing leaves the rows where they are."""
    first, given = indices[0], [i for i, index in enumerate(indices) if index is not None]
    if first is None:
        return given == list(range(given[0], given[-1] + 1))  # else the indexed dimensions come first
    if first.device.type != "cpu" or first.dtype == torch.bool or first.shape[:1] != (rows,) or first.numel() != rows:
        return False
    others = all(index is None or index.dim() <= first.dim() for index in indices)
    return others and torch.equal(first.flatten(), torch.arange(rows))


def _reshaped(state: Rows | Moved, shape: tuple[int, ...], name: str) -> Followed:
    if isinstance(state, Moved):
        return state
    whole = shape and shape[0] and shape[0] % state.n == 0
    return state._replace(repeat=shape[0] // state.n) if whole else Moved(name)


def _range(node: Any, kind: str, number: int, size: int) -> tuple[int, int]:
    """First row and step of a slice or of a part of a split along the rows."""
    if kind == "Split":
        return number * int(node._saved_split_size), 1
    if kind == "SplitWithSizes":
        return sum(int(part) for part in node._saved_split_sizes[:number]), 1
    (start,) = _positive([int(node._saved_start or 0)], size)
    return min(max(start, 0), size), int(node._saved_step)


def _part(whole: _Operand, start: int, step: int, count: int, name: str) -> Followed:
    rows = whole.state
    if isinstance(rows, Moved):
        return rows
    repeat = rows.repeat
    if not count or (repeat > 1 and (step > 1 or start % repeat or count % repeat)):
        return Moved(name)
    return rows._replace(start=rows.start + rows.step * (start // repeat), step=rows.step * step, n=count // repeat)


def _joined(operands: Sequence[_Operand | None], name: str) -> Followed:
    """Parts that are joined along the rows, in their order."""
    states = [None if one is None else one.state for one in operands]
    whole: Rows | None = None
    for rows in states:
        if not isinstance(rows, Rows):
            return rows or Moved(name)
        if whole is None:
            whole = rows
            continue
        follows = rows._replace(start=whole.start, n=whole.n) == whole and rows.start == whole.start + whole.step * whole.n
        if not follows:
            return Moved(name)
        whole = whole._replace(n=whole.n + rows.n)
    return whole
