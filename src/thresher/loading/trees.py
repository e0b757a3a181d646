"""Nested batches: tensors inside tuples, lists, mappings and dataclasses, as collate functions and models return them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested structure, in order."""
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
    """Rebuild a nested structure with `function` applied to each leaf of a kind; everything else is passed through."""
    return map_where(function, tree, lambda part: isinstance(part, kind))


def map_where(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Rebuild a nested structure with `function` applied to each leaf, the outermost parts that `is_leaf` says are one."""
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
    """Move the tensors of a batch; a batch that is there already is returned as it is, the very same object."""
    if all(leaf.device == device for leaf in leaves(tree)):
        return tree
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)
