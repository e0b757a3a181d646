"""Nested batches: tensors inside tuples, lists, mappings and dataclasses, as collate functions and models return them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yields every tensor of a nested structure, in order.

    Example:
        >>> [leaf.item() for leaf in leaves({"x": torch.tensor(1), "y": [torch.tensor(2), "text"]})]
        [1, 2]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name))


def map_leaves(function: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """Rebuilds a nested structure with `function` applied to each leaf of a type; everything else is passed through."""
    return map_where(function, tree, lambda part: isinstance(part, kind))


def map_where(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Rebuilds a nested structure with `function` applied to the outermost parts for which `is_leaf` is true."""
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        rebuilt: Any = copy.copy(tree)
        for key, value in tree.items():
            rebuilt[key] = map_where(function, value, is_leaf)
        return rebuilt
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_where(function, value, is_leaf) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_where(function, value, is_leaf) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        rebuilt = copy.copy(tree)
        for field in fields(tree):
            object.__setattr__(rebuilt, field.name, map_where(function, getattr(tree, field.name), is_leaf))
        return rebuilt
    return tree


def to_device(tree: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch; a batch that is on the device already is returned as it is, the very same object."""
    if all(leaf.device == device for leaf in leaves(tree)):
        return tree
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)
