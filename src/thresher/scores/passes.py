"""Scores from one pass over the dataset: what the score files share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher._version import __version__
from thresher.passes.engine import Answer as Answer
from thresher.passes.engine import Forward as Forward
from thresher.passes.engine import plain_forward as plain_forward
from thresher.passes.scan import Models as Models
from thresher.passes.scan import Seen as Seen
from thresher.passes.scan import as_list as as_list
from thresher.passes.scan import scan as scan
from thresher.scores.table import Scores

Taken = tuple[int, int]
"""Numbers of samples put through forward and backward passes."""


def rows(feature: Tensor | None, n: int) -> Tensor:
    """Features as (n, D).

    Raises:
        ValueError: The last linear layer was not given one row a sample.
    """
    assert feature is not None
    if feature.dim() != 2 or len(feature) != n:
        raise ValueError(
            f"the model's last nn.Linear was given {tuple(feature.shape)} for {n} samples; this score needs one row of "
            "features a sample, shape (n, D)"
        )
    return feature.float()


def or_nan(values: Tensor, known: Tensor) -> Tensor:
    """The values where they are known, else NaN."""
    return torch.where(known, values.float(), torch.nan)


def scores_of(
    name: str,
    seen: Seen,
    models: Models,
    *,
    trained: Taken,
    provenance: Mapping[str, Any] | None,
    backward: int = 0,
    **settings: Any,
) -> Scores:
    """Scores with what they cost: one forward pass of all samples a model, and what the caller says the models took.

    Args:
        name: Of the score.
        seen: Values of shape (N,).
        models: That answered.
        trained: Samples that training them put through forward and backward passes.
        provenance: What the caller knows of them.
        backward: Samples that scoring itself put through backward passes.
        settings: Of the score.

    Raises:
        ValueError: `trained` is not two numbers of 0 or more.
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
