"""Decides whether a call fits a trace, by the kinds of its inputs, the settings of the module, and variables outside of it."""

import contextlib
import inspect
import types
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import eq, is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from thresher.comparing import is_compared
from thresher.distributed.wrappers import check_wrapping, in_several_processes
from thresher.subset.graphs import CONSTANT_TYPES, Graphs, Unsupported
from thresher.subset.side_effects import CONTAINERS, effects_undone, is_library, slots_of
from thresher.torch_internals import has_call_hooks
from thresher.trees import own_attributes

FREE_TRACES = 8
"""Number of traces of a module that are made at the first call of their kind."""
CALLS_PER_TRACE = 32
"""Number of calls of one kind with the plain model before a further trace is made for this kind."""
EVERY = 256
"""Number of calls after which graphs are compared with the model again, besides calls 1, 2, 4, 8 and so on."""
MAX_REMEMBERED = 4096
"""Number of kinds without a trace whose calls are counted."""


class Patience:
    """Decides which kinds of calls are traced: the first few at once, a further one when it has come up often enough.

    A trace takes as long as hundreds of steps of a small model. A kind that comes up a few times does not save that much.

    Args:
        free: Number of traces that are made at the first call of their kind.

    Attributes:
        traces: Number of traces that were tried.
        seconds: Time that they took, in seconds.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self.traces = 0
        self.seconds = 0.0
        self._calls: Counter[int] = Counter()
        self._traces: Counter[int] = Counter()

    def is_due(self, kind: Hashable, *, at_once: bool = True) -> bool:
        """Counts a call of a kind that has no trace, and returns whether to trace it now.

        Args:
            kind: Description of the call.
            at_once: Whether the kind is traced at once while fewer than `free` traces were made. Default: True.
        """
        if at_once and self.traces < self.free:
            return True
        place = hash(kind)
        # Only hashes are kept, because the description of a large model is long.
        if len(self._calls) >= MAX_REMEMBERED:
            self._calls.clear()
        self._calls[place] += 1
        # Twice as many calls for each earlier trace of this kind. Otherwise kinds that push each other out of the table of
        # traces would be traced again and again.
        return self._calls[place] >= CALLS_PER_TRACE << self._traces[place]

    def reason(self) -> str:
        """Returns why a kind is not traced now."""
        return (
            f"it was traced {self.traces} times for different kinds of inputs or settings, which took {self.seconds:.1f} s. "
            f"Another kind is traced only after {CALLS_PER_TRACE} calls. Pad inputs to few lengths, and pass a number that "
            "changes in every step as a tensor"
        )

    def count(self, kind: Hashable, seconds: float) -> None:
        """Counts a trace. A further trace of the same kind needs twice as many calls.

        Args:
            kind: Description of the call.
            seconds: Time that the trace took, in seconds.
        """
        place = hash(kind)
        self.traces = self.traces + 1
        self.seconds = self.seconds + seconds
        if self._calls.pop(place, None) is not None:
            self._traces[place] += 1


def is_due(calls: int) -> bool:
    """Checks whether a call is one of those in which graphs are compared with the model.

    Args:
        calls: Number of calls that used the graphs, this one included.
    """
    return is_compared(calls) or not calls % EVERY


def dense(tensor: Tensor) -> Tensor:
    """Returns a tensor in a memory format that graphs accept: contiguous, or channels_last.

    Raises:
        Unsupported: The tensor has another layout.
    """
    if tensor.is_nested:
        raise Unsupported("it is given a nested tensor; pass a padded tensor and a mask instead")
    if tensor.layout is not torch.strided:
        raise Unsupported("it is given a sparse tensor; pass a dense tensor instead")
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    # The copy needs no history, because gradients go to the tensor of the caller.
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


def describe(tree: Any, n: int, *, sizes: bool = True) -> Any:
    """Returns a hashable description of nested arguments.

    Args:
        tree: Arguments of a call.
        n: Batch size; a first dimension of this size is taken for the batch dimension.
        sizes: Whether the description has the sizes of the other dimensions; if not, it has only their number. Default: True.

    Raises:
        Unsupported: The arguments hold a mutable object, which a trace would treat as constant.
    """
    if isinstance(tree, Tensor):
        others = (lambda shape: tuple(shape)) if sizes else len
        # A tensor with another first dimension is shared by all samples, so this size counts.
        if tree.dim() and len(tree) == n:
            shape = ("n", others(tree.shape[1:]))
        else:
            shape = others(tree.shape)
        channels_last = tree.dim() == 4 and tree.is_contiguous(memory_format=torch.channels_last)
        return shape, tree.dtype, tree.device, tree.requires_grad, channels_last
    if isinstance(tree, Mapping):
        return type(tree), tuple(
            (key, describe(value, n, sizes=sizes)) for key, value in tree.items()
        )
    if isinstance(tree, tuple | list):
        return type(tree), tuple(describe(value, n, sizes=sizes) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), tuple(
            describe(getattr(tree, field.name), n, sizes=sizes) for field in fields(tree)
        )
    if isinstance(tree, CONSTANT_TYPES):
        # With the type, since True, 1 and 1.0 are equal.
        return type(tree), tree
    raise Unsupported(
        f"it is given a {type(tree).__name__}, whose contents would be constants in the trace"
    )


class Shapes:
    """Remembers the shapes of the first call of each kind, to find the dimensions whose size varies in later calls."""

    def __init__(self) -> None:
        self._first: OrderedDict[Hashable, tuple[int, list[torch.Size]]] = OrderedDict()

    def varying(self, kind: Hashable, tensors: list[Tensor], n: int) -> list[tuple[int, int]]:
        """Returns the dimensions, except the batch, whose size differs from the first call of the same kind.

        Args:
            kind: Description of the call without sizes.
            tensors: Tensors of the call.
            n: Batch size.

        Returns:
            Pairs (position of the tensor, dimension); none if one of these has size 0 or 1, which tracing treats specially.
        """
        before, shapes = self._first.setdefault(kind, (n, [tensor.shape for tensor in tensors]))
        if len(self._first) > MAX_REMEMBERED:
            self._first.popitem(last=False)
        dims = [
            (i, d)
            for i, (first, tensor) in enumerate(zip(shapes, tensors, strict=True))
            for d, (old, new) in enumerate(zip(first, tensor.shape, strict=True))
            # A first dimension that changes together with the batch size is the batch.
            if old != new and not (d == 0 and (old, new) == (before, n))
        ]
        return dims if all(tensors[i].shape[d] > 1 for i, d in dims) else []


def autocast(tensors: list[Tensor]) -> torch.dtype | None:
    """Returns the dtype of autocast on the device of the inputs; None without autocast."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


LONGEST = 64
"""Number of members up to which a container is compared in every call."""


class Variables:
    """Snapshot of the globals and closure variables that the functions of some modules read.

    Args:
        parts: Modules whose forward functions, and the functions they call, are searched for variables.

    Attributes:
        key: Hashable description of the values.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._found: dict[tuple[int, str], tuple[Any, str]] = {}
        self._seen: set[int] = set()
        for kind in dict.fromkeys(map(type, parts)):
            # Statically: `getattr` would run a descriptor of the user's.
            self._follow(inspect.getattr_static(kind, "forward", None), kind)
        # Functions in attributes, such as an activation or a `forward` that was replaced for one module.
        for function in [
            value
            for part in parts
            for value in part.__dict__.values()
            if type(value) is types.FunctionType
        ]:
            self._follow(function, None)
        self._fixed = []
        self._open = []
        for space, name in self._found.values():
            value = _read(space, name)
            if isinstance(value, (*CONSTANT_TYPES, Tensor)):
                self._fixed.append((space, name, value))
            # The same object may have other contents in the next call, so its contents are compared, too.
            elif isinstance(value, CONTAINERS) or hasattr(value, "__dict__"):
                self._open.append((space, name, value, _members(value)))
        self.key = (
            tuple(
                value if isinstance(value, CONSTANT_TYPES) else id(value)
                for _, _, value in self._fixed
            ),
            tuple((id(value), _by_identity(members)) for _, _, value, members in self._open),
        )

    def changed(self) -> str | None:
        """Returns the name of a variable that has changed since the snapshot, or None. It runs in every call of the model."""
        for space, name, value in self._fixed:
            if _read(space, name) is not value:
                return name
        for space, name, value, members in self._open:
            if _read(space, name) is not value or not _same(_members(value), members):
                return name
        return None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the variables when the block ends.

        Raises:
            HasEffects: The block changed one.
        """
        with effects_undone((name, value) for _, name, value, _ in self._open) as changed:
            try:
                yield
            finally:
                for space, name, value, *_ in (*self._fixed, *self._open):
                    if _read(space, name) is not value:
                        changed.append(name)
                        _write(space, name, value)

    def _follow(self, function: Any, kind: type | None) -> None:
        """Finds the variables of a function and of the functions that it may call.

        Args:
            function: Function, or anything else, which is skipped.
            kind: Class whose methods it may call.
        """
        # Bound methods, static methods and decorators wrap the function whose code names its variables.
        function = inspect.unwrap(getattr(function, "__func__", function))
        if (
            type(function) is not types.FunctionType
            or id(function) in self._seen
            or is_library(function.__module__)
        ):
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
        # A constant of a module that the code imports, such as a scale in a file of settings.
        if isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                for member in names & set(vars(value)):
                    if not isinstance(vars(value)[member], types.ModuleType):
                        self._add(vars(value), member, names)
            return
        if isinstance(value, type):
            # `apply` is code of torch, and the code of the forward does not name the functions that it calls.
            if issubclass(value, torch.autograd.Function):
                self._follow(vars(value).get("forward"), None)
                self._follow(vars(value).get("backward"), None)
            return
        # Objects of libraries have too many attributes to compare in every call, and a module in a global is no part of the
        # model.
        library = isinstance(value, nn.Module) or is_library(
            getattr(type(value), "__module__", None) or ""
        )
        if library and not isinstance(
            value, (*CONSTANT_TYPES, *CONTAINERS, Tensor, types.SimpleNamespace)
        ):
            return
        self._follow(value, None)
        self._found[id(space), name] = space, name


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
        # A long list, such as a vocabulary, would take too long to compare in every call.
        if len(value) > LONGEST:
            return len(value)
        return dict(value) if isinstance(value, dict) else list(value)
    return {
        name: member
        for name, member in value.__dict__.items()
        if isinstance(member, CONSTANT_TYPES)
    }


def _same(now: Any, before: Any) -> bool:
    """Compares members by identity, which also tells a tensor from a number that is equal to it."""
    if type(now) is int or type(before) is int or len(now) != len(before):
        return type(now) is type(before) is int and now == before
    if isinstance(now, dict):
        return all(name in before and member is before[name] for name, member in now.items())
    return all(map(is_, now, before))


def _by_identity(members: Any) -> Any:
    if isinstance(members, int):
        return members
    values = members.items() if isinstance(members, dict) else enumerate(members)
    return tuple(
        (name, value if isinstance(value, CONSTANT_TYPES) else id(value)) for name, value in values
    )


TABLES = ("_modules", "_parameters", "_buffers")
MAX_BYTES = 4096
"""Size of the largest array whose contents are compared in every call."""


class GraphTensors(NamedTuple):
    """Tensors of a module that its graphs read and update; an int is the position of a tensor of the call.

    Attributes:
        inputs: Arguments of the forward graph.
        differentiated: Tensors whose gradients the backward graph computes.
        buffers: Buffers that the forward graph updates.
    """

    inputs: list[Any]
    differentiated: list[Any]
    buffers: list[Tensor]


class Settings:
    """Snapshot of a module's settings, to detect later changes.

    Args:
        module: Module that is traced.

    Raises:
        ValueError: A part of the module is in a wrapper for several processes that belongs around `subset_backward`.

    Attributes:
        key: Hashable description of everything that a trace treats as constant.
        trains: Whether any parameter gets a gradient.
        outside: Variables outside the module that its forward reads.
    """

    def __init__(self, module: nn.Module) -> None:
        # Checked again, because a block inside may be sharded after the model was wrapped.
        check_wrapping(module)
        self._modules = _modules_by_prefix(module)
        parts = self._modules.values()
        self._snapshots = [_snapshot(part) for part in parts]
        self.outside = Variables(parts)
        self._of_graphs: dict[int, tuple[Graphs, GraphTensors]] = {}
        self.key = (
            tuple(_module_signature(part) for part in parts),
            # The key shows which names share a tensor or module, as tied weights do, because the graph has one argument for them.
            _first_places(thing for part in parts for thing in (part, *_registered_tensors(part))),
            self.outside.key,
        )
        self.trains = any(parameter.requires_grad for parameter in module.parameters())

    def hold(self) -> bool:
        """Checks that nothing has changed since the snapshot, including the identity of the tensors; runs in every call."""
        return (
            all(_unchanged(*snapshot) for snapshot in self._snapshots)
            and self.outside.changed() is None
        )

    def tensors(self, graphs: Graphs) -> GraphTensors:
        """Returns the tensors that graphs traced with these settings read or update."""
        if id(graphs) not in self._of_graphs:
            inputs = [self._find(*source) for source in graphs.inputs]
            differentiated = [self._find(*source) for source in graphs.grads if source is not None]
            buffers = [self._find("buffer", name) for name in graphs.mutated]
            # Stored with their tensors, so that the graphs stay alive and their `id` is not reused.
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
    """Checks before tracing that a graph of a module would do everything that the module does.

    Args:
        module: Module that is to be traced.

    Raises:
        Unsupported: The module has hooks, parameters without a shape (lazy modules), or an nn.SyncBatchNorm, which shares
            statistics between processes.
    """
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise Unsupported("it has parameters without a shape yet; call it once before wrapping it")
    for name, part in module.named_modules():
        if has_call_hooks(part):
            raise Unsupported(
                f"module {name or 'model'!r} has hooks, which a traced graph does not call"
            )
        # A process that keeps no row runs no backward graph, and the others would wait for its part of the statistics.
        if isinstance(part, nn.SyncBatchNorm) and part.training and in_several_processes():
            raise Unsupported(
                f"module {name or 'model'!r} is a SyncBatchNorm, whose statistics all processes share; use BatchNorm"
            )


def has_global_hooks() -> bool:
    """Checks whether a hook is registered for all modules, other than those by which torch names modules in profiles."""
    if not torch_module._has_any_global_hook():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    tables = [
        table
        for name, table in vars(torch_module).items()
        if name.startswith(("_global_forward", "_global_backward"))
    ]
    hooks = [hook for table in tables for hook in table.values() if callable(hook)]
    return any(
        type(getattr(hook, "__self__", None)).__module__ != "torch.utils.module_tracker"
        for hook in hooks
    )


def _modules_by_prefix(module: nn.Module) -> dict[str, nn.Module]:
    """Returns every module by the prefix of its parameters' names; a shared module is there once for each prefix."""
    modules: dict[str, nn.Module] = {}
    # Not `named_modules`, which by default leaves out the second name of a shared module: a trace may use either.
    ahead = [("", module)]
    while ahead:
        prefix, part = ahead.pop()
        if isinstance(part, ScriptModule):
            name = f"module {prefix[:-1]!r}" if prefix else "the model"
            raise Unsupported(
                f"{name} comes from torch.jit.script or torch.jit.trace, and cannot be traced; use the original Python module"
            )
        modules[prefix] = part
        ahead.extend(
            (f"{prefix}{name}.", child)
            for name, child in part._modules.items()
            if child is not None
        )
    return modules


def _first_places(things: Iterable[Any]) -> tuple[int, ...]:
    """Returns for each object the position where it came up first, which shows the objects that are shared."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(thing), place) for place, thing in enumerate(things))


def _module_signature(part: nn.Module) -> tuple[Any, ...]:
    """Returns a hashable description of one module without its children."""
    seen: set[int] = set()
    attributes = tuple(_constant(value, seen) for _, value in own_attributes(part))
    return (
        type(part),
        has_call_hooks(part),
        attributes,
        tuple(_tensor_signature(tensor) for tensor in _registered_tensors(part)),
    )


def _snapshot(part: nn.Module) -> tuple[Any, ...]:
    """Returns the arguments of `_unchanged`: a module and everything that is compared with it later."""
    inside = {
        name: _constant(value, set())
        for name, value in own_attributes(part)
        if not _is_fixed(value)
    }
    tables = [
        _module_members(table)
        for table in (part.__dict__, *(part.__dict__[name] for name in TABLES))
    ]
    return (
        part,
        type(part),
        has_call_hooks(part),
        tables,
        inside,
        [_tensor_signature(t) for t in _registered_tensors(part)],
    )


def _module_members(table: dict[str, Any]) -> tuple[list[str], list[Any]]:
    return list(table), list(table.values())


def _unchanged(
    part: Any, kind: type, hooked: bool, tables: Any, inside: dict[str, Any], signatures: Any
) -> bool:
    """Compares by identity, not by equality: a tensor may equal the number whose place it has taken."""
    attributes = part.__dict__
    if type(part) is not kind or has_call_hooks(part) != hooked:
        return False
    # Empty tables first, then names, then members: this runs for every module in every call.
    for table, (names, members) in zip(
        (attributes, *map(attributes.__getitem__, TABLES)), tables, strict=True
    ):
        if (table or names) and not (
            list(table) == names and all(map(is_, table.values(), members))
        ):
            return False
    if inside and any(
        _constant(attributes[name], set()) != value for name, value in inside.items()
    ):
        return False
    return not signatures or all(
        map(eq, map(_tensor_signature, _registered_tensors(part)), signatures)
    )


def _registered_tensors(part: nn.Module) -> list[Tensor | None]:
    return [*part._parameters.values(), *part._buffers.values()]


def _tensor_signature(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return (
        tensor.requires_grad,
        tensor.dtype,
        tensor.device,
        None if is_lazy(tensor) else tensor.shape,
    )


def _is_fixed(value: Any) -> bool:
    """Checks that nothing inside a value can change."""
    return isinstance(value, CONSTANT_TYPES) or (
        type(value) is tuple and all(map(_is_fixed, value))
    )


def _constant(value: Any, seen: set[int]) -> Any:
    """Returns a hashable description of a value: numbers by value, tensors by identity, objects by the numbers in them.

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
        # The bytes of an array of objects are addresses.
        return id(
            value
        ), value.tobytes() if value.nbytes <= MAX_BYTES and not value.dtype.hasobject else None
    # Objects may refer to each other in a circle.
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, Namespace | SimpleNamespace) or is_dataclass(value):
        return id(value), tuple(_constant(member, seen) for member in _attributes(value))
    return id(value), tuple(
        member for member in _attributes(value) if isinstance(member, CONSTANT_TYPES)
    )


def _attributes(value: Any) -> Iterable[Any]:
    """Returns the values of the attributes of an object, those in slots included."""
    inside = getattr(value, "__dict__", None)
    if inside is not None:
        return inside.values()
    names = (name for kind in type(value).__mro__ for name in slots_of(kind))
    return (getattr(value, name, None) for name in names)
