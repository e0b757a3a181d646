"""Copies of a model's Python attributes, such as a call counter, for a forward pass that the loop must not notice."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.jit import ScriptModule

from thresher.trees import own_attributes

COPIED = (list, deque, dict, Counter, OrderedDict, defaultdict, set)
MOST_ELEMENTS = 2**16
"""Number of members or elements up to which a value is copied."""


class Attributes:
    """Copies of the attributes of all parts of a model: numbers, containers, small arrays and tensors without gradient.

    Other objects are shared, so a forward pass can change them.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        # One table for all parts: a list that two attributes or parts share is one list among the copies, too.
        copies: dict[int, Any] = {}
        # Modules of torch.jit keep their attributes in C++, where they are no entries of `__dict__`.
        self._of = [
            (part, _copy_attributes(part, copies))
            for part in module.modules()
            if not isinstance(part, ScriptModule)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replaces the attributes by their copies while the block runs. The attributes themselves are not written."""
        held = [(part, dict(own_attributes(part))) for part, _ in self._of]
        try:
            _write(self._of)
            yield
        finally:
            _write(held)


def _copy_attributes(part: nn.Module, copies: dict[int, Any]) -> dict[str, Any]:
    return {name: _copy(value, copies) for name, value in own_attributes(part)}


def _write(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for part, values in attributes:
        # Past `__setattr__`, which would register modules and parameters, and which models override. An attribute that the pass
        # has added would stay otherwise.
        for name in [name for name, _ in own_attributes(part) if name not in values]:
            del part.__dict__[name]
        part.__dict__.update(values)


def _copy(value: Any, made: dict[int, Any]) -> Any:
    """Copies a value that a forward pass may change in place; `made` maps the identity of a value to its copy."""
    if id(value) in made:
        return made[id(value)][1]
    if isinstance(value, Tensor):
        if not value.requires_grad and value.numel() <= MOST_ELEMENTS:
            one = value.clone()
        else:
            one = value
    elif type(value) is np.ndarray:
        one = value.copy() if value.size <= MOST_ELEMENTS else value
    elif type(value) is SimpleNamespace or (type(value) in COPIED and len(value) <= MOST_ELEMENTS):
        one = copy.copy(value)
    else:
        return value
    # Noted before the members are copied, so that a container that contains itself does not recurse forever. The table keeps
    # the value, because the identity of an object can be reused once the object is gone.
    made[id(value)] = value, one
    members = vars(one) if type(one) is SimpleNamespace else one
    if isinstance(members, dict):
        for key in members:
            members[key] = _copy(members[key], made)
    elif isinstance(members, list | deque):
        for i, member in enumerate(members):
            members[i] = _copy(member, made)
    return one
