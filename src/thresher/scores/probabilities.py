"""Probabilities of the classes of all samples after an epoch, from which scores of training dynamics are made."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import scan


def class_probabilities(model: nn.Module, loader: DataLoader[Any], *, forward: Forward | None = None) -> tuple[Tensor, Tensor]:
    """Returns the probabilities of the classes of all samples, by one forward pass without gradients, and the classes.

    Call it after each epoch of a training and stack the results: `aum`, `dyn_unc`, `dual` and `tdds` are made of them. A pass
    over N samples is part of the cost of these scores.

    Args:
        model: Model whose outputs are logits with the classes in dimension 1.
        loader: Loader over a map-style dataset without augmentation; it is read in the order of the dataset, for any sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: a batch is a pair, `(model(batch[0]), batch[1])`.

    Returns:
        Probabilities, shape (N, C), float32, and classes, shape (N,), int64.

    Raises:
        TypeError: `model` or `loader` has the wrong type, or the dataset has no length.
        ValueError: The outputs do not have shape (n, C), the targets are no classes, or the loader gives batches whose rows
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
        outputs = found[0].outputs
        if not isinstance(outputs, Tensor) or outputs.dim() != 2:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(f"class_probabilities: outputs must score classes, shape (n, classes), got {got}")
        return outputs.float().softmax(1)

    seen = scan(model, loader, read, forward=forward)
    if seen.labels is None:
        raise ValueError("class_probabilities: the targets are no classes; give class indices, or probabilities of the classes")
    return seen.values, seen.labels
