"""BatchNorm whose statistics count each row for the candidates that it stands for, where rows were drawn by their scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm

from thresher.attribution.rows import AttributionError
from thresher.attribution.tracker import Lookup
from thresher.subset.module import SubsetBackward

BY_ANOTHER_NAME = (
    "The BatchNorm layers weigh the rows of a batch in the forward pass of run.model, and this loss is of a batch that was not "
    "put through it. Call run.model(inputs) in the loop{}. Nothing was recorded."
)


class WeightedNorms:
    """The BatchNorm layers of a model, which weigh the rows of training passes of `run.model` while an epoch asks for it.

    Normalisation uses the weighted mean and variance of the batch, and gradients pass through both. The running statistics
    are updated by them with the momentum of the layer; the variance is corrected as for observations with such weights, which
    is n / (n - 1) where all weights are equal. Outside of such a pass the layers are as they were.

    Args:
        model: The user's model.
        way_around: End of messages: what to do instead.

    Raises:
        ValueError: A layer cannot be weighted.
    """

    def __init__(self, model: nn.Module, way_around: str) -> None:
        self._model, self._way_around = model, way_around
        self.active = False
        """Whether the rows of the epoch in progress are weighted."""
        normalisations_of(model, way_around)

    @contextmanager
    def weighing(self, inputs: Lookup) -> Iterator[None]:
        """Lets the layers weigh the rows of the forward pass that the block makes.

        Args:
            inputs: Rows that the inputs of the pass show.

        Raises:
            AttributionError: The rows are not known.
        """
        layers = self.in_use()
        rows = inputs.rows
        if layers and (rows is None or inputs.refuse or rows.batch.unknown is not None):
            self.refuse(rows.batch.unknown if rows is not None and rows.batch.unknown else inputs.description)
        stand_for = None if rows is None else rows.batch.stand_for
        if not layers or rows is None or stand_for is None:
            yield
            return
        weights = stand_for[rows.start : rows.start + rows.step * rows.n : rows.step]
        try:
            for name, layer in layers.items():
                layer.__dict__["forward"] = partial(_forward, layer, name, weights, rows.repeat, self._way_around)
            yield
        finally:
            for layer in layers.values():
                layer.__dict__.pop("forward", None)

    def in_use(self) -> dict[str, _BatchNorm]:
        """Returns the layers, by name, that a forward pass would now give the statistics of the batch, to be weighted.

        Raises:
            ValueError: A layer cannot be weighted.
        """
        if not self.active:
            return {}
        found = normalisations_of(self._model, self._way_around)
        return {name: layer for name, layer in found.items() if layer.training or layer.running_mean is None}

    def refuse(self, why: str) -> None:
        """Refuses a forward pass.

        Args:
            why: Reason why its rows are not known, such as what its inputs are.

        Raises:
            AttributionError: Always.
        """
        raise AttributionError(
            f"The BatchNorm layers of run.model weigh the rows of a training pass, and those of this one are not known: {why}. "
            "Give run.model the inputs as run.loader yielded them, or slices of them, and let the dataset, the collate_fn or "
            f"the model itself change them{self._way_around}."
        )

    def refuse_loss(self) -> None:
        """Refuses a loss of a batch that was not put through `run.model`.

        Raises:
            AttributionError: Always.
        """
        raise AttributionError(BY_ANOTHER_NAME.format(self._way_around))


def normalisations_of(model: nn.Module, way_around: str) -> dict[str, _BatchNorm]:
    """Returns the BatchNorm layers of a model by name.

    Args:
        model: The user's model.
        way_around: End of the message: what to do instead.

    Raises:
        ValueError: A layer does not run `forward` of torch's BatchNorm when the model is called.

    Example:
        >>> list(normalisations_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), ""))
        ['1']
    """
    found: dict[str, _BatchNorm] = {}
    for name, part in model.named_modules():
        why = None
        if isinstance(part, SubsetBackward) or "_orig_mod" in part._modules or part._compiled_call_impl is not None:
            why = "is traced or compiled; give attach the module itself"
        elif isinstance(part, ScriptModule) and "BatchNorm" in part.original_name:
            why = "was made by torch.jit; give attach the Python module"
        elif isinstance(part, _BatchNorm) and (type(part).forward is not _BatchNorm.forward or "forward" in vars(part)):
            why = "has a forward of its own; use torch.nn.BatchNorm"
        if why is not None:
            which = f"{name or 'the model'} ({type(part).__name__})"
            raise ValueError(f"The rows of BatchNorm layers are to be weighted, and {which} {why}{way_around}.")
        if isinstance(part, _BatchNorm):
            found[name] = part
    return found


def _forward(layer: _BatchNorm, name: str, weights: Tensor, repeat: int, way_around: str, values: Tensor) -> Tensor:
    """The forward of a layer in training mode, with weighted rows."""
    layer._check_input_dim(values)
    n = len(weights)
    if len(values) not in (n, n * repeat) or not torch.is_grad_enabled():
        what = "without gradients" if not torch.is_grad_enabled() else f"for an input of shape {tuple(values.shape)}"
        raise AttributionError(
            f"BatchNorm {name!r} was called {what} in a forward pass of run.model of {n} samples, whose rows it weighs, and it "
            "is not known which rows these are. Let the samples be the first dimension of the layer's input, in their order, "
            f"and do not recompute it in the backward pass{way_around}."
        )
    if values.numel() == values.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {values.size()}")
    if len(values) != n:
        weights = weights.repeat_interleave(repeat)
    return weighted_norm(layer, values, weights.to(values.device))


def weighted_norm(layer: _BatchNorm, values: Tensor, weights: Tensor) -> Tensor:
    """Normalises a batch by its weighted mean and variance, and updates the running statistics of the layer.

    Args:
        layer: A layer in training mode, or without running statistics.
        values: Input of the layer, shape (rows, channels, ...).
        weights: Weights of the rows, shape (rows,), float32, greater than 0.

    Returns:
        Output of the layer, of the shape and dtype of `values`.

    Example:
        The second row counts three times.

        >>> layer = nn.BatchNorm1d(1, affine=False, momentum=1.0)
        >>> outputs = weighted_norm(layer, torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 3.0]))
        >>> layer.running_mean, layer.running_var
        (tensor([3.]), tensor([8.]))
    """
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    shares = (weights / weights.sum()).to(wide.dtype)
    around = (1, -1, *[1] * (values.dim() - 2))
    mean = _weighted_mean(wide, shares)
    centred = wide - mean.view(around)
    variance = _weighted_mean(centred.square(), shares)
    scale = (variance + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    outputs = centred * scale.view(around)
    if layer.bias is not None:
        outputs = outputs + layer.bias.view(around)
    if layer.training and layer.track_running_stats:
        places = values.numel() // (values.shape[0] * values.shape[1])
        _remember(layer, mean.detach(), variance.detach() / (1 - shares.square().sum() / places))
    return outputs.to(values.dtype)


def _weighted_mean(values: Tensor, shares: Tensor) -> Tensor:
    """Mean over rows, whose weights have a sum of 1, and over places, shape (channels,)."""
    by_row = values.reshape(*values.shape[:2], -1).mean(2)
    return (by_row * shares.unsqueeze(1)).sum(0)


def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Updates the running statistics by those of a batch, as torch does."""
    count, factor = layer.num_batches_tracked, 0.0 if layer.momentum is None else layer.momentum
    if count is not None:
        count.add_(1)
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        if running is not None:
            share = factor if count is None or layer.momentum is not None else count.reciprocal().to(running.dtype)
            # By `data`, as in torch: a pass in evaluation mode may still wait for its backward pass.
            running.data.lerp_(new.to(running.dtype), share)
