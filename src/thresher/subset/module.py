"""The module that `subset_backward` returns: a forward pass over the whole batch, a backward pass over rows with a gradient."""

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thresher.distributed.wrappers import SubsetModule, check_wrapping
from thresher.subset.compilers import compiled, given, lacks_compiler, lacks_torch
from thresher.subset.function import Call, RowMeter, SubsetFunction
from thresher.subset.graphs import (
    Graphs,
    HasEffects,
    Outdated,
    TooManyKinds,
    Unclear,
    Uncompiled,
    Unsupported,
    flatten_tensors,
)
from thresher.subset.side_effects import effects_undone
from thresher.subset.trace_key import (
    EVERY,
    FREE_TRACES,
    Patience,
    Settings,
    Shapes,
    autocast,
    dense,
    describe,
    has_global_hooks,
    is_due,
)
from thresher.torch_internals import innermost_transform
from thresher.warning import warn

MAX_TRACES = 64
"""Number of kinds of calls whose traces each module keeps; the least recently used kind is dropped first."""
ATTEMPTS = 4
"""Number of calls in which the forward has side effects, after which the model is not traced again."""
SECONDS_TO_TELL = 5.0
"""Seconds of tracing from which a log message explains the wait."""
logger = logging.getLogger("thresher")


def subset_backward(
    model: nn.Module,
    *,
    strict: bool = False,
    compile: bool | None = None,  # noqa: A002
) -> "SubsetBackward":
    """Wraps a model so that its backward pass runs only on the rows of the batch that the loss depends on.

    Call the result like the model. Its forward runs the whole batch. If only some rows of the outputs carry gradient, as after
    `losses[kept].mean().backward()`, its backward runs on those rows only. The gradients equal those of the model.

    The first call with inputs of a new kind traces the model (AOTAutograd, symbolic batch size) and tests the graphs on a few
    rows: their outputs, random draws and gradients must be those of the model, or the plain model is used. The first dimension
    of the inputs is the batch; tensors with another first dimension are shared by all samples. If an operation lets samples
    affect each other, the plain model is used. The exception is batch normalization with the statistics of the batch: gradients
    pass through it as if the kept rows were the whole batch (see `mixes_samples`).

    Calls are of the same kind if they agree in shapes (except the batch size), dtypes, constants among the arguments, and
    settings (attributes of the modules, and the globals and closures that the forward reads). Each kind needs a trace of its
    own, with one exception: if the model allows it, the second shape gets a trace with symbolic sizes that serves all later
    shapes, so sequences may have any length. The first 8 kinds are traced at their first call, others at their 32nd, as are
    lengths that cannot share a trace. So pass a number that changes in every step as a tensor. When the plain model is used, a
    warning gives the reason once, and `fallback` holds it.

    A trace does not notice changes in files and clocks, long lists and large arrays, variables that only library code reads,
    and values deep inside objects (but it notices a number directly in an object that is an attribute of a module). Therefore
    outputs and buffers are compared with those of the model in calls 1, 2, 4, 8 and so on, and then in every 256th call of each
    trace. If they differ, a warning is given and the plain model is used from then on; up to 255 earlier calls may have used
    the old value.

    Tracing and comparing run the forward of the model an extra time, and calls of a traced model do not run its Python code. So
    a forward that changes Python objects, such as a counter, is not traced: a warning names the changed object, and the change
    by the extra run is undone. These changes go unnoticed: to globals that the forward does not name, to objects of libraries
    such as iterators, to arrays of more than 64 MiB in total, and outside Python, such as printed text.

    Args:
        model: Any module. Its arguments may hold tensors in nested structures; it returns a tensor, tuple, dict or dataclass.
            The result shares its parameters, buffers and `state_dict`.
        strict: Whether to raise if the model cannot be traced or compiled, instead of using the plain model with one
            warning. Default: False.
        compile: Whether Inductor, the compiler of `torch.compile`, compiles both graphs, each once for all batch sizes and all
            numbers of kept rows. Default: True if `torch.compile` has compiled `model` or a part of it with Inductor (with the
            same settings), else False.

    Returns:
        Module that wraps `model`; if `model` is a result of `torch.compile`, the module inside it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` is, or contains, a wrapper for several processes, such as DistributedDataParallel, which must go
            around the result instead. Raised on a call if the wrapper was added later.
        RuntimeError: torch is older than 2.11. Or the graphs cannot be compiled, for example without a C++ compiler, with
            `compile=True`, or with `strict=True` and a compiled model. On a call: under a `torch.func` transform; on double
            backward; with `strict`, if the model cannot be traced or compiled.

    Example:
        >>> import torch
        >>> model = subset_backward(torch.nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 5.0]])).squeeze(1)
        >>> losses[[0, 2]].sum().backward()  # costs two of the three rows
        >>> model.weight.grad
        tensor([[4., 5.]])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"subset_backward: `model` must be a torch.nn.Module, got {type(model).__name__}"
        )
    if (reason := lacks_torch()) is not None:
        raise RuntimeError(reason)
    check_wrapping(model)
    return _around(model, strict, compile)


def _around(model: nn.Module, strict: bool, wanted: bool | None) -> "SubsetBackward":
    """Wraps a model; `wanted` is the argument `compile`."""
    wrapped = given(model)
    options = None if wanted is False else wrapped.options
    if wanted and options is None:
        options = {}
    reason = None if options is None else lacks_compiler(wrapped.module)
    if wrapped.other is not None and wanted is None:
        reason = f"the backend {wrapped.other} compiled the model, and only Inductor can compile the graphs"
    if reason is not None and (strict or wanted):
        raise RuntimeError(
            f"subset_backward: its graphs cannot be compiled: {reason}; or set compile=False."
        )
    # Python looks special methods up in the class, so `__getattr__` cannot forward them.
    if hasattr(type(wrapped.module), "__getitem__"):
        kind = SubsetContainer
    else:
        kind = SubsetBackward
    unusable = reason is not None and options is not None
    plain = None if unusable or wrapped.module is model else model
    subset_model = kind(wrapped.module, strict=strict, options=options, plain=plain)
    if reason is not None:
        subset_model.do_not_compile(reason)
    return subset_model


class SubsetBackward(SubsetModule):
    """The user's model with another backward pass; `subset_backward` makes it.

    Args:
        model: The user's model.
        strict: Whether to raise if the model cannot be traced or compiled.
        options: Settings of Inductor, which compiles the graphs; None leaves them as they are. Default: None.
        plain: Module that is called when the graphs are not used, a result of torch.compile. Default: the model itself, or with
            `options` the model compiled with them when it is first needed.

    Attributes:
        wrapped: The user's model, without the wrapper of torch.compile.
        fallback: Reason why the last call used the plain model; None if it did not.
        compilations: Number of graphs that were compiled.
        tracing_s: Seconds that tracing and compiling have taken.
        meter: Counter of the samples that go backward; None if nothing counts them.

    Example:
        >>> import torch
        >>> model = subset_backward(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        >>> list(model.state_dict()), model.wrapped[1], model.fallback
        (['0.weight', '0.bias'], ReLU(), None)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strict: bool,
        options: dict[str, Any] | None = None,
        plain: nn.Module | None = None,
    ) -> None:
        super().__init__()
        # Loads torch's compiler, which takes too long for a training step.
        import_module("thresher.subset.making")
        # The same table objects as in the model, so that `to()`, `functional_call` and `load_state_dict` reach its tensors,
        # under names without a prefix.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = model.__dict__[registry]
        self.training = model.training
        self.strict = strict
        self.fallback: str | None = None
        self.meter: RowMeter | None = None
        self.compilations = 0
        self.tracing_s = 0.0
        self._options = options
        self.__dict__["_plain"] = (
            plain  # not a submodule: a parameter has only one name in the state_dict
        )
        self._traces: OrderedDict[Any, list[Graphs]] = OrderedDict()
        self._refused: dict[Any, Unsupported] = {}
        self._patience = Patience(MAX_TRACES if strict else FREE_TRACES)
        self._shapes = Shapes()
        self._settings: Settings | None = None
        self._stopped: Unsupported | None = None
        self._effects = 0
        self._said: set[type] = set()
        self._told = False
        self.__dict__["wrapped"] = model  # from here on, other attributes are those of the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the same arguments, and returns its result.

        Raises:
            RuntimeError: The call is under a `torch.func` transform, or the model cannot be traced and `strict` is True.
        """
        # Without gradients there is nothing to leave out, and torch.compile cannot trace a call that traces.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._call_plain(*args, **kwargs)
        if innermost_transform() is not None or torch.autograd.forward_ad._current_level >= 0:
            raise RuntimeError(
                "subset_backward: torch.func transforms are not supported; call the model itself (.wrapped)"
            )
        try:
            traced = self._prepare_call(args, kwargs)
        except Unsupported as reason:
            self._give_up(reason)
            traced = None
        if traced is None:
            return self._call_plain(*args, **kwargs)
        call, differentiated = traced
        if self.meter is not None:
            call.meter = self.meter.subset_pass(call.n)
        outputs = SubsetFunction.apply(call, *differentiated)
        return call.graphs.rebuild(list(outputs))

    def _call_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, compiled if the graphs are."""
        plain = self.__dict__["_plain"]
        if plain is None:
            if self._options is None:
                plain = self.wrapped
            else:
                plain = compiled(self.wrapped, self._options)
            self.__dict__["_plain"] = plain
        return plain(*args, **kwargs)

    # Tracing

    def _prepare_call(self, *arguments: Any) -> tuple[Call, list[Tensor]] | None:
        """Returns the call of the graphs and the tensors that get gradients; None if there is nothing to leave out.

        Raises:
            Unsupported: The plain model must be used.
        """
        if self._stopped is not None:
            raise self._stopped
        if has_global_hooks():
            raise Unsupported(
                "hooks are registered for all modules, which a traced graph does not call"
            )
        tensors, rebuild = flatten_tensors(arguments)
        inputs = [dense(tensor) for tensor in tensors]
        settings = self._settings
        if settings is None or not settings.hold():
            settings = self._settings = Settings(self.wrapped)
        chosen = self._graphs(tensors, rebuild, arguments, settings)
        if chosen is None:
            return None
        graphs, n = chosen
        arranged = settings.tensors(graphs)
        graphs.calls += 1
        # Before the graphs run, so that if they differ, the model itself computes this call.
        if is_due(graphs.calls):
            self._compare(graphs, settings, tensors, rebuild)
        if self.fallback is not None:
            self.fallback = None
        # Gradients go to the tensors of the caller. The graph reads the tensors from `dense`, which may be copies that autograd
        # does not connect with them.
        differentiated = [tensors[i] if isinstance(i, int) else i for i in arranged.differentiated]
        inputs = [inputs[i] if isinstance(i, int) else i for i in arranged.inputs]
        return Call(graphs, inputs, arranged.buffers, n, graphs.lengths_of(tensors)), differentiated

    def _graphs(
        self, tensors: list[Tensor], rebuild: Any, arguments: Any, settings: Settings
    ) -> tuple[Graphs, int] | None:
        """Returns graphs that hold for these inputs, and their batch size; None if there is nothing to leave out."""
        sizes = Counter(len(t) for t in tensors if t.dim())
        if set(sizes) <= {0, 1} or not (
            settings.trains or any(tensor.requires_grad for tensor in tensors)
        ):
            return None  # in a batch of one sample there is nothing to leave out
        likely = sizes.most_common(1)[0][0]
        base = settings.key, autocast(tensors)
        exact = (*base, describe(arguments, likely))
        graphs = self._find_graphs(exact, tensors)
        # A last batch with only one sample is no reason for a further trace if its kind was traced with more samples.
        if (
            graphs is None
            and exact in self._traces
            and max(len(tensors[one.first]) for one in self._traces[exact]) < 2
        ):
            return None
        any_size = (*base, describe(arguments, likely, sizes=False))
        graphs = graphs or self._find_graphs(any_size, tensors)
        if graphs is None and any_size not in self._refused:
            varying = self._shapes.varying(any_size, tensors, likely)
            # A model that needs to know its length, as in a loop over positions, is traced for this length below.
            with contextlib.suppress(Unsupported):
                if varying:
                    graphs = self._trace_kind(any_size, settings, tensors, rebuild, sizes, varying)
                else:
                    graphs = None
        # Otherwise each further length would be traced at once.
        at_once = self.strict or any_size not in self._refused
        graphs = graphs or self._trace_kind(
            exact, settings, tensors, rebuild, sizes, at_once=at_once
        )
        return graphs, len(tensors[graphs.first])

    def _find_graphs(self, key: Any, tensors: list[Tensor]) -> Graphs | None:
        """Returns graphs of a kind of call that hold for these inputs; None if there are none."""
        known = self._traces.get(key)
        if known is None:
            return None
        self._traces.move_to_end(key)
        return next((graphs for graphs in known if graphs.fits(tensors)), None)

    def _trace_kind(
        self,
        key: Any,
        settings: Settings,
        tensors: list[Tensor],
        rebuild: Any,
        sizes: Counter[int],
        varying: Sequence[tuple[int, int]] = (),
        *,
        at_once: bool = True,
    ) -> Graphs:
        """Traces the model for a kind of call.

        Raises:
            Unsupported: The model cannot be traced, or its kind of call is not traced yet.
        """
        if key in self._refused:
            raise self._refused[key]
        if not self._patience.is_due(key, at_once=at_once):
            raise TooManyKinds(self._patience.reason())
        started = time.perf_counter()
        try:
            # Tracing runs the forward an extra time: its changes to globals must not happen twice.
            with settings.outside.kept():
                graphs = self._trace(settings, tensors, rebuild, sizes, varying)
        # Not stored as refused: the reason lies in the values of this batch, or may be gone in the next call.
        except (Unclear, HasEffects):
            raise
        except Unsupported as reason:
            self._refused[key] = reason
            raise
        finally:
            took = time.perf_counter() - started
            self._patience.count(key, took)
            self.tracing_s = self._patience.seconds
            if took > SECONDS_TO_TELL and not self._told:
                self._told = True
                logger.warning(
                    "subset_backward: tracing %s took %.1f s%s. This happens once for each kind of call, such as a first batch "
                    "of another length. `tracing_s` of the model has the total time. This is logged once.",
                    type(self.wrapped).__name__, took, " with compiling" if self._options is not None else "",
                )  # fmt: skip
        # A list, because graphs of one kind can exclude each other's batch sizes by their guards.
        self._traces.setdefault(key, []).append(graphs)
        if len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        return graphs

    def _compare(
        self, graphs: Graphs, settings: Settings, tensors: list[Tensor], rebuild: Any
    ) -> None:
        """Compares graphs with the model; instead of compiled graphs, the examined graphs from which they were compiled.

        Raises:
            Outdated: Outputs or buffers differ; the graphs of the model are not used from now on.
            HasEffects: The forward changes something that it did not change when it was traced.
        """
        from thresher.subset.verify import differs

        # The comparison replaces random draws operation by operation, which is not possible inside compiled kernels.
        checked = graphs.examined or graphs
        checked.calls = graphs.calls
        with settings.outside.kept(), effects_undone(self.wrapped.named_modules()):
            outdated = differs(self.wrapped, checked, settings.tensors(checked), tensors, rebuild)
        if outdated:
            self._stopped = Outdated(
                f"in call {graphs.calls} of the traced model its outputs differ from the model's. Its forward depends on a "
                "value that changed and that Thresher cannot observe, so results since the last comparison may be wrong (calls "
                f"1, 2, 4, 8 and so on are compared, then every {EVERY}th). Make this value an argument, or a buffer of the "
                "module"
            )
            self._traces.clear()
            raise self._stopped

    def _trace(
        self,
        settings: Settings,
        tensors: list[Tensor],
        rebuild: Any,
        sizes: Counter[int],
        varying: Sequence[tuple[int, int]] = (),
    ) -> Graphs:
        """Traces the model, checks the graphs against it, and compiles them if they are to be compiled."""
        from thresher.subset.making import as_unsupported, make_graphs
        from thresher.subset.verify import check_against_module

        inputs = [dense(tensor) for tensor in tensors]
        graphs = make_graphs(self.wrapped, inputs, rebuild, sizes, self._options, varying)
        checked = graphs.examined or graphs
        # Whatever fails in this backward pass of the model itself leaves its graphs without a proof.
        try:
            with effects_undone(self.wrapped.named_modules()):
                check_against_module(
                    self.wrapped, checked, settings.tensors(checked), tensors, rebuild
                )
        except Exception as error:
            reason = as_unsupported(error)
            raise reason from reason.__cause__
        if graphs.compiled_backward is not None:
            self.compilations += 2
        elif graphs.uncompiled is not None:
            self.do_not_compile(graphs.uncompiled)
        return graphs

    def do_not_compile(self, reason: str) -> None:
        """Switches compilation off from now on.

        Args:
            reason: Why the graphs cannot be compiled, for the warning, which is given once.

        Raises:
            Unsupported: `strict` is set.
        """
        if self.strict:
            raise Unsupported(f"its graphs cannot be compiled: {reason}")
        self._options = None
        self._warn(
            Uncompiled,
            f"the graphs of {type(self.wrapped).__name__} run without torch.compile. Gradients are right and the backward pass "
            f"costs the kept rows only, but operations are not fused: {reason}",
        )

    def _give_up(self, reason: Unsupported) -> None:
        name = type(self.wrapped).__name__
        if self.strict:
            raise RuntimeError(
                f"subset_backward: {name} cannot be used with strict=True: {reason}"
            ) from reason
        self.fallback = str(reason)
        if isinstance(reason, HasEffects):
            self._traces.clear()  # they lack the side effect that a comparison has found
            self._effects += 1
            self._stopped = reason if self._effects >= ATTEMPTS else None
        self._warn(
            Unsupported if isinstance(reason, Unclear) else type(reason),
            f"using the plain {name}, whose gradients are right but whose backward pass costs the whole batch however few rows "
            f"are kept: {reason}",
        )

    def _warn(self, kind: type, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn(
                f"subset_backward: {text}. strict=True raises instead. This warning is given once."
            )

    # Everything else is forwarded to the user's model

    def train(self, mode: bool = True) -> "SubsetBackward":
        """Sets training or evaluation mode, here and in the model.

        Args:
            mode: Whether to set training mode. Default: True.
        """
        self.training = mode
        self.wrapped.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the `state_dict` of the model."""
        return self.wrapped.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a `state_dict` of the model."""
        return self.wrapped.load_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        members = self.__dict__
        if name == "wrapped":
            raise AttributeError(
                "subset_backward: `wrapped` cannot be replaced; call subset_backward with the other model"
            )
        if name == "training" and "wrapped" in members:
            members["wrapped"].training = value
        # A loop that sets an attribute, such as a temperature, means the model whose forward reads it, not this wrapper.
        if "wrapped" not in members or name in members or hasattr(nn.Module, name):
            super().__setattr__(name, value)
        else:
            setattr(members["wrapped"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["wrapped"], name)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs and settings refer to the tensor objects of this model. A copy has other tensors, so it is traced again.
        fresh = {
            "_traces": OrderedDict(),
            "_refused": {},
            "_patience": Patience(self._patience.free),
            "_shapes": Shapes(),
        }
        return {**self.__dict__, **fresh, "_settings": None, "_plain": None, "meter": None}


class SubsetContainer(SubsetBackward):
    """A wrapped model whose parts can be indexed like `nn.Sequential`; `subset_backward` makes it.

    Args:
        model: The user's model.
        strict: Whether to raise if the model cannot be traced.

    Example:
        >>> import torch
        >>> model = subset_backward(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        >>> len(model), model[1], [type(part).__name__ for part in model]
        (2, ReLU(), ['Linear', 'ReLU'])
    """

    wrapped: Any

    def __getitem__(self, place: Any) -> Any:
        return self.wrapped[place]

    def __setitem__(self, place: Any, part: Any) -> None:
        self.wrapped[place] = part

    def __delitem__(self, place: Any) -> None:
        del self.wrapped[place]

    def __contains__(self, part: Any) -> bool:
        return part in self.wrapped

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __bool__(self) -> bool:
        # Otherwise `__len__` would decide, and an empty container would pass for no model.
        return True


def mixes_samples(model: nn.Module) -> tuple[str, ...]:
    """Returns the parts of a model that let samples of a batch affect each other in its current mode (training or evaluation).

    With such a part, rows that are left out of the loss still affect the gradient. If the part is batch normalization,
    `subset_backward` passes gradients back as if the kept rows were the whole batch, with the statistics of the whole batch; if
    it is anything else, `subset_backward` uses the plain model.

    Args:
        model: Any module. If it is a result of `subset_backward` and was called before, the operations in its graphs that mix
            samples are named, too.

    Returns:
        Names such as "BatchNorm2d 'layer1.0.bn1'"; empty if no part is known to mix samples.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> mixes_samples(model)
        ("BatchNorm1d '1'",)
        >>> mixes_samples(model.eval())
        ()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"mixes_samples: `model` must be a torch.nn.Module, got {type(model).__name__}"
        )
    names = list(_batch_norms(model.wrapped if isinstance(model, SubsetBackward) else model))
    for part in model.modules():
        if isinstance(part, SubsetBackward):
            for known in part._traces.values():
                names.extend(name for graphs in known for name in graphs.mixing)
    return tuple(dict.fromkeys(names))


def _batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the batch normalizations that use the statistics of the batch."""
    return tuple(
        f"{type(part).__name__} {name!r}"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    )
