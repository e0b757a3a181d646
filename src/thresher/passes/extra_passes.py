"""The forward passes that a run makes in addition to those of its loop: refresh, full pass, scoring."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from thresher import rng
from thresher.attribution.resolve import layout_of
from thresher.attribution.rows import AttributionError, RowLayout
from thresher.attribution.tracked_model import TrackedModel
from thresher.cost import Cost
from thresher.distributed.wrappers import averages, data_parallel, inside, plain_module
from thresher.loading.collate_check import UnknownRows
from thresher.loading.loader import SelectedLoader
from thresher.losses.base import SignalReader
from thresher.losses.signals import as_classes, narrow
from thresher.passes.engine import (
    Forward,
    answers,
    check_plain,
    feature_rows,
    isolated_pass,
    plain_forward,
    watch_last_linear,
)
from thresher.passes.saved_attributes import Attributes
from thresher.passes.scoring_settings import Scoring
from thresher.records import Records
from thresher.trees import leaves

BufferPlace = tuple[nn.Module, str]
Copies = list[tuple[nn.Module, str, Tensor]]


def places_of(module: nn.Module) -> list[BufferPlace]:
    """Returns the place of each buffer of a model: the module that holds it, and its name there."""
    return [(part, name) for part in module.modules() for name, _ in part._buffers.items()]


def _buffer(part: nn.Module, name: str) -> Tensor | None:
    # Modules of torch.jit have a table without `get`.
    buffers = part._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401


def copies_of(places: list[BufferPlace]) -> Copies:
    """Returns copies of buffers; parts that share a buffer share its copy."""
    clones: dict[int, Tensor] = {}
    copies = []
    for part, name in places:
        buffer = _buffer(part, name)
        # A lazy buffer has no shape, and so nothing to copy, before its first pass.
        if buffer is not None and not is_lazy(buffer):
            if id(buffer) not in clones:
                clones[id(buffer)] = buffer.detach().clone()
            copies.append((part, name, clones[id(buffer)]))
    return copies


@contextmanager
def replaced(copies: Copies) -> Iterator[None]:
    """Replaces buffers by copies while the block runs. The buffers themselves are not written.

    Args:
        copies: Result of `copies_of`.

    Example:
        >>> import torch
        >>> norm = nn.BatchNorm1d(2)
        >>> with replaced(copies_of(places_of(norm))):
        ...     outputs = norm(torch.randn(4, 2))
        >>> norm.num_batches_tracked
        tensor(0)
    """
    # Other objects in the table, instead of values that are written back: a write would raise the version of a buffer that an
    # unfinished backward pass of the loop has saved, and autograd would refuse that pass.
    held = [(part, name, part._buffers[name]) for part, name, _ in copies if name in part._buffers]
    for part, name, copy in copies:
        part._buffers[name] = copy
    try:
        yield
    finally:
        for part, name, buffer in held:
            part._buffers[name] = buffer


def share_buffers(parallel: DistributedDataParallel | None) -> None:
    """Copies the buffers of the first process to all processes, as a training forward pass does. All processes must call it.

    The statistics of a batch normalization differ from process to process after each step. With equal buffers, each sample of
    a pass that is divided among the processes gets the loss that one process would compute.

    Args:
        parallel: Wrapper of the model that holds the buffers. No-op for None, and with `broadcast_buffers=False`.
    """
    if parallel is not None and parallel.broadcast_buffers and parallel.modules_buffers:
        # torch has no public method for it: DistributedDataParallel calls this one itself at the start of a training pass.
        parallel._sync_buffers()


def _observes(part: nn.Module) -> bool:
    """Whether a module observes ranges for a quantization; its kernels write buffers without a new version."""
    return any(base.__module__.startswith("torch.ao.quantization") for base in type(part).__mro__)


class WrittenBuffers:
    """Finds the buffers that a model writes even in evaluation mode, such as queues and counters.

    The first pass gets copies of all buffers, which shows the buffers that it writes. Later passes get copies of those only.
    """

    def __init__(self) -> None:
        # By model, since a scoring model has buffers of its own; weakly, so that a model which the user drops is freed.
        self._written: weakref.WeakKeyDictionary[nn.Module, list[BufferPlace]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def untouched(self, module: nn.Module) -> Iterator[None]:
        """Protects the buffers of a model from its forward passes while the block runs.

        Args:
            module: The model, in evaluation mode.
        """
        known = self._written.get(module)
        copies = copies_of(places_of(module) if known is None else known)
        versions = [copy._version for _, _, copy in copies]
        with replaced(copies):
            yield
            # While the copies are still in place: a pass that assigns a buffer shows as another object, one that writes it as
            # another version.
            if known is None:
                self._written[module] = [
                    (part, name)
                    for (part, name, copy), version in zip(copies, versions, strict=True)
                    if _buffer(part, name) is not copy
                    or copy._version != version
                    or _observes(part)
                ]


class Beginning(NamedTuple):
    """State in which a forward pass of the loop began.

    Attributes:
        states: Random states.
        buffers: Copies of the buffers of the model.
        attributes: Copies of the Python attributes of the model.
        autocast: Dtype of autocast; None if there was none.
    """

    states: rng.RandomStates
    buffers: Copies
    attributes: Attributes
    autocast: torch.dtype | None


def first_size(tree: Any) -> int:
    """Returns the first size of the first tensor of a nested structure; 0 without one."""
    return next((len(leaf) for leaf in leaves(tree) if leaf.dim()), 0)


class ExtraPasses:
    """Makes the run's own forward passes, which the training loop does not notice.

    Args:
        model: The tracked model; None if `attach` got none.
        loader: The loader of the run.
        reader: Reads the signals.
        records: Records of all samples, to which the signals are written.
        cost: Counters of samples, to which each pass adds.
        forward: The user's function `(model, batch) -> (outputs, targets)`; None: `plain_forward`.
        device: Device of the model.
        unknown_rows: Its `reason` is set if the rows of a batch turn out not to be its samples in order.
        needed_by: Name of the method that needs extra passes. None: no method needs them.
    """

    def __init__(
        self,
        model: TrackedModel | None,
        loader: SelectedLoader,
        reader: SignalReader,
        records: Records,
        cost: Cost,
        forward: Forward | None,
        device: torch.device,
        unknown_rows: UnknownRows,
        needed_by: str | None,
    ) -> None:
        self._model = model
        self._loader = loader
        self._reader = reader
        self._records = records
        self._cost = cost
        self._forward = forward
        self.device = device
        self._unknown_rows = unknown_rows
        self._needed_by = needed_by
        self._per_sample = 1
        self._buffers = WrittenBuffers()

    @property
    def possible(self) -> bool:
        """Whether there are a model and a criterion to make passes with."""
        return self._model is not None and self._reader.criterion is not None

    @property
    def have_compared(self) -> bool:
        """Whether a batch was compared, perhaps before the run was saved."""
        return self._cost.comparing > 0

    @property
    def is_plain(self) -> bool:
        """Whether forward passes of the run call `model(batch[0])`, because `attach` got no `forward`."""
        return self._forward is None

    @property
    def repeatable(self) -> bool:
        """Whether a call of the criterion leaves no trace. A callable object that is not a module may count its calls."""
        if self._reader.criterion is None:
            criterion = None
        else:
            criterion = self._reader.criterion.original
        # The adapters repeat a module on a copy, and a plain function has nowhere to count.
        return isinstance(criterion, nn.Module | FunctionType) or not getattr(
            criterion, "__dict__", {}
        )

    def check(self, batch: Any) -> None:
        """Checks that extra passes can read a batch, so that an error comes before training and not after its first epoch.

        Raises:
            AttributionError: Extra passes will be made, and the rows of a batch are not its samples in order.
            ValueError: Extra passes will be made, `attach` got no `forward`, and the batch is not a pair of inputs and targets.
        """
        if self._needed_by is None:
            return
        self._check_rows(f"run the forward passes of {self._needed_by}")
        if self._forward is None:
            # A `forward` of the user's may take batches of any structure, so this is checked only without one.
            check_plain(batch, f"{self._needed_by} makes extra forward passes, and ")

    def can_choose(self, batch: Any, n: int) -> bool:
        """Returns whether a batch has one row for each of its n samples, so that rows can be left out before the loop."""
        return self._unknown_rows.reason is None and all(
            leaf.shape[:1] == (n,) for leaf in leaves(batch)
        )

    def refresh(self, ids: Tensor, *, training: bool) -> None:
        """Records the losses of samples that a plan left out, from one forward-only pass.

        Args:
            ids: Ids of the samples, shape (k,), int64.
            training: Whether the model runs in training mode.

        Raises:
            AttributionError: The rows of a batch are not its samples in order.
        """
        wanted = self._reader.recorded
        # Before the batches, of which this process may have none: the other processes would wait for it.
        self._share_buffers()
        with self._pass(module := self.module, training=training):
            for batch, batch_ids in self._loader.passes(ids):
                self._check_rows("refresh losses")
                signals = self._signals(module, batch, len(batch_ids), wanted)
                self._records.write(batch_ids.to(self.device), signals)
                rows = len(batch_ids) * self._per_sample
                self._cost.refresh += rows
                self._cost.forward += rows

    def full_pass(self, ids: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Computes signals that are too large to record, in one forward-only pass.

        Args:
            ids: Ids of all training samples, shape (N,), int64.
            names: Names out of "error", "feature" and "label".

        Returns:
            Tensors by name, with one row per sample, on the device.

        Raises:
            AttributionError: The rows of a batch are not its samples in order.
            ValueError: `names` has "label", and the targets are not classes.
        """
        criterion = self._reader.criterion
        module = self._plain_module
        assert criterion is not None
        parts_of: dict[str, list[Tensor]] = {name: [] for name in names}
        self._share_buffers()
        with self._pass(module):
            forward = plain_forward if self._forward is None else self._call
            for (answer,) in answers(
                [module], self._with_counts(ids), forward, features="feature" in parts_of
            ):
                n = answer.layout.n
                if "error" in parts_of:
                    parts_of["error"].append(
                        criterion.errors(answer.outputs, answer.targets, answer.layout)
                    )
                if "label" in parts_of:
                    parts_of["label"].append(as_classes(answer.targets, n))
                if answer.feature is not None:
                    parts_of["feature"].append(answer.feature.reshape(n, -1).float())
                self._cost.scoring += n * self._per_sample
                self._cost.forward += n * self._per_sample
        return {name: torch.cat(parts) for name, parts in parts_of.items()}

    def score(self, batch: Any, ids: Tensor, scoring: Scoring) -> dict[str, Tensor]:
        """Computes and records the signals of all rows of a batch, before some of them are chosen for the loop.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the device.
            scoring: Settings of the pass.

        Returns:
            Signals by name, shape (n,); `error` and `feature` of shape (n, ...).

        Raises:
            AttributionError: The rows of a batch are not its samples in order.
        """
        smaller = self._candidates(batch, scoring)
        module = self.module if scoring.model is None else inside(scoring.model)
        wanted = self._reader.chosen_by
        n = len(ids)
        featured = watch_last_linear(module) if "feature" in wanted else nullcontext()
        with self._pass(module, dtype=scoring.dtype), featured as last:
            # No criterion defines the feature: a hook gets it.
            signals = self._signals(module, smaller, n, wanted - {"feature"})
            if last is not None:
                signals["feature"] = feature_rows(last.take()[1], n)
        self._cost.scoring += n * self._per_sample
        self._cost.forward += n * self._per_sample
        self._records.write(ids, narrow(signals))
        return signals

    def _candidates(self, batch: Any, scoring: Scoring) -> Any:
        """Checks a batch, and returns it with its inputs scaled down by the `input_scale` of the scoring pass."""
        self._check_rows("choose samples by their losses")
        self.check(batch)
        if scoring.input_scale == 1:
            return batch
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if pair:
            return (scoring.shrink(batch[0]), batch[1])
        return scoring.shrink(batch)

    def _check_rows(self, doing: str) -> None:
        if self._unknown_rows.reason is not None:
            raise AttributionError(
                f"Cannot {doing}: the rows of a batch do not match its samples: {self._unknown_rows.reason}. "
                "Use a collate_fn that keeps the order of the samples."
            )

    @property
    def module(self) -> nn.Module:
        """The user's model, taken out of `DistributedDataParallel`, whose calls wait for others; a `SubsetBackward` stays."""
        assert self._model is not None
        return inside(self._model.module)

    @property
    def call(self) -> str:
        """Description, for messages, of what an extra pass calls."""
        if self._forward is None:
            return "`model(batch[0])`"
        return "the function `forward` that attach was given"

    def beginning(self, autocast: torch.dtype | None) -> Beginning:
        """Captures the state in which a forward pass begins now.

        Args:
            autocast: Dtype of autocast; None if there is none.
        """
        module = self._plain_module
        return Beginning(
            rng.capture(self.device), copies_of(places_of(module)), Attributes(module), autocast
        )

    @property
    def _plain_module(self) -> nn.Module:
        return plain_module(self.module)

    def watch_forward(self, begins: Callable[[torch.dtype | None], None] | None) -> None:
        """Sets the function that gets the autocast dtype when a forward pass of the loop begins; None removes it."""
        if self._model is not None:
            self._model.on_forward = begins

    @staticmethod
    def versions(batch: Any) -> list[int]:
        """Returns the version counters of a batch's tensors, to detect changes in place."""
        # Inference tensors have no version counter: reading it raises an error.
        return [leaf._version for leaf in leaves(batch) if not leaf.is_inference()]

    def repeat(self, batch: Any, n: int, beginning: Beginning | None) -> tuple[Tensor, bool] | None:
        """Repeats a forward pass of the loop as an extra pass, in the same modes. Nothing is recorded.

        Args:
            batch: The batch as it was yielded.
            n: Number of its samples.
            beginning: State with which the loop's pass began; None if the loop did not call `run.model`.

        Returns:
            Losses, shape (n,), and whether they were computed without half precision. None if the losses depend on random
            numbers that cannot be repeated.
        """
        assert self._model is not None
        device = self.device
        dtype = self._model.autocast if beginning is None else beginning.autocast
        module = self._plain_module
        now = beginning or self.beginning(dtype)
        # Without the cache of autocast: the loop would get back weights that were cast here under no_grad, without a gradient.
        autocast = torch.autocast(
            device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        )
        with (
            isolated_pass(
                [module], devices=[device], generators=self._loader.generators(), training=None
            ),
            # Buffers and attributes as they were when the loop's pass began; the present ones come back at the end.
            replaced(now.buffers),
            now.attributes.in_place(),
            autocast,
        ):
            if beginning is not None:
                # Undone by `isolated_pass`, which has captured the states of the loop before.
                rng.restore(beginning.states, device)
            before = rng.capture(device)
            with self._explain_errors(batch):
                outputs, targets, layout = self._answer(module, batch, n)
                self._cost.comparing += n * self._per_sample
                self._cost.forward += n * self._per_sample
                # The loop called its model directly, so its random numbers are not known and dropout cannot be repeated.
                if beginning is None and not rng.equal(before, rng.capture(device)):
                    return None
                losses = self._reader.signals(outputs, targets, layout, set())["loss"]
                # The random state moves on, so that a criterion that draws gives other losses in the second call.
                torch.rand(1, dtype=torch.float32, device=device)
                again = self._reader.signals(outputs, targets, layout, set())["loss"]
            if not torch.allclose(losses, again, equal_nan=True):
                return None  # the criterion draws random numbers
        return losses, dtype in (None, torch.float32)

    def _share_buffers(self) -> None:
        assert self._model is not None
        share_buffers(data_parallel(self._model.module) or averages(self._plain_module))

    @contextmanager
    def _pass(
        self, module: nn.Module, *, training: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """Isolates one forward pass from the training.

        Args:
            module: The model.
            training: Whether it runs in training mode. Default: False.
            dtype: Dtype of autocast. Default: that of the last training pass, so that losses are those of training.
        """
        assert self._model is not None
        generators = self._loader.generators()
        dtype = dtype or self._model.autocast
        isolated = isolated_pass(
            [module], devices=[self.device], generators=generators, training=training, dtype=dtype
        )
        # A pass in training mode is a refresh as in the published code of a method, which updates running statistics in it. So
        # the buffers are protected in evaluation mode only.
        with isolated, nullcontext() if training else self._buffers.untouched(module):
            yield

    def _with_counts(self, ids: Tensor) -> Iterator[tuple[Any, int]]:
        for batch, batch_ids in self._loader.passes(ids):
            self._check_rows("look at single samples")
            self.check(batch)
            yield batch, len(batch_ids)

    def _signals(
        self, module: nn.Module, batch: Any, n: int, wanted: set[str]
    ) -> dict[str, Tensor]:
        with self._explain_errors(batch):
            outputs, targets, layout = self._answer(module, batch, n)
            return self._reader.signals(outputs, targets, layout, wanted)

    def _answer(self, module: nn.Module, batch: Any, n: int) -> tuple[Any, Any, RowLayout]:
        """Returns the outputs of a batch, its targets, and their layout."""
        if self._forward is not None:
            outputs, targets = self._call(module, batch, n)
            return outputs, targets, layout_of(batch, n, targets)
        return *plain_forward(module, batch), RowLayout(n, None)

    def _call(self, module: nn.Module, batch: Any, n: int | None = None) -> tuple[Any, Any]:
        """Calls the user's `forward`, and notes how often it passes a sample through the model: twice for an image pair."""
        assert self._forward is not None
        calls: list[int] = []
        with module.register_forward_pre_hook(
            lambda _, *inputs: calls.append(first_size(inputs)), with_kwargs=True
        ):
            answer = self._forward(module, batch)
        # Both images of a pair may go through the model in two calls, or in one call with twice the rows, if rows come first.
        rows = first_size(batch) if n in (None, first_size(batch)) else 0
        self._per_sample = max(
            1, sum(size // rows if rows and size % rows == 0 else 1 for size in calls)
        )
        return answer

    @contextmanager
    def _explain_errors(self, batch: Any) -> Iterator[None]:
        """Explains an error of a pass without `forward=`: which pass failed, and what to do."""
        if self._forward is not None:
            yield
            return
        check_plain(batch)
        try:
            yield
        # No `forward` helps with these. OutOfMemoryError is a RuntimeError, so it would be explained below.
        except (AttributionError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(
                f"`forward` is needed: {self._needed_by or 'this method'} makes extra forward passes, which call "
                "`model(batch[0])` and the criterion with its outputs and `batch[1]`. That failed with "
                f"{type(error).__name__}: {error}. The loop probably converts, flattens or unpacks the tensors of the batch. "
                "Pass attach(forward=lambda model, batch: (outputs, targets)) that does the same as the loop."
            ) from error
