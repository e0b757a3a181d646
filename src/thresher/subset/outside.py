"""Variables outside a module that its forward reads: globals and closures, which a trace takes for constant."""

import contextlib
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thresher.subset.graphs import CONSTANT_TYPES

LIBRARIES = frozenset({"torch", "numpy", "thresher", *sys.stdlib_module_names})
"""Packages whose own variables do not change what a forward computes."""
CONTAINERS = (list, dict, set, deque)
LONGEST = 64
"""Number of members up to which a container is compared in every call."""


class Variables:
    """Variables that the functions of some modules read from outside, with their values at the time this object was made.

    Args:
        parts: Modules whose forward is followed.

    Attributes:
        key: Hashable description of the values.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._found: dict[tuple[int, str], tuple[Any, str]] = {}
        self._seen: set[int] = set()
        for kind in dict.fromkeys(map(type, parts)):
            self._follow(inspect.getattr_static(kind, "forward", None), kind)
        for function in [value for part in parts for value in part.__dict__.values() if type(value) is types.FunctionType]:
            self._follow(function, None)
        self._fixed, self._open = [], []
        for space, name in self._found.values():
            value = _read(space, name)
            if isinstance(value, (*CONSTANT_TYPES, Tensor)):
                self._fixed.append((space, name, value))
            elif isinstance(value, CONTAINERS) or hasattr(value, "__dict__"):
                self._open.append((space, name, value, _members(value)))
        self.key = (
            tuple(value if isinstance(value, CONSTANT_TYPES) else id(value) for _, _, value in self._fixed),
            tuple((id(value), _by_identity(members)) for _, _, value, members in self._open),
        )

    def changed(self) -> str | None:
        """Returns the name of a variable that has another value now, or None; runs in every call."""
        for space, name, value in self._fixed:
            if _read(space, name) is not value:
                return name
        for space, name, value, members in self._open:
            if _read(space, name) is not value or not _same(_members(value), members):
                return name
        return None

    @contextlib.contextmanager
    def restored(self) -> Iterator[list[str]]:
        """Restores the variables when the block ends, and returns a list that then has the names of those that changed."""
        changed: list[str] = []
        try:
            yield changed
        finally:
            for space, name, value in self._fixed:
                if _read(space, name) is not value:
                    changed.append(name)
                    _write(space, name, value)
            for space, name, value, members in self._open:
                if _read(space, name) is not value or not _same(_members(value), members):
                    changed.append(name)
                    _write(space, name, value)
                    _refill(value, members)

    def _follow(self, function: Any, kind: type | None) -> None:
        """Finds the variables of a function and of the functions that it may call.

        Args:
            function: Function, or anything else, which is skipped.
            kind: Class whose methods it may call.
        """
        function = inspect.unwrap(getattr(function, "__func__", function))
        if type(function) is not types.FunctionType or id(function) in self._seen or _is_library(function.__module__):
            return
        self._seen.add(id(function))
        names = _names(function.__code__)
        for name in names:
            if name in function.__globals__:
                self._add(function.__globals__, name, names)
            if kind is not None:
                method = inspect.getattr_static(kind, name, None)
                self._follow(method.fget if isinstance(method, property) else method, kind)
        for cell in function.__closure__ or ():
            self._add(cell, "cell_contents", names)

    def _add(self, space: Any, name: str, names: set[str]) -> None:
        value = _read(space, name)
        if isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                for member in names & set(vars(value)):
                    if not isinstance(vars(value)[member], types.ModuleType):
                        self._add(vars(value), member, names)
            return
        if isinstance(value, type):
            if issubclass(value, torch.autograd.Function):
                self._follow(vars(value).get("forward"), None)
                self._follow(vars(value).get("backward"), None)
            return
        library = isinstance(value, nn.Module) or _is_library(getattr(type(value), "__module__", None) or "")
        if library and not isinstance(value, (*CONSTANT_TYPES, *CONTAINERS, Tensor, types.SimpleNamespace)):
            return
        self._follow(value, None)
        self._found[id(space), name] = space, name


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES - {"__main__"}


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of the globals and attributes that a function and the functions inside it read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _read(space: Any, name: str) -> Any:
    if type(space) is dict:
        return space.get(name)
    try:
        return space.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _write(space: Any, name: str, value: Any) -> None:
    if type(space) is dict:
        space[name] = value
    else:
        space.cell_contents = value


def _members(value: Any) -> Any:
    """Returns a copy of the members of a short container, or of the attributes of an object; only the length of a long one."""
    if isinstance(value, CONTAINERS):
        if len(value) > LONGEST:
            return len(value)
        return dict(value) if isinstance(value, dict) else list(value)
    return {name: member for name, member in value.__dict__.items() if isinstance(member, CONSTANT_TYPES)}


def _same(now: Any, before: Any) -> bool:
    """Compares members by identity, which also tells a tensor from a number that is equal to it."""
    if type(now) is int or type(before) is int or len(now) != len(before):
        return type(now) is type(before) is int and now == before
    if isinstance(now, dict):
        return all(name in before and member is before[name] for name, member in now.items())
    return all(map(_is, now, before))


def _is(a: Any, b: Any) -> bool:
    return a is b


def _by_identity(members: Any) -> Any:
    if isinstance(members, int):
        return members
    values = members.items() if isinstance(members, dict) else enumerate(members)
    return tuple((name, value if isinstance(value, CONSTANT_TYPES) else id(value)) for name, value in values)


def _refill(value: Any, members: Any) -> None:
    """Puts the members back that a container or an object had."""
    if isinstance(members, int):
        return
    if not isinstance(value, CONTAINERS):
        value.__dict__.update(members)
        return
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(members)
