"""What a trace takes for constant in a module: described once, and looked at in every call to see whether it still holds."""

from collections.abc import Iterable, Mapping
from operator import eq, is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thresher.subset.graphs import CONSTANT, Graphs, own_attributes

TABLES = ("_modules", "_parameters", "_buffers")


class Held(NamedTuple):
    """A module's tensors as graphs take them; positions stand for the tensors of a call."""

    inputs: list[Any]
    trained: list[Any]
    buffers: list[Tensor]


class Settings:
    """A module's settings when this was made.

    Attributes:
        key: A hashable description of what tracing takes for constant.
        trains: Whether any parameter gets a gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = _parts(module)
        self._watched = [_watched(part) for part in self._parts.values()]
        self._of_graphs: dict[int, tuple[Graphs, Held]] = {}
        parts = self._parts.values()
        self.key = (
            tuple(_described(part) for part in parts),
            _places(thing for part in parts for thing in (part, *_tensors(part))),
        )
        self.trains = any(parameter.requires_grad for parameter in module.parameters())

    def hold(self) -> bool:
        """Whether they are what they were, down to which tensors there are; runs in every call."""
        return all(_unchanged(*watched) for watched in self._watched)

    def tensors(self, graphs: Graphs) -> "Held":
        """What graphs that were made under these settings read and update."""
        if id(graphs) not in self._of_graphs:
            inputs = [self._held(*source) for source in graphs.inputs]
            trained = [self._held(*source) for source in graphs.grads if source is not None]
            self._of_graphs[id(graphs)] = graphs, Held(inputs, trained, [self._held("buffer", name) for name in graphs.mutated])
        return self._of_graphs[id(graphs)][1]

    def _held(self, kind: str, name: Any) -> Any:
        """A parameter or buffer by its full name; the position of what the call gives."""
        if kind == "leaf":
            return name
        prefix, dot, last = name.rpartition(".")
        part = self._parts[prefix + dot]
        return (part._parameters if kind == "param" else part._buffers)[last]


def has_hooks(part: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Every module by the prefix of its parameters' names; a shared one by each."""
    found: dict[str, nn.Module] = {}
    ahead = [("", module)]
    while ahead:
        prefix, part = ahead.pop()
        found[prefix] = part
        ahead.extend((f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None)
    return found


def _places(things: Iterable[Any]) -> tuple[int, ...]:
    """Where each thing came up first, so that what is shared shows."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(thing), place) for place, thing in enumerate(things))


def _described(part: nn.Module) -> tuple[Any, ...]:
    seen: set[int] = set()
    own = tuple(_constant(value, seen) for _, value in own_attributes(part))
    return type(part), has_hooks(part), own, tuple(_facts(tensor) for tensor in _tensors(part))


def _watched(part: nn.Module) -> tuple[Any, ...]:
    """A module with what `_unchanged` compares it to."""
    inside = {name: _constant(value, set()) for name, value in own_attributes(part) if not _is_fixed(value)}
    tables = [_members(table) for table in (part.__dict__, *(part.__dict__[name] for name in TABLES))]
    return part, type(part), has_hooks(part), tables, inside, [_facts(tensor) for tensor in _tensors(part)]


def _members(table: dict[str, Any]) -> tuple[list[str], list[Any]]:
    return list(table), list(table.values())


def _unchanged(part: Any, kind: type, hooked: bool, tables: Any, inside: dict[str, Any], facts: Any) -> bool:
    """By identity, not equality: a tensor may equal the number in whose place it is."""
    attributes = part.__dict__
    if type(part) is not kind or has_hooks(part) != hooked:
        return False
    for table, (names, members) in zip((attributes, *map(attributes.__getitem__, TABLES)), tables, strict=True):
        if (table or names) and not (list(table) == names and all(map(is_, table.values(), members))):
            return False
    if inside and any(_constant(attributes[name], set()) != value for name, value in inside.items()):
        return False
    return not facts or all(map(eq, map(_facts, _tensors(part)), facts))


def _tensors(part: nn.Module) -> list[Tensor | None]:
    return [*part._parameters.values(), *part._buffers.values()]


def _facts(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.requires_grad, tensor.dtype, tensor.device, None if is_lazy(tensor) else tensor.shape


def _is_fixed(value: Any) -> bool:
    """Whether nothing inside a value can change."""
    return isinstance(value, CONSTANT) or (type(value) is tuple and all(map(_is_fixed, value)))


def _constant(value: Any, seen: set[int]) -> Any:
    """A hashable description of what a module holds: numbers by value, tensors by identity, objects by their numbers."""
    if isinstance(value, CONSTANT):
        return value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, Mapping):
        return tuple((key, _constant(member, seen)) for key, member in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return tuple(_constant(member, seen) for member in value)
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    return id(value), tuple(member for member in getattr(value, "__dict__", {}).values() if isinstance(member, CONSTANT))
