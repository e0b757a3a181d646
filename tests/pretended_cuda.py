"""A CPU that says it is `cuda:0`: real values, and a count of what would wait for the device or mix devices.

Tensors that are on the pretended device have the class `OnDevice`, whose `device` is `cuda:0`. A torch function mode runs every
operation on the CPU, gives its results that class, and counts operations that read values on the host.
"""

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import thresher.subset.function as subset_function
from thresher.passes.loss_comparison import Comparison
from thresher.subset.module import SubsetBackward

CUDA = torch.device("cuda", 0)
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "nonzero", "argwhere", "equal", "allclose",
    "is_nonzero", "unique", "unique_consecutive", "masked_select", "bincount", "__array__", "__contains__", "__repr__",
    "__format__", "__nonzero__", "__reduce_ex__",
}  # fmt: skip
"""Operations whose result the host has to know."""
TAKES_ANY = {
    "register_hook",
    "backward",
    "type_as",
    "as_subclass",
    "__hash__",
    "result_type",
    "promote_types",
    "can_cast",
}
"""Functions that may have tensors of both devices."""


class OnDevice(torch.Tensor):
    device = property(lambda self: CUDA)  # pyright: ignore[reportAssignmentType]
    is_cpu, is_cuda = property(lambda self: False), property(lambda self: True)  # pyright: ignore[reportAssignmentType]

    def get_device(self):
        return 0


class ParameterOnDevice(OnDevice, nn.Parameter):
    pass


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Puts a tensor on the pretended device, in place."""
    kinds: dict[type, type] = {torch.Tensor: OnDevice, nn.Parameter: ParameterOnDevice}
    tensor.__class__ = kinds.get(type(tensor), type(tensor))
    return tensor


def put_module(module: nn.Module) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        put(tensor)
    return module


def put_all(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, put, tree)


def is_cuda(device: Any) -> bool:
    try:
        return torch.device(device).type == "cuda"
    except (RuntimeError, TypeError):
        return False


def place() -> str:
    """Returns the innermost line of the library, or "loop"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/src/thresher/")
        if found:
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "loop"


class PretendedCuda(TorchFunctionMode):
    """Counts waits for the device and operations on both devices, by the place in the library, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.mixed: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("__get__", "__set__", "__delete__"):
                found = func(*args, **kwargs)
                of_tensor = (
                    name == "__get__"
                    and isinstance(args[0], OnDevice)
                    and isinstance(found, torch.Tensor)
                )
                return put(found) if of_tensor else found
            if name in ("to", "cpu", "cuda") and isinstance(args[0], torch.Tensor):
                return self._moved(func, name, args, kwargs)
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            here = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
            wanted = is_cuda(kwargs["device"]) if kwargs.get("device") is not None else None
            if wanted:
                kwargs["device"] = torch.device("cpu")
            self._count(name, args, kwargs, tensors, here, wanted=bool(wanted))
            found = func(*args, **kwargs)
        plain = name in ("item", "tolist", "numpy")
        return found if plain or not (wanted or (here and wanted is None)) else put_all(found)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        source, *rest = args
        was = isinstance(source, OnDevice)
        devices = [
            one for one in (*rest, kwargs.get("device")) if isinstance(one, torch.device | str)
        ]
        like = [one for one in rest if isinstance(one, torch.Tensor)]
        after = was if name == "to" else name == "cuda"
        if name == "to" and (devices or like):
            after = is_cuda(devices[0]) if devices else isinstance(like[0], OnDevice)
        if after != was and source.numel() and not (after and kwargs.get("non_blocking", False)):
            self.waits[place()] += 1
        if name != "to":
            found = source.clone()
        else:
            rest = [
                torch.device("cpu") if isinstance(one, torch.device | str) else one for one in rest
            ]
            found = func(
                source,
                *rest,
                **(kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") else {})),
            )
            found = found.clone() if found is source and after != was else found
        if after:
            return put(found)
        if isinstance(found, OnDevice):
            found.__class__ = torch.Tensor
        return found

    def _count(
        self, name: str, args: Any, kwargs: Any, tensors: Any, here: Any, *, wanted: bool
    ) -> None:
        if here and name in READS:
            self.waits[place()] += 1
        if (
            name == "copy_"
            and len(tensors) == 2
            and len(here) == 1
            and not kwargs.get("non_blocking", False)
        ):
            self.waits[place()] += 1
        if name in ("tensor", "as_tensor", "new_tensor") and (
            wanted or (here and name == "new_tensor")
        ):
            self.waits[place()] += 1
        if (
            here
            and name in ("__getitem__", "__setitem__", "index", "index_put_", "index_put")
            and len(args) > 1
        ):
            indices = [one for one in tree_leaves(args[1]) if isinstance(one, torch.Tensor)]
            if any(
                one.dtype in (torch.bool, torch.uint8)
                or not one.dim()
                or not isinstance(one, OnDevice)
                for one in indices
            ):
                self.waits[place()] += 1
        elif here and name == "where" and len(args) == 1:
            self.waits[place()] += 1
        elif here and name not in ("copy_", *TAKES_ANY):
            apart = [one for one in tensors if not isinstance(one, OnDevice) and one.dim()]
            if apart:
                self.mixed[f"{name} at {place()}"] += 1


class Event:
    """An event of CUDA that is over at once."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def pretended_cuda(monkeypatch: Any) -> Iterator[PretendedCuda]:
    """Enters the mode, also in hooks and backward functions, which the engine runs outside of it, and lets models be traced."""
    mode = PretendedCuda()
    for name, value in {
        "Event": Event,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    autocast, is_enabled, dtype_of = (
        torch.autocast.__init__,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
    )
    monkeypatch.setattr(
        torch.autocast,
        "__init__",
        lambda self, _, *args, **kwargs: autocast(self, "cpu", *args, **kwargs),
    )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _=None: is_enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _="cpu": dtype_of("cpu"))
    repeat, trace = Comparison._repeat, SubsetBackward._trace

    def repeated(self: Any, *args: Any) -> Any:
        with mode:
            return repeat(self, *args)

    def traced(self: Any, settings: Any, tensors: Any, *args: Any) -> Any:
        changed = [
            (one, type(one))
            for one in (*tensors, *self.wrapped.parameters(), *self.wrapped.buffers())
        ]
        for one, kind in changed:
            one.__class__ = {OnDevice: torch.Tensor, ParameterOnDevice: nn.Parameter}.get(
                kind, kind
            )
        try:
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportAttributeAccessIssue]
                return trace(self, settings, tensors, *args)
        finally:
            for one, kind in changed:
                one.__class__ = kind

    monkeypatch.setattr(Comparison, "_repeat", repeated)
    monkeypatch.setattr(SubsetBackward, "_trace", traced)
    for function in (subset_function.SubsetFunction, subset_function.KeptRows):
        apply, backward = function.apply, function.backward

        def applied(*args: Any, apply: Any = apply) -> Any:
            return (
                put_all(apply(*args))
                if any(isinstance(one, OnDevice) for one in args)
                else apply(*args)
            )

        def back(ctx: Any, *gradients: Any, backward: Any = backward) -> Any:
            with mode:
                return backward(ctx, *put_all(gradients))

        monkeypatch.setattr(function, "apply", applied)
        monkeypatch.setattr(function, "backward", staticmethod(back))
    with mode:
        yield mode
