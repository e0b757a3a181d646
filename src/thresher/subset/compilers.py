"""Models that torch.compile has compiled: the module inside, and the settings of Inductor. Also what compiling requires."""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from thresher.torch_internals import without_compiler

OLDEST_TORCH = "2.11"
"""First version of torch that has all that tracing needs."""
WITHOUT_KERNELS = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends of torch.compile that generate no kernels: they run the operations of PyTorch one by one, as uncompiled graphs
do."""


class Given(NamedTuple):
    """How torch.compile has compiled the user's model.

    Attributes:
        module: Module inside of the wrapper of torch.compile; the model itself if there is none.
        options: Settings of Inductor if it compiled the model or a part of it, else None.
        other: Name of the backend if another one than Inductor generated kernels, else None.
    """

    module: nn.Module
    options: dict[str, Any] | None
    other: str | None


def given(model: nn.Module) -> Given:
    """Detects how torch.compile has compiled a model.

    Args:
        model: Any module: a result of torch.compile, a module compiled in place by its `compile()` method, a module with such
            parts, or a plain one.
    """
    inside = without_compiler(model)
    backends = list(_backends(model))
    for backend in backends:
        if getattr(backend, "compiler_name", None) == "inductor":
            return Given(inside, dict(backend.config), None)
    names = [str(getattr(backend, "compiler_name", backend)) for backend in backends]
    return Given(inside, None, next((name for name in names if name not in WITHOUT_KERNELS), None))


def lacks_compiler(model: nn.Module) -> str | None:
    """Returns why Inductor cannot compile a model on the CPU; None if it can, or if the model is not on the CPU."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    # Imported here: loading Inductor takes longer than all other imports together.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"Inductor finds no C++ compiler ({error}). Install g++ or clang++, or name one in the variable CXX"
    return None


def lacks_torch() -> str | None:
    """Returns why this version of torch cannot trace a model; None if it can."""
    # A TorchVersion compares as a version; as text, 2.9 would be newer than 2.11.
    if torch.__version__ >= OLDEST_TORCH:
        return None
    return f"subset_backward needs torch {OLDEST_TORCH} or newer, but torch {torch.__version__} is installed"


def _backends(model: nn.Module) -> Iterator[Any]:
    """Yields the backends that compiled a model and its parts, beginning with the backend of the whole model."""
    for part in model.modules():
        # torch has no public function that names the backend. Read from `__dict__`, because the wrapper of torch.compile passes
        # `getattr` on to the model inside.
        context = part.__dict__.get("dynamo_ctx")
        if context is not None:
            yield _innermost(getattr(context, "callback", None))
        elif part._compiled_call_impl is not None:
            # A module that was compiled in place by its `compile()` has no wrapper: only a closure holds its backend.
            yield _innermost(
                inspect.getclosurevars(part._compiled_call_impl).nonlocals.get("callback")
            )


def _innermost(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def compiled_like(model: nn.Module, module: nn.Module) -> Any:
    """Compiles a module with the Inductor settings of a model; returns it as it is if Inductor did not compile the model.

    Args:
        model: Any module.
        module: Module inside of it.
    """
    options = given(model).options
    return module if options is None else compiled(module, options)


def compiled(module: nn.Module, options: dict[str, Any]) -> Any:
    """Returns a module compiled with settings of Inductor."""
    return torch.compile(module, options=options or None)
