"""Side effects of a forward pass on Python objects, which are undone after an extra pass for tracing or comparing."""

import contextlib
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from thresher.subset.graphs import CONSTANT_TYPES, HasEffects, LeafIndex
from thresher.trees import REGISTRIES

LIBRARIES = frozenset({"torch", "numpy", "thresher", *sys.stdlib_module_names})
"""Packages whose variables are assumed not to change what a forward computes."""
CONTAINERS = (list, dict, set, deque)
ARRAYS = (Tensor, np.ndarray)
MOST_OBJECTS = 2**16
"""Largest number of objects that are checked, and of members of a container that is restored."""
MOST_BYTES = 2**26
"""Largest total size, in bytes, of all arrays and tensors that are restored."""
TENSOR_TABLES = ("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
"""Attributes of modules in which tracing may leave its tensors; they are restored, but do not count as side effects."""


def is_library(module: str | None) -> bool:
    """Checks whether the name of a module is that of a library, rather than of a model's own code."""
    return (module or "").partition(".")[0] in LIBRARIES - {"__main__"}


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class, without those of its bases."""
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


@contextlib.contextmanager
def effects_undone(objects: Iterable[tuple[str, Any]]) -> Iterator[list[str]]:
    """Restores objects, and those inside of them, when the block ends; yields a list for the names of other changes it makes.

    Attributes, class attributes, containers, arrays and tensors are restored in place. Parameters, and objects of libraries
    such as files and iterators, are not.

    Args:
        objects: Names and objects, such as `named_modules()` of a model.

    Raises:
        HasEffects: An object changed, or the block added a name to the list.
    """
    held = _snapshot(objects)
    changed = list[str]()
    try:
        yield changed
    finally:
        for label, store, before in held:
            if keys := _restore(store, before):
                if label.endswith("."):
                    names = [f"{label}{key}" for key in keys]
                else:
                    names = [label]
                changed += [name for name in names if name.rpartition(".")[2] not in TENSOR_TABLES]
        # Raised even if the block failed: tracing fails if it meets a tensor that it has itself left in a container.
        if changed and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            raise HasEffects(
                f"its forward changes {', '.join(sorted(changed)[:3])}, which a traced graph does not repeat"
            )


def _snapshot(objects: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, dict[Any, Any]]]:
    """Returns a label, an object and its contents for each object that can change, beginning with the outermost ones."""
    # Breadth first, so the limits leave out what lies deepest. `found` keeps every object alive, so no `id` is reused.
    ahead = deque(objects)
    found = []
    seen = set[int]()
    room = MOST_BYTES
    while ahead and len(found) < MOST_OBJECTS:
        for label, store in _stores(*ahead.popleft()):
            size = store.nbytes if isinstance(store, ARRAYS) else 0
            if id(store) in seen or size > room:
                continue
            seen.add(id(store))
            room -= size
            found.append((label, store, contents := _contents(store)))
            if not (isinstance(store, ARRAYS) or label.rpartition(".")[2] in TENSOR_TABLES):
                inside = (
                    (f"{label}{key}" if label.endswith(".") else label, value)
                    for key, value in contents.items()
                )
                ahead.extend(pair for pair in inside if not isinstance(pair[1], CONSTANT_TYPES))
    return found


def _stores(label: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yields each object that holds contents of `thing`, with a label, which ends with a dot if the contents are attributes."""
    kind = type(thing)
    # Not a Parameter: a forward that writes one is refused by `assemble`, and all of them may be too large to copy.
    array = kind is np.ndarray or (
        kind is Tensor and not (thing.requires_grad or thing.is_meta or thing.is_sparse)
    )
    if array or (isinstance(thing, (*CONTAINERS, tuple)) and len(thing) <= MOST_OBJECTS):
        yield label, thing
    bases = [base for base in kind.__mro__ if not is_library(base.__module__)]
    with_attributes = bases or isinstance(thing, SimpleNamespace | Namespace | nn.Module)
    # Wrappers of this library count and time calls, which is no effect of the model.
    if kind.__module__.partition(".")[0] != "thresher" and with_attributes:
        if hasattr(thing, "__dict__"):
            yield f"{label or 'model'}.", vars(thing)
        if any(map(slots_of, bases)):
            yield f"{label}.", thing
        yield from ((f"{base.__name__}.", base) for base in bases)


def _contents(store: Any) -> dict[Any, Any]:
    if isinstance(store, ARRAYS):
        return {"": store.clone() if isinstance(store, Tensor) else store.copy()}
    if isinstance(store, dict):
        # Not by the method `items`, which a subclass may override. The registries of a module, such as its hooks, are compared
        # elsewhere.
        return {
            key: value
            for key, value in dict.items(store)
            if key not in REGISTRIES or key in TENSOR_TABLES
        }
    if isinstance(store, type):
        return {name: value for name, value in vars(store).items() if not name.startswith("__")}
    if isinstance(store, (*CONTAINERS, tuple)):
        return dict(enumerate(store))
    return {
        name: getattr(store, name, None) for base in type(store).__mro__ for name in slots_of(base)
    }


def _restore(store: Any, before: dict[Any, Any]) -> list[Any]:
    """Restores the contents of an object, and returns the keys of those that had changed."""
    kind: Any = type(store)
    if isinstance(store, ARRAYS):
        old = before[""]
        # NaN counts as equal to NaN.
        same = bool(((store == old) | ((store != store) & (old != old))).all())
        if not same:
            store[...] = old
        return [] if same else [""]
    now = _contents(store)
    # By identity: `==` of arrays has no truth value, and that of objects is the user's code. `LeafIndex` stands for a missing
    # key, since None may be a value.
    keys = [
        key
        for key in {**before, **now}
        if before.get(key, LeafIndex) is not now.get(key, LeafIndex)
    ]
    if keys and isinstance(store, CONTAINERS) and not isinstance(store, dict):
        # In place, because others may hold the same container.
        store.clear()
        (store.update if isinstance(store, set) else store.extend)(before.values())
        return keys
    # Not through the user's `__setattr__`, which may have side effects itself.
    owner: Any = type if isinstance(store, type) else object
    put, drop = (
        (kind.__setitem__, kind.__delitem__)
        if isinstance(store, dict)
        else (owner.__setattr__, owner.__delattr__)
    )
    for key in keys:
        put(store, key, before[key]) if key in before else drop(store, key)
    return keys
