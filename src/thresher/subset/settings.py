"""Everything about a module that a trace takes for constant: described once, and compared in every call."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from operator import eq, is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from thresher.subset.graphs import CONSTANT_TYPES, Graphs, Unsupported, own_attributes
from thresher.subset.outside import Variables
from thresher.subset.parallel import check_wrapping, in_several_processes

TABLES = ("_modules", "_parameters", "_buffers")
MAX_BYTES = 4096
"""Size of the largest array whose contents are compared in every call."""


class GraphTensors(NamedTuple):
    """Tensors of a module that its graphs read and update; an int is the position of a tensor of the call.

    Attributes:
        inputs: Arguments of the forward graph.
        differentiated: Tensors that the backward graph gives gradients of.
        buffers: Buffers that the forward graph updates.
    """

    inputs: list[Any]
    differentiated: list[Any]
    buffers: list[Tensor]


class Settings:
    """Settings of a module at the time when this object was made.

    Args:
        module: Module that is traced.

    Raises:
        ValueError: A part of it was put into a wrapper of several processes that belongs around all of it.

    Attributes:
        key: Hashable description of everything that tracing takes for constant.
        trains: Whether any parameter gets a gradient.
        outside: Variables outside the module that its forward reads.
    """

    def __init__(self, module: nn.Module) -> None:
        check_wrapping(module)
        self._modules = _modules_by_prefix(module)
        parts = self._modules.values()
        self._snapshots = [_snapshot(part) for part in parts]
        self.outside = Variables(parts)
        self._of_graphs: dict[int, tuple[Graphs, GraphTensors]] = {}
        self.key = (
            tuple(_module_signature(part) for part in parts),
            _first_places(thing for part in parts for thing in (part, *_registered_tensors(part))),
            self.outside.key,
        )
        self.trains = any(parameter.requires_grad for parameter in module.parameters())

    def hold(self) -> bool:
        """Checks that nothing has changed since, down to the identity of the tensors; runs in every call."""
        return all(_unchanged(*snapshot) for snapshot in self._snapshots) and self.outside.changed() is None

    def tensors(self, graphs: Graphs) -> GraphTensors:
        """Returns the tensors that graphs which were traced under these settings read and update."""
        if id(graphs) not in self._of_graphs:
            inputs = [self._find(*source) for source in graphs.inputs]
            differentiated = [self._find(*source) for source in graphs.grads if source is not None]
            buffers = [self._find("buffer", name) for name in graphs.mutated]
            self._of_graphs[id(graphs)] = graphs, GraphTensors(inputs, differentiated, buffers)
        return self._of_graphs[id(graphs)][1]

    def _find(self, kind: str, name: Any) -> Any:
        """Returns a parameter or buffer by its full name, or the position of a tensor of the call."""
        if kind == "leaf":
            return name
        prefix, dot, last = name.rpartition(".")
        part = self._modules[prefix + dot]
        return (part._parameters if kind == "param" else part._buffers)[last]


def check_traceable(module: nn.Module) -> None:
    """Refuses a module whose graph would leave something out, before it is traced.

    Args:
        module: Module that is to be traced.

    Raises:
        Unsupported: It has hooks, parameters without a shape, or statistics that processes exchange.
    """
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise Unsupported("it has parameters without a shape yet; call it once before wrapping it")
    for name, part in module.named_modules():
        if has_hooks(part):
            raise Unsupported(f"module {name or 'model'!r} has hooks, which a traced graph does not call")
        if isinstance(part, nn.SyncBatchNorm) and part.training and in_several_processes():
            raise Unsupported(f"module {name or 'model'!r} exchanges the statistics of its batches with other processes")


def has_hooks(part: nn.Module) -> bool:
    """Checks whether a call of a module runs more than its forward."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def has_global_hooks() -> bool:
    """Checks whether a hook is registered for all modules; those by which torch names modules in profiles do not count."""
    if not torch_module._has_any_global_hook():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    tables = [table for name, table in vars(torch_module).items() if name.startswith(("_global_forward", "_global_backward"))]
    hooks = [hook for table in tables for hook in table.values() if callable(hook)]
    return any(type(getattr(hook, "__self__", None)).__module__ != "torch.utils.module_tracker" for hook in hooks)


def _modules_by_prefix(module: nn.Module) -> dict[str, nn.Module]:
    """Returns every module by the prefix of its parameters' names; a shared module is there once for each prefix."""
    found: dict[str, nn.Module] = {}
    ahead = [("", module)]
    while ahead:
        prefix, part = ahead.pop()
        if isinstance(part, ScriptModule):
            name = f"module {prefix[:-1]!r}" if prefix else "the model"
            raise Unsupported(
                f"{name} was made by torch.jit.script or torch.jit.trace, and such a module cannot be traced; use the Python "
                "module that it was made of"
            )
        found[prefix] = part
        ahead.extend((f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None)
    return found


def _first_places(things: Iterable[Any]) -> tuple[int, ...]:
    """Returns for each object the position where it came up first, which shows the objects that are shared."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(thing), place) for place, thing in enumerate(things))


def _module_signature(part: nn.Module) -> tuple[Any, ...]:
    """Returns a hashable description of one module without its children."""
    seen: set[int] = set()
    own = tuple(_constant(value, seen) for _, value in own_attributes(part))
    return type(part), has_hooks(part), own, tuple(_tensor_signature(tensor) for tensor in _registered_tensors(part))


def _snapshot(part: nn.Module) -> tuple[Any, ...]:
    """Returns the arguments of `_unchanged`: a module and everything that is compared with it later."""
    inside = {name: _constant(value, set()) for name, value in own_attributes(part) if not _is_fixed(value)}
    tables = [_members(table) for table in (part.__dict__, *(part.__dict__[name] for name in TABLES))]
    return part, type(part), has_hooks(part), tables, inside, [_tensor_signature(t) for t in _registered_tensors(part)]


def _members(table: dict[str, Any]) -> tuple[list[str], list[Any]]:
    return list(table), list(table.values())


def _unchanged(part: Any, kind: type, hooked: bool, tables: Any, inside: dict[str, Any], signatures: Any) -> bool:
    """Compares by identity, not by equality: a tensor may equal the number whose place it has taken."""
    attributes = part.__dict__
    if type(part) is not kind or has_hooks(part) != hooked:
        return False
    for table, (names, members) in zip((attributes, *map(attributes.__getitem__, TABLES)), tables, strict=True):
        if (table or names) and not (list(table) == names and all(map(is_, table.values(), members))):
            return False
    if inside and any(_constant(attributes[name], set()) != value for name, value in inside.items()):
        return False
    return not signatures or all(map(eq, map(_tensor_signature, _registered_tensors(part)), signatures))


def _registered_tensors(part: nn.Module) -> list[Tensor | None]:
    return [*part._parameters.values(), *part._buffers.values()]


def _tensor_signature(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.requires_grad, tensor.dtype, tensor.device, None if is_lazy(tensor) else tensor.shape


def _is_fixed(value: Any) -> bool:
    """Checks that nothing inside a value can change."""
    return isinstance(value, CONSTANT_TYPES) or (type(value) is tuple and all(map(_is_fixed, value)))


def _constant(value: Any, seen: set[int]) -> Any:
    """Returns a hashable description of a value: numbers by value, tensors by identity, objects by their numbers.

    Args:
        value: Attribute of a module, or part of one.
        seen: Identities of the objects that were described before; they are not described again.
    """
    if isinstance(value, CONSTANT_TYPES):
        return value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, Mapping):
        return tuple((key, _constant(member, seen)) for key, member in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return tuple(_constant(member, seen) for member in value)
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= MAX_BYTES and not value.dtype.hasobject else None
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, Namespace | SimpleNamespace) or is_dataclass(value):
        return id(value), tuple(_constant(member, seen) for member in _attributes(value))
    return id(value), tuple(member for member in _attributes(value) if isinstance(member, CONSTANT_TYPES))


def _attributes(value: Any) -> Iterable[Any]:
    """Returns the values of the attributes of an object, those in slots included."""
    inside = getattr(value, "__dict__", None)
    if inside is not None:
        return inside.values()
    names = (name for kind in type(value).__mro__ for name in _slots(kind))
    return (getattr(value, name, None) for name in names)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
