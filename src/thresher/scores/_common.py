"""What the score files share: the cost of scores, and features as one row per sample."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher._version import __version__
from thresher.passes.scan import Models, Seen, as_list
from thresher.scores.table import Scores

PassCounts = tuple[int, int]
"""Numbers of samples that went through a forward and through a backward pass."""


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
    """Returns scores with their cost: one forward pass over all samples per model, and what training the models took.

    Args:
        name: Name of the score.
        seen: Values of all samples, shape (N,), and their labels.
        models: Models that were asked.
        trained: Numbers of samples that training the models put through forward and backward passes.
        provenance: Facts about the models that the caller knows; None where there are none.
        backward: Number of samples that scoring itself put through backward passes. Default: 0.
        **settings: Settings of the score.

    Raises:
        ValueError: `trained` is not two whole numbers of 0 or more.
    """
    models, n = as_list(models), len(seen.values)
    if len(trained) != 2 or not all(isinstance(count, int) and count >= 0 for count in trained):
        raise ValueError(f"{name}: `trained` must be two whole numbers of 0 or more (forward, backward), got {trained!r}")
    versions = {"thresher": __version__, "torch": str(torch.__version__)}
    known = {"models": len(models), "model": type(models[0]).__name__, "versions": versions, **settings, **(provenance or {})}
    return Scores(
        torch.arange(n),
        seen.values,
        name,
        labels=seen.labels,
        forward=trained[0] + n * len(models),
        backward=trained[1] + backward,
        provenance=known,
    )
