"""What a function or an object remembers between calls: saved, and put back in place.

That is attributes of it and its class, variables of closures, global variables that a function names, and the containers,
small tensors and small arrays in them. Objects of other packages than that of the function are left alone: they may be in use
elsewhere.
"""

import io
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_PARTS = 4096
"""Number of parts that are looked at."""
MOST_ENTRIES = 256
"""Number of entries of the largest container whose entries are looked at, too."""
MOST_ELEMENTS = 65536
"""Number of elements of the largest tensor or array that is saved."""

CONTAINERS = list | tuple | set | frozenset | deque
LEAVES = int | float | complex | str | bytes | ModuleType | None | random.Random | torch.Generator | np.random.Generator


def held_state(root: Any) -> list[tuple[Any, Any]]:
    """Returns what a callable or an object remembers now, for `put_back`.

    Args:
        root: Function, method, partial or object.

    Example:
        >>> counts = [1]
        >>> def count():
        ...     counts[0] += 1
        >>> before = held_state(count)
        >>> count()
        >>> put_back(before)
        >>> counts
        [1]
    """
    package = _package_of(root)
    return [(part, contents) for part in _parts_of(root) if (contents := _contents_of(part, package)) is not None]


def held_iterator(root: Any) -> Any:
    """Returns an iterator that a callable or an object keeps, whose position cannot be put back; None where there is none."""
    return next((one for one in _parts_of(root) if isinstance(one, Iterator) and not isinstance(one, io.IOBase)), None)


def put_back(state: list[tuple[Any, Any]]) -> None:
    """Puts everything back as it was when `held_state` was called."""
    for part, contents in state:
        if isinstance(part, CellType):
            part.cell_contents = contents[0]
        elif isinstance(part, list | bytearray):
            part[:] = contents
        elif isinstance(part, dict | set | deque):
            part.clear()
            (part.extend if isinstance(part, deque) else part.update)(contents)
        elif isinstance(part, np.ndarray):
            part[...] = contents
        elif isinstance(part, Tensor):
            if not torch.equal(part, contents):
                part.detach().copy_(contents)
        else:
            attributes, named = contents
            _set_attributes(part, attributes)
            if named:
                part.__globals__.update(named)


def _parts_of(root: Any) -> list[Any]:
    """Returns a callable or an object and what is found inside."""
    found: dict[int, Any] = {}
    waiting, package = deque([root]), _package_of(root)
    while waiting and len(found) < MOST_PARTS:
        part = waiting.popleft()
        if id(part) not in found and not isinstance(part, LEAVES):
            found[id(part)] = part
            waiting.extend(_inside(part, package))
    return list(found.values())


def _package_of(part: Any) -> str:
    if isinstance(part, partial):
        return _package_of(part.func)
    owner = part if isinstance(part, FunctionType | MethodType | type) else type(part)
    return (owner.__module__ or "").partition(".")[0]


def _inside(part: Any, package: str) -> list[Any]:
    """Returns what is found one step inside a part."""
    if isinstance(part, CellType):
        return [] if is_empty(part) else [part.cell_contents]
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, MethodType):
        return [part.__func__, part.__self__]
    if isinstance(part, dict):
        return list(part.values()) if len(part) <= MOST_ENTRIES else []
    if isinstance(part, CONTAINERS):
        return list(part) if len(part) <= MOST_ENTRIES else []
    if isinstance(part, Tensor | np.ndarray) or _package_of(part) != package:
        return []
    if isinstance(part, FunctionType):
        defaults = [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
        return [*(part.__closure__ or ()), *defaults, *vars(part).values(), *_globals_of(part).values()]
    call = type(part).__dict__.get("__call__")
    return [*_attributes_of(part).values(), type(part), *([call] if isinstance(call, FunctionType) else [])]


def _contents_of(part: Any, package: str) -> Any:
    """Returns a copy of what a part holds; None where it holds nothing that can change, or too much."""
    if isinstance(part, CellType):
        return None if is_empty(part) else (part.cell_contents,)
    if isinstance(part, dict | list | bytearray | set | deque):
        return part.copy()
    if isinstance(part, Tensor):
        return part.detach().clone() if part.is_cpu and part.layout is torch.strided and part.numel() <= MOST_ELEMENTS else None
    if isinstance(part, np.ndarray):
        return part.copy() if part.flags.writeable and part.size <= MOST_ELEMENTS else None
    if isinstance(part, CONTAINERS | partial | MethodType) or _package_of(part) != package:
        return None
    return _attributes_of(part), _globals_of(part) if isinstance(part, FunctionType) else {}


def _globals_of(function: FunctionType) -> dict[str, Any]:
    known = function.__globals__
    return {name: known[name] for name in function.__code__.co_names if name in known}


def _attributes_of(part: Any) -> dict[str, Any]:
    if isinstance(part, type):
        return {name: value for name, value in vars(part).items() if name[:2] != "__" and not hasattr(value, "__get__")}
    own = getattr(part, "__dict__", None)
    slots = [name for kind in type(part).__mro__ for name in _slots_of(kind) if hasattr(part, name)]
    return (dict(own) if isinstance(own, dict) else {}) | {name: getattr(part, name) for name in slots}


def _set_attributes(part: Any, attributes: dict[str, Any]) -> None:
    now, kind = _attributes_of(part), type if isinstance(part, type) else object
    for name in now.keys() - attributes.keys():
        kind.__delattr__(part, name)
    for name, value in attributes.items():
        if now.get(name, now) is not value:
            kind.__setattr__(part, name, value)


def is_empty(cell: CellType) -> bool:
    """Whether a variable of a closure has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]
