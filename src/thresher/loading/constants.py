"""Parts of a batch that belong to no single sample: whether they are the same in two batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from thresher.loading.trees import attributes_of


def differing_part(one: Any, other: Any, path: str = "batch") -> str | None:
    """Names the first part in which two nested structures differ.

    Args:
        one: First structure.
        other: Second structure.
        path: Expression for the structures, which the name begins with.

    Returns:
        Name and shape or type of the part, such as "`batch[0]`, of shape (7, 8),"; None where the two are the same.
    """
    if one is other:
        return None
    kind = type(one)
    if kind is type(other):
        pairs = None
        if isinstance(one, Tensor | np.ndarray):
            return None if _same_values(one, other) else _named(path, other)
        if isinstance(one, Mapping) and list(one) == list(other):
            pairs = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
        elif isinstance(one, tuple | list) and len(one) == len(other):
            names = getattr(one, "_fields", None)
            places = [f"[{i}]" for i in range(len(one))] if names is None else [f".{name}" for name in names]
            pairs = [(path + place, a, b) for place, a, b in zip(places, one, other, strict=True)]
        elif not isinstance(one, Mapping | tuple | list) and (names := attributes_of(one)):
            pairs = [(f"{path}.{name}", getattr(one, name, None), getattr(other, name, None)) for name in names]
        if pairs is not None:
            return next((found for where, a, b in pairs if (found := differing_part(a, b, where))), None)
        if (one == other) is True or (isinstance(one, float) and one != one and other != other):
            return None
    return _named(path, other)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two tensors or two arrays have the same dtype, shape and values; not-a-number equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = one == other
    return bool(same.all()) or bool((same | ((one != one) & (other != other))).all())


def _named(path: str, part: Any) -> str:
    what = f"of shape {tuple(part.shape)}" if isinstance(part, Tensor | np.ndarray) else f"a {type(part).__name__}"
    return f"`{path}`, {what},"
