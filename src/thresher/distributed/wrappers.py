"""Wrappers of models: the one of `subset_backward`, and those for training in several processes, which go around it.

In its extra forward passes, the run calls the module inside of a wrapper for several processes. `DistributedDataParallel`
averages gradients by hooks of the parameters, and `fully_shard` gathers parameters by hooks of the modules that it shards. A
traced graph calls no hook of a module, so only the modules inside of these can be traced.
"""

import sys
import weakref
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from thresher.torch_internals import without_compiler

DDP_ORDER = (
    "a DistributedDataParallel. With subset_backward around it, gradients would not be averaged between processes. Put "
    "subset_backward inside: DistributedDataParallel(thresher.subset_backward(module))"
)
SHARDED_ORDER = (
    "sharded by fully_shard, which gathers the parameters by hooks that a traced graph does not call. Put subset_backward "
    "inside every sharded module: if blocks are sharded by themselves, replace each block by "
    "fully_shard(thresher.subset_backward(block)) before fully_shard(model); else use "
    "fully_shard(thresher.subset_backward(model))"
)
FLAT = (
    "sharded by FullyShardedDataParallel, which is not supported, because it flattens the parameters of a module into one "
    "tensor. Use torch.distributed.fsdp.fully_shard(thresher.subset_backward(module))"
)


class SubsetModule(nn.Module):
    """Base class of the result of `subset_backward`, to recognize that result without loading the tracer.

    Attributes:
        wrapped: The user's model.
        fallback: Reason why the last call used the plain model; None if it did not.
        tracing_s: Seconds that tracing and compiling have taken.
        meter: Counter of the samples that go backward; None if nothing counts them.
    """

    wrapped: nn.Module
    fallback: str | None
    tracing_s: float
    meter: Any


def plain_module(model: nn.Module) -> nn.Module:
    """Returns the model inside of `subset_backward`; any other model itself."""
    return model.wrapped if isinstance(model, SubsetModule) else model


def check_wrapping(model: nn.Module) -> None:
    """Refuses a model that `subset_backward` must not wrap.

    Args:
        model: Model that is to be wrapped.

    Raises:
        ValueError: The model is, or contains, a wrapper that belongs around `subset_backward` or that is not supported.
    """
    # The model itself is among them, under the name "".
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            problem = DDP_ORDER
        elif isinstance(part, _kinds("FSDPModule")):
            problem = SHARDED_ORDER
        elif isinstance(part, _kinds("FullyShardedDataParallel")) or _is_flattened(part):
            problem = FLAT
        else:
            continue
        raise ValueError(
            f"subset_backward: {f'module {name!r} of the model' if name else '`model`'} is {problem}."
        )


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a call of a model gathers parameters, so all processes must call it."""
    return any(
        isinstance(part, _kinds("FSDPModule", "FullyShardedDataParallel"))
        for part in model.modules()
    )


def in_several_processes() -> bool:
    """Returns whether this process is one of a group that trains together."""
    # A build of torch without torch.distributed has no `is_initialized`.
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def data_parallel(model: nn.Module | None) -> DistributedDataParallel | None:
    """Returns a model that is a `DistributedDataParallel`, without the wrapper of torch.compile; None for any other model."""
    model = without_compiler(model)
    return model if isinstance(model, DistributedDataParallel) else None


def inside(model: nn.Module) -> nn.Module:
    """Returns the module that `DistributedDataParallel` wraps, whose calls wait for no other process; or the model itself."""
    parallel = data_parallel(model)
    return model if parallel is None else parallel.module


_AROUND: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = (
    weakref.WeakKeyDictionary()
)


def trains_inside(model: nn.Module, parallel: nn.Module) -> None:
    """Registers a model that a `DistributedDataParallel` calls inside its forward pass, as some trainers do.

    Args:
        model: Model whose gradients are averaged.
        parallel: Module whose forward pass calls `model`; if it is no `DistributedDataParallel`, nothing is registered.
    """
    if isinstance(parallel, DistributedDataParallel):
        # The run may get the compiled model or the module inside it.
        for part in (model, without_compiler(model)):
            # The value is weak, too: a wrapper refers to its model, so it would keep the key of its entry alive forever.
            _AROUND[part] = weakref.ref(parallel)


def averages(model: nn.Module | None) -> DistributedDataParallel | None:
    """Returns the `DistributedDataParallel` that averages the gradients of a model: itself, or one that calls it."""
    reference = None if model is None else _AROUND.get(model)
    return data_parallel(model) if reference is None else reference()


class CallInside:
    """Calls a `DistributedDataParallel` with another module inside, and restores the user's module after the call.

    Args:
        model: The user's model. Its reducer refers to the parameters, so `module` must have the same parameter objects.
        module: Module that is called instead of the one inside.
    """

    def __init__(self, model: DistributedDataParallel, module: nn.Module) -> None:
        self._model = model
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the same arguments, and returns its result."""
        members = self._model._modules
        module = members["module"]
        members["module"] = self._module
        try:
            # Through the wrapper, whose forward pass prepares the average of the gradients.
            return self._model(*args, **kwargs)
        finally:
            members["module"] = module


def _kinds(*names: str) -> tuple[type, ...]:
    """Returns classes of `torch.distributed.fsdp` by name; none if it is not imported, because the import takes two seconds."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else tuple(getattr(fsdp, name) for name in names)


def _is_flattened(part: nn.Module) -> bool:
    """Checks whether `FullyShardedDataParallel` around a module has made views of its parameters."""
    # A module inside of FullyShardedDataParallel is not an instance of it, and torch has no public mark. `fully_shard` sets the
    # same private one but leaves parameters that are leaves, so its parameters are checked, too.
    managed = getattr(part, "_is_fsdp_managed_module", False)
    if managed:
        parameters = [parameter for parameter in part._parameters.values() if parameter is not None]
    else:
        parameters = []
    return any(
        hasattr(parameter, "_is_flat_param") or parameter.grad_fn is not None
        for parameter in parameters
    )
