"""The autograd graph between what the model returned and what the criterion is called with: can rows have moved?"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

MOST_OPERATIONS = 256
"""Largest number of operations that are searched; rows that an earlier operation moved are not noticed."""


def reordered_by(outputs: Tensor, returned: Set[int]) -> str | None:
    """Finds an operation that can have moved rows since the model returned its outputs.

    Args:
        outputs: A tensor that the criterion is called with.
        returned: Sequence numbers of the autograd nodes of the tensors that the model returned.

    Returns:
        Name of the autograd node, or None where there is no such operation between `outputs` and a returned tensor.
    """
    if outputs.grad_fn is None or not returned:
        return None
    oldest = min(returned)
    todo: list[tuple[Any, str | None]] = [(outputs.grad_fn, None)]
    for _ in range(MOST_OPERATIONS):
        if not todo:
            break
        node, moved = todo.pop()
        if node._sequence_nr() in returned:
            if moved is not None:
                return moved
            continue
        moved = moved or (node.name() if moves_rows(node) else None)
        parents = (parent for parent, _ in node.next_functions if parent is not None)
        todo += [(parent, moved) for parent in parents if parent._sequence_nr() >= oldest]
    return None


def moves_rows(node: Any) -> bool:
    """Returns whether an autograd node can take rows out of their order.

    Args:
        node: An autograd node, such as `tensor.grad_fn`.
    """
    kind = node.name().split("Backward")[0]
    if kind in {"IndexSelect", "Gather", "Sort", "Flip", "Roll"}:
        dims = node._saved_dims if kind in {"Flip", "Roll"} else (node._saved_dim,)
        negative_zero = 2**64 - len(node._input_metadata[0].shape)  # a negative dim is saved as an unsigned number
        return not dims or any(dim in {0, negative_zero} for dim in dims)
    if kind == "Index":
        first = node._saved_indices[0] if node._saved_indices else None
        in_order = first is None or (first.device.type == "cpu" and torch.equal(first, torch.arange(len(first))))
        return not in_order
    return kind in {"Take", "MaskedSelect"}
