"""Runs the forward passes that the library makes itself: modes, random states, autocast, outputs and features."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thresher import rng
from thresher.attribution.resolve import layout_of
from thresher.attribution.rows import RowLayout
from thresher.distributed.wrappers import SubsetModule
from thresher.losses.signals import as_classes
from thresher.trees import to_device


class LastLinear:
    """Remembers the `nn.Linear` of a model that ran last in the latest forward pass, and its input.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ran: tuple[nn.Linear, Tensor] | None = None

    def note(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Remembers a layer that runs; a forward pre-hook."""
        assert isinstance(layer, nn.Linear)
        # Each layer replaces the one before: the order in which layers run counts, not that of their registration.
        self._ran = layer, inputs[0]

    def take(self) -> tuple[nn.Linear, Tensor]:
        """Returns the layer and its input, and forgets them.

        Raises:
            ValueError: No `nn.Linear` has run.
        """
        if self._ran is None:
            raise ValueError(
                f"features are the input of the last nn.Linear, but {type(self._model).__name__} calls no nn.Linear"
            )
        # Forgotten, so that a pass in which no linear layer runs is an error instead of the features of the batch before.
        ran = self._ran
        self._ran = None
        return ran


@contextmanager
def watch_last_linear(model: nn.Module) -> Iterator[LastLinear]:
    """Watches the linear layers of a model while the block runs.

    Args:
        model: The model; its hooks are taken away at the end.

    Yields:
        A `LastLinear`, whose `take` returns the layer that ran last and its input.

    Raises:
        ValueError: The model has no `nn.Linear`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with watch_last_linear(model) as last:
        ...     outputs = model(torch.ones(5, 4))
        ...     layer, feature = last.take()
        >>> layer is model[2], tuple(feature.shape)
        (True, (5, 3))
    """
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ValueError(
            f"features are the input of the last nn.Linear, but {type(model).__name__} has no nn.Linear"
        )
    last = LastLinear(model)
    hooks = [layer.register_forward_pre_hook(last.note) for layer in layers]
    try:
        yield last
    finally:
        # Even after an error: a hook that stayed would keep the features of the last batch alive.
        for hook in hooks:
            hook.remove()


def feature_rows(feature: Tensor | None, n: int) -> Tensor:
    """Returns features as one row per sample, shape (n, D), float32.

    Args:
        feature: Input of the last linear layer.
        n: Number of samples.

    Raises:
        ValueError: The input of the last linear layer does not have one row per sample.
    """
    assert feature is not None
    if feature.dim() != 2 or len(feature) != n:
        raise ValueError(
            f"the input of the model's last nn.Linear has shape {tuple(feature.shape)} for {n} samples; one row of features "
            "per sample is needed, shape (n, D)"
        )
    return feature.float()


Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""`(model, batch) -> (outputs, targets)`."""


class Answer(NamedTuple):
    """The outputs of one model for one batch, with targets and features.

    Attributes:
        outputs: What the model returned.
        targets: The targets of the batch.
        feature: Input of the `nn.Linear` that ran last; None if features were not requested.
        layout: Layout of the rows as samples.
        head: The `nn.Linear` that ran last; None if features were not requested.
    """

    outputs: Any
    targets: Any
    feature: Tensor | None
    layout: RowLayout
    head: nn.Linear | None = None


def plain_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Computes the outputs of a batch that is a pair of inputs and targets, or one tensor that is both.

    Args:
        model: The model.
        batch: The batch.

    Returns:
        Outputs and targets.

    Raises:
        ValueError: The batch is neither a pair nor a tensor.
    """
    check_plain(batch)
    if isinstance(batch, Tensor):
        return (model(batch), batch)
    return (model(batch[0]), batch[1])


def check_plain(batch: Any, reason: str = "") -> None:
    """Checks that inputs and targets of a batch are known: it is a pair of them, or one tensor that is both.

    Args:
        batch: The batch.
        reason: Why passes are made, for the message, such as "Kakurenbo runs passes of its own, and ".

    Raises:
        ValueError: The batch is neither a pair nor a tensor.
    """
    if not (isinstance(batch, Tensor) or (isinstance(batch, tuple | list) and len(batch) == 2)):
        raise ValueError(
            f"`forward` is needed: {reason}a batch that is {type(batch).__name__} is not a pair of inputs and targets. "
            "Pass forward=lambda model, batch: (outputs, targets)."
        )


def device_of_model(model: nn.Module) -> torch.device | None:
    """Returns the device of the first parameter or buffer of a model; None if it has neither."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), None)


@contextmanager
def isolated_pass(
    models: Sequence[nn.Module],
    *,
    devices: Iterable[torch.device],
    generators: Iterable[torch.Generator] = (),
    training: bool | None = False,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Prepares models for forward passes without gradients, and restores modes and random states afterwards.

    Args:
        models: The models. The mode of each of their modules is restored.
        devices: Devices whose global random states are restored, together with those of the CPU, NumPy and Python.
        generators: Generators whose states are restored.
        training: Whether the models run in training mode. None keeps the mode of each module. Default: False.
        dtype: Dtype of autocast; None or float32: no autocast.
    """
    parts = [part for model in models for part in model.modules()]
    # `modules()` of the wrapper yields the parts of the user's model but not that model. Its mode is restored, too.
    parts += [part.wrapped for part in parts if isinstance(part, SubsetModule)]
    modes = [(part, part.training) for part in parts]
    generators = list(generators)
    devices = list(devices)
    with ExitStack() as stack:
        for device in devices:
            # One context per device: each restores the states of one CUDA device, besides those of the CPU, NumPy and Python.
            stack.enter_context(rng.undisturbed(device, generators))
        stack.enter_context(torch.no_grad())
        if dtype in (None, torch.float32):
            autocast = nullcontext()
        else:
            autocast = torch.autocast(devices[0].type, dtype=dtype)
        stack.enter_context(autocast)
        try:
            if training is not None:
                for model in models:
                    # By `train`, which a model may override to keep parts of it in another mode.
                    model.train(training)
            yield
        finally:
            # Not by `train(mode)`: a part that the user holds in another mode, such as frozen BatchNorm, must stay in it.
            for part, mode in modes:
                part.training = mode


def answers(
    models: Sequence[nn.Module],
    batches: Iterable[tuple[Any, int]],
    forward: Forward,
    *,
    features: bool = False,
) -> Iterator[list[Answer]]:
    """Runs batches through one or more models. Call it inside `isolated_pass`.

    Args:
        models: The models.
        batches: Pairs of a batch and its number of samples; each batch is moved to the device of each model.
        forward: Function that computes outputs and targets.
        features: Whether the answers contain the input of the last linear layer.

    Yields:
        The answers of the models to one batch.
    """
    devices = [device_of_model(model) for model in models]
    with ExitStack() as stack:
        watches = [
            stack.enter_context(watch_last_linear(model)) if features else None for model in models
        ]
        for batch, n in batches:
            # One batch of all models at a time, so that outputs of earlier batches need not stay in memory.
            answers_of_models = []
            for model, device, watch in zip(models, devices, watches, strict=True):
                here = batch if device is None else to_device(batch, device)
                outputs, targets = forward(model, here)
                head, feature = (None, None) if watch is None else watch.take()
                # The rows of a plain pair are its samples. A function of the user's may flatten tokens or reorder rows.
                if forward is plain_forward:
                    layout = RowLayout(n, None)
                else:
                    layout = layout_of(here, n, targets)
                answers_of_models.append(Answer(outputs, targets, feature, layout, head))
            yield answers_of_models


def labels_or_none(targets: Any, n: int) -> Tensor | None:
    """Returns the class of each sample, shape (n,), int64, as `losses.signals.as_classes` does; None without classes."""
    try:
        # By trying, so that `as_classes` alone decides what classes are.
        return as_classes(targets, n)
    except ValueError:
        return None
