"""Disagreement of an ensemble: samples that its members answer differently, or none of them surely.

Chitta et al., "Training Data Subset Search with Ensemble Active Learning", arXiv:1905.12737, which trains on the samples that
an ensemble disagrees about.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.scores.passes import Answer, Forward, Models, Taken, as_list, scan, scores_of
from thresher.scores.table import Scores

Kind = Literal["entropy", "mutual_information", "variation_ratio"]


def entropy(probs: Tensor) -> Tensor:
    """- sum(p log p) over the last dimension; 0 log 0 is 0."""
    return -torch.special.xlogy(probs, probs).sum(-1)


def disagreement_of(probs: Tensor, kind: Kind) -> Tensor:
    """How far members disagree about each sample.

    Args:
        probs: Class probabilities, shape (M, n, C).
        kind: "entropy" of the mean of the members; "mutual_information": that less the mean of the members' own entropies;
            "variation_ratio": share of the members that do not answer what most do.

    Returns:
        Shape (n,), 0 or more.
    """
    if kind == "variation_ratio":
        votes = torch.nn.functional.one_hot(probs.argmax(2), probs.shape[2]).sum(0)
        return 1 - votes.amax(1) / len(probs)
    whole = entropy(probs.mean(0))
    return whole if kind == "entropy" else (whole - entropy(probs).mean(0)).clamp(min=0)


def disagreement(
    models: Models,
    loader: DataLoader[Any],
    *,
    kind: Kind = "entropy",
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """How far an ensemble disagrees about each sample; labels are not needed.

    Args:
        models: The ensemble; two or more, for other kinds than "entropy".
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        kind: See `disagreement_of`.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the models put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the models, such as their epochs and seeds.

    Raises:
        TypeError: See `passes.scan`.
        ValueError: Likewise, no such `kind`, one model where it takes several, or outputs that are not (n, classes).
    """
    models = as_list(models)
    if kind not in get_args(Kind):
        raise ValueError(f"disagreement: `kind` must be one of {get_args(Kind)}, got {kind!r}")
    if kind != "entropy" and len(models) < 2:
        raise ValueError(f"disagreement: `models` must be two or more for {kind!r}, got one, which always agrees with itself")

    def read(answers: list[Answer]) -> Tensor:
        return disagreement_of(torch.stack([_probs(one) for one in answers]), kind)

    seen = scan(models, loader, read, forward=forward)
    return scores_of(kind, seen, models, trained=trained, provenance=provenance)


def _probs(answer: Answer) -> Tensor:
    outputs = answer.outputs
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"disagreement: outputs must score classes, shape (n, classes), got {got}")
    return outputs.double().softmax(1).cpu()
