"""Common parts of the scores: their cost, features of samples, and class probabilities."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher._version import __version__
from thresher.passes.engine import Answer, Forward, feature_rows, plain_forward
from thresher.passes.scan import Models, Seen, as_list, scan
from thresher.score_table import Scores

PassCounts = tuple[int, int]
"""Numbers of samples that went through a forward and through a backward pass."""


def checked_history(name: str, argument: str, values: Any, dims: int) -> Tensor:
    """Checks values of all samples over the epochs, and returns them as float64 on the CPU.

    Args:
        name: Name of the calling function, used in error messages.
        argument: Name of the argument, used in error messages.
        values: Values, shape (T, N) or (T, N, C) for T epochs.
        dims: Number of dimensions, 2 or 3.

    Raises:
        TypeError: `values` are not floating-point numbers.
        ValueError: `values` are empty or have another number of dimensions.
    """
    history = torch.as_tensor(values).detach().cpu()
    if not history.is_floating_point():
        raise TypeError(f"{name}: `{argument}` must be floating-point numbers, got {history.dtype}")
    if history.dim() != dims or not history.numel():
        form = "(epochs, samples)" if dims == 2 else "(epochs, samples, classes)"
        raise ValueError(f"{name}: `{argument}` must have shape {form}, got {tuple(history.shape)}")
    return history.double()


def checked_window(name: str, window: int, epochs: int) -> int:
    """Checks the number of epochs of a window, and returns it.

    Args:
        name: Name of the calling function, used in the error message.
        window: Value of the argument `window`.
        epochs: Number of epochs in the history.

    Raises:
        ValueError: `window` is not an integer of 2 or more, or there are fewer epochs.
    """
    if not isinstance(window, int) or isinstance(window, bool) or not 2 <= window <= epochs:
        raise ValueError(
            f"{name}: `window` must be a whole number of epochs within [2, {epochs}], got {window!r}"
        )
    return window


def of_history(
    name: str,
    values: Tensor,
    labels: Tensor | None,
    trained: PassCounts,
    provenance: Mapping[str, Any] | None,
    **settings: Any,
) -> Scores:
    """Returns `Scores` computed from the history of a training run, with the cost of that run.

    Args:
        name: Name of the score.
        values: Scores, shape (N,); NaN if unknown.
        labels: Classes, shape (N,), int64; None if there are no classes.
        trained: Numbers of samples that training put through forward and backward passes.
        provenance: Facts about the training run; None for none.
        **settings: Settings of the score.
    """
    known = {
        "versions": {"thresher": __version__, "torch": str(torch.__version__)},
        **settings,
        **(provenance or {}),
    }
    forward, backward = trained
    values = torch.where(values.isfinite(), values, torch.nan)
    return Scores(
        torch.arange(len(values)),
        values,
        name,
        labels=labels,
        forward=forward,
        backward=backward,
        provenance=known,
    )


def or_nan(values: Tensor, known: Tensor) -> Tensor:
    """Returns the values where they are known, and NaN elsewhere."""
    return torch.where(known, values.float(), torch.nan)


def scored(
    name: str,
    seen: Seen,
    models: Models,
    *,
    trained: PassCounts,
    provenance: Mapping[str, Any] | None,
    backward: int = 0,
    **settings: Any,
) -> Scores:
    """Returns `Scores` with their cost: a forward pass over all samples for each model, and the cost of training the models.

    Args:
        name: Name of the score.
        seen: Values of all samples, shape (N,), and their labels.
        models: Models that computed the values.
        trained: Numbers of samples that training the models put through forward and backward passes.
        provenance: Facts about the models; None for none.
        backward: Number of samples that scoring itself put through backward passes. Default: 0.
        **settings: Settings of the score.

    Raises:
        ValueError: `trained` is not a pair of whole numbers of 0 or more.
    """
    models = as_list(models)
    n = len(seen.values)
    if len(trained) != 2 or not all(isinstance(count, int) and count >= 0 for count in trained):
        raise ValueError(
            f"{name}: `trained` must be two whole numbers of 0 or more (forward, backward), got {trained!r}"
        )
    versions = {"thresher": __version__, "torch": str(torch.__version__)}
    known = {
        "models": len(models),
        "model": type(models[0]).__name__,
        "versions": versions,
        **settings,
        **(provenance or {}),
    }
    return Scores(
        torch.arange(n),
        seen.values,
        name,
        labels=seen.labels,
        forward=trained[0] + n * len(models),
        backward=trained[1] + backward,
        provenance=known,
    )


def sample_features(
    model: nn.Module, loader: DataLoader[Any], *, forward: Forward | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes features of all samples by a forward pass without gradients.

    `thresher.scores.d2` takes these features. The pass over N samples is part of the cost of its scores.

    Args:
        model: Model; the inputs of its last `nn.Linear` are the features.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.

    Returns:
        Features, shape (N, D), float32, and classes, shape (N,), int64, or None if the targets are not classes.

    Raises:
        TypeError: `model` or `loader` has the wrong type, or the dataset has no length.
        ValueError: The model has no `nn.Linear`, the inputs of its last one are not of shape (batch, D), or the loader yields
            batches whose rows cannot be matched to samples.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([1, 0]))
        >>> found, classes = sample_features(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), DataLoader(data))
        >>> found
        tensor([[1., 0.],
                [0., 3.]])
    """
    seen = scan(model, loader, _rows, forward=forward or plain_forward, features=True)
    return seen.values, seen.labels


def _rows(answers: list[Answer]) -> Tensor:
    return feature_rows(answers[0].feature, answers[0].layout.n)


def class_outputs(name: str, answer: Answer) -> Tensor:
    """Returns the outputs of a model, shape (n, classes).

    Args:
        name: Name of the function, which begins the message.
        answer: Answer of the model to a batch.

    Raises:
        ValueError: The outputs have another shape.
    """
    outputs = answer.outputs
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        if isinstance(outputs, Tensor):
            got = tuple(outputs.shape)
        else:
            got = type(outputs).__name__
        raise ValueError(f"{name}: outputs must score classes, shape (n, classes), got {got}")
    return outputs


def class_probabilities(
    model: nn.Module, loader: DataLoader[Any], *, forward: Forward | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the class probabilities of all samples by a forward pass without gradients.

    Call it after each epoch of training and stack the results, from which `aum`, `dyn_unc`, `dual` and `tdds` compute scores.
    Each pass over N samples is part of their cost.

    Args:
        model: Model whose outputs are logits with the classes in dimension 1.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.

    Returns:
        Probabilities, shape (N, C), float32, and classes, shape (N,), int64.

    Raises:
        TypeError: `model` or `loader` has the wrong type, or the dataset has no length.
        ValueError: The outputs do not have shape (n, C), the targets are not classes, or the loader yields batches whose rows
            cannot be matched to samples.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> model = nn.Linear(1, 2, bias=False)
        >>> model.weight.data = torch.tensor([[0.0], [1.0]])
        >>> data = DataLoader(TensorDataset(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1])))
        >>> probabilities, classes = class_probabilities(model, data)
        >>> probabilities.gather(1, classes[:, None]).squeeze(1)
        tensor([0.5000, 0.8808])
    """

    def read(found: list[Answer]) -> Tensor:
        return class_outputs("class_probabilities", found[0]).float().softmax(1)

    seen = scan(model, loader, read, forward=forward)
    if seen.labels is None:
        raise ValueError(
            "class_probabilities: targets are not classes; give class indices or class probabilities"
        )
    return seen.values, seen.labels
