"""Memorization: how much more often a model classifies a sample correctly if it trained on that sample.

Feldman & Zhang, "What Neural Networks Memorize and Why", NeurIPS 2020, arXiv:2008.03703. The paper uses thousands of models,
each trained on a random 70 % of the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.losses.adapters import adapt
from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import Models, Seen, as_list, scan
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, scored


def membership(name: str, trained_on: Sequence[Tensor], models: int, n: int) -> Tensor:
    """Returns which model trained on which sample, shape (models, n), bool.

    Args:
        name: Name of the calling function, used in error messages.
        trained_on: Ids of the samples that each model trained on, one int64 tensor per model.
        models: Number of models.
        n: Number of samples.

    Raises:
        TypeError: The ids are not int64 tensors.
        ValueError: The number of tensors is not the number of models, or an id is outside [0, n).

    Example:
        >>> membership("memorisation", [torch.tensor([0, 2]), torch.tensor([1])], 2, 3)
        tensor([[ True, False,  True],
                [False,  True, False]])
    """
    if len(trained_on) != models:
        raise ValueError(
            f"{name}: `trained_on` must have the ids of each of the {models} models, got {len(trained_on)}"
        )
    member = torch.zeros(models, n, dtype=torch.bool)
    for row, ids in zip(member, trained_on, strict=True):
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{name}: `trained_on` must be int64 tensors of ids, got {got}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
            raise ValueError(
                f"{name}: `trained_on` must be ids within [0, {n}), got {int(ids.min())} to {int(ids.max())}"
            )
        row[ids.cpu()] = True
    return member


def difference(correct: Tensor, member: Tensor) -> Tensor:
    """Returns the accuracy of the models that trained on a sample minus that of the others, for each sample.

    Args:
        correct: Whether each model classifies each sample correctly, shape (M, N), bool.
        member: Whether each model trained on each sample, shape (M, N), bool.

    Returns:
        Differences, shape (N,), within [-1, 1]; NaN if all models or none trained on the sample.

    Example:
        >>> correct = torch.tensor([[True, True], [False, True]])
        >>> difference(correct, torch.tensor([[True, False], [False, True]]))
        tensor([1., 0.], dtype=torch.float64)
    """

    def accuracy(models: Tensor) -> Tensor:
        return (correct & models).sum(0).double() / models.sum(0)

    return accuracy(member) - accuracy(~member)


def memorisation(
    models: Models,
    trained_on: Sequence[Tensor],
    loader: DataLoader[Any],
    *,
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the accuracy of the models that trained on it minus that of the models that did not.

    Args:
        models: Models, each trained on a part of the dataset.
        trained_on: Ids of the samples that each model trained on, one int64 tensor per model.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the models, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the models, such as their epochs and seeds. Default: none.

    Returns:
        Scores of all samples, within [-1, 1]; NaN if all models or none trained on the sample.

    Raises:
        TypeError: `models`, `loader` or `trained_on` has the wrong type, or the dataset has no length.
        ValueError: `trained_on` does not fit the models or the dataset, or the loader gives batches whose rows cannot be
            matched to samples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> models = [nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)]
        >>> for model, sign in zip(models, (1.0, -1.0)):
        ...     model.weight.data = torch.tensor([[-sign], [sign]])
        >>> loader = DataLoader(TensorDataset(torch.ones(2, 1), torch.tensor([1, 0])))
        >>> memorisation(models, [torch.tensor([0]), torch.tensor([1])], loader).values
        tensor([1., 1.])
    """
    models = as_list(models)
    criterion = adapt(nn.CrossEntropyLoss())
    n = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    member = membership("memorisation", trained_on, len(models), n)

    def read(answers: list[Answer]) -> Tensor:
        correct = [
            criterion.read(one.outputs, one.targets, {"correct"}, one.layout.n)["correct"].cpu()
            for one in answers
        ]
        return torch.stack(correct, dim=1)

    seen = scan(models, loader, read, forward=forward)
    values = Seen(difference(seen.values.T, member), seen.labels)
    return scored("memorisation", values, models, trained=trained, provenance=provenance)
