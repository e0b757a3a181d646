"""Wraps the user's model, to remember which rows its outputs belong to: the rows of its inputs."""

import copy
import operator
from collections.abc import Callable, Iterator
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import nn

from thresher.attribution.cost_meter import TRANSFORMED, Meter
from thresher.attribution.tracker import RowTracker
from thresher.backward_ratio import Stopwatch
from thresher.distributed.wrappers import plain_module
from thresher.timing import Timing
from thresher.torch_internals import innermost_transform, next_node
from thresher.trees import leaves


class TrackedModel(nn.Module):
    """A thin wrapper of the user's model with the same parameters, names and attributes, which can be read and set.

    Copies and pickles contain the user's model, without the tracking.

    Args:
        module: The user's model.
        call: Function that runs a forward pass of the training loop; None to call `module`.
        tracker: Remembers the rows of the outputs.
        timer: Times the first training passes.
        device: Device of the model.
        meter: Counts the samples of forward and backward passes.
        timing: Records how the time of the run is spent.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any] | None,
        tracker: RowTracker,
        timer: Stopwatch,
        device: torch.device,
        meter: Meter,
        timing: Timing,
    ) -> None:
        super().__init__()
        members: dict[str, Any] = self.__dict__
        del members["training"]  # everything that is not found here is read from the user's model
        # The registries themselves, not the module as a child: names stay those of the user's model, without "module." before
        # them, and a layer that the loop replaces or adds later is at once in both.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            members[registry] = module.__dict__[registry]
        members["module"] = module
        members["_called"] = module if call is None else call
        members |= {"_tracked_by": tracker, "_timed_by": timer, "_runs_on": device}
        members |= {"_counted_by": meter, "_booked_by": timing}
        self.autocast: torch.dtype | None = None
        """Autocast dtype of the last training pass; None without autocast."""
        self.on_forward: Callable[[torch.dtype | None], None] | None = None
        """Function that is called with the autocast dtype when a training pass begins."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; with gradients enabled, remembers the rows of its outputs."""
        members = self.__dict__
        module = members["module"]
        tracker = members["_tracked_by"]
        timer = members["_timed_by"]
        if torch.compiler.is_compiling():  # before the clock, which a compiler refuses
            return module(*args, **kwargs)
        begin = perf_counter()
        # Inside of vmap or grad, tensors have no storage to recognize, and several passes are one call.
        if innermost_transform() is not None:
            members["_counted_by"].make_unknown(TRANSFORMED)
            return self._users_own()(*args, **kwargs)
        if not torch.is_grad_enabled():
            members["_counted_by"].evaluated += 1
            return module(*args, **kwargs)
        kind = members["_runs_on"].type
        members["autocast"] = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        )
        if members["on_forward"] is not None:
            members["on_forward"](members["autocast"])
        # Before the call: a model may change its inputs in place, and the nodes of the pass are those made after this number.
        inputs = tracker.look_inputs((args, kwargs))
        first = next_node()
        # An earlier subset may be left over from a call of the model itself, or from one that failed.
        call = members["_called"]
        members["_counted_by"].passes.subset = None
        measures = timer.running and module.training
        calls = perf_counter()
        if measures:
            outputs = timer.forward(lambda: call(*args, **kwargs))
        else:
            outputs = call(*args, **kwargs)
        called = perf_counter()
        tracker.remember_outputs(outputs, inputs)
        if inputs.rows is not None and not inputs.refuse:
            members["_counted_by"].passed(outputs, inputs.rows, first, is_whole=inputs.is_whole)
        else:
            shapes = [leaf.shape[:2] for leaf in leaves((args, kwargs))]
            members["_counted_by"].passed(
                outputs, None, first, shapes=shapes, evaluates=not module.training
            )
        members["_booked_by"].attribution_s += perf_counter() - called + calls - begin
        return outputs

    # The remaining methods pass on to the user's model.

    def train(self, mode: bool = True) -> "TrackedModel":
        """Sets training or evaluation mode of the user's model.

        Args:
            mode: Whether to set training mode. Default: True.
        """
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> "TrackedModel":
        """Applies a function to every module of the user's model.

        Args:
            fn: Function of a module.
        """
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "TrackedModel":
        self.module._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask an object for attributes before it has any: `self.module` would call this method again,
        # endlessly.
        module = self.__dict__.get("module")
        if module is None:
            raise AttributeError(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            raise AttributeError(
                "run.model.module is the model that attach was given; attach a new run to train another one"
            )
        if name in ("autocast", "on_forward"):
            self.__dict__[name] = value
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    # Python looks special methods up in the class, where `__getattr__` is not asked.
    def __getitem__(self, key: Any) -> Any:
        return self._users_own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._users_own()[key] = value

    def __len__(self) -> int:
        return len(self._users_own())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._users_own())

    def __contains__(self, item: Any) -> bool:
        return item in self._users_own()

    # With `__len__` above, Python would ask a model without items for its length.
    def __bool__(self) -> bool:
        return bool(self.module)

    def _users_own(self) -> Any:
        """The user's model itself, without the wrapper of `subset_backward`."""
        return plain_module(self.module)

    def __repr__(self) -> str:
        return f"TrackedModel({self.module!r})"

    def __copy__(self) -> Any:
        return copy.copy(self._users_own())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._users_own(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self._users_own(),), 0)  # loads without this library, too


def _of_the_users_model(name: str) -> Callable[..., Any]:
    @wraps(getattr(nn.Module, name))
    def method(self: TrackedModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return method


# nn.Module defines these methods, so Python does not ask `__getattr__` for them, and would miss overrides in the user's model.
for _name in (
    "state_dict",
    "load_state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "_get_name",
    "named_modules",
    "compile",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
):
    setattr(TrackedModel, _name, _of_the_users_model(_name))
