"""The features of a sample: the input of the linear layer that ran last."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class LastLinear:
    """The `nn.Linear` of a model that ran last in the latest forward pass, and its input.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ran: tuple[nn.Linear, Tensor] | None = None

    def note(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Remembers a layer that runs; a forward pre-hook."""
        assert isinstance(layer, nn.Linear)
        self._ran = layer, inputs[0]

    def take(self) -> tuple[nn.Linear, Tensor]:
        """Returns the layer and its input, and forgets them.

        Raises:
            ValueError: No `nn.Linear` has run.
        """
        if self._ran is None:
            raise ValueError(
                f"features are the input of the last nn.Linear, and {type(self._model).__name__} has no nn.Linear that runs"
            )
        ran, self._ran = self._ran, None
        return ran


@contextmanager
def watch_last_linear(model: nn.Module) -> Iterator[LastLinear]:
    """Watches the linear layers of a model while the block runs.

    Args:
        model: The model; its hooks are taken away at the end.

    Yields:
        The layer that ran last and its input, after each forward pass.

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
        raise ValueError(f"features are the input of the last nn.Linear, and {type(model).__name__} has no nn.Linear")
    last = LastLinear(model)
    hooks = [layer.register_forward_pre_hook(last.note) for layer in layers]
    try:
        yield last
    finally:
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
            f"the model's last nn.Linear was given {tuple(feature.shape)} for {n} samples; one row of features per sample is "
            "needed, shape (n, D)"
        )
    return feature.float()
