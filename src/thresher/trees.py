"""Functions for nested batches: tensors in tuples, lists, mappings, dataclasses and other objects."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

REGISTRIES = frozenset(nn.Module().__dict__) - {"training"}
"""Names of the attributes that every module has."""


def attributes_of(tree: Any) -> tuple[str, ...]:
    """Returns the names of the attributes that hold the parts of an object; nothing for modules, classes and functions."""
    if isinstance(tree, type):
        return ()
    if is_dataclass(tree):
        return tuple(field.name for field in fields(tree))
    if not hasattr(tree, "__dict__") or isinstance(tree, nn.Module | FunctionType | ModuleType):
        return ()
    return tuple(vars(tree))


def own_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """Returns the names and values of the attributes that a module has beyond those of every `nn.Module`."""
    return [(name, value) for name, value in part.__dict__.items() if name not in REGISTRIES]


def leaves(tree: Any, *, objects: bool = True) -> list[Tensor]:
    """Returns every tensor of a nested structure, in order.

    Args:
        tree: Nested structure.
        objects: Whether to search the attributes of objects that are not dataclasses. Objects inside such an object are never
            searched, because they may refer to each other. Default: True.

    Example:
        >>> [leaf.item() for leaf in leaves({"x": torch.tensor(1), "y": [torch.tensor(2), "text"]})]
        [1, 2]
    """
    tensors: list[Tensor] = []
    todo = [
        (tree, objects)
    ]  # a stack is faster than recursion, and every step calls this several times
    while todo:
        part, inside = todo.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
            continue
        if isinstance(part, Mapping):
            parts: Any = [*part.values()]
        elif isinstance(part, tuple | list):
            parts = part
        elif inside or is_dataclass(part):
            parts = [getattr(part, name) for name in attributes_of(part)]
            inside = inside and is_dataclass(part)
        else:
            continue
        todo += [(one, inside) for one in reversed(parts)]
    return tensors


def map_leaves(
    function: Callable[[Any], Any], tree: Any, kind: type = Tensor, *, objects: bool = True
) -> Any:
    """Rebuilds a nested structure with `function` applied to each leaf of a type; everything else is passed through.

    Args:
        function: Function from a leaf to its replacement.
        tree: Nested structure.
        kind: Type of the leaves. Default: tensors.
        objects: Whether to search objects that are not dataclasses, as in `leaves`. Default: True.
    """
    return map_where(function, tree, lambda part: isinstance(part, kind), objects=objects)


def map_where(
    function: Callable[[Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool],
    *,
    objects: bool = True,
) -> Any:
    """Rebuilds a nested structure with `function` applied to the outermost parts for which `is_leaf` is true.

    Args:
        function: Function from a part to its replacement.
        tree: Nested structure.
        is_leaf: Function of a part that returns whether `function` is applied to it.
        objects: Whether to search objects that are not dataclasses, as in `leaves`. Default: True.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        rebuilt: Any = copy.copy(tree)
        for key, value in tree.items():
            rebuilt[key] = map_where(function, value, is_leaf, objects=objects)
        return rebuilt
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_where(function, value, is_leaf, objects=objects) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_where(function, value, is_leaf, objects=objects) for value in tree)
    if not (objects or is_dataclass(tree)):
        return tree
    inside = objects and is_dataclass(tree)
    parts = {name: getattr(tree, name) for name in attributes_of(tree)}
    mapped = {
        name: map_where(function, part, is_leaf, objects=inside) for name, part in parts.items()
    }
    if all(mapped[name] is part for name, part in parts.items()):
        return tree
    rebuilt = copy.copy(tree)
    for name, part in mapped.items():
        object.__setattr__(rebuilt, name, part)
    return rebuilt


def to_device(tree: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch to a device. Returns the same object if they are on the device already.

    Args:
        tree: Batch of tensors in tuples, lists, mappings, dataclasses and other objects.
        device: The device.

    Example:
        >>> to_device({"x": torch.zeros(2)}, torch.device("cpu"))
        {'x': tensor([0., 0.])}
    """
    for leaf in leaves(tree):
        if leaf.device != device:
            break
    else:
        return tree
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)


def differing_part(one: Any, other: Any, path: str = "batch") -> str | None:
    """Returns the name of the first part in which two nested structures differ.

    Args:
        one: First structure.
        other: Second structure.
        path: Start of the name: an expression for the whole structure. Default: "batch".

    Returns:
        Name and shape or type of the part, such as "`batch[0]`, of shape (7, 8),"; None if the two are the same.
    """
    if one is other:
        return None
    kind = type(one)
    if kind is type(other):
        pairs = None
        if isinstance(one, Tensor | np.ndarray):
            return None if _same_values(one, other) else _describe(path, other)
        if isinstance(one, Mapping) and list(one) == list(other):
            pairs = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
        elif isinstance(one, tuple | list) and len(one) == len(other):
            names = getattr(one, "_fields", None)
            if names is None:
                places = [f"[{i}]" for i in range(len(one))]
            else:
                places = [f".{name}" for name in names]
            pairs = [(path + place, a, b) for place, a, b in zip(places, one, other, strict=True)]
        elif not isinstance(one, Mapping | tuple | list) and (names := attributes_of(one)):
            pairs = [
                (f"{path}.{name}", getattr(one, name, None), getattr(other, name, None))
                for name in names
            ]
        if pairs is not None:
            return next(
                (name for where, a, b in pairs if (name := differing_part(a, b, where))), None
            )
        if (one == other) is True or (isinstance(one, float) and one != one and other != other):
            return None
    return _describe(path, other)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two tensors or two arrays have the same dtype, shape and values; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = one == other
    return bool(same.all()) or bool((same | ((one != one) & (other != other))).all())


def _describe(path: str, part: Any) -> str:
    """Returns the name and the shape or type of a part, as the subject of a sentence: "`batch[0]`, of shape (7, 8),"."""
    if isinstance(part, Tensor | np.ndarray):
        return f"`{path}`, of shape {tuple(part.shape)},"
    return f"`{path}`, a {type(part).__name__},"
