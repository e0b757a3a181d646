"""Memorisation: how much likelier a model is to be right about a sample for having trained on it.

Feldman & Zhang, "What Neural Networks Memorize and Why", NeurIPS 2020, arXiv:2008.03703: thousands of models, each trained on
a random 70 % of the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.losses.adapt import adapt
from thresher.scores.passes import Answer, Forward, Models, Seen, Taken, as_list, scan, scores_of
from thresher.scores.table import Scores


def membership(name: str, trained_on: Sequence[Tensor], models: int, n: int) -> Tensor:
    """Which model trained on which sample, shape (models, n), bool.

    Raises:
        TypeError: Ids that are not int64.
        ValueError: Not one tensor of ids a model, or an id outside [0, n).
    """
    if len(trained_on) != models:
        raise ValueError(f"{name}: `trained_on` must have the ids of each of the {models} models, got {len(trained_on)}")
    member = torch.zeros(models, n, dtype=torch.bool)
    for row, ids in zip(member, trained_on, strict=True):
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{name}: `trained_on` must be int64 tensors of ids, got {got}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
            raise ValueError(f"{name}: `trained_on` must be ids within [0, {n}), got {int(ids.min())} to {int(ids.max())}")
        row[ids.cpu()] = True
    return member


def difference(correct: Tensor, member: Tensor) -> Tensor:
    """Share of right answers of the models that trained on a sample, less that of the others.

    Args:
        correct: Shape (M, N), bool.
        member: Which model trained on which sample, shape (M, N), bool.

    Returns:
        Shape (N,), within [-1, 1]; NaN where all models or none trained on the sample.
    """

    def right(of: Tensor) -> Tensor:
        return (correct & of).sum(0).double() / of.sum(0)

    return right(member) - right(~member)


def memorisation(
    models: Models,
    trained_on: Sequence[Tensor],
    loader: DataLoader[Any],
    *,
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Share of right answers with a sample in training, less that without it.

    Args:
        models: Each trained on a part of the data.
        trained_on: Of each model the ids that it trained on, int64.
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the models put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the models, such as their epochs and seeds.

    Raises:
        TypeError: See `passes.scan`.
        ValueError: Likewise, or `trained_on` that does not fit.
    """
    models, criterion = as_list(models), adapt(nn.CrossEntropyLoss())
    n = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    member = membership("memorisation", trained_on, len(models), n)

    def read(answers: list[Answer]) -> Tensor:
        found = [criterion.read(one.outputs, one.targets, {"correct"}, one.group.n)["correct"].cpu() for one in answers]
        return torch.stack(found, dim=1)

    seen = scan(models, loader, read, forward=forward)
    values = Seen(difference(seen.values.T, member), seen.labels)
    return scores_of("memorisation", values, models, trained=trained, provenance=provenance)
