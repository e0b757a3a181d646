"""Features of all samples after a training, of which scores of distances are made."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.passes.engine import Answer, Forward, plain_forward
from thresher.passes.features import feature_rows
from thresher.passes.scan import scan


def sample_features(
    model: nn.Module, loader: DataLoader[Any], *, forward: Forward | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the features of all samples, by one forward pass without gradients, and the classes.

    `d2` is made of them. The pass over N samples is part of the cost of the scores.

    Args:
        model: Model that computes the features: the inputs of its last `nn.Linear`.
        loader: Loader over a map-style dataset without augmentation; it is read in the order of the dataset, for any sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: a batch is a pair, `(model(batch[0]), batch[1])`.

    Returns:
        Features, shape (N, D), float32, and classes, shape (N,), int64; None where the targets are no classes.

    Raises:
        TypeError: `model` or `loader` has the wrong type, or the dataset has no length.
        ValueError: The model has no `nn.Linear` or one with inputs of another shape, or the loader gives batches whose rows
            cannot be matched to samples.

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
